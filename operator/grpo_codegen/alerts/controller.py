"""Alerts on the operator itself: without it runs go on, but nothing starts, restarts or ends
well."""

from grpo_api.report.metrics import (
    CONTROLLER,
    EVENTS,
    HEARD,
    JOB_INFO,
    JOB_PHASE,
    JOB_RECONCILE_FAILURES,
    LEADER,
    LOOP_LAG,
    LOSSES,
    MEMORY_LIMIT,
    QUEUE_DEPTH,
    QUEUE_LONGEST,
    RECONCILES,
    SPANS,
    UNREADABLE_OBJECTS,
    Metric,
)

from .alert import JOB, OPERATOR_UID, PER_OPERATOR, Alert

_OWN = f'controller="{CONTROLLER}"'
_QUEUE = f'name="{CONTROLLER}"'
_RATE = f"sum {PER_OPERATOR} (rate({RECONCILES.name}{{{_OWN}}}[10m]))"
_ERRORS = f'sum {PER_OPERATOR} (rate({RECONCILES.name}{{{_OWN},result="error"}}[10m]))'
_FAILING = f"{_ERRORS} / {_RATE} > <errorShare>"
_LEADER_OF_THE_DAY = f"last_over_time({LEADER.name}[1d])"
_RESIDENT = "process_resident_memory_bytes"
_PER_JOB = "max by (cluster, job, namespace, grpojob)"
"""With the operator: that another one fails says nothing of this one's jobs."""
_PER_REPLICA = "max by (cluster, job, instance)"
_LAG = f"sum by (cluster, job, le) (rate({LOOP_LAG.name}_bucket[10m]))"


def _lost(metric: Metric, what: str) -> str:
    """How many were lost, under a label that says what they were."""
    chosen = f'{metric.name}{{result=~"{"|".join(LOSSES)}"}}'
    lost = f"sum {PER_OPERATOR} (increase({chosen}[15m])) > 0"
    return f'label_replace({lost}, "what", "{what}", "", "")'


ALERTS = (
    Alert(
        name="GRPOOperatorDown",
        expression=(
            f"count {PER_OPERATOR} ({_LEADER_OF_THE_DAY}) unless "
            f"count {PER_OPERATOR} ({LEADER.name} == 1) or absent({_LEADER_OF_THE_DAY})"
        ),
        for_="5m",
        severity="critical",
        summary="No GRPO operator is there, or none of them leads",
        description=(
            "Gangs that run go on; nothing starts, restarts or is cleared away until it is back."
        ),
        runbook=(
            "`kubectl get deployment,pods -l app.kubernetes.io/name=grpo-operator -A`: does it "
            "have a pod, and does that run?",
            "`kubectl get lease -n grpo-system`: its holder is the pod that leads. If there are "
            "pods and none leads, their logs say why: the API server doesn't answer in time, or "
            "RBAC lacks the Lease.",
            "If one leads, Prometheus doesn't scrape it: look at the PodMonitor's labels and at "
            "NetworkPolicies.",
            "After an operator was removed on purpose, silence the alert for a day.",
        ),
        dashboard=OPERATOR_UID,
    ),
    Alert(
        name="GRPOTwoLeaders",
        expression=f"sum {PER_OPERATOR} ({LEADER.name}) > 1",
        for_="2m",
        severity="critical",
        summary="{{ $value }} GRPO operators lead at the same time",
        description=(
            "Both decide for the same jobs. Writes carry a resourceVersion and the chart's policy "
            "refuses the older leader, so that no job is started twice; but one of them is wrong."
        ),
        runbook=(
            "`kubectl get lease -n grpo-system`: its holder is the right one. Delete the pod of "
            "the other.",
            "Compare the clocks of their nodes, and look in both logs for the Lease.",
        ),
        dashboard=OPERATOR_UID,
    ),
    Alert(
        name="GRPOLeaderFlapping",
        expression=f"sum {PER_OPERATOR} (changes({LEADER.name}[1h])) > <leaderChanges>",
        for_="0m",
        summary="The leader of the GRPO operator changes often",
        description=(
            "Each change costs a LIST of everything and seconds in which nothing is decided. The "
            "leader loses its Lease when the API server is slow or its event loop is late."
        ),
        runbook=(
            "The log of a pod that led says why it ended: out of memory, or a Lease that it "
            "could not renew in time.",
            "Give it more CPU or memory, or look at the API server's latency.",
        ),
        dashboard=OPERATOR_UID,
    ),
    Alert(
        name="GRPOOperatorDeaf",
        expression=(f"time() - min by (cluster, job, resource) ({HEARD.name}) > <deafSeconds>"),
        for_="1m",
        severity="critical",
        summary=(
            "The GRPO operator has received nothing about {{ $labels.resource }} for {{ $value | "
            "humanizeDuration }}"
        ),
        description="A proxy may swallow its watches. It decides by what it knew then.",
        runbook=(
            "`/readyz` of the operator names what is not served, `/healthz` what is deaf; the "
            "kubelet restarts it then.",
            "If that doesn't help, look at the way between it and the API server.",
        ),
        dashboard=OPERATOR_UID,
    ),
    Alert(
        name="GRPOOperatorFailing",
        expression=_FAILING,
        for_="15m",
        severity="critical",
        summary="{{ $value | humanizePercentage }} of the GRPO operator's reconciles fail",
        description="Its log says why: the API server denies a request, or doesn't answer.",
        runbook=(
            "`kubectl logs -n grpo-system -l app.kubernetes.io/name=grpo-operator --prefix --tail=-1`; "
            "`rest_client_requests_total` by `code` "
            "distinguishes denials from outages.",
            "After an upgrade: do RBAC and CRD match the operator's version?",
        ),
        dashboard=OPERATOR_UID,
    ),
    Alert(
        name="GRPOQueueStuck",
        expression=(
            f"max {PER_OPERATOR} ({QUEUE_LONGEST.name}{{{_QUEUE}}}) > <stuckSeconds> or "
            f"sum {PER_OPERATOR} ({QUEUE_DEPTH.name}{{{_QUEUE}}}) > 0 and {_RATE} == 0"
        ),
        for_="5m",
        severity="critical",
        summary="The GRPO operator doesn't get on with its queue",
        description="A reconcile hangs, or none ends although jobs wait.",
        runbook=(
            "Its log's last lines name the job; delete the operator's pod: what it did is in the "
            "jobs' status, and it goes on from there.",
            "Please report it with the log.",
        ),
        dashboard=OPERATOR_UID,
    ),
    Alert(
        name="GRPOJobNotReconciled",
        expression=(
            f"({_PER_JOB} ({JOB_RECONCILE_FAILURES.name}) >= <failuresInARow> or "
            f"({_PER_JOB} ({JOB_INFO.name}) unless {_PER_JOB} ({JOB_PHASE.name}))) "
            f"unless on (cluster, job) ({_FAILING})"
        ),
        for_="10m",
        summary=f"The operator fails to reconcile {JOB}",
        description=(
            "Every reconcile of this job fails, or none has written its status yet, while others "
            "go well: nothing of it starts, restarts or ends."
        ),
        runbook=(
            "The operator's log names the job and the error.",
            "A conflict with another controller, a webhook or a quota shows there as a denial.",
            "An error in the operator itself has a traceback: please report it.",
        ),
    ),
    Alert(
        name="GRPOObjectsUnreadable",
        expression=f"max by (cluster, job, resource) ({UNREADABLE_OBJECTS.name}) > 0",
        for_="10m",
        summary="The GRPO operator can't read {{ $value }} {{ $labels.resource }}",
        description=(
            "They are left alone: written by a newer version of the operator, or by hand in a way "
            "that this one does not understand. Such jobs run on and nothing is decided for them."
        ),
        runbook=(
            "`kubectl get grpojobs -A`, condition `Readable`: its message names the field.",
            "After a rollback, install the newer version again or delete what it wrote.",
        ),
        dashboard=OPERATOR_UID,
    ),
    Alert(
        name="GRPOOperatorMemoryTight",
        expression=(
            f"{_PER_REPLICA} ({_RESIDENT}) / {_PER_REPLICA} ({MEMORY_LIMIT.name}) "
            "> <operatorMemoryShare>"
        ),
        for_="10m",
        summary=(
            "The GRPO operator {{ $labels.instance }} uses {{ $value | humanizePercentage }} of "
            "its memory limit"
        ),
        description="Beyond the limit the kernel ends it, and the next one fills its caches again.",
        runbook=(
            "Raise `resources.limits.memory`; it needs more with each job and pod that it watches.",
            "Lower `ttlSecondsAfterFinished` of jobs, or delete those that have ended.",
        ),
        dashboard=OPERATOR_UID,
    ),
    Alert(
        name="GRPOOperatorLate",
        expression=f"histogram_quantile(0.99, {_LAG}) > <lagSeconds>",
        for_="10m",
        summary="Timers of the GRPO operator are {{ $value | humanizeDuration }} late",
        description=(
            "Its event loop computes for too long at a time, or gets too little CPU. A leader "
            "that is late loses its Lease."
        ),
        runbook=(
            "Is its CPU throttled? Raise `resources.requests.cpu` and leave out the limit.",
            "Otherwise please report it with the number of jobs, pods and nodes.",
        ),
        dashboard=OPERATOR_UID,
    ),
    Alert(
        name="GRPOReportsLost",
        expression=f"{_lost(EVENTS, 'events')} or {_lost(SPANS, 'spans')}",
        for_="0m",
        summary=(
            'The GRPO operator has lost {{ $value | printf "%.0f" }} {{ $labels.what }} within a '
            "quarter of an hour"
        ),
        description=(
            "Nothing that is decided depends on them, but users miss events, or traces have gaps."
        ),
        runbook=(
            "Events: does RBAC allow `create` of events in the job's namespace?",
            "Spans: does the collector of `tracing.endpoint` answer, and take as many?",
        ),
        dashboard=OPERATOR_UID,
    ),
)

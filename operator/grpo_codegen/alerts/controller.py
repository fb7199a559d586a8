"""Alerts on the operator itself: without it runs go on, but nothing starts, restarts or ends
well."""

from grpo_api.report.metrics import (
    CONTROLLER,
    HEARD,
    LEADER,
    QUEUE_DEPTH,
    QUEUE_LONGEST,
    RECONCILES,
)

from .alert import Alert

_OWN = f'controller="{CONTROLLER}"'
_QUEUE = f'name="{CONTROLLER}"'
_RATE = f"sum(rate({RECONCILES.name}{{{_OWN}}}[10m]))"

ALERTS = (
    Alert(
        name="GRPOOperatorDown",
        expression=f"absent({LEADER.name} == 1)",
        for_="5m",
        severity="critical",
        summary="No GRPO operator is there, or none of them leads",
        description=(
            "Gangs that run go on; nothing starts, restarts or is cleared away until it is back."
        ),
        runbook=(
            "`kubectl get deployment,pods -l app.kubernetes.io/name=grpo-operator -A`: does it "
            "have a pod, and "
            "does that run?",
            "`kubectl get lease -n grpo-system`: its holder is the pod that leads. If there are "
            "pods and none leads, "
            "their logs say why: the API server doesn't answer in time, or RBAC lacks the Lease.",
            (
                "If one leads, Prometheus doesn't scrape it: look at the PodMonitor's labels and "
                "at "
                "NetworkPolicies."
            ),
        ),
        fires_in=("operator gone", "nobody leads"),
    ),
    Alert(
        name="GRPOOperatorDeaf",
        expression=f"time() - min by (resource) ({HEARD.name}) > <deafSeconds>",
        for_="1m",
        severity="critical",
        summary=(
            "The GRPO operator has heard nothing of {{ $labels.resource }} for {{ $value | "
            "humanizeDuration }}"
        ),
        description="A proxy may swallow its watches. It decides by what it knew then.",
        runbook=(
            "`/readyz` of the operator names what is not served, `/healthz` what is deaf; the "
            "kubelet restarts it "
            "then.",
            "If that doesn't help, look at the way between it and the API server.",
        ),
        fires_in=("operator deaf",),
    ),
    Alert(
        name="GRPOOperatorFailing",
        expression=(
            f'sum(rate({RECONCILES.name}{{{_OWN},result="error"}}[10m])) / {_RATE} > <errorShare>'
        ),
        for_="15m",
        severity="critical",
        summary="{{ $value | humanizePercentage }} of the GRPO operator's reconciles fail",
        description="Its log says why: the API server denies a request, or doesn't answer.",
        runbook=(
            "`kubectl logs deployment/grpo-operator`; `rest_client_requests_total` by `code` "
            "tells denials from "
            "outages.",
            "After an upgrade: do RBAC and CRD match the operator's version?",
        ),
        fires_in=("API server denies",),
    ),
    Alert(
        name="GRPOQueueStuck",
        expression=(
            f"max({QUEUE_LONGEST.name}{{{_QUEUE}}}) > <stuckSeconds> or "
            f"sum({QUEUE_DEPTH.name}{{{_QUEUE}}}) > 0 and {_RATE} == 0"
        ),
        for_="5m",
        severity="critical",
        summary="The GRPO operator doesn't get on with its queue",
        description="A reconcile hangs, or none ends although jobs wait.",
        runbook=(
            "Its log's last lines name the job; delete the operator's pod: what it did is in the "
            "jobs' status, and "
            "it goes "
            "on from there.",
            "Please report it with the log.",
        ),
        fires_in=("queue stuck",),
    ),
)

"""What the product gives for an input, as plain values: the only module here that imports the
product.

A move of product modules changes the imports of this file and of the builders in tests/unit, and no
recorded file.
"""

import contextlib
import io
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any
from unittest import mock

import yaml
from rich.console import Console

from grpo_api.job import SpecInvalid, parse_spec
from grpo_api.job_object import GRPOJob
from grpo_api.plan.plan import ExecutionPlan
from grpo_api.report.report import Result
from grpo_cli.__main__ import main
from grpo_cli.cluster.delivery import export_job
from grpo_cli.commands import status as status_screen
from grpo_cli.commands.prefetch import prefetch_job
from grpo_kube.objects.resources import merge_patch
from grpo_kube.objects.times import Observed
from grpo_operator.admission.snapshot import Snapshot
from grpo_operator.decide.cleanup import clean_up
from grpo_operator.decide.decisions import Action, Decision
from grpo_operator.decide.first_seen import FirstSeenTracker
from grpo_operator.decide.next_action import decide
from grpo_operator.decide.observation import Observation, Silence, observe
from grpo_operator.kueue.pod_sets import place_job
from grpo_operator.kueue.workload_manifest import (
    Priority,
    adoption_patch,
    finished_status,
    pause_patch,
    queue_patch,
    readiness_status,
    status_without_admission,
    workload,
)
from grpo_operator.kueue.workload_steps import Write, next_step
from grpo_operator.pods.manifests import (
    Attempt,
    attempt_of,
    checkpoint_volume_claim,
    engines_job,
    indexed_job,
)
from grpo_operator.pods.namespace_objects import engine_service, network_policy, rendezvous_service
from grpo_operator.pods.pod_spec import PodDefaults
from grpo_operator.process.job_metrics import JobMetrics
from grpo_operator.records.records import GRPOJobRecord
from grpo_operator.records.workloads import PodSetUpdate, workload_record
from grpo_operator.report.events import event, telling_change
from grpo_operator.report.status import build_status, to_json
from grpo_operator.tracing.spans import export_request
from grpo_planner.hardware.inventory import Inventory
from grpo_planner.plan import plan_job
from tests.golden.layout import unlike
from tests.golden.shapes import PLAN_ANNOTATION, condition, fields, filled, objects_of
from tests.unit.operator_world import KEY, LIMITS, NOW, PODS, make_job, stored
from tests.unit.queue_world import queue
from tests.unit.trace_world import lived
from tests.virtual_time import virtually

Json = dict[str, Any]
WIDTH = 200
"""Columns of the terminal of `grpo status`."""
PIPE_WIDTH = 240
"""Columns of what is piped: rows of tables stay whole."""
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def grpo(*arguments: str, stdin: str = "") -> Json:
    """Return exit code and lines of one run of the command line."""
    out, errors = io.StringIO(), io.StringIO()
    with _piped(stdin), contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = main(arguments)
    found: Json = {
        "exit code": code,
        "prints": _lines(out.getvalue()),
        "complains": _lines(errors.getvalue()),
    }
    return {key: value for key, value in found.items() if value != []}


@contextlib.contextmanager
def _piped(text: str) -> Iterator[None]:
    """Let the text be standard input while the block runs, and no variable ask for colours."""
    with mock.patch.object(sys, "stdin", io.StringIO(text)), mock.patch.dict(os.environ):
        for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
            os.environ.pop(name, None)
        os.environ["COLUMNS"] = str(PIPE_WIDTH)
        yield


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines()]


def job(manifest: str, *flags: str, plans: Sequence[str] = ()) -> Json:
    """Return what `grpo plan` and `grpo render` print for a file of GRPOJobs; `plans` are flags of
    the first alone."""
    found = {"grpo plan": grpo("plan", "-f", "-", *flags, *plans, stdin=manifest)}
    rendered = grpo("render", "-f", "-", "-n", "default", *flags, stdin=manifest)
    if rendered["exit code"]:
        return {**found, "grpo render": rendered}
    objects = yaml.load_all("\n".join(rendered["prints"]), Loader=_LOADER)
    return found | objects_of(objects)


def shared_objects(watchers: Sequence[Json]) -> Json:
    """Return the objects that all jobs of a namespace share."""
    return {
        "rendezvous": rendezvous_service("team-a"),
        "engines": engine_service("team-a"),
        "policy": network_policy("team-a", []),
        "policy with watchers": network_policy("team-a", watchers),
    }


def attempt(
    record: GRPOJobRecord, plan: ExecutionPlan, number: int, pods: PodDefaults = PODS
) -> Json:
    """Return the objects that the operator creates for an attempt."""
    one = _attempt(record, plan, number)
    claim = checkpoint_volume_claim(one.key, one.uid, one.spec)
    made = (claim, indexed_job(one, pods), engines_job(one, pods))
    return objects_of(item for item in made if item)


def _attempt(record: GRPOJobRecord, plan: ExecutionPlan, number: int) -> Attempt:
    return attempt_of(record, record.valid_spec, plan, number)


def helper_jobs(record: GRPOJobRecord, plan: ExecutionPlan) -> Json:
    """Return the Jobs of `grpo prefetch` and `grpo export`."""
    one = _attempt(record, plan, 1)
    return {
        "grpo prefetch": objects_of([prefetch_job(one.key._asdict(), one.spec, PODS)]),
        "grpo export": objects_of([export_job(one, PODS)]),
        "grpo export that converts": objects_of(
            [export_job(one, PODS, merge=True, dtype="bfloat16")]
        ),
    }


def workload_for(
    record: GRPOJobRecord, plan: ExecutionPlan, value: int = 0, kind: str = "", name: str = ""
) -> Json:
    """Return the Workload of a job that Kueue admits; its priority is that of the class."""
    body = workload(record, plan, Priority(value, kind, name), PODS)
    annotations = body["metadata"]["annotations"]
    read = {key: json.loads(annotation) for key, annotation in annotations.items()}
    return {**body, "metadata": {**body["metadata"], "annotations": read}}


def placed_by_kueue(
    item: Json, record: GRPOJobRecord, plan: ExecutionPlan, labels: Mapping[str, str]
) -> Json:
    """Return the gang's pod where Kueue's flavor with these node labels and a toleration puts
    it."""
    tolerations = ({"key": "spot", "operator": "Exists"},)
    body = indexed_job(_attempt(record, plan, 1), PODS)
    flavor = PodSetUpdate(node_selector=labels, tolerations=tolerations)
    made = place_job(body, workload_record(item), [flavor])
    template = made["spec"]["template"]
    template["metadata"]["annotations"].pop(PLAN_ANNOTATION)
    placement_fields = ("nodeSelector", "tolerations", "schedulingGates", "affinity")
    return {
        "metadata": template["metadata"],
        "spec": {key: template["spec"].get(key) for key in placement_fields},
    }


def looked_at(
    observation: Observation, jobs: Sequence[GRPOJobRecord] = (), snapshot: Snapshot | None = None
) -> Json:
    """Return what one look at a job leads to: the decision, the write to its status, its event,
    what is deleted.

    Where the job asks for an attempt, the queue answers: the cluster has the nodes of `snapshot`
    and the other jobs.
    """
    decision = decide(observation, LIMITS)
    rendered: Json = {"decides": _decision(decision)}
    if decision.action is Action.ADMIT:
        decision = _answered(observation, decision, jobs, snapshot)
        answer = _decision(decision)
        rendered["is answered"] = {
            key: value for key, value in answer.items() if value != rendered["decides"].get(key)
        }
    if decision.action is Action.DELETE:
        return rendered
    new = build_status(observation, decision)
    rendered["writes"] = _patch(observation, to_json(new))
    change = telling_change(observation.job.status.conditions, new.conditions)
    if change:
        sent_event = event(observation.job, change, observation.now, new)
        rendered["tells"] = f"{sent_event['type']} {sent_event['reason']}: {sent_event['message']}"
    if observation.job.key == KEY and observation.job.spec is not None:
        clean_up_result = clean_up(_looked_again(observation, stored(observation.job, new)), LIMITS)
        rendered |= {"clears up": ends} if (ends := fields(clean_up_result)) else {}
    return rendered


def _answered(
    observation: Observation,
    decision: Decision,
    jobs: Sequence[GRPOJobRecord] = (),
    snapshot: Snapshot | None = None,
) -> Decision:
    """Return what the admission queue says after a pass."""

    async def answer() -> Decision | None:
        there = queue([observation.job, *jobs], snapshot or Snapshot(), image=PODS.image)
        await there.run_cycle()
        return await there.answer(observation, decision)

    answers = virtually(answer())
    assert answers is not None, f"{observation.job.key} has no verdict"
    return answers


@cache
def base_plan() -> Json:
    """Return the plan of the builders' job, with which the plans in status/ are compared."""
    spec = make_job().spec
    assert spec is not None
    chosen = plan_job(spec, Inventory()).chosen
    assert chosen is not None
    plan: Json = chosen.model_dump(mode="json", by_alias=True, exclude_none=True)
    return plan


def _patch(observation: Observation, new: Json) -> Json:
    """Return what of a status changes, a condition in a line and a plan by what differs from
    base_plan."""
    patch: Json = merge_patch(to_json(observation.job.status), new)
    if "conditions" in patch:
        patch["conditions"] = [condition(one) for one in patch["conditions"]]
    if patch.get("usage"):
        patch["usage"] = filled(patch["usage"])
    if "plan" in patch:
        patch["plan"] = unlike(new["plan"], base_plan())
    return patch


def _looked_again(observation: Observation, job: GRPOJobRecord) -> Observation:
    """Return the next look, at the job with its new status and at the same children."""
    children = [
        child
        for child in (observation.child, observation.engines, *observation.earlier_jobs)
        if child
    ]
    pods = [*observation.pods, *observation.engine_pods, *observation.earlier_pods]
    return observe(
        job,
        children,
        pods,
        now=observation.now,
        at=observation.at,
        first_seen_tracker=FirstSeenTracker(),
    )


def _decision(decision: Decision) -> Json:
    """Return a decision without what the status says anyway: plan, outcome, what was learned."""
    rendered = fields(decision)
    for name in ("plan", "ended", "learned", "rollback", "resume_from", "revisions"):
        if rendered.pop(name, None) is not None:
            rendered.setdefault("carries", []).append(name)
    return rendered


def write_to_workload(
    observation: Observation, item: Json | None, snapshot: Snapshot | None = None
) -> Json:
    """Return what one look at a job leads to, with the write to its Workload, which Kueue has left
    as `item`."""
    rendered = looked_at(observation, snapshot=snapshot)
    decision = decide(observation, LIMITS)
    if decision.action is Action.ADMIT:
        decision = _answered(observation, decision, snapshot=snapshot)
    due = None if decision.action is Action.COMMIT else next_step(observation, decision, PODS)
    return (
        {
            **rendered,
            "writes to its Workload": {due.write.value: _body(due.write, observation, item)},
        }
        if due
        else rendered
    )


def _body(write: Write, observation: Observation, item: Json | None) -> Json | str:
    """Return the body of the write; a new Workload is recorded elsewhere."""
    if write is Write.AMEND:
        return queue_patch(observation.job, Priority())
    if write in (Write.PAUSE, Write.RESUME):
        return pause_patch(write is Write.PAUSE)
    if write is Write.ADOPT:
        return adoption_patch(observation.job)
    if item is None or write in (Write.CREATE, Write.DELETE):
        return "(recorded as a Workload)" if write is Write.CREATE else ""
    if write is Write.CLEAR:
        status = status_without_admission(item, NOW)
    elif write is Write.FINISH:
        status = finished_status(item, True, "training is done", NOW)
    else:
        status = readiness_status(item, write is Write.READY, NOW)
    return {**status, "conditions": [condition(one) for one in status["conditions"]]}


def problems(spec: Json) -> list[str]:
    """Return what is said of a spec that is refused when it is created."""
    try:
        parse_spec(spec, creating=True)
    except SpecInvalid as error:
        return list(error.problems)
    return []


def metrics_page(jobs: Sequence[GRPOJobRecord]) -> list[str]:
    """Return the lines of the operator's /metrics that tell of jobs."""
    return _lines(virtually(JobMetrics(lambda: jobs, lambda: NOW).text()))


def story(seed: int) -> Json:
    """Return what is told of a generated GPU job: its usage in the end, and the spans of its
    traces.

    Of spans, all names are counted, and the first of each name in each attempt is shown as it is
    sent.
    """
    world = lived(random.Random(seed), losses=1)
    spans = list(world.spans())
    first = {(span.trace.id, span.name): span for span in reversed(spans)}
    return {
        "ends": [gang.loss for gang in world.gangs],
        "usage": world.status["usage"],
        "spans": Counter(span.name for span in spans),
        "sent": export_request(first.values()),
    }


def screen(record: GRPOJobRecord) -> list[str]:
    """Return the lines of `grpo status`."""
    out = io.StringIO()
    console = Console(width=WIDTH, file=out, force_terminal=False, highlight=False, emoji=False)
    status_screen.show_status(
        console, str(record.key), GRPOJob(spec=record.valid_spec, status=record.status)
    )
    return _lines(out.getvalue())


def silence(seconds: float) -> Silence:
    """Return that rank 0 has not answered for so long."""
    return Silence(Observed(NOW - seconds), "10.0.0.7:8080: no answer in time")


def results() -> list[str]:
    """Return every result that a trainer may report."""
    return [result.value for result in Result]

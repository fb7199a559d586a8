"""How a pod ended: the typed end in what the kubelet wrote about the pod. Pure.

Three sources are trusted, in this order: the Outcome in the termination message, the container's
and pod's state by the kubelet, and the exit code. "The contract between operator and pod" in
docs/internals/architecture.md has the design. Only an Outcome can say Succeeded.

An eviction for memory or disk is not the cluster's whim. The same pod, started again, runs short
again, unlike one that was preempted or drained. The kubelet writes the cause as text alone, in the
formats of pkg/kubelet/eviction/helpers.go (Kubernetes 1.36), so other texts count as another cause.

A node that reboots loses its containers without a word of their end: what is reported of them then
says nothing about the program.
"""

import re
from dataclasses import dataclass, replace
from functools import lru_cache

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from grpo_api.report.preflight import PreflightReport
from grpo_api.report.report import EXIT_CODES, MemoryShortage, Outcome, Result
from grpo_api.report.root_cause import CausePriority, cause_priority
from grpo_api.report.termination_message import truncate_to_fit
from grpo_api.text.contract import CONTAINER, SHARED_MEMORY_VOLUME
from grpo_api.text.quantity import MAX_COUNT, quantity_bytes
from grpo_kube.objects.json_reader import MAX_OBJECT, JsonObject, reported_time, truncate
from grpo_kube.objects.times import Reported

_RESULTS = {code: result for result, code in EXIT_CODES.items() if result is not Result.SUCCEEDED}
_SYMPTOMS = (Result.SUCCEEDED, Result.ERROR, Result.HANG, Result.RENDEZVOUS_TIMEOUT)
_SYMPTOM_CODES = {EXIT_CODES[result] for result in _SYMPTOMS}
_LOST = ("Unknown", "ContainerStatusUnknown")
"""Reasons of a container that its node has lost, as containerd and the kubelet write them."""
MAX_DETAIL = 8192
_DETAILS = tuple(
    (name,)
    for name in (
        *("rank", "step", "totalSteps", "divergedOn", "metrics", "revisions", "standstill"),
        *("shortage", "engineCause", "checkpointStep", "account", "export", "checkpoint"),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodTermination:
    """The end of one pod. `reported`: an Outcome says so, not the container's state."""

    outcome: Outcome
    reported: bool
    disrupted: bool = False
    """The cluster ended the pod (eviction, preemption, node loss), not the program."""
    exit_code: int | None = None
    reasons: tuple[str, ...] = ()
    """The kubelet's and the cluster's words for the end, such as OOMKilled or Evicted."""
    node: str = ""
    """Where it ran."""
    held_seconds: float | None = None
    """From the pod's arrival at its kubelet, as soon as it is bound, to the end of its container;
    None where one of these is not known. By that kubelet's clock alone, so that an error of the
    clock cancels out."""
    ran_seconds: float | None = None
    """The container's part of it."""

    @property
    def has_succeeded(self) -> bool:
        """True if the trainer's own Outcome says Succeeded."""
        return self.reported and self.outcome.result is Result.SUCCEEDED

    @property
    def tier(self) -> CausePriority:
        """The end's rank in the search for the cause."""
        result, message = self.outcome.result, self.outcome.message
        return cause_priority(result, message, reported=self.reported, disrupted=self.disrupted)

    @property
    def is_certain_cause(self) -> bool:
        """True if no later end of a peer can be the cause of this one.

        A trainer that lost a peer reports Error, Hang or RendezvousTimeout, and one that received
        SIGTERM reports Preempted. A process that died without a report was not stopped by a peer's
        end. One that ended with the exit code of these results may have lost its report to a full
        disk, and so may one that ended with 0 and is done: rank 0's report decides.
        """
        if self.tier <= CausePriority.DISRUPTION:
            return True
        may_be_symptom = self.tier is CausePriority.TERMINATED or self.exit_code in _SYMPTOM_CODES
        return not self.reported and not may_be_symptom

    @property
    def is_own_failure(self) -> bool:
        """True if the program failed by itself, not by the cluster, SIGTERM or success."""
        return not (self.has_succeeded or self.disrupted or self.tier is CausePriority.TERMINATED)


_PACKED = TypeAdapter(PodTermination)
UNPACKED = 512
"""How many ends stay unpacked: those of one large gang."""


def pack_termination(termination: PodTermination) -> bytes:
    """An end in few bytes: pods stay long after their end, and are hardly ever read then."""
    return _PACKED.dump_json(termination, by_alias=True)


@lru_cache(UNPACKED)
def unpack_termination(packed: bytes) -> PodTermination:
    """The end that was packed."""
    return _PACKED.validate_json(packed)


def trainer_container(status: JsonObject) -> JsonObject:
    """The training container's status in a pod's, without those of sidecars."""
    for container in status.parts("containerStatuses"):
        if container.text("name") == CONTAINER:
            return container
    return JsonObject(None)


def pod_termination(status: JsonObject, attempt: int = 0, node: str = "") -> PodTermination | None:
    """The end in the status of a pod of this attempt, on that node; None while its container may
    run.

    Raises:
        Unreadable: a field has a type that it can't have.
    """
    target = status.condition("DisruptionTarget")
    disrupted = target.text("status") == "True"
    explanations = (target.reason_and_message(), status.reason_and_message())
    why = ": ".join(filter(None, explanations))
    state = trainer_container(status).part("state")
    if "terminated" in state:
        terminated = state.part("terminated")
        disrupted = disrupted or terminated.text("reason") in _LOST
        termination = _container_termination(terminated, attempt, disrupted, why)
        held_seconds, ran_seconds = _durations(status, terminated)
        reasons = _reasons(terminated, target, status)
        ended = replace(
            termination,
            node=node,
            reasons=reasons,
            held_seconds=held_seconds,
            ran_seconds=ran_seconds,
        )
        return _as_disruption(_with_shortage(ended, status), why)
    if status.text("phase") != "Failed":
        return None
    failed_init = next(filter(_has_failed, status.parts("initContainerStatuses")), None)
    if failed_init and not why:
        outcome = truncate_to_fit(Outcome(result=Result.ERROR), _init_message(failed_init))
        exit_code = _exit_code(failed_init)
        return PodTermination(outcome=outcome, reported=False, exit_code=exit_code, node=node)
    # no container ran: the kubelet refused or evicted the pod, which says nothing about the program
    outcome = truncate_to_fit(Outcome(result=Result.PREEMPTED), why or "the pod failed")
    reasons = _reasons(target, status)
    refused = PodTermination(
        outcome=outcome, reported=False, disrupted=True, node=node, reasons=reasons
    )
    return _with_shortage(refused, status)


def _with_shortage(termination: PodTermination, status: JsonObject) -> PodTermination:
    """The end with the shortage for which the kubelet evicted the pod, if it did."""
    eviction = eviction_of(status)
    # A trainer that the kubelet stops says Preempted, for it sees SIGTERM alone.
    says_why = termination.reported and termination.outcome.result is not Result.PREEMPTED
    if eviction is None or says_why:
        return termination
    outcome = eviction.outcome(termination.outcome)
    return replace(termination, outcome=outcome, reported=False, disrupted=False)


def _as_disruption(termination: PodTermination, why: str) -> PodTermination:
    """The end as the cluster's where the cluster ended the pod: what the trainer reports of it
    then, such as a peer that it has lost, is a symptom."""
    outcome = termination.outcome
    is_disruption = termination.tier is CausePriority.DISRUPTION
    if not is_disruption or termination.has_succeeded or outcome.result is Result.PREEMPTED:
        return termination
    message = outcome.message
    if termination.reported:
        reason = why or "the cluster ended the pod"
        message = f"{reason}; the trainer reported {outcome.result}: {message}"
    preempted = outcome.model_copy(update={"result": Result.PREEMPTED})
    return replace(termination, outcome=truncate_to_fit(preempted, message))


def preflight_report(state: JsonObject) -> PreflightReport | None:
    """The report in the state of a preflight's container; None where it left something else.

    Raises:
        Unreadable: a field has a type that it can't have.
    """
    message = state.part("terminated").text("message", MAX_OBJECT)
    try:
        # A newer image may report more.
        return PreflightReport.model_validate_json(message, extra="ignore")
    except ValidationError:
        return None


def _reasons(*parts: JsonObject) -> tuple[str, ...]:
    return tuple(filter(None, (part.text("reason") for part in parts)))


def _durations(status: JsonObject, terminated: JsonObject) -> tuple[float | None, float | None]:
    """How long the pod was held and how long its container ran; None for what makes no duration."""
    arrived_at = reported_time(status, "startTime")
    started_at = reported_time(terminated, "startedAt")
    finished_at = reported_time(terminated, "finishedAt")
    return _duration(arrived_at, finished_at), _duration(started_at, finished_at)


def _duration(begin: Reported | None, end: Reported | None) -> float | None:
    if not begin or not end or end < begin:
        return None
    return end - begin


def _exit_code(container: JsonObject) -> int:
    """Exit code of a container that has ended, else 0."""
    return container.part("state").part("terminated").integer("exitCode")


def _has_failed(init_container: JsonObject) -> bool:
    """True if an init container failed by itself. Of a pod that ends before it starts, the kubelet
    reports those as lost that did not run."""
    terminated = init_container.part("state").part("terminated")
    return bool(_exit_code(init_container)) and terminated.text("reason") not in _LOST


def _init_message(container: JsonObject) -> str:
    """How an init container failed. One that did not start has no log."""
    end = f"init container {container.text('name')} ended with exit code {_exit_code(container)}"
    terminated = container.part("state").part("terminated")
    if terminated.text("reason") == "OOMKilled":
        return f"{end} at its memory limit (OOMKilled); raise its resources.limits.memory"
    detail = truncate(terminated.text("message", MAX_OBJECT).strip(), MAX_DETAIL)
    return f"{end}: {detail}" if detail else f"{end}; see its log"


def _container_termination(
    terminated: JsonObject, attempt: int, disrupted: bool, why: str
) -> PodTermination:
    message = terminated.text("message", MAX_OBJECT)
    outcome = _parse_outcome(message, attempt)
    is_reported = outcome is not None
    if outcome is None:
        detail = "; ".join(part for part in (why, message.strip()) if part)
        outcome = _outcome_of_state(terminated, detail)
    return PodTermination(
        outcome=outcome,
        reported=is_reported,
        disrupted=disrupted,
        exit_code=terminated.integer("exitCode"),
    )


def _outcome_of_state(terminated: JsonObject, detail: str) -> Outcome:
    """What the container's state says of a program that said nothing itself."""
    code = terminated.integer("exitCode")
    if terminated.text("reason") == "OOMKilled":
        message = (
            "the kernel killed the container at its memory limit (OOMKilled); raise "
            "spec.resources.limits.memory"
        )
        shortage = MemoryShortage(memory="Host")
        return Outcome(result=Result.OUT_OF_MEMORY, message=message, shortage=shortage)
    if terminated.text("reason") in _LOST:
        result = Result.PREEMPTED
        message = "the node lost the container, as a reboot does"
    elif code == 0:
        result = Result.ERROR
        message = "the container ended with exit code 0 but left no outcome, so it is not done"
    else:
        result = _RESULTS.get(code, Result.ERROR)
        message = f"the container ended with exit code {code} and left no outcome"
    if detail:
        bounded_detail = truncate(detail, MAX_DETAIL)
        message += f": {bounded_detail}"
    return truncate_to_fit(Outcome(result=result), message)


def _parse_outcome(message: str, attempt: int) -> Outcome | None:
    """The Outcome in a termination message; None when it holds something else, such as a kubelet's
    own words.

    One of another attempt counts as something else: only the attempt itself can say how it ended.
    Details that can't be believed are left out, for they don't change how it ended.
    """
    try:
        outcome = Outcome.model_validate_json(message, extra="ignore")
    except ValidationError as error:
        if not all(problem["loc"][:1] in _DETAILS for problem in error.errors()):
            return None
        believed = {
            name: value for name, value in from_json(message).items() if (name,) not in _DETAILS
        }
        outcome = Outcome.model_validate(believed, extra="ignore")
    return outcome if outcome.attempt in (0, attempt) else None


EVICTED = "Evicted"
"""The pod's reason after any eviction by its kubelet."""
MAX_MESSAGE = 1024
"""Characters of the kubelet's message that are kept: it names every container over its request."""
_LOW = re.compile(r"The node was low on resource: ([a-z-]{1,32})\. ")
_CONTAINER_USAGE = re.compile(
    rf"Container {CONTAINER} was using ([0-9A-Za-z.]{{1,32}}), request is "
)
_POD_USAGE = re.compile(r"Pod [-a-z0-9.]{1,253} was using ([0-9A-Za-z.]{1,32}), request is ")
_VOLUME = re.compile(r'Usage of EmptyDir volume "([-a-z0-9]{1,63})" exceeds the limit ')
_STORAGE_LIMITS = (
    " exceeded its local ephemeral storage limit ",
    "Pod ephemeral local storage usage exceeds the total limit of containers ",
)
_DISK_RESOURCES = ("ephemeral-storage", "inodes")


@dataclass(frozen=True, slots=True)
class Eviction:
    """A shortage for which a kubelet evicted a pod."""

    result: Result
    """OutOfMemory or OutOfDisk."""
    message: str
    """The kubelet's words, and the field to raise where one is certain."""
    used_bytes: int = 0
    """Memory that the training container used; 0 where the kubelet did not say."""

    def outcome(self, before: Outcome) -> Outcome:
        """The outcome of an evicted pod: how far `before` says that it was, with this cause."""
        shortage = None
        if self.result is Result.OUT_OF_MEMORY:
            shortage = MemoryShortage(memory="Host", allocated_bytes=self.used_bytes)
        changes = {"result": self.result, "shortage": shortage}
        return truncate_to_fit(before.model_copy(update=changes), self.message)


def eviction_of(status: JsonObject) -> Eviction | None:
    """The shortage for which a pod was evicted; None for every other end.

    A pod that a node with pressure refused was not evicted: it never ran, and its scheduler finds
    it another node.
    """
    if status.text("reason") != EVICTED:
        return None
    message = truncate(status.text("message", MAX_OBJECT).strip(), MAX_MESSAGE)
    low_resource = _LOW.search(message + " ")
    resource = low_resource[1] if low_resource else ""
    if resource == "memory":
        why = f"the kubelet evicted the pod for memory: {message}"
        return Eviction(Result.OUT_OF_MEMORY, why, _used_bytes(message))
    if resource in _DISK_RESOURCES:
        why = (
            f"the kubelet evicted the pod for disk: {message} Raise "
            "spec.resources.requests.ephemeral-storage, so that it gets a node with more"
        )
        return Eviction(Result.OUT_OF_DISK, why)
    if field := _exceeded_limit(message):
        why = f"the kubelet evicted the pod for disk: {message} Raise {field}"
        return Eviction(Result.OUT_OF_DISK, why)
    return None


def _exceeded_limit(message: str) -> str:
    """The field with the limit of disk that the pod exceeded; empty for another cause."""
    if volume := _VOLUME.search(message):
        if volume[1] == SHARED_MEMORY_VOLUME:
            return "spec.sharedMemory"
        return f"emptyDir.sizeLimit of the volume {volume[1]} in spec.podTemplate.spec.volumes"
    if any(text in message for text in _STORAGE_LIMITS):
        return "spec.resources.limits.ephemeral-storage"
    return ""


def _used_bytes(message: str) -> int:
    """Memory of the training container, or of the pod if only that is said; else 0."""
    usage = _CONTAINER_USAGE.search(message) or _POD_USAGE.search(message)
    if usage is None:
        return 0
    try:
        return min(MAX_COUNT, quantity_bytes(usage[1]))
    except ValueError:
        return 0

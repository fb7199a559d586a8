"""Resolves a GRPOJob's spec with its GRPOJobClass: the spec that is planned and run.

It is done once per attempt, before planning, so that nothing behind it knows of classes. The spec
is read as a user wrote it: a field that has its default counts as unset, since the API server fills
defaults in. Maps and lists of both are joined; for one key, one variable or one field `fixed` goes
before the job, and the job before `default`. A job that says something else than `fixed` is refused
and not overruled.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from pydantic import ValidationError

from .job import GRPOJobSpec, SpecInvalid, parse_spec
from .job_class import ClassLimits, GRPOJobClassSpec
from .plan.plan import ExecutionPlan
from .pods.platform import VOLUME_PREFIX, PlatformSpec
from .spec.run_policy import GPURange, PlacementSpec
from .status.status import AppliedJobClass
from .text.base import Model
from .text.contract import CLASS_KIND, LABEL_QUEUE
from .text.problems import problem_message
from .text.schema import structural_schema

Fields = dict[str, Any]
_KEYS = {"env": "name", "podTemplate.spec.imagePullSecrets": "name"}
"""By path, the lists whose items have a key; of all others equal items are the same."""
RESOLVED = 512
"""How many resolved specs are kept: waiting jobs are resolved again in every admission cycle."""


class Resolution(NamedTuple):
    """A job's spec with its class."""

    spec: GRPOJobSpec | None
    """None where both together make no valid spec."""
    problems: tuple[str, ...]
    """Why the class refuses the job, a sentence each."""


def resolve(spec: GRPOJobSpec, job_class: AppliedJobClass, labels: Mapping[str, str]) -> Resolution:
    """The effective spec of a job with these labels, and why its class refuses it."""
    text = json.dumps(_set_fields(spec))
    class_text = json.dumps(job_class.spec, sort_keys=True)
    merged = _resolve_spec(text, class_text, job_class.name)
    if merged.spec is None:
        return merged
    limits = class_spec(class_text).limits
    # A queue that the spec names needs no label.
    labels = {LABEL_QUEUE: spec.placement.queue_name or "", **labels}
    problems = (*merged.problems, *_limit_problems(spec, merged.spec, limits, labels))
    allowed = (f"{CLASS_KIND} {job_class.name}: {problem}" for problem in problems)
    return Resolution(merged.spec, tuple(allowed))


@lru_cache(64)
def class_spec(text: str) -> GRPOJobClassSpec:
    """The typed spec of a class, by its JSON.

    Raises:
        ValidationError: this version doesn't know a field or a value of it.
    """
    return GRPOJobClassSpec.model_validate(json.loads(text), strict=True, by_name=False)


def class_limits(job_class: AppliedJobClass) -> ClassLimits:
    """The limits of a class that a status records; none where this version can't read it."""
    with contextlib.suppress(ValidationError):
        return class_spec(json.dumps(job_class.spec, sort_keys=True)).limits
    return ClassLimits()


def applied_class(name: str, generation: int, spec: Fields) -> AppliedJobClass:
    """A class as a status records it: without the defaults that the API server has filled in."""
    # resolve reports a spec that can't be read
    with contextlib.suppress(ValidationError):
        spec = _set_fields(class_spec(json.dumps(spec)))
    return AppliedJobClass(name=name, generation=generation, spec=spec)


def gpus_problem(job_class: AppliedJobClass, plan: ExecutionPlan) -> str:
    """Why the class refuses a plan, whose engines take GPUs beside the trainers'; empty if it does
    not."""
    most = class_limits(job_class).gpus
    if most is None or plan.all_gpus <= most:
        return ""
    return (
        f"{CLASS_KIND} {job_class.name}: the plan takes {plan.all_gpus} GPUs, its engines' "
        f"included; at most {most} are allowed: lower spec.placement.gpus.max, or set "
        "spec.generation.engine to Colocated"
    )


@lru_cache(RESOLVED)
def _resolve_spec(text: str, class_text: str, name: str) -> Resolution:
    """The effective spec, and what of the job contradicts what its class fixes."""
    job_fields: Fields = json.loads(text)
    try:
        job_class = class_spec(class_text)
    except ValidationError as error:
        schema = structural_schema(GRPOJobClassSpec, defaults=False)
        problem = problem_message(error.errors()[0], schema, kind=CLASS_KIND)
        sentence = f"{CLASS_KIND} {name} can't be read by this version: {problem}"
        return Resolution(None, (sentence,))
    fixed = _set_fields(job_class.fixed)
    resources = _set_fields(job_class.platform.resources)
    if resources:
        fixed["resources"] = resources
    problems = tuple(_conflicts(job_fields, fixed))
    fields = _overlay(_overlay(_set_fields(job_class.default), job_fields), fixed)
    _fit_to_job(fields, job_fields)
    _cap(fields, job_class.limits)
    try:
        spec = parse_spec(fields)
    except SpecInvalid as error:
        sentences = (f"{CLASS_KIND} {name}: with it {problem}" for problem in error.problems)
        return Resolution(None, tuple(sentences))
    problems += tuple(_volume_clashes(spec, job_class.platform))
    spec = spec.on_platform(job_class.platform, job_class.limits.gpus)
    return Resolution(spec, problems)


def _volume_clashes(spec: GRPOJobSpec, platform: PlatformSpec) -> Iterator[str]:
    """A sentence for each name and folder that a volume of the job shares with one of its class:
    the API server takes no such pod."""
    folders = {mount.mount_path for mount in spec.volume_mounts}
    for volume in platform.volumes:
        name = f"{VOLUME_PREFIX}{volume.name}"
        if name in spec.pod_template.spec.volume_names:
            yield f"spec.podTemplate.spec.volumes[{name}]: rename it"
        if volume.mount_path in folders:
            folder = f"spec.volumeMounts[{volume.mount_path:.100}]"
            yield f"{folder}: the class mounts its own there; choose another mountPath"


def _set_fields(model: Model) -> Fields:
    """What a model has beside its defaults, as JSON."""
    return model.model_dump(mode="json", by_alias=True, exclude_defaults=True)


def _overlay(below: Any, above: Any, path: str = "") -> Any:
    """Both joined; for one field, key or item `above` wins."""
    if isinstance(below, dict) and isinstance(above, dict):
        joined = below | above
        for name in below.keys() & above.keys():
            joined[name] = _overlay(below[name], above[name], _field_path(path, name))
        return joined
    if isinstance(below, list) and isinstance(above, list):
        key = _KEYS.get(path)
        items = {_identity(item, key): item for item in below}
        items |= {_identity(item, key): item for item in above}
        return list(items.values())
    return above


def _conflicts(job_value: Any, fixed: Any, path: str = "") -> Iterator[str]:
    """A sentence for each field that the job sets and its class fixes to something else."""
    if isinstance(job_value, dict) and isinstance(fixed, dict):
        for name in sorted(job_value.keys() & fixed.keys()):
            yield from _conflicts(job_value[name], fixed[name], _field_path(path, name))
        return
    if isinstance(job_value, list) and isinstance(fixed, list):
        key = _KEYS.get(path)
        if key is None:
            return
        by_key = {item[key]: item for item in fixed}
        for item in job_value:
            if by_key.get(item[key], item) != item:
                yield f"spec.{path}[{item[key]}] is fixed by the class: remove it"
        return
    if job_value != fixed:
        yield f"spec.{path} is {job_value!r:.60}, and the class fixes {fixed!r:.60}: remove it"


def _field_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _identity(item: Any, key: str | None) -> str:
    return str(item[key]) if key else json.dumps(item, sort_keys=True)


def _fit_to_job(fields: Fields, job_fields: Fields) -> None:
    """Leave out settings for a claim, an engine or GPUs that the job does not have."""
    if "volumeClaimTemplate" not in job_fields.get("checkpoint", {}):
        fields.get("checkpoint", {}).pop("volumeClaimTemplate", None)
    generation = fields.get("generation", {})
    job_generation = job_fields.get("generation", {})
    engine = job_generation.get("engine")
    if fields.get("placement", {}).get("accelerator") == "CPU" or engine == "Transformers":
        for name in generation.keys() & {"engine", "engineArguments"} - job_generation.keys():
            del generation[name]


def _cap(fields: Fields, limits: ClassLimits) -> None:
    """Give a job that leaves the number of GPUs open, and any job's duration, the largest that is
    allowed: the duration may be raised while an attempt runs."""
    placement = fields.setdefault("placement", {})
    is_open = placement.get("accelerator") != "CPU" and "gpusPerNode" not in placement
    if limits.gpus is not None and is_open:
        gpus = placement.setdefault("gpus", {})
        fewest = max(gpus.get("min", 1), placement.get("nodes", 1))
        gpus.setdefault("max", max(fewest, limits.gpus))
    longest = limits.active_deadline_seconds
    if longest is not None:
        fields["activeDeadlineSeconds"] = min(fields.get("activeDeadlineSeconds", longest), longest)


def _limit_problems(
    spec: GRPOJobSpec, effective: GRPOJobSpec, limits: ClassLimits, labels: Mapping[str, str]
) -> Iterator[str]:
    """A sentence for each limit that the job exceeds."""
    path, gpus = _asked_gpus(spec.placement)
    if limits.gpus is not None and gpus > limits.gpus:
        yield f"spec.placement.{path} asks for {gpus} GPUs; at most {limits.gpus} are allowed"
    seconds = spec.active_deadline_seconds or 0
    longest = limits.active_deadline_seconds
    if longest is not None and seconds > longest:
        yield f"spec.activeDeadlineSeconds is {seconds}; at most {longest} is allowed"
    priority = effective.placement.priority_class_name
    names = limits.priority_class_names
    if priority and names and priority not in names:
        allowed = ", ".join(names)
        yield f"spec.placement.priorityClassName is {priority}; allowed: {allowed:.120}"
    for label in limits.required_labels:
        if not labels.get(label):
            yield f"metadata.labels: {label} is missing; set it on the GRPOJob"


def _asked_gpus(placement: PlacementSpec) -> tuple[str, int]:
    """The field by which a job asks for the most GPUs, and their number; 0 on CPUs."""
    if placement.accelerator == "CPU":
        return "accelerator", 0
    gpus = placement.gpus or GPURange()
    asked = {
        "gpusPerNode": placement.declared_gpus,
        "gpus.max": gpus.max,
        "gpus.min": gpus.min,
        "nodes": placement.nodes,
    }
    counts = {path: count or 0 for path, count in asked.items()}
    path = max(counts, key=lambda path: counts[path])
    return path, counts[path]

"""Writes the provenance Statement of grpo_api beside an exported model, signed if there is a key.

The statement is written before the export gets its final name, so that every export has one. It
contains what rank 0 knows for certain. What a pod can't know (the content behind an image's tag,
settings of the cluster) is left out or marked.
"""

import os
import platform
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import torch

from grpo_api.job import GRPOJobSpec
from grpo_api.plan.plan import JobIdentity, TrainingPlan
from grpo_api.provenance.provenance import (
    BUILD_TYPE,
    BUILDER,
    ENVELOPE_FILE,
    PREDICATE_TYPE,
    STATEMENT_FILE,
    STATEMENT_TYPE,
    AttemptRecord,
    BuildDefinition,
    Builder,
    BuildMetadata,
    Dependency,
    End,
    EnvironmentRecord,
    ExternalParameters,
    FileDigest,
    InternalParameters,
    Provenance,
    ReferenceRecord,
    RunDetails,
    RunRecord,
    Statement,
    Subject,
    WeightsProof,
)
from grpo_api.report.artifacts import SUMS, files_of, parse_sums
from grpo_api.report.report import Progress
from grpo_api.report.revisions import DATASET_FINGERPRINT
from grpo_api.spec.dataset import DatasetSpec
from grpo_api.text.contract import DATA_MOUNT, DATA_MOUNT_ENV, IMAGE_ENV

from ..process.outcome import kept_outcomes
from ..runtime.clock import unix_time
from ..runtime.paths import attempt_folder
from ..weights.model_files import Source
from ..weights.proof import Proof
from .hashing import sha256_sums
from .signing_key import sign_payload

SECTIONS = sorted(
    (GRPOJobSpec.model_fields.keys() & TrainingPlan.model_fields.keys()) - {"resume_from"}
)
"""Sections of the spec that the plan carries unchanged. It carries resumeFrom as a folder, so that
is not one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenanceFacts:
    """A run that is over, as rank 0 knows it."""

    plan: TrainingPlan
    source: Source
    """Where the policy came from."""
    proofs: Sequence[Proof]
    """What was proven of it and of its reference, in order."""
    progress: Progress
    """What the attempt has come to."""
    started: float
    """Unix time of the process's start, in seconds."""


def write_provenance(run: ProvenanceFacts, folder: Path) -> None:
    """Write the Statement about all files of an export into its folder, and the envelope if the
    plan wants a signature.

    Raises:
        OSError: a file can't be read or written.
        BadInput: the key can't be used; it could at the start.
    """
    text = _statement(run, subjects(folder)).model_dump_json(exclude_none=True, indent=2).encode()
    (folder / STATEMENT_FILE).write_bytes(text)
    if run.plan.export and run.plan.export.signing_key_secret_ref:
        (folder / ENVELOPE_FILE).write_bytes(sign_payload(text))


def subjects(folder: Path) -> list[Subject]:
    """Return all files of a folder with their hashes. Files in its own list of hashes, which are
    most of its bytes, aren't read again.

    Raises:
        OSError: a file can't be read.
    """
    recorded_sums = parse_sums((folder / SUMS).read_text(encoding="utf-8"))
    sums = {**sha256_sums(folder, files_of(folder).keys() - recorded_sums.keys()), **recorded_sums}
    return [
        Subject(name=name, digest=FileDigest(sha256=digest))
        for name, digest in sorted(sums.items())
    ]


def _statement(run: ProvenanceFacts, about: list[Subject]) -> Statement:
    plan = run.plan
    shown_elsewhere = {"job", "execution", *SECTIONS}
    return Statement(
        type=STATEMENT_TYPE,
        subject=about,
        predicate_type=PREDICATE_TYPE,
        predicate=Provenance(
            build_definition=BuildDefinition(
                build_type=BUILD_TYPE,
                external_parameters=_external_parameters(plan),
                internal_parameters=InternalParameters(
                    job=plan.job.model_dump(),
                    execution=plan.execution.model_dump(mode="json", exclude_none=True),
                    pod_plan=plan.model_dump(
                        mode="json", exclude_none=True, exclude=shown_elsewhere
                    ),
                ),
                resolved_dependencies=list(_resolved_dependencies(run)),
            ),
            run_details=RunDetails(
                builder=Builder(id=BUILDER, version=packages()),
                metadata=build_metadata(plan.job, run.started),
                grpo_run=_record(run),
            ),
        ),
    )


def build_metadata(job: JobIdentity, started: float) -> BuildMetadata:
    """The attempt that makes an artifact, from a Unix time in seconds until now."""
    return BuildMetadata(
        invocation_id=f"{job.uid}/{job.attempt}",
        started_on=_moment(started),
        finished_on=_moment(unix_time()),
    )


def _moment(seconds: float) -> str:
    """A Unix time as RFC 3339 writes it, in whole seconds."""
    return datetime.fromtimestamp(int(seconds), UTC).isoformat().replace("+00:00", "Z")


def _external_parameters(plan: TrainingPlan) -> ExternalParameters:
    """The spec's sections, and the names of those that the pods don't get."""
    spec = plan.model_dump(mode="json", exclude_none=True, include=set(SECTIONS))
    for reward in spec["rewards"]:
        if "http" in reward:
            # A URL may contain a user name and a password.
            reward["http"]["url"] = _public(reward["http"]["url"])
    left_out = {
        name: field for name, field in GRPOJobSpec.model_fields.items() if name not in SECTIONS
    }
    return ExternalParameters(
        spec=spec, omitted=sorted(field.alias or name for name, field in left_out.items())
    )


def _public(url: str) -> str:
    """An address without what may be a secret in it: user and password, query and fragment."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _resolved_dependencies(run: ProvenanceFacts) -> Iterator[Dependency]:
    """Model, data, reward models, and the image as far as it is known."""
    plan, commits = run.plan, dict(run.progress.revisions)
    rows = commits.pop(DATASET_FINGERPRINT, "")
    yield _model(run, commits.get("model", ""))
    yield _dataset(plan.dataset, commits.get("dataset", ""))
    yield Dependency(name="rows", digest={"sha256": rows} if rows else {})
    for position, reward in enumerate(plan.rewards):
        if reward.model:
            name = f"rewards[{position}].model"
            yield from_hub(name, reward.model.name, commits.get(name, ""))
    if image := os.environ.get(IMAGE_ENV):
        yield _image(image)


def _model(run: ProvenanceFacts, commit: str) -> Dependency:
    """The model that the run began with; its fingerprint names the weights also where there is no
    commit."""
    dependency = from_hub("model", run.source.name, commit or run.source.revision)
    annotations = {"xxh3_128": run.proofs[0].fingerprint} if run.proofs else {}
    return dependency.model_copy(update={"annotations": annotations})


def _dataset(dataset: DatasetSpec, commit: str) -> Dependency:
    if dataset.name:
        return from_hub("dataset", f"datasets/{dataset.name}", commit)
    return Dependency(name="dataset", uri=Path(os.environ.get(DATA_MOUNT_ENV, DATA_MOUNT)).as_uri())


def from_hub(name: str, repository: str, commit: str) -> Dependency:
    """A repository of the hub, or where there is no commit the folder that its name is."""
    if not commit:
        return Dependency(
            name=name, uri=Path(repository).as_uri() if repository.startswith("/") else repository
        )
    return Dependency(name=name, uri=f"hf://{repository}@{commit}", digest={"gitCommit": commit})


def _image(image: str) -> Dependency:
    """The image as the pod's template names it; a pod can't see what a tag led to."""
    digest = image.rpartition("@sha256:")[2] if "@sha256:" in image else ""
    if digest:
        return Dependency(name="image", uri=f"docker://{image}", digest={"sha256": digest})
    annotations = {"known": "by its tag only, which may lead elsewhere later"}
    return Dependency(name="image", uri=f"docker://{image}", annotations=annotations)


def _record(run: ProvenanceFacts) -> RunRecord:
    attempts, reference = _attempts(run), _reference(run)
    proofs = [
        WeightsProof(what=proof.what, parameters=proof.parameters, fingerprint=proof.fingerprint)
        for proof in run.proofs
    ]
    return RunRecord(
        steps=run.progress.step,
        attempts=attempts,
        reference=reference,
        proofs=proofs,
        environment=environment(),
    )


def _attempts(run: ProvenanceFacts) -> list[AttemptRecord]:
    """All attempts; of the earlier ones what their processes left on the volume, and what the
    operator saw."""
    attempt, folder = run.plan.job.attempt, run.plan.checkpoint_directory
    reasons = {end.attempt: end.reason for end in run.plan.ends} if run.plan.ends else {}
    earlier = [
        AttemptRecord(attempt=number, ends=_ends(folder, number), reason=reasons.get(number, ""))
        for number in range(1, attempt)
    ]
    return [
        *earlier,
        AttemptRecord(attempt=attempt, resumed_from_step=run.progress.resumed_from_step),
    ]


def _ends(checkpoint_directory: str | None, attempt: int) -> list[End]:
    """The ends of an attempt's processes; without their messages, which may quote anything."""
    folder = attempt_folder(checkpoint_directory, attempt)
    if folder is None:
        return []
    # A gang's processes mostly end alike, so equal ends are counted instead of listed.
    counted = Counter((str(outcome.result), outcome.step) for outcome in kept_outcomes(folder))
    return [
        End(result=result, step=step, ranks=ranks)
        for (result, step), ranks in sorted(counted.items())
    ]


def _reference(run: ProvenanceFacts) -> ReferenceRecord:
    sync, strategy, step = run.plan.reference.sync, run.plan.execution.strategy, run.progress.step
    if sync is None:
        return ReferenceRecord(strategy=strategy)
    # resumes are exact, moved references included: how often follows from the steps, however many
    # attempts they took
    syncs = step // sync.every_steps
    moved: dict[str, Any] = {"syncs": syncs, "last_sync_step": syncs * sync.every_steps}
    return ReferenceRecord(
        strategy=strategy, sync_every_steps=sync.every_steps, mixup=sync.mixup, **moved
    )


DRIVER = Path("/proc/driver/nvidia/version")


def environment(variables: Mapping[str, str] = os.environ) -> EnvironmentRecord:
    """The environment record of this process."""
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    # Of variables the names alone: a value may be a token.
    return EnvironmentRecord(
        platform=platform.platform(),
        command=sys.orig_argv,
        variables=sorted(variables),
        gpus=gpus,
        driver=driver(),
        cuda=str(torch.version.cuda or ""),
    )


def driver() -> str:
    """Version of the kernel's NVIDIA driver; empty without one."""
    version = re.search(r"\d{3,}\.[\d.]+", DRIVER.read_text()) if DRIVER.exists() else None
    return version[0] if version else ""


def packages() -> dict[str, str]:
    """Versions of Python and of every package that it finds, by name."""
    versions = {
        distribution.name.lower(): distribution.version
        for distribution in metadata.distributions()
        if distribution.name
    }
    return {"python": platform.python_version()} | dict(sorted(versions.items()))

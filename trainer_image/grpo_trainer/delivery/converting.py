"""Converts an export on request: merges the adapter into its base, or changes the dtype, and states
the origin.

The pod converts, since the base is there, and so that no laptop needs torch or room for both.

grpo_api's ConversionStatement is written beside the model: which files of which export it was made
from. A reader who has only the conversion can thus find its source, and can't mistake it for the
signed export.
"""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from grpo_api.plan.plan import JobIdentity, TrainingPlan
from grpo_api.provenance.provenance import (
    BUILDER,
    CONSUMED,
    CONVERSION_TYPE,
    ORIGINAL,
    OWN_FILES,
    PREDICATE_TYPE,
    STATEMENT_FILE,
    STATEMENT_TYPE,
    Builder,
    Conversion,
    ConversionDefinition,
    ConversionDetails,
    ConversionParameters,
    ConversionStatement,
    Dependency,
)
from grpo_api.report.artifacts import SUMS, WEIGHTS, sums_text, weights_hash

from ..checkpoints.export import merge_adapter
from ..checkpoints.hashing import list_files, read_sums, sha256_sums
from ..checkpoints.provenance import build_metadata, from_hub, packages, subjects
from ..hub.model_card import CARD, converted_card
from ..hub.repositories import Hub, Repository
from ..runtime.clock import unix_time
from ..runtime.errors import BadInput
from ..weights.checkpoint_files import ADAPTER_CONFIG
from ..weights.model_files import Dtype, Source, locate_model
from ..weights.models import load_causal


def write_conversion(
    job: JobIdentity,
    consumed: Mapping[str, str],
    source: Source,
    folder: Path,
    *,
    parameters: ConversionParameters,
    started: float,
) -> None:
    """Write the document about all files of a converted model into its folder. `consumed` has the
    sha256 of each of the export's files, `started` is a Unix time in seconds.

    Raises:
        OSError: a file can't be read or written.
    """
    used = [
        Dependency(name=f"{CONSUMED}{name}", digest={"sha256": digest})
        for name, digest in sorted(consumed.items())
    ]
    if parameters.merge:
        used.append(from_hub("base", source.name, source.revision))
    statement = ConversionStatement(
        type=STATEMENT_TYPE,
        subject=subjects(folder),
        predicate_type=PREDICATE_TYPE,
        predicate=Conversion(
            build_definition=ConversionDefinition(
                build_type=CONVERSION_TYPE,
                external_parameters=parameters,
                resolved_dependencies=used,
            ),
            run_details=ConversionDetails(
                builder=Builder(id=BUILDER, version=packages()),
                metadata=build_metadata(job, started),
            ),
        ),
    )
    (folder / STATEMENT_FILE).write_text(
        statement.model_dump_json(exclude_none=True, indent=2), encoding="utf-8"
    )


_INDEX = ".safetensors.index.json"


def convert_export(
    plan: TrainingPlan, export: Path, folder: Path, dtype: str | None, *, merge: bool
) -> Path:
    """Write the converted model to `folder`, which must not exist, with its own hashes and
    provenance; return `folder`.

    The export's own statement and signature go into the subfolder ORIGINAL: they don't hold for the
    converted files.

    Raises:
        BadInput: there is no adapter to merge, an adapter without `merge`, or no base for it; or
            the export's files have changed.
        OSError: the disk fails, or is full.
    """
    adapter = (export / ADAPTER_CONFIG).is_file()
    if merge and not adapter:
        raise BadInput("the export is a whole model: leave --merge out")
    if adapter and not merge:
        raise BadInput("--dtype needs --merge here")
    started, consumed = unix_time(), _verified_sums(export)
    target = cast(Dtype, dtype or plan.execution.dtype)
    _copy(export, consumed, folder, weights=adapter)
    source = Source(plan.model.name, export, "", target)
    if adapter:
        base = Repository("model", plan.model.name, plan.model.revision, "model")
        source = locate_model(base, target, Hub(plan.revisions))
        merge_adapter(source, folder, remote_code=plan.model.trust_remote_code)
    else:
        model: Any = load_causal(source, plan.model.trust_remote_code)
        model.save_pretrained(folder)
    parameters = ConversionParameters(merge=merge, dtype=target)
    _seal(folder, parameters)
    if (export / STATEMENT_FILE).exists():
        write_conversion(plan.job, consumed, source, folder, parameters=parameters, started=started)
    return folder


def _seal(folder: Path, parameters: ConversionParameters) -> None:
    """Write the hashes of a model that is complete, after its page has been made true of it."""
    sums = sha256_sums(folder, list_files(folder))
    card = folder / CARD
    if card.is_file():
        page = card.read_text(encoding="utf-8")
        converted = converted_card(page, weights_hash(sums), parameters.description)
        card.write_text(converted, encoding="utf-8")
        sums |= sha256_sums(folder, [CARD])
    (folder / SUMS).write_text(sums_text(sums), encoding="utf-8")


def _verified_sums(export: Path) -> dict[str, str]:
    """Name → sha256 of the model's files, which were read and are what was exported."""
    recorded = read_sums(export)
    sums = sha256_sums(export, recorded or list_files(export))
    changed = sorted(name for name, digest in recorded.items() if sums[name] != digest)
    if changed:
        raise BadInput(
            f"{', '.join(changed)} of {export} is not what was exported: restore it there"
        )
    return sums


def _copy(export: Path, names: Iterable[str], folder: Path, *, weights: bool) -> None:
    """Copy the model's files, with its weights or without, and put its own statements into
    ORIGINAL."""
    (folder / ORIGINAL).mkdir(parents=True)
    for name in names:
        if weights or not name.endswith((WEIGHTS, _INDEX)):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(export / name, folder / name)
    for name in OWN_FILES:
        if (export / name).exists():
            shutil.copyfile(export / name, folder / ORIGINAL / name)

"""Writes grpo_api's ConversionStatement beside a converted model: which files of which export it was made from.

A reader who has only the conversion can thus find its source, and can't mistake it for the signed export.
"""

from collections.abc import Mapping
from pathlib import Path

from grpo_api.plan.plan import TrainingPlan
from grpo_api.provenance.provenance import (
    BUILDER,
    CONSUMED,
    CONVERSION_TYPE,
    PREDICATE_TYPE,
    STATEMENT_FILE,
    STATEMENT_TYPE,
    Builder,
    BuildMetadata,
    Conversion,
    ConversionDefinition,
    ConversionDetails,
    ConversionParameters,
    ConversionStatement,
    Dependency,
)

from ..checkpoints.environment import packages
from ..checkpoints.provenance import from_hub, moment, subjects
from ..clock import unix_time
from ..weights.models import Source


def write_conversion(
    plan: TrainingPlan,
    consumed: Mapping[str, str],
    source: Source,
    folder: Path,
    *,
    asked: ConversionParameters,
    started: float,
) -> None:
    """Write the document about all files of a converted model into its folder.

    Args:
        plan: of the attempt whose export it was.
        consumed: name → sha256 of the export's files.
        source: the base that an adapter was merged into, or the export itself.
        folder: the converted model, complete.
        asked: what was asked for.
        started: Unix time, in seconds.

    Raises:
        OSError: a file can't be read or written.
    """
    used = [Dependency(name=f"{CONSUMED}{name}", digest={"sha256": one}) for name, one in sorted(consumed.items())]
    if asked.merge:
        used.append(from_hub("base", source.name, source.revision))
    statement = ConversionStatement(
        type=STATEMENT_TYPE,
        subject=subjects(folder),
        predicate_type=PREDICATE_TYPE,
        predicate=Conversion(
            build_definition=ConversionDefinition(
                build_type=CONVERSION_TYPE,
                external_parameters=asked,
                resolved_dependencies=used,
            ),
            run_details=ConversionDetails(
                builder=Builder(id=BUILDER, version=packages()),
                metadata=BuildMetadata(
                    invocation_id=f"{plan.job.uid}/{plan.job.attempt}",
                    started_on=moment(started),
                    finished_on=moment(unix_time()),
                ),
            ),
        ),
    )
    (folder / STATEMENT_FILE).write_text(statement.model_dump_json(exclude_none=True, indent=2), encoding="utf-8")

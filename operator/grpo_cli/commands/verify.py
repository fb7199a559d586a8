"""`grpo verify`: is this folder the model that a job exported, unchanged, and what was it made of;
no cluster needed.

Exit codes:

- 0: as exported or converted, and signed by the key if one is given
- 1: not so, with a line per file that differs
- 2: the folder or the key can't be read
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path

from grpo_api.provenance.provenance import (
    ENVELOPE_FILE,
    STATEMENT_FILE,
    ConversionStatement,
    Dependency,
    Envelope,
    EnvironmentRecord,
    Provenance,
)
from grpo_api.text.messages import printable_text

from ..inputs.integrity import (
    Comparison,
    NotGenuine,
    compare_files,
    read_documents,
    read_original,
    require_signature,
    unsigned_message,
)
from ..show.errors import OptionError
from ..show.terminal import byte_progress, console, show_facts

GENUINE, DIFFERENT = 0, 1


def register(parser: ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "folder", metavar="DIR", type=Path, help=f"the exported model, with its {STATEMENT_FILE}"
    )
    parser.add_argument(
        "--key", metavar="PUBLIC", type=Path, help="public key in PEM that must have signed it"
    )
    parser.add_argument(
        "--ignore", metavar="PATTERN", action="append", default=[],
        help=("files that may be there besides, such as .gitattributes or '.cache/*'; again for "
             "more"),
    )  # fmt: skip


def run(options: Namespace) -> int:
    """Checks the folder and prints what the model was made of."""
    folder: Path = options.folder
    if not folder.is_dir():
        raise OptionError(f"{folder} is no folder")
    try:
        return _verify_folder(folder, options)
    except NotGenuine as error:
        return _report_difference([str(error)])
    except OSError as error:
        raise OptionError(f"{error.filename} can't be read: {error.strerror}") from error


def _verify_folder(folder: Path, options: Namespace) -> int:
    documents = read_documents(folder)
    statement, envelope = documents.statement, documents.envelope
    converted = isinstance(statement, ConversionStatement)
    key: Path | None = options.key
    signer: str | None = None
    # a conversion may be unsigned: then its original's signature is checked
    if key and (envelope or not converted):
        signer = require_signature(envelope, key)
    with byte_progress("reading") as report_bytes:
        compared = compare_files(folder, statement, options.ignore, report_bytes)
    if compared.problems:
        return _report_difference(compared.problems)
    if isinstance(statement, ConversionStatement):
        trained, signed = read_original(folder, statement)
        if key and not signer:
            return _report_difference(
                [unsigned_message(signed, key)], "these files are a conversion of it"
            )
        conversion = ("converted", statement.predicate.description)
        made_of = [conversion, *_facts(trained.predicate)]
    else:
        made_of = [*_facts(statement.predicate)]
    facts = [*_check_facts(compared, envelope, signer), *made_of]
    show_facts(console(), [(_plain(label), _plain(text)) for label, text in facts])
    return GENUINE


def _report_difference(
    problems: list[str], verdict: str = "this is not the model that was exported"
) -> int:
    for problem in (*problems, verdict):
        print(f"grpo: {_plain(problem)}", file=sys.stderr)
    return DIFFERENT


def _plain(text: object) -> str:
    """What a stranger wrote, on one line and without what could steer the terminal."""
    return printable_text(str(text), keep="")


def _check_facts(
    compared: Comparison, envelope: Envelope | None, signer: str | None
) -> Iterator[tuple[str, str]]:
    """What holds."""
    yield "files", f"{compared.files}, {compared.size:,} bytes: all there, none changed, none added"
    if signer:
        yield "signed", f"by the given key, {signer}"
    elif envelope:
        yield "signed", f"{ENVELOPE_FILE} was not checked: give the public key with --key"
    else:
        yield "signed", "by nobody: a person who changes a file can change its hash, too"


def _facts(predicate: Provenance) -> Iterator[tuple[str, str]]:
    """What the model was made of, in words; the rest is in the file."""
    build, details, run = (
        predicate.build_definition,
        predicate.run_details,
        predicate.run_details.grpo_run,
    )
    job, plan = build.internal_parameters.job, build.internal_parameters.execution
    yield "job", f"{job.get('namespace')}/{job.get('name')}, uid {job.get('uid')}"
    yield (
        "exported",
        f"{details.metadata.finished_on} after {run.steps} steps, by attempt {job.get('attempt')}",
    )
    yield (
        "trained",
        f"{plan.get('method')} on {_devices(plan)}, {plan.get('dtype')}, ZeRO "
        f"{plan.get('zeroStage')}",
    )
    for dependency in build.resolved_dependencies:
        yield dependency.name, _dependency(dependency)
    for attempt in run.attempts[:-1]:
        ends = ", ".join(f"{end.ranks} × {end.result} at step {end.step}" for end in attempt.ends)
        yield f"attempt {attempt.attempt}", ends or attempt.reason or "ended without a word"
    for attempt in run.attempts[-1:]:
        yield (
            f"attempt {attempt.attempt}",
            f"began at step {attempt.resumed_from_step or 0} and exported the model",
        )
    yield "reference", _reference(predicate)
    for proof in run.proofs:
        yield (
            "proven",
            f"{proof.what}: {proof.parameters} parameters as in their files, {proof.fingerprint}",
        )
    version = details.builder.version
    names = ("grpo-operator", "python", "torch", "transformers", "trl", "peft", "deepspeed")
    yield "versions", ", ".join(f"{name} {version[name]}" for name in names if name in version)
    yield "ran on", _environment(run.environment)


def _environment(where: EnvironmentRecord) -> str:
    """Platform, GPUs, driver and CUDA, as far as they are known."""
    parts = [where.platform, *where.gpus]
    if where.driver:
        parts.append(f"driver {where.driver}")
    if where.cuda:
        parts.append(f"CUDA {where.cuda}")
    return ", ".join(filter(None, parts))


def _devices(plan: dict[str, object]) -> str:
    if plan.get("accelerator") == "CPU":
        return f"CPUs of {plan.get('nodes')} nodes"
    return f"{plan.get('gpus')} × {plan.get('gpuProduct') or 'GPU'} of {plan.get('nodes')} nodes"


def _dependency(dependency: Dependency) -> str:
    parts = [dependency.uri]
    parts += [
        f"{kind}:{digest}"
        for kind, digest in dependency.digest.items()
        if digest not in dependency.uri
    ]
    parts += [f"{name} {value}" for name, value in dependency.annotations.items()]
    return ", ".join(filter(None, parts)) or "unknown"


def _reference(predicate: Provenance) -> str:
    reference = predicate.run_details.grpo_run.reference
    if reference.sync_every_steps is None:
        return reference.strategy
    moved = f"moved {reference.syncs} times" + (
        f", last after step {reference.last_sync_step}" * bool(reference.syncs)
    )
    return (
        f"{reference.strategy}, {moved} (every {reference.sync_every_steps} steps, mixup "
        f"{reference.mixup})"
    )

"""`grpo init`: writes a GRPOJob to begin with, or the one that trains what a TRL script trains.

The script is read and never run: it may be anybody's. Stderr and the top of the file list what the
script computes and what a job does not have. Each entry has its line and what to do. Exit codes: 0
written, 2 the file can't be read or makes no single trainer.
"""

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from ..from_trl.cli_config import read_config
from ..from_trl.dataset_reader import WRITE_ROWS
from ..from_trl.job_spec import job_documents, job_name
from ..from_trl.notebook import SUFFIX, code_cells, name_cells
from ..from_trl.script_reader import read_script
from ..from_trl.trl_run import TrlError, TrlRun, TrlSetting
from ..inputs.manifest import reading_problem
from ..show.errors import ManifestError, OptionError
from ..show.kubectl_yaml import KubectlDumper, load_documents, load_lines

WRITTEN = 0
YAML_SUFFIXES = (".yaml", ".yml", ".json")


def register(parser: ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "--from-trl",
        metavar="FILE",
        help="a Python script or notebook that makes a GRPOTrainer, or the YAML file of "
        "`trl grpo --config`",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="write into this new file; unset: to stdout"
    )
    parser.add_argument("--name", help="metadata.name of the job; unset: by the file's name")
    parser.add_argument(
        "--processes",
        type=_count,
        metavar="N",
        help="processes that the script is launched on, one a GPU. Unset: 1, and a note says so",
    )
    parser.add_argument("--model", metavar="ID", help="the model, where the script computes it")
    parser.add_argument(
        "--parameters", metavar="SIZE", help="size of a model that the planner doesn't know"
    )


def run(options: Namespace) -> int:
    """Writes the job."""
    if options.from_trl is None:
        for option in ("processes", "model", "parameters"):
            if getattr(options, option) is not None:
                raise OptionError(f"--{option} goes with --from-trl")
        text = small_job(options.name or "first-grpo")
        _check_name(load_documents(text)[0])
        _write(options, text)
        return WRITTEN
    source = Path(options.from_trl)
    text = _read_text(source)
    cells: list[str] = []
    try:
        if source.suffix.lower() == SUFFIX:
            cells = code_cells(text, source.name)
            text = "\n".join(cells)
        trl_run = _read_run(source, text)
        _mark_folders(trl_run, source)
        name = options.name or job_name(source.name)
        documents = job_documents(
            trl_run, name, options.processes, options.model, options.parameters
        )
    except TrlError as error:
        raise ManifestError(name_cells(str(error), cells)) from error
    notes = [note.text(partial(name_cells, cells=cells)) for note in trl_run.notes]
    _check_name(documents[-1])
    _write(options, render(source.name, documents, notes))
    for note in notes:
        print(f"grpo: {source.name}: {note}", file=sys.stderr)
    return WRITTEN


def _check_name(job: dict[str, Any]) -> None:
    if problem := reading_problem(job):
        raise OptionError(f"--name: {problem}")


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65536:
        raise ArgumentTypeError(f"{text!r} is no number of processes; write 1 to 65536")
    return int(text)


def _read_text(source: Path) -> str:
    try:
        return source.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ManifestError(f"{source}: {error.strerror}") from error
    except ValueError as error:
        raise ManifestError(f"{source}: it is not UTF-8 text") from error


def _read_run(source: Path, text: str) -> TrlRun:
    def read_module(name: str) -> str | None:
        path = source.parent / f"{name.replace('.', '/')}.py"
        try:
            return path.read_text(encoding="utf-8-sig") if path.is_file() else None
        except (OSError, ValueError):
            return None

    if source.suffix.lower() not in YAML_SUFFIXES:
        return read_script(text, source.name, read_module)
    try:
        lines = load_lines(text)
    except ValueError as error:
        raise ManifestError(f"{source}: {error}") from error
    values = {name: TrlSetting(value, line) for name, (value, line) in lines.items()}
    return read_config(values, source.name, read_module)


def _mark_folders(trl_run: TrlRun, source: Path) -> None:
    """Take no folder for the repository of the hub that it looks like: `models/mine`."""

    def is_folder(name: object) -> bool:
        places = (Path(), source.parent)
        path = Path(name) if isinstance(name, str) and name else Path("/")
        return not path.is_absolute() and any((place / path).is_dir() for place in places)

    model, dataset = trl_run.model, trl_run.dataset
    if model and is_folder(model.value):
        trl_run.model = TrlSetting(f"./{Path(model.value)}", model.line)
    if is_folder(dataset.name):
        dataset.is_made_by_script = True
        trl_run.note(0, "dataset", str(dataset.name), f"it is a folder here; {WRITE_ROWS}")


def _write(options: Namespace, text: str) -> None:
    if options.output is None:
        print(text, end="")
        return
    path = Path(options.output)
    if path.is_file():
        raise OptionError(f"-o {path}: the file exists and may hold changes of yours; remove it")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"-o {options.output}: {error.strerror}") from error


SMALL_JOB = """\
# A GRPO job. `grpo plan -f FILE --gpus 1xA100` plans it without a cluster, `kubectl apply -f FILE`
# runs it.
apiVersion: grpo.dev/v1alpha1
kind: GRPOJob
metadata:
  {name}
spec:
  model:
    name: Qwen/Qwen2.5-0.5B-Instruct                 # a hub id, or a folder of model.volume
  dataset:
    name: openai/gsm8k            # or files, on a volume or in a ConfigMap
    config: main
    promptColumn: question
    systemPrompt: Think step by step. Put the result into \\boxed{{}}.
  rewards:
  - accuracy: {{answerColumn: answer, extract: Boxed, compare: Numeric}}
  training:
    maxSteps: 200                 # unset: one pass over the dataset
    numGenerations: 8             # completions per prompt
    promptsPerStep: 8
    maxCompletionLength: 512
  placement: {{gpus: {{max: 8}}}}
  checkpoint:                     # the trained model ends up here, too
    volumeClaimTemplate: {{size: 30Gi, accessMode: ReadWriteOnce}}
"""


class _Dumper(KubectlDumper):
    """Writes texts of several lines as blocks."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def render(source: str, documents: Sequence[dict[str, Any]], notes: Sequence[str]) -> str:
    """The YAML of a job that was made of a file."""
    head = [f"# Made of {_comment(source)} by `grpo init --from-trl`."]
    if notes:
        head.append("# Not taken as it stands:")
        head += [f"# - {_comment(note)}" for note in notes]
    bodies = [
        yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)
        for document in documents
    ]
    return "\n".join(head) + "\n" + "---\n".join(bodies)


def small_job(name: str) -> str:
    """A small commented job."""
    name_line = yaml.dump({"name": name}, Dumper=KubectlDumper).strip()  # '123' stays a text
    return SMALL_JOB.format(name=name_line)


def _comment(text: str) -> str:
    """A text that ends no comment line."""
    return "".join(letter if letter.isprintable() else " " for letter in text)

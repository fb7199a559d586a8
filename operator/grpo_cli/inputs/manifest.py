"""Reads GRPOJobs from YAML files.

Metadata that the API server would refuse is found here, before a command counts on it.
"""

import argparse
import re
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grpo_api.job import GRPOJobSpec, SpecInvalid, parse_spec
from grpo_api.text.contract import API_VERSION, CLASS_KIND, KIND, MAX_JOB_NAME
from grpo_api.text.messages import shorten, value_text
from grpo_api.text.names import LABEL_KEY, LABEL_VALUE

from ..show.errors import ManifestError, OptionError
from ..show.kubectl_yaml import load_documents

_FIELDS = {"apiVersion", "kind", "metadata", "spec", "status"}
MAX_NAMESPACE = 63
"""Characters of a namespace's name, and of a label's value."""
_NAME = re.compile("[a-z0-9]([-a-z0-9]*[a-z0-9])?")
GENERATED = "xxxxx"
"""Stands for the five letters by which the API server ends a name that it makes of
metadata.generateName."""


class Job(NamedTuple):
    """A GRPOJob of a file."""

    metadata: dict[str, Any]
    """With a valid name."""
    spec: GRPOJobSpec
    classes: Sequence[dict[str, Any]] = ()
    """The GRPOJobClasses of the same file."""


class _OneFile(argparse.Action):
    """Takes one file: argparse would take the last of several, and the others would be lost."""

    def __call__(self, _: object, options: Any, value: Any, *__: object) -> None:
        """Takes it."""
        earlier = getattr(options, self.dest)
        if earlier is not None:
            raise OptionError(f"-f {earlier} -f {value}: name one file or folder, or pipe all to -")
        setattr(options, self.dest, value)


def add_filename(parser: argparse._ActionsContainer, *, required: bool = False) -> None:
    """Add the option that names the file of the jobs."""
    parser.add_argument(
        *("-f", "--filename"),
        action=_OneFile,
        help="file or folder with GRPOJobs; - is standard input",
        required=required,
    )


def load_specs(source: str, stdin: str | None = None) -> list[Job]:
    """The GRPOJobs of a file, or of the YAML and JSON files of a folder, typed.

    stdin: what standard input held, where the caller has read it.

    Raises:
        ManifestError: what load_jobs raises, or every wrong field of every job, with file, job and
            path.
    """
    jobs, problems = [], []
    for file, job, classes in _jobs_of_files(source, stdin):
        try:
            spec = parse_spec(job["spec"], creating=_is_new(job))
            jobs.append(Job(job["metadata"], spec, classes))
        except SpecInvalid as error:
            problems += [
                f"{file}: {job['metadata']['name']}: {problem}" for problem in error.problems
            ]
    if problems:
        raise ManifestError(*problems)
    return jobs


def read_job(job: Mapping[str, Any]) -> Job:
    """A GRPOJob object, typed.

    Raises:
        ManifestError: every wrong field, with its path.
    """
    document = _with_name(dict(job))
    if problem := reading_problem(document):
        raise ManifestError(problem)
    try:
        spec = parse_spec(document["spec"], creating=_is_new(document))
    except SpecInvalid as error:
        raise ManifestError(*error.problems) from error
    return Job(document["metadata"], spec)


def document_of(job: Job) -> dict[str, Any]:
    """The GRPOJob object of a job, with what its user has set."""
    spec = job.spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
    metadata = dict(job.metadata)
    if metadata.get("generateName"):
        del metadata["name"]
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}


def with_own_name(job: Job) -> Job:
    """The job with a name of its own, where an API server would make it of generateName."""
    metadata = dict(job.metadata)
    prefix = metadata.pop("generateName", None)
    if prefix:
        metadata["name"] = f"{prefix}{uuid.uuid4().hex[: len(GENERATED)]}"
    return job._replace(metadata=metadata)


def load_config_maps(source: str, stdin: str | None = None) -> dict[str, dict[str, str]]:
    """The files of the ConfigMaps in a file, or in the files of a folder, by name.

    stdin: as of load_specs.

    Raises:
        ManifestError: as load_jobs; or a ConfigMap has no name.
    """
    config_maps = {}
    for file in _files_of(source):
        for document in _documents_of(file, stdin):
            if document["kind"] != "ConfigMap":
                continue
            metadata = document.get("metadata")
            name = metadata.get("name") if isinstance(metadata, dict) else None
            if not isinstance(name, str):
                raise ManifestError(f"{file}: a ConfigMap has no metadata.name; give it one")
            config_maps[name] = document.get("data") or {}
    return config_maps


def _is_new(job: dict[str, Any]) -> bool:
    """True if the object was written by a user, not read from an API server, which gives each a
    uid."""
    return "uid" not in job["metadata"]


def load_jobs(source: str) -> list[dict[str, Any]]:
    """The GRPOJobs of a YAML or JSON file with any number of documents, or of the files of a
    folder; `-` is standard input.

    Each has a valid `metadata.name` and a `spec`, whose content is not checked. Objects of other
    kinds are left out, so that a file may also hold the job's volumes.

    Raises:
        ManifestError: no such file, no YAML, or no GRPOJob in it that can be read.
    """
    return [job for _, job, _ in _jobs_of_files(source)]


def load_classes(file: str) -> list[dict[str, Any]]:
    """The GRPOJobClasses of a YAML or JSON file.

    Raises:
        ManifestError: no such file, no YAML, or no GRPOJobClass in it.
    """
    classes = _classes_of(_documents_of(file))
    if not classes:
        raise ManifestError(f"{file} holds no {CLASS_KIND}")
    return classes


def _classes_of(documents: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [document for document in documents if document["kind"] == CLASS_KIND]


def _jobs_of_files(
    source: str, stdin: str | None = None
) -> list[tuple[str, dict[str, Any], list[dict[str, Any]]]]:
    """Each GRPOJob with the file that holds it, and the classes in that file."""
    documents = [(file, _documents_of(file, stdin)) for file in _files_of(source)]
    jobs = [
        (file, _with_name(manifest), _classes_of(objects))
        for file, objects in documents
        for manifest in objects
        if manifest["kind"] == KIND
    ]
    if not jobs:
        kinds = sorted({str(manifest["kind"]) for _, objects in documents for manifest in objects})
        others = f", but {shorten(', '.join(kinds), 80)}" if kinds else ""
        raise ManifestError(
            f"{source} holds no {KIND}{others}; one begins with `apiVersion: {API_VERSION}` and "
            f"`kind: {KIND}`"
        )
    for file, job, _ in jobs:
        if problem := reading_problem(job):
            raise ManifestError(f"{file}: {problem}")
    return jobs


def read_stdin() -> str:
    """What standard input holds.

    Raises:
        ManifestError: it is no text.
    """
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ManifestError("standard input: it is not UTF-8 text; save it as UTF-8") from error


_SUFFIXES = (".yaml", ".yml", ".json")


def _files_of(source: str) -> list[str]:
    """The file, or those of a folder that `kubectl apply -f` takes.

    Raises:
        ManifestError: the name is empty.
    """
    if not source:
        raise ManifestError("-f names no file; is a variable of the shell unset?")
    if source == "-" or not Path(source).is_dir():
        return [source]
    return [str(path) for path in sorted(Path(source).iterdir()) if path.suffix in _SUFFIXES]


def _documents_of(file: str, stdin: str | None = None) -> list[dict[str, Any]]:
    """The objects of a file that name their kind."""
    try:
        if stdin is None:
            stdin = read_stdin() if file == "-" else Path(file).read_text(encoding="utf-8")
        documents = load_documents(stdin)
    except OSError as error:
        raise ManifestError(f"{file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ManifestError(f"{file}: it is not UTF-8 text; save it as UTF-8") from error
    except ValueError as error:
        raise ManifestError(f"{file}: {error}") from error
    return [document for document in documents if "kind" in document]


def _with_name(job: dict[str, Any]) -> dict[str, Any]:
    """The object with a name, if only by metadata.generateName, which it has in this case alone."""
    metadata = job.get("metadata")
    if not isinstance(metadata, dict) or not metadata.get("generateName"):
        return job
    named = dict(metadata)
    if metadata.get("name") is None:
        named["name"] = f"{metadata['generateName']}{GENERATED}"
    else:
        del named["generateName"]  # as the API server does
    return {**job, "metadata": named}


def reading_problem(job: dict[str, Any]) -> str:
    """What keeps a GRPOJob from being read at all; empty when nothing does."""
    metadata, version = job.get("metadata"), job.get("apiVersion")
    if version != API_VERSION:
        return f"apiVersion is {value_text(version)}; this version reads {API_VERSION}"
    if not isinstance(job.get("spec"), dict):
        return f"the {KIND} has no spec"
    if unknown := [name for name in job if name not in _FIELDS]:
        return f"{unknown[0]}: unknown field beside spec; indent it if it belongs into spec"
    if not isinstance(metadata, dict) or metadata.get("name") is None:
        return f"the {KIND} has no metadata.name; give it one, such as first-job"
    return _metadata_problem(metadata)


def _metadata_problem(metadata: dict[str, Any]) -> str:
    """The first field of an object's metadata that the API server would refuse."""
    name, namespace = metadata["name"], metadata.get("namespace")
    prefix = metadata.get("generateName")
    is_text = isinstance(name, str) and isinstance(prefix, str | None)
    if not (is_text and _NAME.fullmatch(name) and len(name) <= MAX_JOB_NAME):
        field, most, where = "name", MAX_JOB_NAME, "at both ends"
        if prefix:
            field, most, where = "generateName", MAX_JOB_NAME - len(GENERATED), "first"
        return (
            f"metadata.{field} is {value_text(metadata[field])}; it takes 1 to {most} small "
            f"letters, digits and hyphens, with a letter or digit {where}"
        )
    if not isinstance(namespace, str | None):
        return f"metadata.namespace is {value_text(namespace)}; put it in quotes to make it a text"
    if namespace and not (_NAME.fullmatch(namespace) and len(namespace) <= MAX_NAMESPACE):
        return (
            f"metadata.namespace is {value_text(namespace)}; it takes 1 to {MAX_NAMESPACE} small "
            "letters, digits and hyphens, with a letter or digit at both ends"
        )
    for field in ("labels", "annotations"):
        entries = metadata.get(field) or {}
        if not isinstance(entries, dict):
            return f"metadata.{field} is {value_text(entries)}; write it as key: value"
        for key, value in entries.items():
            if problem := _entry_problem(field, key, value):
                return f"metadata.{field}.{key} {problem} (got {value_text(value)})"
    return ""


def _entry_problem(field: str, key: str, value: object) -> str:
    """What is wrong with a label or an annotation."""
    if not isinstance(value, str):
        return "must be text; put the value in quotes"
    if not re.fullmatch(LABEL_KEY, key):
        return "must have a key such as team or example.com/team"
    if field == "labels" and not (len(value) <= MAX_NAMESPACE and re.fullmatch(LABEL_VALUE, value)):
        return f"must be at most {MAX_NAMESPACE} letters, digits, `-`, `_` and `.`"
    return ""

"""Reads GRPOJobs from YAML files, every value as kubectl reads it.

YAML 1.1, which PyYAML speaks, takes `5e-6` for text where kubectl sees a number. Metadata that the
API server would refuse is found here, before a command counts on it.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from grpo_api.job import GRPOJobSpec, SpecInvalid, parse_spec
from grpo_api.text.contract import API_VERSION, CLASS_KIND, KIND, MAX_JOB_NAME

from ..show.errors import ManifestError


class _Loader(yaml.SafeLoader):
    """SafeLoader that takes `5e-6` for a number, `4.0` for 4 and a date for text, as kubectl does
    for JSON."""

    def construct_number(self, node: yaml.ScalarNode) -> float:
        """A float, or an int where there is no fraction."""
        value: float = self.construct_yaml_float(node)
        return int(value) if value.is_integer() else value


_NAME = re.compile("[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+")


def _without_timestamps(
    resolvers: list[tuple[str, re.Pattern[str]]],
) -> list[tuple[str, re.Pattern[str]]]:
    """Return YAML's resolvers of plain scalars without that of dates, which kubectl takes for
    text."""
    return [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]


_Loader.yaml_implicit_resolvers = {
    first: _without_timestamps(resolvers)
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_number)
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


class Job(NamedTuple):
    """A GRPOJob of a file."""

    metadata: dict[str, Any]
    """With a valid name."""
    spec: GRPOJobSpec
    classes: Sequence[dict[str, Any]] = ()
    """The GRPOJobClasses of the same file."""


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
    document = dict(job)
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
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": job.metadata, "spec": spec}


def load_config_maps(file: str) -> dict[str, dict[str, str]]:
    """The files of the ConfigMaps in a YAML or JSON file, by name.

    Raises:
        ManifestError: as load_jobs.
    """
    documents = _documents_of(file)
    return {
        document["metadata"]["name"]: document.get("data") or {}
        for document in documents
        if document["kind"] == "ConfigMap"
    }


def _is_new(job: dict[str, Any]) -> bool:
    """True if the object was written by a user, not read from an API server, which gives each a
    uid."""
    return "uid" not in job["metadata"]


def load_jobs(source: str) -> list[dict[str, Any]]:
    """The GRPOJobs of a YAML or JSON file with any number of documents, or of the files of a
    folder; `-` is standard input.

    Each has a valid `metadata.name` and a `spec`, whose content is not looked at. Objects of other
    kinds are left out, so that a file may also hold the job's volumes.

    Raises:
        ManifestError: no such file, no YAML, or no GRPOJob in it that can be read.
    """
    return [job for _, job, _ in _jobs_of_files(source)]


def load_classes(file: str) -> list[dict[str, Any]]:
    """The GRPOJobClasses of a YAML or JSON file.

    Raises:
        ManifestError: no such file, or no YAML.
    """
    return _classes_of(_documents_of(file))


def _classes_of(documents: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [document for document in documents if document["kind"] == CLASS_KIND]


def _jobs_of_files(
    source: str, stdin: str | None = None
) -> list[tuple[str, dict[str, Any], list[dict[str, Any]]]]:
    """Each GRPOJob with the file that holds it, and the classes in that file."""
    files = [source]
    if source != "-" and Path(source).is_dir():
        # those that `kubectl apply -f` takes of a folder
        files = [str(path) for path in sorted(Path(source).iterdir()) if path.suffix in _SUFFIXES]
    documents = [(file, _documents_of(file, stdin)) for file in files]
    jobs = [
        (file, manifest, _classes_of(objects))
        for file, objects in documents
        for manifest in objects
        if manifest["kind"] == KIND
    ]
    if not jobs:
        raise ManifestError(
            f"{source} holds no {KIND}; one begins with `apiVersion: {API_VERSION}` and `kind: "
            f"{KIND}`"
        )
    for file, job, _ in jobs:
        if problem := reading_problem(job):
            raise ManifestError(f"{file}: {problem}")
    return jobs


_SUFFIXES = (".yaml", ".yml", ".json")


def _documents_of(file: str, stdin: str | None = None) -> list[dict[str, Any]]:
    """The objects of a file that name their kind."""
    try:
        documents = load_documents(_text_of(file) if stdin is None else stdin)
    except OSError as error:
        raise ManifestError(f"{file}: {error.strerror}") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ManifestError(f"{file}: {error}") from error
    return [document for document in documents if "kind" in document]


def _text_of(file: str) -> str:
    return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")


def load_documents(text: str) -> list[dict[str, Any]]:
    """The objects of a YAML stream, empty documents and anything that is no object left out.

    Raises:
        yaml.YAMLError: the text is no YAML.
        ValueError: a number in it has no digits, such as `0b_`.
        RecursionError: it is nested deeper than Python's stack.
    """
    documents = yaml.load_all(text, Loader=_Loader)
    return [document for document in documents if isinstance(document, dict)]


def load_value(text: str) -> Any:
    """One YAML value, such as `5e-6`, `[q_proj, v_proj]` or `null`.

    Raises:
        yaml.YAMLError: the text is no YAML.
        ValueError: a number in it has no digits, such as `0b_`.
        RecursionError: it is nested deeper than Python's stack.
    """
    return yaml.load(text, Loader=_Loader)


def load_lines(text: str) -> dict[str, tuple[Any, int]]:
    """The entries of one YAML mapping, each with its line.

    Raises:
        yaml.YAMLError: the text is no YAML.
        ValueError: it is no mapping, or a number in it has no digits, such as `0b_`.
        RecursionError: it is nested deeper than Python's stack.
    """
    node = yaml.compose(text, Loader=_Loader)
    values = yaml.load(text, Loader=_Loader)
    if not isinstance(node, yaml.MappingNode):
        raise ValueError(  # noqa: TRY004  # of the text, not of a type
            "the file holds no settings; write them as key: value"
        )
    lines = {key.value: key.start_mark.line + 1 for key, _ in node.value}
    return {str(key): (value, lines.get(str(key), 0)) for key, value in values.items()}


def reading_problem(job: dict[str, Any]) -> str:
    """What keeps a GRPOJob from being read at all; empty when nothing does."""
    metadata = job.get("metadata")
    if job.get("apiVersion") != API_VERSION:
        return f"apiVersion is {job.get('apiVersion')!r}; this version reads {API_VERSION}"
    if not isinstance(job.get("spec"), dict):
        return f"the {KIND} has no spec"
    if not isinstance(metadata, dict) or metadata.get("name") is None:
        return f"the {KIND} has no metadata.name; give it one, such as first-job"
    return _metadata_problem(metadata)


def _metadata_problem(metadata: dict[str, Any]) -> str:
    """The first field of an object's metadata that the API server would refuse."""
    name, namespace = metadata["name"], metadata.get("namespace")
    if not (isinstance(name, str) and _NAME.fullmatch(name) and len(name) <= MAX_JOB_NAME):
        return (
            f"metadata.name is {name!r}; it takes 1 to {MAX_JOB_NAME} small letters, digits and "
            "hyphens, with a letter or digit at both ends"
        )
    if not isinstance(namespace, str | None):
        return f"metadata.namespace is {namespace!r}; put it in quotes to make it a text"
    for field in ("labels", "annotations"):
        entries = metadata.get(field) or {}
        if not isinstance(entries, dict):
            return f"metadata.{field} is {entries!r}; write it as key: value"
        for key, value in entries.items():
            if not (isinstance(key, str) and isinstance(value, str)):
                return (
                    f"metadata.{field} has {key!r}: {value!r}; put both in quotes to make them "
                    "texts"
                )
    return ""

"""Reads GRPOJobs from YAML files exactly as kubectl does.

Exists because YAML 1.1, which PyYAML speaks, takes `5e-6` for text where kubectl sees a number. Used by every command
of the CLI that takes a file, and by the tests that parse examples.
"""

import re
import sys
from pathlib import Path
from typing import Any

import yaml

from grpo_api.contract import API_VERSION, KIND

from .errors import ManifestError


class _Loader(yaml.SafeLoader):
    """SafeLoader that takes `5e-6` for a number, `4.0` for 4 and a date for text, as kubectl does for JSON."""

    def construct_number(self, node: yaml.ScalarNode) -> float:
        """A float, or an int where there is no fraction."""
        value: float = self.construct_yaml_float(node)
        return int(value) if value.is_integer() else value


_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+")
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_number)
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def load_jobs(source: str) -> list[dict[str, Any]]:
    """The GRPOJobs of a YAML or JSON file with any number of documents; `-` is standard input.

    Objects of other kinds are left out, so that a file may also hold the job's volumes.

    Raises:
        ManifestError: no such file, no YAML, or no GRPOJob in it.
    """
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
        documents = load_documents(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ManifestError(f"{source}: {error}") from error
    jobs = [document for document in documents if document.get("kind") == KIND]
    if not jobs:
        raise ManifestError(f"{source} holds no {KIND}; one begins with `apiVersion: {API_VERSION}` and `kind: {KIND}`")
    for job in jobs:
        _require_version(job, source)
    return jobs


def load_documents(text: str) -> list[dict[str, Any]]:
    """The objects of a YAML stream, empty documents and anything that is no object left out.

    Raises:
        yaml.YAMLError: the text is no YAML.
    """
    documents = yaml.load_all(text, Loader=_Loader)
    return [document for document in documents if isinstance(document, dict)]


def _require_version(job: dict[str, Any], source: str) -> None:
    if job.get("apiVersion") != API_VERSION:
        raise ManifestError(f"{source}: apiVersion is {job.get('apiVersion')!r}; this version reads {API_VERSION}")
    if not isinstance(job.get("spec"), dict):
        raise ManifestError(f"{source}: the {KIND} has no spec")

"""The cluster as the user's kubectl sees it.

The base install needs no Kubernetes client that way: contexts, credentials and plug-ins are kubectl's business. The
environment variable KUBECTL names another program, or one with flags.
"""

import json
import os
import shlex
import subprocess
from argparse import ArgumentParser, Namespace
from typing import Any

from pydantic import ValidationError

from grpo_api.base import dotted
from grpo_api.contract import GROUP, PLURAL
from grpo_api.job import GRPOJob

from .errors import KubectlError


def add_arguments(parser: ArgumentParser) -> None:
    """The flags that say which cluster and which namespace."""
    add_namespace(parser)
    parser.add_argument("--context", help="context of the kubeconfig; unset: the current one")


def add_namespace(parser: ArgumentParser) -> None:
    """The flag that says which namespace, for commands whose `--context` means more."""
    parser.add_argument("-n", "--namespace", help="namespace of the job; unset: the context's")


def command(options: Namespace, *arguments: str) -> list[str]:
    """kubectl's command line."""
    line = shlex.split(os.environ.get("KUBECTL", "kubectl"))
    line += [f"--context={options.context}"] if options.context not in (None, ".") else []
    line += [f"--namespace={options.namespace}"] if options.namespace else []
    return [*line, *arguments]


def get(options: Namespace, *arguments: str) -> dict[str, Any]:
    """What `kubectl get … -o json` prints.

    Raises:
        KubectlError: kubectl is missing, fails, or prints what is no object.
    """
    line = command(options, "get", *arguments, "--output=json")
    try:
        done = subprocess.run(line, capture_output=True, text=True, check=False)
    except OSError as error:
        raise KubectlError(f"{line[0]}: {error.strerror}; install kubectl or set KUBECTL to it") from error
    if done.returncode:
        raise KubectlError(done.stderr.strip())
    return _object(line[0], done.stdout)


def _object(program: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise KubectlError(f"{program} printed no JSON object: {text[:80]!r}; does KUBECTL name kubectl?")
    return found


def get_job(options: Namespace, name: str) -> tuple[dict[str, Any], GRPOJob]:
    """A GRPOJob's metadata and its typed form.

    Raises:
        KubectlError: no such job, or one of a version that this one can't read.
    """
    found = get(options, f"{PLURAL}.{GROUP}", name)
    try:
        # fields that only a newer operator knows are left out; only a value that it alone knows is an error
        return found["metadata"], GRPOJob.model_validate(found, extra="ignore")
    except ValidationError as error:
        wrong = "; ".join(f"{dotted(problem['loc'])}: {problem['msg']}" for problem in error.errors())
        raise KubectlError(f"{name} was written by another version of the operator: {wrong}") from error

"""The cluster as the user's kubectl sees it.

The base install needs no Kubernetes client that way: contexts, credentials and plug-ins are
kubectl's business. The environment variable KUBECTL names another program, or one with flags.
"""

import io
import json
import os
import re
import shlex
import subprocess
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any

from pydantic import ValidationError

from grpo_api.text.base import dotted_path
from grpo_api.text.contract import GROUP, PLURAL
from grpo_api.text.problems import requirement

from ..show.errors import KubectlError, KubectlExitError, OptionError

if TYPE_CHECKING:
    from grpo_api.job_object import GRPOJob

RESOURCE = f"{PLURAL}.{GROUP}"
"""GRPOJobs, by the name that no other kind has."""
_NAME = re.compile("[a-z0-9]([-.a-z0-9]*[a-z0-9])?")
_LOG_LINE = re.compile(r"^[EWI]\d{4} \d\d:.*\n?", re.MULTILINE)
STREAM_BYTES = 2**20
"""Most bytes of a stream that are taken at a time."""


def add_arguments(parser: ArgumentParser) -> None:
    """The flags that say which cluster and which namespace."""
    add_namespace(parser)
    parser.add_argument("--context", help="context of the kubeconfig; unset: the current one")


def add_namespace(parser: ArgumentParser) -> None:
    """The flag that says which namespace, for commands whose `--context` means more."""
    parser.add_argument("-n", "--namespace", help="namespace of the job; unset: the context's")


def command(options: Namespace, *arguments: str) -> list[str]:
    """kubectl's command line.

    Raises:
        KubectlError: the variable KUBECTL is no command line.
    """
    try:
        line = shlex.split(os.environ.get("KUBECTL") or "kubectl")
    except ValueError as error:
        raise KubectlError(f"KUBECTL is no command line: {error}") from error
    line += [f"--context={options.context}"] if options.context not in (None, ".") else []
    line += [f"--namespace={options.namespace}"] if options.namespace else []
    return [*line, *arguments]


def get_json(options: Namespace, *arguments: str) -> dict[str, Any]:
    """Run `kubectl get … -o json` and return the parsed object.

    Raises:
        KubectlError: kubectl is missing, fails, or prints what is no object.
    """
    line = command(options, "get", *arguments, "--output=json")
    return _object(line[0], _run(line))


def newest_warning(options: Namespace, name: str) -> str:
    """Return the message of the newest Warning event of a pod or Job; empty without one, or if
    events can't be read."""
    try:
        events = get_json(
            options, "events", f"--field-selector=involvedObject.name={name},type=Warning"
        )["items"]
    except KubectlError:
        return ""
    return reason_and_message(max(events, key=event_time, default={}))


def reason_and_message(part: dict[str, Any]) -> str:
    """`reason: message` of an event or a status, as far as they are set."""
    return ": ".join(filter(None, (part.get("reason"), (part.get("message") or "").strip())))


def event_time(event: dict[str, Any]) -> str:
    """When an event was seen last; times of one form sort as texts."""
    metadata = event.get("metadata") or {}
    return str(
        event.get("lastTimestamp")
        or event.get("eventTime")
        or metadata.get("creationTimestamp")
        or ""
    )


def create_object(options: Namespace, manifest: dict[str, Any]) -> str:
    """Create the object and return its name.

    Raises:
        KubectlError: it is refused.
    """
    line = command(options, "create", "--filename=-", "--output=json")
    name: str = _object(line[0], _run(line, json.dumps(manifest)))["metadata"]["name"]
    return name


def run_kubectl(options: Namespace, *arguments: str, stdin: str | None = None) -> str:
    """What kubectl prints; `stdin` is its standard input.

    Raises:
        KubectlError: kubectl is missing or fails.
    """
    return _run(command(options, *arguments), stdin)


def context_namespace(options: Namespace) -> str:
    """The namespace of the context; `default` where it names none, or there is no kubectl."""
    try:
        output = run_kubectl(
            options, "config", "view", "--minify", "--output=jsonpath={..namespace}"
        )
    except KubectlError:
        output = ""
    return output.strip() or "default"


def stream_output(options: Namespace, *arguments: str) -> Iterator[bytes]:
    """What kubectl prints, as it comes.

    Raises:
        KubectlError: kubectl is missing, or ends with an error; what had come until then was
            printed.
    """
    line = command(options, *arguments)
    with tempfile.TemporaryFile() as errors:
        with _start_process(line, errors) as process:
            try:
                output = process.stdout
                assert isinstance(output, io.BufferedReader), "it was started with a pipe"
                while chunk := output.read1(STREAM_BYTES):
                    yield chunk
            except BaseException:  # GeneratorExit, too: who asked wants no more
                process.kill()
                raise
        if process.returncode:
            errors.seek(0)
            text = errors.read().decode(errors="replace")
            raise KubectlError(_failure_message(line[0], text, process.returncode))


def _start_process(line: list[str], errors: IO[bytes]) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
        )
    except OSError as error:
        raise _missing_program_error(line[0], error) from error


def _run(line: list[str], stdin: str | None = None) -> str:
    try:
        completed_process = subprocess.run(
            # What a pod or a plug-in prints may be anything.
            line,
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise _missing_program_error(line[0], error) from error
    if completed_process.returncode:
        raise KubectlExitError(
            _failure_message(line[0], completed_process.stderr, completed_process.returncode),
            completed_process.stdout,
        )
    return completed_process.stdout


def _failure_message(program: str, stderr: str, exit_code: int) -> str:
    """What kubectl says of its failure, without the lines of its log before."""
    return _LOG_LINE.sub("", stderr).strip() or f"{program} ended with exit code {exit_code}"


def _missing_program_error(program: str, error: OSError) -> KubectlError:
    return KubectlError(f"{program}: {error.strerror}; install kubectl or set KUBECTL to it")


def _object(program: str, text: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError:
        parsed = None
    if not isinstance(parsed, dict):
        raise KubectlError(
            f"{program} printed no JSON object: {text[:80]!r}; does KUBECTL name kubectl?"
        )
    return parsed


def require_name(name: str) -> None:
    """Make sure that kubectl takes the name for one: `--all` would mean all jobs.

    Raises:
        OptionError: no job can have this name.
    """
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise OptionError(
            f"the job's name is {name!r:.80}; it takes small letters, digits and hyphens"
        )


def get_object_of_job(options: Namespace, name: str) -> dict[str, Any]:
    """The GRPOJob object of this name.

    Raises:
        OptionError: no job can have this name.
        KubectlError: there is no such job.
    """
    require_name(name)
    return get_json(options, RESOURCE, name)


def get_jobs(options: Namespace, names: Sequence[str]) -> list[dict[str, Any]]:
    """The GRPOJob objects of these names; without names all of the namespace, or of the cluster
    with `options.all_namespaces`.

    Raises:
        KubectlError: there is no such job.
    """
    if names:
        return [get_object_of_job(options, name) for name in names]
    everywhere = ["--all-namespaces"] * options.all_namespaces
    items: list[dict[str, Any]] = get_json(options, RESOURCE, *everywhere)["items"]
    return items


def get_job(options: Namespace, name: str) -> "tuple[dict[str, Any], GRPOJob]":
    """A GRPOJob's metadata and its typed form.

    Raises:
        KubectlError: no such job, or one of a version that this one can't read.
    """
    return read_job(get_object_of_job(options, name))


def read_job(item: dict[str, Any]) -> "tuple[dict[str, Any], GRPOJob]":
    """The metadata of a GRPOJob object and its typed form, its spec with the class of its last
    attempt.

    Raises:
        KubectlError: it is of a version that this one can't read.
    """
    # Of the commands that import this module, those that plan need no types of a status.
    from grpo_api.effective_spec import resolve
    from grpo_api.job_object import GRPOJob

    try:
        # fields that only a newer operator knows are left out; only a value that it alone knows is
        # an error
        job = GRPOJob.model_validate(item, extra="ignore")
        if job.status.job_class:
            spec = resolve(job.spec, job.status.job_class, {}).spec or job.spec
            job = job.model_copy(update={"spec": spec})
        return item["metadata"], job
    except ValidationError as error:
        raise version_error(item.get("metadata", {}).get("name"), error) from error


def version_error(name: object, error: ValidationError, path: str = "") -> KubectlError:
    """What to raise of a job, or of the part of it at this path, that can't be read."""
    problems = [
        f"{path}{dotted_path(problem['loc'])}: {requirement(problem, {})}"
        for problem in error.errors()
    ]
    wrong = "; ".join(problems)
    return KubectlError(f"{name} was written by another version of the operator: {wrong}")

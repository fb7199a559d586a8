"""kubectl and helm against one kubeconfig: what the tests use of any cluster, ours or one that is
lent.

`ExternalCluster` stands in for ours when GRPO_TEST_KUBECONFIG names a running cluster.
"""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .programs.build import component, toolchain
from .programs.processes import ClusterError, until


class CommandError(ClusterError):
    """kubectl or helm ended with an error; `stderr` has its text."""

    def __init__(self, line: str, code: int, stderr: str) -> None:
        super().__init__(f"`{line}` failed with exit code {code}: {stderr.strip()}")
        self.stderr = stderr


class Access:
    """Commands for the cluster that the kubeconfig names."""

    def __init__(self, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig

    @property
    def environment(self) -> dict[str, str]:
        """The environment for a user's command against this cluster."""
        return {**os.environ, "KUBECONFIG": str(self.kubeconfig)}

    def kubectl(self, *arguments: str, input: str | None = None) -> str:
        """Run kubectl and return its output; raise CommandError when it fails."""
        return self._run(self.kubectl_command(*arguments), input)

    def kubectl_command(self, *arguments: str) -> list[str]:
        """Return the command line of kubectl, to be run with `environment`."""
        return [*map(str, component("kubectl", _assets_with("kubectl"))), *arguments]

    def helm(self, *arguments: str, input: str | None = None) -> str:
        """Run helm and return its output; raise CommandError when it fails."""
        return self._run([str(toolchain(("helm",)).program("helm")), *arguments], input)

    @contextmanager
    def watching(
        self, kind: str, namespace: str, file: Path
    ) -> Iterator[Callable[[], list[dict[str, Any]]]]:
        """Watch the objects of a kind while the block runs; what is yielded reads all that was
        seen, oldest first.

        The file takes kubectl's words: nobody reads a pipe meanwhile.
        """
        command = self.kubectl_command(
            "--namespace", namespace, "get", kind, "--watch", "--output", "json"
        )
        with file.open("w") as output:
            watch = subprocess.Popen(command, stdout=output, env=self.environment)
        try:
            yield lambda: list(_documents(file.read_text()))
        finally:
            watch.terminate()
            watch.wait()

    def _run(self, command: list[str], stdin: str | None) -> str:
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, check=False, env=self.environment
        )
        if done.returncode:
            raise CommandError(" ".join(command), done.returncode, done.stderr)
        return done.stdout

    def wait(self, what: str, *arguments: str, expect: str, seconds: float = 120) -> None:
        """Run `kubectl <arguments>` again and again until it prints exactly `expect`."""
        until(
            f"{what} to be {expect!r}", lambda: self.kubectl(*arguments).strip() == expect, seconds
        )


def _documents(text: str) -> Iterator[dict[str, Any]]:
    """The JSON documents of a text one after the other, but for a last one that is not whole."""
    decoder, text = json.JSONDecoder(), text.lstrip()
    while text:
        try:
            found, end = decoder.raw_decode(text)
        except json.JSONDecodeError:
            return
        yield found
        text = text[end:].lstrip()


def _assets_with(name: str) -> str:
    assets = os.environ.get("KUBEBUILDER_ASSETS", "")
    return assets if assets and (Path(assets) / name).exists() else ""


class ExternalCluster(Access):
    """A cluster that somebody else runs: everything works but what needs its processes or its
    machines."""

    @property
    def url(self) -> str:
        """The API server's URL."""
        return self.kubectl(
            "config", "view", "--minify", "-o", "jsonpath={.clusters[0].cluster.server}"
        )

    def stop_apiserver(self) -> None:
        """Not possible: it is not ours to kill."""
        raise ClusterError(
            f"the cluster of GRPO_TEST_KUBECONFIG={self.kubeconfig} is not ours to stop"
        )

    def start_apiserver(self) -> None:
        """Not possible, as for `stop_apiserver`."""
        self.stop_apiserver()

    def load(self, *images: Path) -> None:
        """Not possible: there is no general way to put an image on foreign nodes."""
        archives = " and ".join(map(str, images))
        raise ClusterError(
            f"push {archives} to a registry that the nodes of {self.url} can reach, or unset "
            "GRPO_TEST_KUBECONFIG"
        )

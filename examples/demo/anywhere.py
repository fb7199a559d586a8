"""`make demo CONTEXT=…`: the quickstart on any cluster, from a machine with python3, kubectl and
helm and nothing else.

Installs the operator where the cluster lacks it or images are named, applies
examples/quickstart.yaml as it is, and follows it until the model is trained and evaluated. Only the
standard library: it runs before anything is installed.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples" / "quickstart.yaml"
CHART = ROOT / "charts" / "grpo-operator"
RELEASE, SYSTEM_NAMESPACE = "grpo-operator", "grpo-system"
JOBS = ("quickstart", "quickstart-evaluation")
DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
TIMEOUT_SECONDS = 1800.0
POLL_SECONDS = 2.0


class DemoError(Exception):
    """Why the demo can't go on, in a sentence for its user."""


class Cluster:
    """kubectl and helm against one context; `namespace` is the demo's."""

    def __init__(self, context: str, namespace: str) -> None:
        for program in ("kubectl", "helm"):
            if shutil.which(program) is None:
                raise DemoError(f"{program} is not on the PATH: install it first")
        self.context = context
        self.namespace = namespace

    def kubectl(self, *arguments: str) -> str:
        """The output of kubectl."""
        return run("kubectl", "--context", self.context, "--namespace", self.namespace, *arguments)

    def objects(self, kind: str, *arguments: str) -> list[dict[str, Any]]:
        """The objects of a kind."""
        items: list[dict[str, Any]] = json.loads(
            self.kubectl("get", kind, *arguments, "--output", "json")
        )["items"]
        return items

    def helm(self, *arguments: str) -> str:
        """The output of helm."""
        return run("helm", "--kube-context", self.context, *arguments)


def run(*command: str) -> str:
    """The output of a command.

    Raises:
        DemoError: it failed; with what it said.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DemoError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


def require_storage(cluster: Cluster) -> None:
    """The quickstart's claim names no class.

    Raises:
        DemoError: the cluster has no default one.
    """
    classes = cluster.objects("storageclasses")
    if not any(
        one["metadata"].get("annotations", {}).get(DEFAULT_CLASS) == "true" for one in classes
    ):
        names = ", ".join(one["metadata"]["name"] for one in classes) or "none at all"
        raise DemoError(
            f"the cluster has no default StorageClass (it has {names}): annotate one with "
            f"{DEFAULT_CLASS}=true, "
            f"or name one in the claim of {QUICKSTART.relative_to(ROOT)}"
        )


def install(cluster: Cluster, trainer: str, operator: str) -> None:
    """Install the chart with these images; without a trainer's image, the operator must be
    there."""
    if not trainer:
        if not cluster.objects(
            "deployments", "--all-namespaces", "--selector", "app.kubernetes.io/name=grpo-operator"
        ):
            raise DemoError(
                "the cluster has no grpo-operator: name the trainer's image that it can pull with "
                "IMAGE=…"
            )
        return
    values = {"image": operator or sibling(trainer), "trainerImage": trainer}
    settings = [part for key, image in values.items() for part in settings_of(key, image)]
    say("helm upgrade --install grpo-operator")
    cluster.helm(
        *(
            "upgrade",
            RELEASE,
            str(CHART),
            "--install",
            "--namespace",
            SYSTEM_NAMESPACE,
            "--create-namespace",
        ),
        *("--wait", "--timeout", "180s", *settings),
    )


def sibling(trainer: str) -> str:
    """The operator's image, of the same repository and tag as the trainer's.

    Raises:
        DemoError: the trainer's has another name.
    """
    place, slash, name = trainer.rpartition("/")
    if not name.startswith("grpo-trainer:"):
        raise DemoError(
            f"IMAGE={trainer} is not named grpo-trainer:<tag>: name the operator's with "
            "OPERATOR_IMAGE=…"
        )
    return f"{place}{slash}{name.replace('grpo-trainer:', 'grpo-operator:', 1)}"


def settings_of(key: str, image: str) -> tuple[str, ...]:
    """The chart's values for an image.

    Raises:
        DemoError: it has no tag.
    """
    repository, colon, tag = image.rpartition(":")
    if not colon or "/" in tag:
        raise DemoError(f"image {image} has no tag: write <repository>:<tag>")
    # A tag may have digits only; --set would make a number of it, which the schema refuses.
    return "--set", f"{key}.repository={repository}", "--set-string", f"{key}.tag={tag}"


def apply(cluster: Cluster) -> None:
    """Apply the quickstart as it is, after removing what an earlier demo left."""
    if cluster.namespace not in [one["metadata"]["name"] for one in cluster.objects("namespaces")]:
        cluster.kubectl("create", "namespace", cluster.namespace)
    cluster.kubectl("delete", "--ignore-not-found", "--filename", str(QUICKSTART))
    say(f"kubectl apply -f {QUICKSTART.relative_to(ROOT)}")
    cluster.kubectl("apply", "--filename", str(QUICKSTART))


def follow(cluster: Cluster) -> list[dict[str, Any]]:
    """Show both jobs whenever something changes, until both have ended.

    Raises:
        DemoError: they have not ended in time.
    """
    end, shown = time.monotonic() + TIMEOUT_SECONDS, ""
    while time.monotonic() < end:
        jobs = [job for job in cluster.objects("grpojobs") if job["metadata"]["name"] in JOBS]
        line = "   ".join(summary(job) for job in jobs)
        if line != shown:
            say(line)
            shown = line
        if len(jobs) == len(JOBS) and all(map(ended, jobs)):
            return jobs
        time.sleep(POLL_SECONDS)
    raise DemoError(
        f"not ended after {TIMEOUT_SECONDS:.0f} s: kubectl -n {cluster.namespace} describe grpojobs"
    )


def summary(job: dict[str, Any]) -> str:
    """Name, phase, step and reward of a job."""
    status = job.get("status", {})
    parts = [
        job["metadata"]["name"],
        status.get("phase", "Pending"),
        status.get("progress", {}).get("summary", ""),
    ]
    if reward := status.get("metrics", {}).get("reward"):
        parts.append(f"reward {reward}")
    return " ".join(filter(None, parts))


def ended(job: dict[str, Any]) -> bool:
    """Whether it has Succeeded or Failed."""
    return job.get("status", {}).get("phase") in ("Succeeded", "Failed")


def conclude(cluster: Cluster, jobs: list[dict[str, Any]]) -> int:
    """Say what came of it, where the model is and how to remove everything; the exit code."""
    for job in jobs:
        status = job["status"]
        print(
            f"\n{job['metadata']['name']}: {status['phase']}\n  "
            f"{status.get('outcome', {}).get('message', '')}"
        )
    place = f"--context {cluster.context} -n {cluster.namespace}"
    print(f"\nLook around:  kubectl {place} get grpojobs,jobs,pods,pvc")
    print(f"Remove it:    kubectl {place} delete -f {QUICKSTART.relative_to(ROOT)}")
    return int(any(job["status"]["phase"] != "Succeeded" for job in jobs))


def say(text: str) -> None:
    """A line with the time since the start."""
    print(f"{time.monotonic() - BEGAN:5.0f} s  {text}", flush=True)


def main() -> int:
    """Run the demo; the exit code is 0 only when both jobs Succeeded."""
    parser = argparse.ArgumentParser(prog="make demo CONTEXT=…", description=__doc__)
    parser.add_argument("--context", required=True, help="kubectl context of the cluster")
    parser.add_argument(
        "--image", default="", help="trainer's image; unset: the operator's that is installed"
    )
    parser.add_argument(
        "--operator-image", default="", help="operator's image; unset: beside the trainer's"
    )
    parser.add_argument("--namespace", default="grpo-quickstart", help="made where it is missing")
    given = parser.parse_args()
    try:
        cluster = Cluster(given.context, given.namespace)
        require_storage(cluster)
        install(cluster, given.image, given.operator_image)
        apply(cluster)
        return conclude(cluster, follow(cluster))
    except DemoError as error:
        print(error, file=sys.stderr)
        return 1


BEGAN = time.monotonic()

if __name__ == "__main__":
    sys.exit(main())

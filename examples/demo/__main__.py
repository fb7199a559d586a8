"""`make demo`: from nothing to a GRPOJob that has Succeeded, on a real Kubernetes, with real
training.

Starts the cluster of harness, builds and loads the images, installs the chart, applies
examples/01-first-job.yaml, follows it and draws what happened. Leaves the cluster up. On a cluster
of one's own it is anywhere.py. Where the machine lets nobody make namespaces, as in most
containers, the same example runs as processes of this machine (`grpo run --local`).
"""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import yaml
from rich.console import Console

from grpo_cli.__main__ import main as grpo
from harness import stack
from harness.access import Access
from harness.cluster import MAIN, Cluster, clusters_folder
from harness.fixtures import training_settings
from harness.images import recipes as images
from harness.programs.prerequisites import refused_namespaces_message
from harness.tools import prepare as prepare_tools

from .follow import History, finished, follow
from .prepare import fill_volume, make_files

EXAMPLE = Path(__file__).resolve().parents[1] / "01-first-job.yaml"
NAMESPACE = "first-job"
OUTPUT = Path("demo-output")
TIMEOUT_SECONDS = 900.0
LAST = 5
VIEW = {
    "NAME": ".metadata.name",
    "PHASE": ".status.phase",
    "STEP": ".status.progress.summary",
    "REWARD": ".status.metrics.reward",
    "KL": ".status.metrics.kl",
    "RESTARTS": ".status.restarts",
}
"""Columns of kubectl's table at the end: its own ones are wider than a terminal of 80 columns."""


@dataclass
class Demo:
    """The demo's state: where it prints, and since when."""

    console: Console = field(default_factory=Console)
    began: float = field(default_factory=time.monotonic)

    def show(self, text: str) -> None:
        """Text as it is, such as the output of kubectl."""
        self.console.print(text, soft_wrap=True, highlight=False, markup=False)

    def say(self, text: str) -> None:
        """One line with the time since the start."""
        self.console.print(
            f"[dim]{time.monotonic() - self.began:5.0f} s[/dim]  {text}", highlight=False
        )


def own_cluster(demo: Demo) -> Cluster:
    """The cluster of `make cluster`, started if it is not up."""
    folder = clusters_folder() / MAIN
    if folder.exists() and Cluster.open(folder).processes.find():
        demo.say("the cluster of `make cluster` is up already")
        return Cluster.open(folder)
    cluster = Cluster.create(MAIN, training_settings(engines=False), demo.say)
    cluster.keep()
    return cluster


def install(demo: Demo) -> Access:
    """A cluster with the operator, and with the job's volume, on which are the model and the
    problems."""
    claim = read_example()["spec"]["checkpoint"]["volume"]["claimName"]
    demo.say("building the programs and images that are not in the cache")
    prepare_tools("demo")
    operator, trainer = images.operator_image(), images.light_trainer_image()
    with ThreadPoolExecutor() as pool:
        files = pool.submit(make_files)
        cluster = own_cluster(demo)
        demo.say("loading the images on both nodes")
        cluster.load_missing(operator.name, operator.archive)
        loading = pool.submit(cluster.load_missing, trainer.name, trainer.archive)
        demo.say("helm install grpo-operator")
        stack.install_operator(cluster, operator, trainer)
        demo.say("preparing the model and the problems on the job's volume")
        files.result()
        loading.result()
    volume = cluster.directory / "volumes" / NAMESPACE
    stack.create_namespace(cluster, NAMESPACE)
    stack.host_volume(cluster, NAMESPACE, claim, volume)
    fill_volume(volume)
    return cluster


def read_example() -> dict[str, Any]:
    """The GRPOJob of the example file."""
    job: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    return job


def apply_example(demo: Demo, access: Access) -> str:
    """Applies the example as it is, after removing what an earlier demo left; returns the job's
    name."""
    name = str(read_example()["metadata"]["name"])
    access.kubectl("delete", "grpojob", name, "--namespace", NAMESPACE, "--ignore-not-found")
    demo.say(f"kubectl apply -f examples/{EXAMPLE.name}")
    access.kubectl("apply", "--filename", str(EXAMPLE), "--namespace", NAMESPACE)
    return name


def show_job(demo: Demo, access: Access, name: str) -> None:
    """Prints the job as kubectl shows it, in columns that fit 80 characters."""
    columns = ",".join(f"{head}:{path}" for head, path in VIEW.items())
    place = ("--namespace", NAMESPACE)
    table = access.kubectl("get", "grpojob", name, *place, "--output", f"custom-columns={columns}")
    demo.show(
        f"\n$ kubectl get grpojob {name} --namespace {NAMESPACE} -o custom-columns=…\n{table}"
    )


def summarise(demo: Demo, job: dict[str, Any], history: History) -> None:
    """Prints what came of the run, and where the picture is."""
    rewards = [value for _, value in history.series("reward")]
    kl = history.series("kl")
    status = job["status"]
    picture = OUTPUT / "first-job.png"
    from .plot import draw  # matplotlib takes a second, which nobody waits for at the start

    draw(history, f"{job['metadata']['name']}: {status['plan']['strategy']} reference", picture)
    (OUTPUT / "first-job.json").write_text(json.dumps(history.steps, indent=1))
    nodes = sorted({pod["node"] for pod in status["pods"]})
    first, last = f"{mean(rewards[:LAST]):.3f}", f"{mean(rewards[-LAST:]):.3f}"
    demo.console.print(
        f"[bold]{finished(job)}[/bold] after {status['progress']['summary']} steps on "
        f"{len(nodes)} nodes"
    )
    demo.console.print(f"mean reward, first {LAST} steps → last {LAST}: {first} → {last}")
    demo.console.print(
        f"KL to the reference, largest of all steps: {max(value for _, value in kl):.3f} nats per "
        "token"
    )
    demo.console.print(
        f"time: {time.monotonic() - demo.began:.0f} s in all; the picture is {picture}"
    )


def explain(demo: Demo) -> None:
    """How to look around and how to remove everything."""
    demo.show(
        f'\nLook around:  eval "$(make -s cluster)"\n'
        f"              kubectl -n {NAMESPACE} get grpojob,jobs,pods\n"
        f"              kubectl -n {NAMESPACE} describe grpojob\n"
        f"              kubectl -n {NAMESPACE} logs job/{read_example()['metadata']['name']}-1\n"
        f"Remove it:    make cluster-down"
    )


def run_here(demo: Demo, reason: str) -> int:
    """Run the example without a cluster; return the trainer's exit code."""
    demo.say(reason)
    demo.say(f"instead: grpo run --local -f examples/{EXAMPLE.name}")
    claim = read_example()["spec"]["checkpoint"]["volume"]["claimName"]
    volume = OUTPUT / "volume"
    volume.mkdir(exist_ok=True)
    fill_volume(volume)
    return grpo(["run", "--local", "-f", str(EXAMPLE), "--volume", f"{claim}={volume}"])


def main() -> int:
    """Runs the demo; the exit code is 0 only for a job that Succeeded."""
    demo = Demo()
    OUTPUT.mkdir(exist_ok=True)
    if refused := refused_namespaces_message():
        return run_here(demo, refused)
    access = install(demo)
    name = apply_example(demo, access)
    job, history = follow(access, NAMESPACE, name, demo.console, TIMEOUT_SECONDS)
    show_job(demo, access, name)
    if finished(job) != "Succeeded":
        demo.show(access.kubectl("describe", "grpojob", name, "--namespace", NAMESPACE))
        return 1
    summarise(demo, job, history)
    explain(demo)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Trains the demo's job under every reference strategy on a real cluster of two nodes, and compares
the curves.

The strategy changes where the reference lives, not what is learnt: this shows it. A quarter of an
hour on two cores:

    python -m benchmarks strategy_demo [--strategies Clone Offload …] [--steps N] [--write]

`--write` puts the table into docs/internals/strategy-measurements.md.
"""

import argparse
import json
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

from benchmarks.pages import STRATEGIES, replace_section, table
from examples.demo.__main__ import EXAMPLE, LAST
from examples.demo.prepare import fill_volume
from harness import stack
from harness.fixtures import AnyCluster, node_level
from harness.images import recipes as images
from harness.jobs import Jobs, is_true

NAMESPACE, CLAIM = "strategies", "first-job"
TIMEOUT_SECONDS = 1200.0
RUNS: dict[str, dict[str, Any]] = {
    "Clone": {"reference": {"strategy": "Clone"}},
    "Offload": {"reference": {"strategy": "Offload"}},
    "Sharded": {"reference": {"strategy": "Sharded"}},
    "None": {"training": {"beta": 0}},
    "Adapter": {
        "adapter": {"use": "Always", "rank": 32, "alpha": 64},
        "training": {"learningRate": 1.14e-4},
    },
}
"""What each run changes in the example; an adapter learns at three times the learning rate."""
Steps = list[dict[str, Any]]


def prepared(cluster: AnyCluster, folder: Path) -> Jobs:
    """The demo's jobs on the cluster, with operator, model and problems in place."""
    operator, trainer = images.operator_image(), images.light_trainer_image()
    for image in (operator, trainer):
        cluster.load(image.archive)
    stack.install_operator(cluster, operator, trainer)
    stack.create_namespace(cluster, NAMESPACE)
    folder.chmod(0o755)
    stack.host_volume(cluster, NAMESPACE, CLAIM, folder / "volume")
    fill_volume(folder / "volume")
    return Jobs(
        cluster, NAMESPACE, yaml.safe_load(EXAMPLE.read_text()), folder / "volume" / "checkpoints"
    )


def run(jobs: Jobs, strategy: str, changes: dict[str, Any]) -> Steps:
    """Trains the example with the changes; returns what rank 0 logged, by step."""
    name = strategy.lower()
    jobs.create(name, **changes)
    job = jobs.wait(
        name,
        "ended",
        lambda job: is_true(job, "Succeeded") or is_true(job, "Failed"),
        TIMEOUT_SECONDS,
    )
    if not is_true(job, "Succeeded"):
        raise RuntimeError(f"{strategy}: {json.dumps(job['status'], indent=1)}")
    steps = [line for line in jobs.step_lines(job) if "reward" in line]
    jobs.kubectl("delete", "grpojob", name)
    return steps


def changes(strategy: str, steps: int | None) -> dict[str, Any]:
    """What a strategy's run changes in the example."""
    found = dict(RUNS[strategy])
    if steps:
        found["training"] = found.get("training", {}) | {"maxSteps": steps}
    return found


def row(strategy: str, steps: Steps, ddp: Steps) -> list[str]:
    """The run in numbers, beside plain DDP with a copy of the policy as its reference."""
    rewards = [step["reward"] for step in steps]
    kl = f"{steps[-1]['kl']:.6f}" if "kl" in steps[-1] else "–"
    apart = "–"
    if "kl" in steps[-1] and strategy != "Adapter":
        apart = f"{max(abs(one['kl'] - other['kl']) for one, other in zip(steps, ddp, strict=True)):.1e}"  # noqa: E501
    return [
        strategy,
        str(len(steps)),
        f"{mean(rewards[:LAST]):.3f}",
        f"{mean(rewards[-LAST:]):.3f}",
        kl,
        apart,
    ]


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--strategies",
        nargs="+",
        choices=RUNS,
        default=list(RUNS),
        help="beside Clone (default: all)",
    )
    parser.add_argument("--steps", type=int, help="of each run (default: the example's)")
    parser.add_argument(
        "--write", action="store_true", help="write the table into strategy-measurements.md"
    )
    options = parser.parse_args()
    curves: dict[str, Steps] = {}
    with tempfile.TemporaryDirectory() as temporary, node_level("strategies") as cluster:
        jobs = prepared(cluster, Path(temporary))
        # the others are compared with Clone
        for strategy in ("Clone", *(name for name in options.strategies if name != "Clone")):
            curves[strategy] = run(jobs, strategy, changes(strategy, options.steps))
            print(row(strategy, curves[strategy], curves["Clone"]), flush=True)
    header = [
        "strategy",
        "steps",
        f"reward, first {LAST}",
        f"last {LAST}",
        "KL, last step",
        "largest difference of KL",
    ]
    text = table(
        header, [row(strategy, steps, curves["Clone"]) for strategy, steps in curves.items()]
    )
    if options.write:
        replace_section(STRATEGIES, "demo", text)
    print(text)
    return 0

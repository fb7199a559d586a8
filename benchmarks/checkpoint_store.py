"""What a checkpoint costs on an object store and on a volume beside each other, as a share of a
step.

Training stands still while a checkpoint is saved. The same gang trains the same model with both, in
turns: two pods of one process, once on a folder that they share, once with a disk of its own each
and versitygw on loopback.

    python -m benchmarks checkpoint_store [--hidden 512] [--layers 8] [--rounds 2] [--write]

Prints the medians over all rounds: seconds that training stood still for a checkpoint, seconds of a
step, and their ratios. `--write` puts the table into docs/how-to/models/object-stores.md. Store,
pods and disk share one machine: what a network adds is not in it.
"""

import argparse
import os
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.pages import ROOT, replace_section, table
from grpo_acceptance.tiny_model import save_tiny, tiny_config
from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.report import Result
from grpo_api.spec.checkpoint import ObjectStoreSpec
from grpo_api.text.contract import CHECKPOINT_STORE_ENV, DATA_MOUNT_ENV
from grpo_api.text.units import MIB
from harness.controlplane import free_port
from harness.programs.object_stores import BUCKET, CREDENTIALS, serving
from tests.support.facts.resume_cases import Case, plan, write_data
from tests.support.ranks.pods import Gang, json_lines

PAGE = ROOT / "docs/how-to/models/object-stores.md"
CASE = Case(rows=64, steps=16, save=4, kill=0, accumulation=2, micro_batch=4)
PLACES = ("volume", "store")
EVERY = 100
"""Steps between checkpoints where a job says nothing else."""


@dataclass
class Measured:
    """Of one place, over all rounds."""

    stalls: list[float] = field(default_factory=list)
    """Seconds that training stood still for each checkpoint."""
    steps: list[float] = field(default_factory=list)
    """Seconds of each step."""
    size: int = 0
    """Bytes of a checkpoint."""

    @property
    def stall(self) -> float:
        """Median."""
        return statistics.median(self.stalls)

    @property
    def step(self) -> float:
        """Median."""
        return statistics.median(self.steps)


def make_plan(folder: Path, run: Path, endpoint: str | None) -> TrainingPlan:
    """Two nodes with a process each; without an endpoint they share a folder."""
    made = plan(CASE, folder, 1)
    update: dict[str, object] = {"keep": 2}
    if endpoint:
        update["store"] = ObjectStoreSpec(url=f"s3://{BUCKET}/runs", endpoint=endpoint)
    return made.model_copy(
        update={
            "rendezvous": made.rendezvous.model_copy(update={"port": free_port()}),
            "execution": made.execution.model_copy(update={"nodes": 2, "processes_per_node": 1}),
            "checkpoint": made.checkpoint.model_copy(update=update),
            "checkpoint_directory": str(run),
        }
    )


def measure(folder: Path, name: str, endpoint: str | None, measured: Measured) -> None:
    """One run on one of the places."""
    keys = {f"{CHECKPOINT_STORE_ENV}{key}": value for key, value in CREDENTIALS.items()}
    made = make_plan(folder, folder / "checkpoints" / name, endpoint)
    with Gang(
        made, folder, folder / name, environment=keys if endpoint else {}, own_disks=bool(endpoint)
    ) as gang:
        gang.wait()
        outcome = gang.outcome()
        assert outcome.result is Result.SUCCEEDED, gang.log()[-4000:]
        assert outcome.checkpoint is not None
        measured.size = outcome.checkpoint.bytes
        measured.stalls += [
            line["seconds"] for line in json_lines(gang.log(), "checkpoint").values()
        ]
        measured.steps += [line["step_seconds"] for step, line in gang.steps().items() if step > 1]


def shown(measured: dict[str, Measured]) -> str:
    """The table."""
    step = statistics.median([seconds for one in measured.values() for seconds in one.steps])
    first = measured[PLACES[0]].stall
    header = [
        "place",
        "MiB",
        "stall of a checkpoint",
        "against a volume",
        "in steps",
        f"of the time, one in {EVERY} steps",
    ]
    rows = [
        [
            name,
            f"{one.size / MIB:.0f}",
            f"{one.stall:.2f} s",
            f"{one.stall / first:.1f}",
            f"{one.stall / step:.1f}",
            f"{one.stall / (one.stall + EVERY * step):.1%}",
        ]
        for name, one in measured.items()
    ]
    return f"{table(header, rows)}\nA step took {step:.2f} s.\n"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--write", action="store_true", help=f"write the table into {PAGE.relative_to(ROOT)}"
    )
    options = parser.parse_args()
    measured = {name: Measured() for name in PLACES}
    with tempfile.TemporaryDirectory() as name, serving("versitygw", Path(name, "store")) as served:
        folder = Path(name)
        os.environ[DATA_MOUNT_ENV] = name
        save_tiny(folder / "model", tiny_config(hidden=options.hidden, layers=options.layers))
        write_data(CASE, folder)
        for number in range(options.rounds):
            for place in PLACES:
                endpoint = served if place == "store" else None
                measure(folder, f"{place}-{number}", endpoint, measured[place])
    text = shown(measured)
    print(text)
    if options.write:
        replace_section(PAGE, "cost", text)

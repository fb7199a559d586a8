"""The generated table against what an expert would do, and every example planned.

A change of the memory or time model that moves a plan is seen and argued for here.
"""

import re
from pathlib import Path

import pytest

from grpo_api.job import parse_spec
from grpo_cli.inputs.manifest import load_jobs
from grpo_codegen.__main__ import ROOT
from grpo_codegen.planner_pages import CLUSTERS, MODELS, cluster, spec
from grpo_planner.plan import plan_job
from grpo_planner.result.result import PlanReason

EXPERT = {
    ("1 × L4", "7B"): ("LoRA", "Adapter", 0, "None"),
    ("4 × A10G", "1B"): ("Full", "Clone", 2, "None"),
    ("4 × A10G", "7B"): ("Full", "Sharded", 3, "CPU"),
    ("8 × L40S", "7B"): ("Full", "Sharded", 3, "None"),
    ("1 × A100 40 GB", "1B"): ("Full", "Clone", 0, "None"),
    ("1 × H100", "1B"): ("Full", "Clone", 0, "None"),
    ("1 × H100", "32B"): ("LoRA", "Adapter", 0, "None"),
    ("8 × A100 80 GB", "1B"): ("Full", "Clone", 0, "None"),
    ("8 × A100 80 GB", "32B"): ("Full", "Sharded", 3, "CPU"),
    ("8 × H100", "7B"): ("Full", "Clone", 2, "None"),
    ("4 × 8 × H100", "32B"): ("Full", "Sharded", 3, "None"),
    ("8 × 8 × H200", "32B"): ("Full", "Sharded", 3, "None"),
    ("7 MIG slices of 10 GB", "7B"): ("LoRA", "Adapter", 3, "None"),
}
REJECTED = {
    ("1 × T4", "1B"): PlanReason.NO_GPUS,
    ("1 × L4", "32B"): PlanReason.OUT_OF_DEVICE_MEMORY,
    ("1 × H100", "70B"): PlanReason.OUT_OF_DEVICE_MEMORY,
    ("shared GPUs", "1B"): PlanReason.NO_GPUS,
    ("empty", "1B"): PlanReason.NO_GPUS,
}
EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.yaml"))


def model(size: str) -> str:
    """The table's model of a size."""
    return next(name for name in MODELS if f"-{size}" in name)


@pytest.mark.parametrize(
    ("case", "expected"), EXPERT.items(), ids=lambda value: " ".join(map(str, value))
)
def test_the_plan_is_an_experts(case: tuple[str, str], expected: tuple[str, str, int, str]) -> None:
    chosen = plan_job(spec(model(case[1])), cluster(case[0])).chosen
    assert chosen is not None
    assert (chosen.method, chosen.strategy, chosen.zero_stage, chosen.offload) == expected


@pytest.mark.parametrize(
    ("case", "reason"), REJECTED.items(), ids=lambda value: " ".join(map(str, value))
)
def test_what_cannot_run_is_rejected(case: tuple[str, str], reason: PlanReason) -> None:
    answer = plan_job(spec(model(case[1])), cluster(case[0]))
    assert not answer.feasible
    assert answer.reason == reason


def test_a_mixed_cluster_uses_its_fast_cards() -> None:
    chosen = plan_job(spec(model("7B")), cluster("mixed: 8 × H100, 4 × 4 × L4, 2 × 4 × T4")).chosen
    assert chosen is not None
    assert chosen.gpu_product == "NVIDIA-H100-80GB-HBM3"


def test_the_table_has_every_cluster_and_says_why() -> None:
    text = Path(ROOT / "docs/internals/planner-table.md").read_text()
    assert all(f"| {name} |" in text for name in CLUSTERS)
    rows = [
        line.strip("| ").split(" | ")
        for line in text.splitlines()
        if re.match(r"\| (?!cluster)", line)
    ]
    assert len(rows) >= 60
    assert all(re.search("[0-9].*[0-9]|no node has GPUs", row[-1]) for row in rows), (
        "each says why, with numbers"
    )


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_plans(path: Path) -> None:
    for job in load_jobs(str(path)):
        wanted = parse_spec(job["spec"])
        answer = plan_job(wanted, cluster("4 × 8 × H100"))
        assert answer.chosen is not None, answer.message
        assert answer.fits_now
        assert (answer.chosen.method == "LoRA") == (wanted.adapter.use == "Always")
        if wanted.placement.gpus:
            assert (
                wanted.placement.gpus.min <= answer.chosen.gpus <= (wanted.placement.gpus.max or 32)
            )

"""`grpo plan --sizes`: the curve of GPUs against time, at any width, and what it says it doesn't
know."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from grpo_cli.__main__ import main
from grpo_cli.show import size_table
from grpo_planner.plan import Planner, plan_job
from grpo_planner.search.scaling_curve import Size
from tests.generated import cases
from tests.samples import changed, job
from tests.unit.planning import BARE, H100, QWEN_7B, inventory, nodes, spec

MODEL = ["plan", QWEN_7B, "--gpus", "8xH100", "--host-memory", "1Ti", "--sizes"]
POSITIVE = st.floats(0.1, 1e5)
SIZES = st.builds(
    Size, gpus=st.integers(1, 4096), engine_gpus=st.integers(0, 9), nodes=st.integers(1, 512),
    gpu_product=st.sampled_from(["", H100, "odd [label]"]),
    method=st.just("full ZeRO-3+offload, Sharded"), step_seconds=POSITIVE,
    step_gpu_seconds=POSITIVE, gpu_hours=st.none() | POSITIVE,
    price=st.none() | POSITIVE, headroom=st.floats(0, 0.99), chosen=st.booleans(),
)  # fmt: skip


def curve() -> list[Size]:
    return Planner(spec(QWEN_7B, generation__engine="Auto")).curve(inventory(nodes(1, 8, H100)))


def test_every_number_of_gpus_has_a_row_and_one_is_chosen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*MODEL, "--steps", "100"]) == 0
    rows = [
        line.split()
        for line in capsys.readouterr().out.split("GPU-s/step")[1].splitlines()[1:]
        if H100 in line
    ]
    sizes = curve()
    assert [int(row[0]) for row in rows] == [size.gpus for size in sizes]
    assert [row[-1] == "CHOSEN" for row in rows] == [size.chosen for size in sizes]
    hours = [100 * size.step_gpu_seconds / 3600 for size in sizes]
    assert all(f"{hour:.1f}" in row for hour, row in zip(hours, rows, strict=True))


def test_a_plan_on_what_is_free_now_is_told_from_the_size_on_empty_nodes() -> None:
    job, busy = spec(QWEN_7B), replace(nodes(1, 8, H100), gpus_free=4)
    planned = plan_job(job, inventory(busy)).chosen
    assert planned is not None
    sizes = Planner(job).curve(inventory(busy))
    for gpus, is_named in ((planned.gpus, True), (8, False)):
        out = Console(width=200, record=True, file=io.StringIO())
        size_table.show_sizes(out, sizes, gpus)
        assert ("on what is free now 4 GPUs are planned" in out.export_text()) == is_named


def test_nodes_that_are_declared_have_the_sizes_of_their_plan() -> None:
    where = {
        "provisioning": "CreatePods", "gpuProduct": H100, "gpusPerNode": 8, "nodes": 2,
        "nodeSelector": {"pool": "h100"},
    }  # fmt: skip
    job, there = spec(QWEN_7B, placement=where), inventory(nodes(1, 1, "NVIDIA-L4"))
    planned = plan_job(job, there).chosen
    assert planned is not None
    (size,) = Planner(job).curve(there)
    assert (size.gpus, size.step_seconds) == (planned.gpus, planned.estimated_step_seconds)


def test_what_is_not_known_says_what_would_make_it_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(MODEL) == 0
    assert "GPU-hours to the end are known where spec.training.maxSteps" in capsys.readouterr().out
    assert main([*MODEL, "--steps", "9"]) == 0
    assert (
        "prices are known where an inventory's nodes have gpuHourPrice" in capsys.readouterr().out
    )
    base = "Qwen/Qwen2.5-7B"
    assert main(["plan", base, "--gpus", "1xL4", "--completion-length", "99999", "--sizes"]) == 3
    assert "nothing fits on any number of these GPUs" in capsys.readouterr().out


def test_prices_are_those_of_the_inventory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    group = {
        "gpuProduct": "H100",
        "gpusPerNode": 1,
        "hostMemoryGiB": 1000,
        "cpu": 64,
        "gpuHourPrice": 2.5,
    }
    path = tmp_path / "inventory.json"
    path.write_text(json.dumps({"nodes": [group]}))
    assert main(["plan", QWEN_7B, "--inventory", str(path), "--steps", "1000", "--sizes"]) == 0
    (row,) = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.rstrip().endswith("CHOSEN") and "%" in line
    ]
    hours, price = map(float, row.split()[-4:-2])
    assert price == pytest.approx(2.5 * hours, rel=0.01)


@given(width=st.integers(20, 260), sizes=st.lists(SIZES, min_size=1, max_size=6))
@settings(max_examples=cases(40))
def test_no_width_loses_a_number(width: int, sizes: list[Size]) -> None:
    out = Console(width=width, file=io.StringIO(), highlight=False, emoji=False)
    size_table.show_sizes(out, sizes)
    assert isinstance(out.file, io.StringIO)
    text = out.file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    words = "".join(text.split())
    for size in sizes:
        assert f"{size.step_seconds:.1f}" in words
        assert "".join(size.gpu_product.split()) in words
        assert size.price is None or f"{size.price:.2f}" in words
    assert words.count("CHOSEN") == sum(size.chosen for size in sizes)


@pytest.mark.parametrize(
    ("change", "flags", "sentence"),
    [
        ({}, ["-o", "json"], "leave out -o"),
        ({"placement.accelerator": "CPU"}, [], "spec.placement.accelerator is CPU"),
    ],
)
def test_where_there_is_no_curve_a_sentence_says_so(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, Any],
    flags: list[str],
    sentence: str,
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job("mine", changed({"model.name": QWEN_7B} | change, BARE))))
    assert main(["plan", "-f", str(path), "--gpus", "8xH100", "--sizes", *flags]) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert not printed.out, "the sentence comes before anything is printed"

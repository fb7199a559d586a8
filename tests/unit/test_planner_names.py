"""GPU products by the names that people use, and host memory that is never assumed without a
word."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.text.units import GIB
from grpo_cli.__main__ import main
from grpo_planner.hardware.inventory import allocatable_memory
from grpo_planner.hardware.inventory_file import InventoryInvalid, parse_gpus, parse_inventory
from grpo_planner.hardware.products import (
    is_of_product,
    label_of,
    lookup_product,
    short_names,
    table,
    unknown_product,
)
from grpo_planner.plan import plan_job
from tests.generated import cases
from tests.unit.planning import H100, LLAMA_1B, spec


@pytest.mark.parametrize(
    ("name", "gib"),
    [("H100", 80), ("H20", 96), ("H800", 80), ("A800", 80), ("GH200", 96), ("B300", 269),
    ("RTX 6000", 48),
     ("h100-pcie", 80), ("L4", 22), ("MI300X", 192), ("4090", 0), ("NVIDIA-H200", 140),
     ("nvidia_a100", 80)],
)  # fmt: skip
def test_products_are_known_by_short_names(name: str, gib: int) -> None:
    label = label_of(name)
    assert (round(lookup_product(label).memory_mib / 1024) if label else 0) == gib


@given(st.sampled_from(sorted(short_names())), st.sampled_from(["-", "_", " "]), st.booleans())
@settings(max_examples=cases(60))
def test_a_short_name_in_any_spelling_is_a_product(name: str, between: str, capitals: bool) -> None:
    spelled = name.replace("-", between)
    assert label_of(spelled.upper() if capitals else spelled.lower()) == short_names()[name]
    assert short_names()[name] in table()


@given(st.text("AHBLNVIDRTX0123456789-", min_size=1, max_size=12))
@settings(max_examples=cases(100))
def test_any_name_is_a_product_or_a_sentence(name: str) -> None:
    label = label_of(name)
    if label is not None:
        assert lookup_product(label).is_known
        return
    with pytest.raises(InventoryInvalid, match="is no GPU product that the planner knows"):
        parse_gpus(f"8x{name}")


def test_a_slip_is_answered_with_the_name() -> None:
    assert "did you mean H100 or" in unknown_product("H10O")
    assert "did you mean" not in unknown_product("zzz")
    for turned in ("H100x8", "H100:8"):
        assert unknown_product(turned) == "the number of GPUs comes first: write 8xH100"


def test_a_slip_in_a_models_name_is_answered_too() -> None:
    answer = plan_job(spec("Qwen/Qwen2.5-7BB"), parse_gpus("8xH100"))
    assert "or did you mean Qwen/Qwen2.5-7B?" in answer.message
    assert "did you mean" not in plan_job(spec("zzz/zzz"), parse_gpus("8xH100")).message


@pytest.mark.parametrize(
    ("wanted", "taken", "left"),
    [
        (
            "H100",
            ["NVIDIA-H100-80GB-HBM3", "NVIDIA-H100-PCIe"],
            ["NVIDIA-H200", "NVIDIA-GH200-480GB"],
        ),
        ("h100", ["NVIDIA-H100-80GB-HBM3"], ["NVIDIA-H200"]),
        ("A100-80GB", ["NVIDIA-A100-SXM4-80GB"], ["NVIDIA-A100-SXM4-40GB"]),
        ("A100", ["NVIDIA-A100-SXM4-80GB", "NVIDIA-A100-SXM4-40GB"], ["NVIDIA-A10", "NVIDIA-A10G"]),
        ("L4", ["NVIDIA-L4"], ["NVIDIA-L40S", "NVIDIA-L40"]),
        ("NVIDIA-L4", ["NVIDIA-L4", "NVIDIA-L4-SHARED"], ["NVIDIA-L40S", "NVIDIA-L40"]),
        ("NVIDIA-H20", ["NVIDIA-H20", "NVIDIA-H20-3e"], ["NVIDIA-H200"]),
        ("NVIDIA-A10", ["NVIDIA-A10"], ["NVIDIA-A10G", "NVIDIA-A100-SXM4-80GB"]),
        ("NVIDIA-H", ["NVIDIA-H100-80GB-HBM3", "NVIDIA-H200"], ["Tesla-T4"]),
        ("", ["anything"], []),
        ("ours", ["ours-2"], ["theirs"]),
    ],
)
def test_a_spec_may_name_a_product_shortly(wanted: str, taken: list[str], left: list[str]) -> None:
    assert [label for label in (*taken, *left) if is_of_product(label, wanted)] == taken


def test_a_job_is_planned_on_the_product_that_its_short_name_means() -> None:
    chosen = plan_job(spec(LLAMA_1B, placement={"gpuProduct": "H100"}), parse_gpus("8xH100")).chosen
    assert chosen is not None
    assert chosen.gpu_product == H100


def test_a_refusal_lists_the_products_that_there_are() -> None:
    refused = plan_job(spec(LLAMA_1B, placement={"gpuProduct": "B200"}), parse_gpus("8xH100"))
    assert refused.message.startswith("no node has GPUs of product B200 that this job may use: ")
    assert f"the cluster has {H100}" in refused.message


def test_inventories_take_short_names() -> None:
    group = {"gpuProduct": "H100", "gpusPerNode": 8, "hostMemoryGiB": 1, "cpu": 1}
    (node,) = parse_inventory({"nodes": [group]}).nodes
    assert node.gpu_product == H100
    assert node.node_selector == (("nvidia.com/gpu.product", H100),)
    (unknown,) = parse_inventory(
        {"nodes": [group | {"gpuProduct": "ours", "gpuMemoryMiB": 4}]}
    ).nodes
    assert unknown.gpu_product == "ours"


def test_host_memory_is_given_or_said_to_be_assumed() -> None:
    assumed, given_ = parse_gpus("2x4xL4"), parse_gpus("2x4xL4", 100 * GIB)
    assert assumed.nodes[0].host_memory_total == allocatable_memory(512 * GIB)
    assert given_.nodes[0].host_memory_total == allocatable_memory(100 * GIB)
    assert given_.assumptions == ()
    chosen = plan_job(spec(LLAMA_1B), assumed).chosen
    assert chosen is not None
    assert (
        "512 GiB of host memory per node are assumed: say how much there is by --host-memory"
        in chosen.warnings
    )


def test_more_gpus_than_a_machine_has_are_said_to_be_of_one_node() -> None:
    (note,) = parse_gpus("64xH100", 8192 * GIB).assumptions
    assert note == "64xH100 is one node of 64 GPUs: for nodes of 8 write 8x8xH100"
    assert parse_gpus("2x16xA100", 2048 * GIB).assumptions == ()


def test_what_is_assumed_of_a_node_is_no_reason_of_a_refusal() -> None:
    message = plan_job(spec(LLAMA_1B), parse_gpus("T4")).message
    assert message.startswith("no node has GPUs that this job may use: Tesla-T4 has compute")
    assert "are assumed" not in message


def test_a_refusal_says_what_was_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "Qwen/Qwen2.5-32B", "--gpus", "1xL4", "-o", "json"]) == 3
    assert "128 GiB of host memory per node are assumed" in capsys.readouterr().err


def test_gpus_lists_every_product_and_short_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpus"]) == 0
    out = capsys.readouterr().out
    assert all(label in out for label in table())
    assert all(name in out for name in short_names())
    assert "can't compute there" in out


@pytest.mark.parametrize(
    ("text", "count", "gpus", "label"),
    [
        ("H100", 1, 1, H100),
        ("8xH100", 1, 8, H100),
        ("4 x 8 x H100", 4, 8, H100),
        ("4x RTX A6000", 1, 4, "NVIDIA-RTX-A6000"),
        ("A100 80GB", 1, 1, "NVIDIA-A100-SXM4-80GB"),
        ("8xA100-80G", 1, 8, "NVIDIA-A100-SXM4-80GB"),
        ("1g.10gb", 1, 1, f"{H100}-MIG-1g.10gb"),
        ("mig-1g.5gb", 1, 1, "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb"),
        ("7xA100-1g.5gb", 1, 1, "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb"),
        ("2x7xA100-MIG-1g.10gb", 2, 1, "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb"),
        ("H100-3G.40GB", 1, 1, f"{H100}-MIG-3g.40gb"),
        ("nvidia.com/mig-1g.18gb", 1, 1, "NVIDIA-H200-MIG-1g.18gb"),
    ],
)
def test_gpus_are_understood_as_people_write_them(
    text: str, count: int, gpus: int, label: str
) -> None:
    (node,) = parse_gpus(text).nodes
    assert (node.count, node.gpus_total, node.gpu_product) == (count, gpus, label)
    assert lookup_product(label).is_known


@pytest.mark.parametrize("text", ["0xH100", "0x8xH100", "8x", "x8", "8x8x8xH100", "", "many"])
def test_what_names_no_gpus_is_an_error_with_a_way_out(text: str) -> None:
    with pytest.raises(InventoryInvalid, match=r"write L4, 8xL4|is no GPU product"):
        parse_gpus(text)


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("1Ti", 2**40),
        ("1TB", 10**12),
        ("1 TiB", 2**40),
        ("512GB", 512 * 10**9),
        ("80G", 80 * 10**9),
    ],
)
def test_host_memory_is_understood_as_people_write_it(
    text: str, amount: int, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["plan", LLAMA_1B, "--gpus", "H100", "-o", "json", "--host-memory"]
    assert main([*asked, text]) == 0
    said = capsys.readouterr().out
    assert main([*asked, str(amount)]) == 0
    assert capsys.readouterr().out == said


def test_a_spec_may_name_an_instance_shortly() -> None:
    assert is_of_product(f"{H100}-MIG-1g.10gb", "H100-1g.10gb")
    assert not is_of_product(f"{H100}-MIG-1g.20gb", "H100-1g.10gb")

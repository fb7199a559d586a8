"""Plans are made for GPUs that the image's torch has kernels for, and for no others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_planner.hardware.inventory import Node
from grpo_planner.hardware.products import IMAGE, obstacle_message, table
from grpo_planner.result.result import PlanReason
from tests.unit.planning import H100, LLAMA_1B, nodes, plan, result, spec

BUILT = "and the torch of the trainer's image is built for 7.5, 8.0, 8.6, 9.0, 10.0, 12.0"
UNFIT = {
    "Tesla-V100-SXM2-32GB": f"Tesla-V100-SXM2-32GB has compute capability 7.0, {BUILT}",
    "Tesla-P100": f"Tesla-P100 has compute capability 6.0, {BUILT}",
    "Tesla-T4": "Tesla-T4 has compute capability 7.5 and so no bfloat16, and the trainer has not "
    "been shown to run in "
    "float32 on GPUs",
    "AMD-Instinct-MI300X": (
        "AMD-Instinct-MI300X is an AMD GPU, and the trainer's image has torch for CUDA alone"
    ),
}


def amd(product: str = "AMD_Instinct_MI300X_OAM") -> Node:
    """Nodes as AMD's labeller describes them."""
    return nodes(1, 8, product, gpu_memory_mib=196592, gpu_resource="amd.com/gpu")


@pytest.mark.parametrize("product", UNFIT)
def test_a_gpu_without_kernels_in_the_image_gets_no_plan(product: str) -> None:
    answer = result(spec(LLAMA_1B), nodes(1, 8, product))
    assert (answer.reason, answer.feasible) == (PlanReason.NO_GPUS, False)
    assert UNFIT[product] in answer.message
    assert (
        "set spec.placement.gpuProduct to other GPUs, or spec.image to an image of yours"
        in answer.message
    )


def test_an_amd_gpu_is_known_by_its_resource() -> None:
    assert "AMD_Instinct_MI300X_OAM is an AMD GPU" in result(spec(LLAMA_1B), amd()).message
    bare = nodes(1, 8, "", gpu_resource="amd.com/gpu")
    assert "amd.com/gpu is an AMD GPU" in result(spec(LLAMA_1B), bare).message, (
        "its memory is not asked for first"
    )


def test_other_gpus_of_the_cluster_are_taken_and_those_left_out_are_told() -> None:
    chosen = plan(spec(LLAMA_1B), nodes(8, 8, "Tesla-V100-SXM2-32GB"), nodes(1, 8, H100))
    assert chosen.gpu_product == H100
    assert any(text.startswith(UNFIT["Tesla-V100-SXM2-32GB"]) for text in chosen.warnings)


@pytest.mark.parametrize("product", UNFIT)
def test_what_an_image_of_the_users_own_can_do_is_not_known(product: str) -> None:
    chosen = plan(spec(LLAMA_1B, image="trainer:1"), nodes(1, 8, product))
    assert chosen.gpu_product == product
    assert f"{UNFIT[product]}: whether spec.image can compute there is not known" in chosen.warnings


def test_a_nodes_own_label_beats_the_table() -> None:
    old = result(
        spec(LLAMA_1B), nodes(1, 1, "NVIDIA-Past", gpu_memory_mib=81559, compute_capability=(5, 2))
    )
    assert "NVIDIA-Past has compute capability 5.2" in old.message
    new = plan(
        spec(LLAMA_1B),
        nodes(1, 1, "NVIDIA-R100", gpu_memory_mib=270000, compute_capability=(10, 3)),
    )
    assert "GPU product 'NVIDIA-R100' is unknown: its speed is a guess" in new.warnings


def test_what_is_assumed_of_an_unknown_product_is_told() -> None:
    chosen = plan(spec(LLAMA_1B), nodes(1, 1, "NVIDIA-Future", gpu_memory_mib=81559))
    assert any(
        "that the image's torch has kernels for it are guesses" in text for text in chosen.warnings
    )


VERSIONS = st.integers(0, 15)


@given(
    st.sampled_from(["", "NVIDIA-X", "Tesla"]),
    st.none() | st.tuples(VERSIONS, VERSIONS | st.integers(0)),
)
def test_code_runs_on_its_own_major_version_from_its_own_minor_on(
    product: str, capability: tuple[int, int] | None
) -> None:
    oldest = {major: min(minor for other, minor in IMAGE if other == major) for major, _ in IMAGE}
    runs = capability is None or capability[1] >= oldest.get(capability[0], float("inf"))
    runs = runs and (capability is None or capability[0] >= 8)  # where bfloat16 begins
    assert (obstacle_message(product, "nvidia.com/gpu", capability) == "") is runs


def test_every_product_has_a_generation() -> None:
    assert {name for name, product in table().items() if product.capability is None} == {
        name for name in table() if name.startswith("AMD")
    }

"""No sentence compares two numbers that look the same: what is lacking shows in the digits."""

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from grpo_api.job import GRPOJobSpec
from grpo_api.text.timing import DAY
from grpo_api.text.units import MIB
from grpo_planner.hardware.inventory import Inventory, Node
from grpo_planner.hardware.products import TORCH_RESERVE, TORCH_SHARE, usable_bytes
from grpo_planner.plan import plan_job
from grpo_planner.result.formatting import distinct, distinct_gib
from grpo_planner.result.result import PlanResult
from grpo_planner.time.constants import stored_fit
from grpo_planner.time.step_time import headline_message, step_message
from tests.generated import cases
from tests.unit.planning import H100, LLAMA_1B, QWEN_7B, nodes, plan, result, spec
from tests.unit.test_planner_properties import GROUPS, jobs

COMPARED = re.compile(
    r"([0-9.]+) GiB(?: per GPU| of host memory per node)?(?: at [a-z]+)?,(?: has)? ([0-9.]+) GiB"
    r"|needs ([0-9.]+) GiB (?:of host memory per node, )?of ([0-9.]+) GiB"
)
"""What is needed and what there is."""


def compared(answer: PlanResult) -> Iterator[tuple[str, str]]:
    """The sizes that sentences on what does not fit compare."""
    texts = [other.rejected.message for other in answer.candidates if other.rejected]
    # What is chosen fits, also where it fills a GPU.
    texts.append(answer.chosen.reason.partition("; ")[2] if answer.chosen else answer.message)
    for text in texts:
        for first, second, third, fourth in COMPARED.findall(text):
            yield first or third, second or fourth


@settings(max_examples=cases(200, gate=6))
@given(job=jobs(), group=GROUPS, index=st.integers(0, 20))
def test_what_just_lacks_memory_shows_how_much(job: GRPOJobSpec, group: Node, index: int) -> None:
    """There is a little less than what something that did not fit needs."""
    answer = plan_job(job, Inventory((group,)))
    rejections = [other.rejected for other in answer.candidates if other.rejected]
    lacking = [each for each in rejections if each.reason in ("DeviceMemory", "HostMemory")]
    assume(lacking)
    rejected = lacking[index % len(lacking)]
    need = rejected.need_bytes
    if rejected.reason == "HostMemory":
        nearly = replace(group, host_memory_free=need - 1, host_memory_total=need - 1)
    else:
        enough_mib = round((need + TORCH_RESERVE) / TORCH_SHARE / MIB) + 1
        sizes = range(enough_mib, 0, -1)
        lacking_mib = next(mib for mib in sizes if usable_bytes(mib) < need)
        nearly = replace(group, gpu_memory_mib=lacking_mib)
    for first, second in compared(plan_job(job, Inventory((nearly,)))):
        assert first != second


@given(first=st.integers(0, 2**50), difference=st.integers(1, 2**31))
def test_sizes_that_differ_look_different(first: int, difference: int) -> None:
    one, other = distinct_gib(first, first + difference)
    assert float(one.removesuffix(" GiB")) < float(other.removesuffix(" GiB"))
    assert distinct(5.0, 5.0) == ("5.0", "5.0")


@pytest.mark.parametrize("model", [LLAMA_1B, QWEN_7B])
def test_a_run_that_takes_just_too_long_shows_by_how_much(model: str) -> None:
    there, fastest = nodes(1, 1, H100), {"placement__objective": "Fastest", "adapter__use": "Never"}
    step = plan(spec(model, **fastest), there).estimated_step_seconds
    assert step is not None
    steps = int(90 * DAY / (step * stored_fit().low)) + 100
    refused = result(spec(model, training__maxSteps=steps, **fastest), there)
    days = re.search(r"of them ([0-9.]+) days: more than 6 h per step or 90 days", refused.message)
    assert days, refused.message
    assert 90 < float(days[1]) < 91


def test_a_step_that_takes_just_too_long_shows_by_how_much() -> None:
    """Its completions are lengthened, one token at a time, until it is refused."""
    there, fastest = nodes(1, 1, H100), {"placement__objective": "Fastest", "adapter__use": "Never"}

    job = {"generation__engine": "Transformers", "training__promptsPerStep": 128} | fastest

    def answer(tokens: int) -> PlanResult:
        return result(spec(QWEN_7B, training__maxCompletionLength=tokens, **job), there)

    short, long = 8000, 16000
    assert answer(short).feasible
    assert not answer(long).feasible
    while long - short > 1:
        middle = (short + long) // 2
        short, long = (middle, long) if answer(middle).feasible else (short, middle)
    message = answer(long).message
    hours = re.search(r"would take ([0-9.]+) h per step or more: more than 6 h per step", message)
    assert hours, message
    assert 6 < float(hours[1]) < 6.1


@given(seconds=st.floats(0.01, 1e5), spread=st.floats(0.01, 9.0))
def test_a_range_has_two_ends(seconds: float, spread: float) -> None:
    chosen = plan(spec(LLAMA_1B), nodes(1, 1, H100))
    seconds = round(seconds, 2)
    measured = chosen.model_copy(update={"estimated_step_seconds": seconds, "step_spread": spread})
    published = measured.model_copy(update={"step_spread": None})
    for text in (headline_message(measured), headline_message(published), step_message(seconds)):
        low, high = re.findall(r"([0-9.]+) to ([0-9.]+) s per step", text)[0]
        assert float(low) < float(high)

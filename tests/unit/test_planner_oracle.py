"""The chosen plan is the best of all candidates, by an oracle that enumerates every one."""

from typing import Any

from hypothesis import assume, event, given, reject, settings
from hypothesis import strategies as st

from grpo_api.job import SpecInvalid
from grpo_planner.hardware.inventory import Inventory, Node
from grpo_planner.plan import plan_job
from tests.generated import cases
from tests.unit.plan_oracle import MOST_GPUS, candidates
from tests.unit.planning import A10G, A100, H100, H200, L4, LLAMA_1B, QWEN_7B, QWEN_32B, nodes, spec

GROUPS = st.builds(
    nodes,
    st.integers(1, 2),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([A10G, A100, H100, H200, L4]),
    st.sampled_from([32, 256, 2048]),
    gpu_hour_price=st.sampled_from([0.5, 3.0]),
)
CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "training__beta": st.sampled_from([0.0, 0.04]),
        "training__numGenerations": st.sampled_from([2, 4, 8]),
        "training__promptsPerStep": st.sampled_from([1, 2, 3]),
        "training__maxCompletionLength": st.sampled_from([64, 512, 4096]),
        "training__optimizer": st.sampled_from(["Auto", "AdamW", "AdamW8bit"]),
        "training__gradientCheckpointing": st.sampled_from(["Auto", "Enabled", "Disabled"]),
        "reference__strategy": st.sampled_from(["Auto", "Clone", "Sharded", "Offload"]),
        "adapter__use": st.sampled_from(["Never", "IfNeeded", "Always"]),
        "generation__engine": st.sampled_from(["Auto", "Transformers", "Colocated"]),
        "generation__sleep": st.booleans(),
        "placement__objective": st.sampled_from(["Balanced", "Fastest", "FewestGPUs", "Cheapest"]),
    },
)


@settings(max_examples=cases(2000, gate=25))
@given(
    st.sampled_from([LLAMA_1B, QWEN_7B, QWEN_32B, "Qwen/Qwen2.5-0.5B"]),
    CHANGES,
    st.lists(GROUPS, min_size=1, max_size=2, unique_by=lambda group: group.gpu_product),
)
def test_no_candidate_is_better_than_the_chosen_plan(
    model: str, changes: dict[str, Any], groups: list[Node]
) -> None:
    small = {"training__numGenerations": 4, "training__promptsPerStep": 2}
    try:
        job = spec(model, **small | changes)
    except SpecInvalid:
        reject()
    assume(all(group.count * group.gpus_total <= MOST_GPUS for group in groups))
    inventory = Inventory(tuple(groups))
    answer = plan_job(job, inventory)
    every = list(candidates(job, inventory))
    event("500 candidates or more" if len(every) >= 500 else "fewer than 500 candidates")
    assert answer.feasible == bool(every), answer.message
    if answer.chosen is None:
        return
    chosen = answer.chosen
    objective = job.placement.objective
    own = [candidate for candidate in every if candidate.is_of(chosen)]
    assert len(own) == 1, "the chosen plan is one of the candidates"
    best = min(every, key=lambda candidate: candidate.score(objective))
    least, reached = best.score(objective), own[0].score(objective)
    assert reached[:2] == least[:2], best
    assert reached[2] <= least[2] * (1 + 1e-9), best

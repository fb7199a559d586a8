"""An evaluation from its plan to its score: model, rows, completions, rewards. Imports torch and all that it needs."""

import os
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from grpo_api.plan.plan import TrainingPlan
from grpo_api.text.contract import DATA_MOUNT, DATA_MOUNT_ENV

from ..building import device
from ..data.dataset import load_prompts
from ..data.prompts import Prompt
from ..errors import BadInput
from ..hub.repositories import Hub
from ..rewards.base import Scores
from ..rewards.reward_set import RewardSet, build_rewards
from ..weights.models import Source, load_tokenizer
from .rewarding import Columns, means, rewarded, weighted
from .sampling import load, sample
from .score import Score, score


def held_out(plan: TrainingPlan, folder: Path, completions: int | None = None, seed: int | None = None) -> Score:
    """Score the model in the folder on the plan's dataset, sampled as in the plan's training.

    Args:
        plan: whose dataset, rewards and sampling.
        folder: the exported model.
        completions: of each row; None for training.numGenerations.
        seed: of the sampling; None for training.seed.

    Raises:
        BadInput: the model, the dataset or a reward can't be used.
        RewardError: a reward failed.
    """
    hub = Hub(plan.revisions)
    rewards = build_rewards(plan.rewards, device=device(plan), hub=hub)
    each = completions or plan.training.num_generations
    if seed is None:
        seed = plan.training.seed
    try:
        scores = _scores(plan, folder, rewards, hub, each=each, seed=seed)
    finally:
        rewards.close()
    sums = weighted(rewards, scores)
    by_row = [sums[start : start + each] for start in range(0, len(sums), each)]
    try:
        return score(by_row, means(scores))
    except ValueError as error:
        raise BadInput(f"evaluation: {error}: the rewards had nothing to say about any of them") from error


def _scores(
    plan: TrainingPlan, folder: Path, rewards: RewardSet, hub: Hub, *, each: int, seed: int
) -> dict[str, Scores]:
    """What each reward says of each completion; those of one row follow each other."""
    execution, remote_code = plan.execution, plan.model.trust_remote_code
    tokenizer = load_tokenizer(Source(str(folder), folder, "", execution.dtype), remote_code)
    prompts, columns = _rows(plan, tokenizer, rewards, hub, each)
    model = load(folder, execution.dtype, device(plan), remote_code=remote_code)
    batch = execution.generation_sub_batch or execution.micro_batch
    completions = sample(model, tokenizer, prompts, plan.training, batch=batch, seed=seed)
    size = plan.training.prompts_per_step * plan.training.num_generations
    return rewarded(rewards, prompts, completions, columns, size)


def _rows(
    plan: TrainingPlan, tokenizer: PreTrainedTokenizerBase, rewards: RewardSet, hub: Hub, each: int
) -> tuple[list[Prompt], Columns]:
    """Prompts and columns of the dataset, with each row repeated for each of its completions."""
    root = Path(os.environ.get(DATA_MOUNT_ENV, DATA_MOUNT))
    few = plan.training.model_copy(update={"prompts_per_step": 1, "generation_batch_size": None})  # no step to fill
    rows = load_prompts(plan.dataset, few, tokenizer, root=root, hub=hub).rows
    rewards.check(rows)
    repeated = rows.select([index for index in range(len(rows)) for _ in range(each)])
    columns = {name: list(repeated[name]) for name in repeated.column_names if name != "prompt"}
    return list(repeated["prompt"]), columns

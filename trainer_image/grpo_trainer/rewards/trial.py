"""`python -m grpo_trainer.rewards.trial ROWS RESULT`: scores the completions of a file with a
plan's rewards as training would, so that rewards are tried before anything is trained.

ROWS is a JSON list of objects: `completion`, `prompt`, and the dataset's columns that the rewards
read. Rewards that are models are left out: they need the training libraries, and a GPU.
"""

import json
import sys
from pathlib import Path
from typing import Any

from grpo_api.spec.rewards import RewardSpec

from ..process.process_setup import hide_unused_libraries
from ..runtime.errors import BadInput, TrainingError
from ..runtime.plan_file import read_plan
from .reward_base import TRL_COLUMNS, reward_arguments
from .reward_set import build_rewards, call_reward


def score_rows(
    rewards: list[RewardSpec], rows: list[dict[str, Any]], max_steps: int | None
) -> dict[str, Any]:
    """By reward: its weight, one score per row (None without one), and why some have none.

    Raises:
        BadInput: a reward can't be used.
        RewardError: one failed for a whole batch.
    """
    for reward in rewards:
        if reward.accuracy:
            _require_column(reward.accuracy.answer_column, rows)
    built = build_rewards(rewards, without_models=True)
    try:
        arguments = _arguments(rows, max_steps)
        return {
            name: {
                "weight": spec.weight,
                "scores": call_reward(function, arguments),
                "problem": built.counters[name].last_problem,
            }
            for spec, name, function in zip(built.specs, built.names, built.functions, strict=True)
        }
    finally:
        built.close()


def _require_column(column: str, rows: list[dict[str, Any]]) -> None:
    for number, row in enumerate(rows, 1):
        if column not in row:
            raise BadInput(
                f"row {number} has no {column!r}, which accuracy.answerColumn names; add it to "
                "every row of the file"
            )


def _arguments(rows: list[dict[str, Any]], max_steps: int | None) -> dict[str, Any]:
    """What TRL gives a reward for these completions."""
    names = sorted({key for row in rows for key in row} - set(TRL_COLUMNS))
    columns = {name: [row.get(name) for row in rows] for name in names}
    prompts = [row.get("prompt", "") for row in rows]
    completions = [row["completion"] for row in rows]
    completion_ids = [row.get("completion_ids", [0]) for row in rows]
    return reward_arguments(columns, prompts, completions, completion_ids, max_steps)


def main(arguments: list[str]) -> int:
    """Scores the file's rows; the result, or the sentence that says what is wrong, is JSON."""
    rows_file, result_file = map(Path, arguments)
    try:
        plan = read_plan()
        hide_unused_libraries(plan.execution)
        rows = json.loads(rows_file.read_text(encoding="utf-8"))
        scores = score_rows(plan.rewards, rows, plan.training.max_steps)
        result: dict[str, Any] = {"rewards": scores}
    except (BadInput, TrainingError) as error:
        result = {"error": str(error)}
    result_file.write_text(json.dumps(result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

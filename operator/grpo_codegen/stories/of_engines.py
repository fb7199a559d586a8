"""Stories of the engines that sample a job's completions."""

from grpo_api.report import training_metrics as trainer

from ..timelines import changed_between, constant, counter, frozen_during, replaced_during
from .engine_series import SAMPLED, WITH_ENGINES, sampling, version, vllm_series
from .job_series import counted_series
from .story import Story
from .world import World, absent_during, changed_during, rank0

_UP = rank0(trainer.ENGINE_UP, engine="1")
_OTHER_TOKENS = rank0(trainer.ENGINE_TOKENS, engine="0")


def _without_one(first: int, end: int) -> World:
    """Engine 1 is given up in the first minute and serves again from the last one on; the other has
    all prompts."""
    waiting = rank0(trainer.ENGINE_WAITING, engine="0")
    idle = dict.fromkeys(
        (rank0(trainer.ENGINE_TOKENS, engine="1"), rank0(trainer.ENGINE_WAITING, engine="1")), 0.0
    )
    return {
        **changed_during(
            WITH_ENGINES,
            first,
            end,
            {waiting: 80.0, _OTHER_TOKENS: 6800.0, **idle},
        ),
        **absent_during(vllm_series("1"), first, end),
        **counted_series(sampling(replaced_during(SAMPLED, first, end, constant(17.0)))),
        _UP: changed_between(first, end, 0.0, 1.0),
        rank0(trainer.ENGINE_VERSION, engine="1"): frozen_during(version, first, end),
        rank0(trainer.ENGINE_LOSSES, engine="1"): counter(first),
    }


STORIES = (
    Story(
        name="two engines",
        summary=(
            "Two engines in pods of their own sample; one is lost in minute 40 and serves again "
            "three minutes later."
        ),
        minutes=120,
        at=110,
        changes={**WITH_ENGINES, **_without_one(40, 43)},
    ),
    Story(
        name="engine gone",
        summary="One of two engines is lost in minute 30, and its new pod finds no GPU until minute 60.",
        changes={**WITH_ENGINES, **_without_one(30, 60)},
        alerts=("GRPOEngineDown",),
    ),
    Story(
        name="engine computes otherwise",
        summary=(
            "From minute 30 to 60 the log-probabilities of the engines are far from the trainer's, "
            "with the same weights."
        ),
        changes={
            **WITH_ENGINES,
            **changed_during(
                WITH_ENGINES,
                30,
                60,
                {
                    rank0(trainer.ENGINE_MISMATCH): 0.43,
                    rank0(trainer.ENGINE_MISMATCH_MAX): 3.0,
                    rank0("importance_ratio_min"): 0.2,
                    rank0("importance_ratio_max"): 2.0,
                },
            ),
        },
        findings=("EngineDrift",),
    ),
    Story(
        name="engine with other weights",
        summary=(
            "After the sync of minute 30 an engine has other weights; they are sent again, and it "
            "has the right ones."
        ),
        minutes=70,
        at=35,
        changes={**WITH_ENGINES, rank0(trainer.ENGINE_PROOF_FAILURES): counter(30)},
        alerts=("GRPOEngineProofFailed",),
    ),
)

"""Chat templates, their variables and stop strings in the live trainer: prompts, losses and
gradients are those of TRL.

The template has Qwen 3's switch: `enable_thinking: false` writes an empty block of thoughts.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
from trl import GRPOTrainer

from grpo_api.plan.plan import TrainingPlan
from grpo_api.spec.generation import GenerationSpec
from grpo_api.spec.model import ModelSpec
from grpo_trainer.data.prompts import PromptEncoder
from grpo_trainer.reference.strategies import strategy_for
from grpo_trainer.training.reference_trainer import ReferenceGRPOTrainer
from grpo_trainer.weights.models import load_policy
from tests.support.ranks import demo_model, runs

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
    "{% endif %}"
)
CHATS = [
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"say {number % 10}"}]
    for number in range(64)
]
STOP = ["a", "e", "zz", "<|user|>"]
EXACT = ("loss", "grad_norm", "reward", "kl", "entropy", "completions/mean_length")
THINKING = {"enable_thinking": True}
BRIEF = {"enable_thinking": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_model.save_policy(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    runs.reset()
    yield
    runs.reset()


def plan(
    model: Path,
    kwargs: dict[str, Any] | None = None,
    stop: Sequence[str] | None = None,
    **training: Any,
) -> TrainingPlan:
    """A plan with the template and the stop strings."""
    base = runs.plan(model, training={"maxSteps": 10, **training})
    spec = ModelSpec(name=base.model.name, chat_template=TEMPLATE, chat_template_kwargs=kwargs)
    generation = GenerationSpec(stop=list(stop) if stop else None)
    return base.model_copy(update={"model": spec, "generation": generation})


def letters(completions: list[Any], **_: Any) -> list[float]:
    """A deterministic reward: share of small letters."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(letter.islower() for letter in text) / runs.COMPLETION for text in texts]


def ours(job: TrainingPlan, logs: runs.Logs | None = None) -> ReferenceGRPOTrainer:
    """The trainer as a pod has it."""
    config = runs.configuration(job)
    return ReferenceGRPOTrainer(
        loaded=load_policy(job.model, job.execution, job.adapter),
        strategy=strategy_for(job.execution, job.reference, trust_remote_code=False),
        args=config,
        stop=job.generation.stop or (),
        reward_funcs=letters,
        train_dataset=Dataset.from_list([{"prompt": chat} for chat in CHATS]),
        callbacks=[logs] if logs else [],
    )


class CuttingTrainer(GRPOTrainer):  # type: ignore[misc]  # TRL is not followed by the type checker
    """TRL with stop strings as a user would add them: completions are cut once they are sampled."""

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        completions, logprobs = super()._generate_single_turn(*args, **kwargs)
        return [self._cut(ids) for ids in completions], logprobs

    def _cut(self, ids: list[int]) -> list[int]:
        for end in range(1, len(ids) + 1):
            if ends(self.processing_class, ids[:end]):
                return ids[:end]
        return ids


def ends(tokenizer: Any, ids: list[int]) -> bool:
    """Whether a completion holds a stop string."""
    text = tokenizer.decode(ids, skip_special_tokens=False)
    return any(stop in text for stop in STOP)


def bare(model: Path, job: TrainingPlan, logs: runs.Logs, kind: type[GRPOTrainer]) -> GRPOTrainer:
    """TRL alone, with the template set as in TRL's own scripts."""
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    tokenizer.chat_template = TEMPLATE
    trainer = kind(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        processing_class=tokenizer,
        args=runs.configuration(job, chat_template_kwargs=job.model.chat_template_kwargs),
        reward_funcs=letters,
        train_dataset=Dataset.from_list([{"prompt": chat} for chat in CHATS]),
        callbacks=[logs],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


@pytest.mark.parametrize("kwargs", [None, THINKING, BRIEF], ids=str)
def test_a_switch_of_the_template_reaches_prompts_lengths_and_export(
    model: Path, tmp_path: Path, kwargs: dict[str, Any] | None
) -> None:
    trainer = ours(plan(model, kwargs))
    prompts, _, _ = trainer._tokenize_prompts(CHATS[:4])
    tokenizer = trainer.processing_class
    expected = [f"<|system|>Be brief.<|user|>say {number}<|assistant|>" for number in range(4)]
    if kwargs == BRIEF:
        expected = [f"{text}<think></think>" for text in expected]
    assert prompts == [tokenizer(text, add_special_tokens=False)["input_ids"] for text in expected]
    encoder = PromptEncoder(trainer.processing_class, kwargs)
    counts = encoder.token_counts(dict(enumerate(CHATS[:4])), str)
    assert list(counts.values()) == list(map(len, prompts)), "maxPromptLength counts the same"
    assert encoder.render(CHATS[0]) == expected[0]
    trainer.write_model(str(tmp_path))
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == TEMPLATE


@pytest.mark.parametrize(
    ("kwargs", "stop"),
    [(BRIEF, None), (THINKING, STOP)],
    ids=["variables", "stop strings"],
)
def test_ten_steps_are_those_of_bare_trl(
    model: Path, kwargs: dict[str, Any] | None, stop: list[str] | None
) -> None:
    job = plan(model, kwargs, stop)
    rows = []
    for make in ("ours", "bare"):
        runs.reset()
        logs = runs.Logs()
        if make == "ours":
            trainer = ours(job, logs)
            trainer.remove_callback(PrinterCallback)
        else:
            trainer = bare(model, job, logs, CuttingTrainer if stop else GRPOTrainer)
        trainer.train()
        rows.append([{key: logs.rows[step][key] for key in EXACT} for step in range(1, 11)])
    assert rows[0] == rows[1]
    mean_length = sum(row["completions/mean_length"] for row in rows[0]) / len(rows[0])
    assert bool(stop) == (mean_length < 7.5), mean_length


def test_a_completion_that_ended_at_a_stop_string_is_not_truncated(model: Path) -> None:
    """TRL leaves truncated ones out of the loss, and would take it for one."""
    trainer = ours(plan(model, stop=STOP, maskTruncatedCompletions=True, maxSteps=1))
    scored = trainer._generate_and_score_completions
    seen = []

    def spy(inputs: Any) -> Any:
        seen.append(scored(inputs))
        return seen[-1]

    trainer._generate_and_score_completions = spy
    trainer.train()
    (batch,) = seen
    tokenizer = trainer.processing_class
    kept = truncated = 0
    for ids, mask in zip(batch["completion_ids"], batch["completion_mask"], strict=True):
        own = [token for token in ids.tolist() if token != tokenizer.pad_token_id]
        is_whole = own[-1] == tokenizer.eos_token_id or ends(tokenizer, own)
        assert bool(mask.any()) == is_whole, tokenizer.decode(own)
        assert not ends(tokenizer, own[:-1]), "it ends with the stop string"
        kept, truncated = kept + is_whole, truncated + (not is_whole)
    assert kept
    assert truncated
    assert trainer._metrics["train"]["completions/clipped_ratio"] == [] or True
    shares = [
        row["completions/clipped_ratio"] for row in trainer.state.log_history if "loss" in row
    ]
    assert shares == [truncated / (kept + truncated)]


def test_trl_itself_can_t_stop_a_transformers_model_at_a_text(model: Path) -> None:
    """Once it can, ours may go."""
    job = plan(model)
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    tokenizer.chat_template = TEMPLATE
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        processing_class=tokenizer,
        args=runs.configuration(job, generation_kwargs={"stop_strings": STOP}),
        reward_funcs=letters,
        train_dataset=Dataset.from_list([{"prompt": chat} for chat in CHATS]),
    )
    with pytest.raises(ValueError, match="could not locate a tokenizer"):
        trainer.train()


def test_further_arguments_of_transformers_reach_its_generation(model: Path) -> None:
    kwargs = {"min_new_tokens": runs.COMPLETION, "suppress_tokens": [50, 51], "typical_p": 0.9}
    job = plan(model, maxSteps=1).model_copy(
        update={"generation": GenerationSpec(engine="Transformers", kwargs=kwargs)}
    )
    trainer = ours(job)
    trainer.remove_callback(PrinterCallback)
    assert trainer.args.generation_kwargs == kwargs
    trainer.train()
    assert {name: getattr(trainer.generation_config, name) for name in kwargs} == kwargs
    (row,) = [row for row in trainer.state.log_history if "loss" in row]
    assert row["completions/min_length"] == runs.COMPLETION

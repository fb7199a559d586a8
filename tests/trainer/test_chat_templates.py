"""Chat templates that users write: what is wrong with one is said with its line, by the preflight
and by rank 0, and none runs for ever. And stop strings, decoded token by token."""

import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from grpo_acceptance.tiny_model import tiny_tokenizer
from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.preflight import PreflightReport
from grpo_api.spec.keyword_arguments import TRANSFORMERS
from grpo_api.spec.model import MAX_TEMPLATE, TRLS_OWN_ARGUMENTS
from grpo_api.text.contract import DATA_MOUNT_ENV
from grpo_trainer.data.prompts import PromptEncoder, require_template
from grpo_trainer.generation.stop_strings import (
    StoppedCompletion,
    StopStringMatcher,
    mark_stopped,
)
from grpo_trainer.preflight.checks import run_checks
from grpo_trainer.preflight.findings import LAPTOP, POD
from grpo_trainer.preflight.rank0 import require_passed
from grpo_trainer.runtime.errors import BadInput
from tests.generated import cases
from tests.support.ranks import demo_model, runs

SECRET = "what only the user may read"
CHAT = [{"role": "user", "content": SECRET}]
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_model.save_policy(tmp_path_factory.mktemp("model"))


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the dataset."""
    monkeypatch.setenv(DATA_MOUNT_ENV, str(tmp_path))
    return tmp_path


def plan(model: Path, data: Path, prompt: Any = CHAT, **spec: Any) -> TrainingPlan:
    """A job with ten rows of this prompt."""
    rows = [json.dumps({"prompt": prompt, "answer": "1"})] * 10
    (data / "rows.jsonl").write_text("\n".join(rows))
    parts = runs.plan(model).model_dump()
    parts["model"] |= spec
    parts["dataset"] = {"files": {"configMap": {"name": "rows"}, "paths": ["rows.jsonl"]}}
    parts["rewards"] = [{"format": {"pattern": "a"}}]
    return TrainingPlan.model_validate(parts)


def problems(report: PreflightReport) -> list[tuple[str, str]]:
    return [(problem.path, problem.message) for problem in report.problems]


@settings(max_examples=cases(300, gate=30))
@given(text=st.text(max_size=200) | st.text("{%}'\"forinendif range()-*1\n", max_size=200))
@example(text="{% if a %}" * 3000)
@example(text="{{" + "(" * 16000)
@example(text="{% for a in b %}" * 30 + "{% endfor %}" * 30)
@example(text="é你🙂" * 10000)
def test_any_text_is_a_template_or_named_bad_input(text: str) -> None:
    assert len(text) <= MAX_TEMPLATE
    problem = ""
    try:
        require_template(text)
    except BadInput as error:
        problem = str(error)
    assert not problem or problem.startswith("spec.model.chatTemplate: ")


def test_transformers_own_blocks_are_no_mistakes() -> None:
    require_template(
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{% continue %}{% endif %}{% endfor %}{{ messages | tojson }}"
    )


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("a\n{% for m in messages %}{{ m.content }}", "line 2: Unexpected end of template"),
        ("{{ messages", "line 1: "),
        ("{{ messages | shout }}", "line 1: No filter named 'shout'"),
    ],
)
def test_the_preflight_and_rank_0_name_the_line_of_a_template_without_sense(
    model: Path, data: Path, template: str, told: str
) -> None:
    job = plan(model, data, chat_template=template)
    ((path, message),) = problems(run_checks(job, POD))[:1]
    assert path == "spec.model.chatTemplate"
    assert told in message
    with pytest.raises(BadInput, match=r"spec\.model\.chatTemplate: line"):
        require_passed(job, is_supervisor=False)


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("a\n{{ messages[0].content + 1 }}", "line 2: can only concatenate str"),
        ("{{ messages[7].content.upper() }}", "line 1: "),
        ("{{ raise_exception('no users here') }}", "no users here"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "maximum recursion depth"),
    ],
)
def test_a_template_that_fails_on_a_prompt_is_named_with_line_and_cause(
    model: Path, data: Path, template: str, told: str
) -> None:
    ((_, message),) = problems(run_checks(plan(model, data, chat_template=template), POD))
    assert "rows.jsonl line 1, column 'prompt'" in message
    assert told in message


def test_a_template_without_an_end_costs_a_preflight_no_more_than_its_limit(
    model: Path, data: Path
) -> None:
    quick = replace(POD, render_seconds=0.3)
    ((path, message),) = problems(run_checks(plan(model, data, chat_template=LOOP), quick))
    assert path == "spec.model.chatTemplate"
    assert "not done with the first prompts after 0.3 s" in message


@pytest.mark.parametrize(
    ("prompt", "template", "use"),
    [(CHAT, None, "Applied"), (SECRET, None, "Unused"), (CHAT, "{{ messages }}", "Applied")],
)
def test_the_report_says_what_the_template_is_for_and_shows_no_prompt(
    model: Path, data: Path, prompt: Any, template: str | None, use: str
) -> None:
    shown: list[str] = []
    job = plan(model, data, prompt, chat_template=template)
    report = run_checks(job, POD, on_prompt=shown.append)
    assert report.problems == []
    assert report.prompts is not None
    assert report.prompts.template == use
    assert SECRET not in report.model_dump_json()
    assert SECRET in shown[0]
    assert bool(report.prompts.template_warning) == (use == "Unused")
    first = replace(LAPTOP, most_rows=1)
    run_checks(job, first, on_prompt=shown.append, only_prompts=True)
    assert shown[1] == shown[0]


def test_the_lists_of_arguments_are_transformers_own() -> None:
    signature = inspect.signature(PreTrainedTokenizerBase.apply_chat_template)
    assert set(signature.parameters) - {"self", "documents", "kwargs"} <= TRLS_OWN_ARGUMENTS
    known = GenerationConfig().to_dict().keys()
    assert known >= TRANSFORMERS.keys()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One whose tokens are pieces of words and of characters, as Qwen's and Llama's are."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<eos>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["the answer is </answer> 42 là 你好 "] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


TOKENIZERS = {"characters": tiny_tokenizer(), "bytes": byte_tokenizer()}
TEXT = st.text("the answr</>42à你🙂 \n", max_size=40)


@settings(max_examples=cases(300, gate=30))
@given(
    kind=st.sampled_from(sorted(TOKENIZERS)),
    text=TEXT,
    noise=st.lists(st.integers(2, 100), max_size=6),
    stop=st.lists(st.text("the answr</>42à你 ", min_size=1, max_size=9), min_size=1, max_size=4),
    prompt=TEXT,
)
@example("bytes", "the </answer> 42", [], ["</answer>"], "")
@example("bytes", "la 你好 42", [], ["你"], "你")
@example("bytes", "a<|im_end|>b", [], ["<|im_end|>"], "x")
def test_a_stop_string_ends_a_completion_with_the_token_that_makes_it_whole(
    kind: str, text: str, noise: list[int], stop: list[str], prompt: str
) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"] + noise
    before = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    matcher = StopStringMatcher(stop, tokenizer, before)
    found = [matcher.is_complete(token) for token in ids]
    first = found.index(True) + 1 if True in found else None
    whole = [
        end
        for end in range(1, len(ids) + 1)
        if any(part in tokenizer.decode(ids[:end], skip_special_tokens=False) for part in stop)
    ]
    assert first == (whole[0] if whole else None)
    (marked,) = mark_stopped([ids[:first]], stop, tokenizer, 1)
    assert isinstance(marked, StoppedCompletion) == bool(whole)
    assert list(marked) == ids[:first]
    if whole:
        assert marked[-1] == 1, "what TRL looks at"


def test_text_is_encoded_as_it_is(model: Path) -> None:
    encoder = PromptEncoder(tiny_tokenizer(), {"enable_thinking": False})
    assert encoder.render("2+2?") == "2+2?"
    assert encoder.token_counts({3: "2+2?"}, str) == {3: 4}

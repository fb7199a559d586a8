"""The page beside an exported model: the hub's reader and a Markdown parser find in it what users
wrote."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.revisions import DATASET_FINGERPRINT
from grpo_api.spec.dataset import DatasetSpec
from grpo_trainer.hub.model_card import TrainedModel, converted_card, model_card, write_card
from tests.generated import cases
from tests.support.ranks import runs

HASH = "sha256:" + "a" * 64
NASTY = (
    "---",
    "\n---\n",
    "a: b",
    "`",
    "```",
    "```\n# x",
    "[x](http://x)",
    "<script>",
    "ü",
    "\u2028",
    "\x85",
    "|",
)
TEXT = st.lists(st.one_of(st.sampled_from(NASTY), st.text(max_size=5)), min_size=1, max_size=6).map(
    "".join
)
NAME = TEXT.map(lambda text: re.sub(r"[\x00-\x20\x7f]", "", text)).filter(bool)
"""As grpo_api.text.names.Repository takes them."""


def trained(model: str = "org/base", strategy: str = "Clone", **changes: Any) -> TrainedModel:
    plan = with_model(runs.plan(Path("m"), strategy=strategy), model)
    fields = {"metrics": {"reward": 1.25}, "revisions": {DATASET_FINGERPRINT: "f" * 64}, "steps": 6}
    return TrainedModel(**{"plan": plan, **fields, **changes})


def read(text: str) -> dict[str, Any]:
    """The front matter, as the hub's client finds it."""
    found: dict[str, Any] = ModelCard(text).data.to_dict()  # type: ignore[no-untyped-call]
    return found


def with_model(plan: TrainingPlan, name: str) -> TrainingPlan:
    return plan.model_copy(update={"model": plan.model.model_copy(update={"name": name})})


def test_the_hub_reads_what_the_model_is() -> None:
    data = read(model_card(trained(), HASH))
    assert data == {
        "base_model": "org/base",
        "base_model_relation": "finetune",
        "datasets": ["demo/prompts"],
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["grpo", "trl", "grpo-operator"],
    }
    data = read(model_card(trained(strategy="Adapter"), HASH))
    assert (data["base_model_relation"], data["library_name"]) == ("adapter", "peft")
    data = read(model_card(trained("/models/base"), HASH))
    assert not {"base_model", "base_model_relation"} & data.keys(), (
        "a folder has no name on the hub"
    )


def test_it_says_what_it_was_made_of(tmp_path: Path) -> None:
    (tmp_path / "b.safetensors").write_bytes(b"b")
    (tmp_path / "a.safetensors").write_bytes(b"a")
    (tmp_path / "README.md").write_text("a library's", encoding="utf-8")
    write_card(trained(revisions={"model": "c" * 40, DATASET_FINGERPRINT: "f" * 64}), tmp_path)
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    for told in ("for 6 steps", "c" * 40, "f" * 64, "` reward `: 1.25", "AutoModelForCausalLM"):
        assert told in text
    # printf a > a.safetensors; printf b > b.safetensors; sha256sum *.safetensors | sha256sum
    assert "sha256:6741e84d570578177e1536a0563070d2da8466ffa87a54e2afc488b7c4076d7b" in text


@given(
    model=NAME,
    dataset=NAME,
    done=st.sampled_from(["merged into its base, to bfloat16", "to float32"]),
)
@settings(max_examples=cases(50))
def test_of_a_conversion_it_says_what_is_true_of_that(model: str, dataset: str, done: str) -> None:
    plan = with_model(runs.plan(Path("m"), strategy="Adapter"), model).model_copy(
        update={"dataset": DatasetSpec(name=dataset)}
    )
    merged = plan.model_copy(
        update={"adapter": plan.adapter.model_copy(update={"merge_on_export": True})}
    )
    other = HASH.replace("a", "b")
    adapter, whole = (model_card(trained(plan=one), HASH) for one in (plan, merged))
    for page in (adapter, whole):
        text = converted_card(page, other, done)
        assert read(text) == read(whole)
        lines = [line for line in text.splitlines() if line != f"- converted: {done}"]
        assert len(lines) == len(text.splitlines()) - 1
        expected = whole.replace(HASH, other).splitlines()
        assert [line for line in lines if "mergeOnExport" not in line] == [
            line for line in expected if "mergeOnExport" not in line
        ]


def test_a_page_of_somebody_else_stays_as_it_is() -> None:
    assert converted_card("# mine\n\nnot ours", HASH, "to float32") == "# mine\n\nnot ours"


@given(model=NAME, dataset=NAME, metrics=st.dictionaries(TEXT, st.floats(), max_size=3))
@settings(max_examples=cases(50))
def test_nothing_that_users_write_gets_out_of_its_place(
    model: str, dataset: str, metrics: dict[str, float]
) -> None:
    plan = with_model(runs.plan(Path("m")), model).model_copy(
        update={"dataset": DatasetSpec(name=dataset)}
    )
    text = model_card(trained(plan=plan, metrics=metrics), HASH)
    assert set(read(text)) <= {
        "base_model", "base_model_relation", "datasets", "library_name", "pipeline_tag", "tags",
    }  # fmt: skip
    assert read(text).get("base_model") in (None, model)
    tokens = MarkdownIt().parse(ModelCard(text).text)
    assert [token.content for token in tokens if token.type == "heading_open"] == [""] * 5
    fences = [token for token in tokens if token.type == "fence"]
    assert [token.info for token in fences] == ["python", "json", "json"]
    settings_shown = json.loads(fences[1].content)
    assert (settings_shown["model"]["name"], settings_shown["dataset"]["name"]) == (model, dataset)
    kinds = {child.type for token in tokens for child in token.children or ()}
    assert kinds <= {"text", "code_inline", "softbreak"}, "no link, no HTML"
    assert sum(token.type == "list_item_open" for token in tokens) == 5 + len(metrics)


def test_numbers_that_are_none_are_told() -> None:
    text = model_card(trained(metrics={"kl": math.nan, "loss": -math.inf}), HASH)
    assert "` kl `: nan" in text
    assert "` loss `: -inf" in text


@pytest.mark.parametrize(
    "field", ["tokenSecretRef", "volume", "node_selector", "nodeSelector", "price"]
)
def test_it_tells_nothing_of_the_cluster(field: str) -> None:
    secret = {"name": "s", "key": "k"}
    plan = runs.plan(Path("org/base"))
    model = plan.model.model_validate(
        {
            "name": "org/base",
            "parameters": "1B",
            "tokenSecretRef": secret,
            "volume": {"claimName": "claim-x"},
        }
    )
    execution = plan.execution.model_copy(
        update={"node_selector": {"a/b": "c"}, "gpu_hour_price": 2.5}
    )
    text = model_card(
        trained(plan=plan.model_copy(update={"model": model, "execution": execution})), HASH
    )
    assert field not in text
    assert "claim-x" not in text

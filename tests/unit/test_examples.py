"""Every example is a job that the API accepts, numbered without gaps: one that doesn't apply is
worse than none."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_api.job import parse_spec
from grpo_cli.inputs.manifest import load_jobs
from grpo_cli.show.kubectl_yaml import load_documents

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(FOLDER.glob("[0-9]*.yaml"))
QUICKSTART = FOLDER / "quickstart.yaml"


def test_examples_are_numbered_without_gaps() -> None:
    numbers = [int(path.name.split("-")[0]) for path in EXAMPLES]
    assert numbers == list(range(1, len(EXAMPLES) + 1))
    assert sorted(FOLDER.glob("*.yaml")) == [*EXAMPLES, QUICKSTART], (
        "and the quickstart, which comes before them"
    )
    assert all(re.fullmatch(r"[0-9]{2}-[a-z0-9-]+\.yaml", path.name) for path in EXAMPLES)


def test_messages_name_examples_that_there_are() -> None:
    root = EXAMPLES[0].parents[1]
    sources = [*(root / "operator").rglob("*.py"), *(root / "trainer_image").rglob("*.py")]
    named = {
        name for path in sources for name in re.findall(r"examples/[\w-]+\.yaml", path.read_text())
    }
    assert named
    assert {name for name in named if not (root / name).exists()} == set()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_parses_and_opens_with_a_comment(path: Path) -> None:
    (job,) = load_jobs(str(path))
    spec = parse_spec(job["spec"], creating=True)
    assert spec.rewards
    assert path.read_text().startswith("# ")


@pytest.mark.parametrize("path", [*EXAMPLES, QUICKSTART], ids=lambda path: path.name)
def test_an_example_is_the_same_to_python_s_yaml_which_takes_5e_6_for_a_text(path: Path) -> None:
    text = path.read_text()
    assert list(yaml.safe_load_all(text)) == load_documents(text)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_configmaps_that_an_example_mounts_are_in_it_or_are_made_by_the_demo(path: Path) -> None:
    documents = load_documents(path.read_text())
    there = {
        document["metadata"]["name"] for document in documents if document["kind"] == "ConfigMap"
    }
    (job,) = load_jobs(str(path))
    assert set(_config_maps(job["spec"])) <= there


def test_the_quickstart_evaluates_as_it_trains_on_rows_that_it_does_not_train_on() -> None:
    documents = load_documents(QUICKSTART.read_text())
    training, evaluation = (parse_spec(job["spec"]) for job in load_jobs(str(QUICKSTART)))
    assert evaluation.resume_from is not None
    assert evaluation.resume_from.grpo_job == load_jobs(str(QUICKSTART))[0]["metadata"]["name"]
    assert evaluation.rewards == training.rewards
    sampling = (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "max_completion_length",
    )
    # how exact the reported reward is follows from the prompts of a step
    for name in (*sampling, "prompts_per_step", "max_prompt_length"):
        assert getattr(evaluation.training, name) == getattr(training.training, name), name
    (data,) = (document["data"] for document in documents if document["kind"] == "ConfigMap")
    rows = {
        name: {json.dumps(json.loads(line)) for line in text.splitlines()}
        for name, text in data.items()
    }
    named = [
        path
        for spec in (training, evaluation)
        if spec.dataset.files
        for path in spec.dataset.files.paths
    ]
    assert named == list(rows) == ["train.jsonl", "held-out.jsonl"]
    assert not rows["train.jsonl"] & rows["held-out.jsonl"]


def test_the_quickstart_needs_nothing_but_a_default_storage_class() -> None:
    documents = load_documents(QUICKSTART.read_text())
    (claim,) = (document for document in documents if document["kind"] == "PersistentVolumeClaim")
    assert "storageClassName" not in claim["spec"]
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    for job in load_jobs(str(QUICKSTART)):
        spec = parse_spec(job["spec"])
        assert spec.image is None
        assert not [one.name for one in spec.pod_template.spec.init_containers if one.image]
        assert (spec.placement.accelerator, spec.nodes) == ("CPU", None)
        assert spec.model.name.startswith("/models/")
        assert set(_config_maps(job["spec"])) == {claim["metadata"]["name"]}


def _config_maps(value: Any) -> list[str]:
    """Names of the ConfigMaps anywhere in a spec."""
    if isinstance(value, list):
        return [name for item in value for name in _config_maps(item)]
    if not isinstance(value, dict):
        return []
    own = [value["configMap"]["name"]] if "configMap" in value else []
    return own + [name for item in value.values() for name in _config_maps(item)]


def test_the_gsm8k_job_is_the_known_one() -> None:
    """The settings of the published GRPO recipe for Llama 3.2 1B on GSM8K, value by value."""
    (job,) = load_jobs(str(EXAMPLES[1]))
    spec = parse_spec(job["spec"], creating=True)
    assert spec.model.name == "meta-llama/Llama-3.2-1B-Instruct"
    assert (spec.dataset.name, spec.dataset.config, spec.dataset.split) == (
        "openai/gsm8k",
        "main",
        "train",
    )
    assert "<reasoning>" in (spec.dataset.system_prompt or "")
    assert "<answer>" in (spec.dataset.system_prompt or "")
    form, right = spec.rewards
    assert form.format is not None
    assert right.accuracy is not None
    assert (form.format.score, right.accuracy.score, right.accuracy.compare) == (0.5, 2.0, "Exact")
    training = spec.training
    assert (training.learning_rate, training.adam_beta1, training.adam_beta2) == (5e-6, 0.9, 0.99)
    assert (training.weight_decay, training.warmup_ratio, training.lr_scheduler_type) == (
        0.1,
        0.1,
        "cosine",
    )
    assert (
        training.num_generations,
        training.max_prompt_length,
        training.max_completion_length,
    ) == (4, 256, 786)
    assert (training.num_train_epochs, training.max_grad_norm, training.dtype) == (
        1,
        0.1,
        "bfloat16",
    )
    assert (spec.checkpoint.every_steps, spec.checkpoint.keep) == (100, 1)
    one_prompt = training.num_generations
    assert training.per_device_train_batch_size == one_prompt
    assert training.prompts_per_step * training.num_generations == 4 * one_prompt, (
        "four accumulated on one GPU"
    )

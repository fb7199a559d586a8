"""The CLI and the operator plan a job from the same sources, to the same bytes."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_api.job import parse_spec
from grpo_cli.__main__ import main
from grpo_cli.commands.render import UNKNOWN_UID
from grpo_kube.objects.resources import ObjectKey
from grpo_operator.admission.plan_cache import Plans
from grpo_operator.pods.manifests import Attempt, checkpoint_volume_claim, indexed_job
from grpo_operator.pods.namespace_objects import rendezvous_service
from grpo_operator.pods.pod_spec import PodDefaults
from grpo_planner.hardware.inventory_file import parse_gpus
from tests.samples import changed, job
from tests.unit.planning import BARE, H100, LLAMA_1B
from tests.unit.test_planner_model import ARCHITECTURE, LLAMA

GPUS = f"8x{H100}"
MODELS = [
    {"name": LLAMA_1B}, {"name": "my/own", "parameters": "3B"},
    {"name": "my/own", "architecture": ARCHITECTURE | {"modelType": "qwen3"}},
]  # fmt: skip


def by_the_operator(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects that the operator creates on eight free GPUs."""
    spec = parse_spec(body["spec"])
    plan = Plans().plan(spec, parse_gpus(GPUS)).chosen
    assert plan is not None
    key = ObjectKey("default", body["metadata"]["name"])
    attempt = Attempt(key=key, uid=UNKNOWN_UID, spec=spec, plan=plan, number=1)
    claim = checkpoint_volume_claim(key, UNKNOWN_UID, spec)
    made = [
        rendezvous_service(key.namespace),
        claim,
        indexed_job(attempt, PodDefaults(image="grpo-trainer")),
    ]
    return [item for item in made if item is not None]


def written(path: Path, model: dict[str, Any]) -> dict[str, Any]:
    """A job with this model, and its file."""
    body = job("mine", changed({"model": model}, BARE))
    path.write_text(yaml.safe_dump(body))
    return body


def rendered(path: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """What `grpo render` prints for the file."""
    assert main(["render", "-f", str(path), "-n", "default", "--gpus", GPUS, *flags]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("model", MODELS, ids=["Catalogue", "Size", "Spec"])
def test_rendered_is_what_the_operator_creates(
    model: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the laptop has in the hub's cache, since the operator has none."""
    snapshot = tmp_path / "hub" / f"models--{model['name'].replace('/', '--')}" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 2}))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    body = written(tmp_path / "job.yaml", model)
    expected = yaml.safe_dump_all(by_the_operator(body), sort_keys=False, width=120)
    assert rendered(tmp_path / "job.yaml", capsys) == expected


def test_a_file_that_only_the_laptop_has_can_be_told_to_the_operator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(LLAMA | {"model_type": "qwen3", "num_hidden_layers": 20})
    )
    flags = ["--config", str(tmp_path)]
    written(tmp_path / "job.yaml", {"name": "my/own"})
    assert (
        main(["plan", "-f", str(tmp_path / "job.yaml"), "--gpus", GPUS, *flags, "-o", "json"]) == 0
    )
    chosen = json.loads(capsys.readouterr().out)["chosen"]
    assert (chosen["architecture"], chosen["shapeSource"]) == ("Exact", "ConfigFile")
    (advice,) = [text for text in chosen["warnings"] if "spec.model.architecture" in text]
    told = {
        "name": "my/own",
        "architecture": yaml.safe_load(advice.split("spec.model.architecture: ")[1]),
    }
    body = written(tmp_path / "told.yaml", told)
    expected = yaml.safe_dump_all(by_the_operator(body), sort_keys=False, width=120)
    assert rendered(tmp_path / "told.yaml", capsys, *flags) == expected
    plan = Plans().plan(parse_spec(body["spec"]), parse_gpus(GPUS)).chosen
    assert plan is not None
    assert plan.memory.model_dump(mode="json", by_alias=True) == chosen["memory"]  # type: ignore[union-attr]
    assert plan.shape_source == "Spec"

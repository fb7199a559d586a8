"""Which files of a repository are fetched: one set of weights, however many formats lie beside each other."""

import json
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]  # it is in __all__
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_trainer.errors import BadInput
from grpo_trainer.weights import models
from grpo_trainer.weights.files import INDEX, shards
from tests.generated import cases

COMMIT = "0123456789abcdef"
SETTINGS = ["config.json", "tokenizer.json", "chat_template.jinja", "modeling.py", "additional/tool.jinja"]
COPIES = ["consolidated.safetensors", "consolidated-00001-of-00002.safetensors", "original/model.safetensors"]
COPIES += [
    "onnx/model.onnx",
    "model-Q4.gguf",
    "pytorch_model.bin",
    "model.fp16.safetensors",
    "model-00009-of-00009.safetensors",
]
SHARDS = ["model-00001-of-00002.safetensors", "part [2].safetensors"]


class Hub:
    """A stand-in for the hub, which can't be reached here: one repository, filtered as the client filters it."""

    def __init__(self, tmp_path: Path, names: Iterable[str], index: str = "") -> None:
        self.repository, self.snapshot = tmp_path / "repository", tmp_path / "snapshots" / COMMIT
        self.snapshot.mkdir(parents=True)
        for name in names:
            file = self.repository / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(index if name == INDEX else "{}")

    def download(self, _name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        """huggingface_hub.snapshot_download."""
        assert revision in (None, COMMIT)
        names = [str(file.relative_to(self.repository)) for file in self.repository.rglob("*") if file.is_file()]
        for name in filter_repo_objects(names, allow_patterns=allow_patterns):
            (self.snapshot / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.repository / name, self.snapshot / name)
        return str(self.snapshot)

    @property
    def fetched(self) -> set[str]:
        """What has been downloaded."""
        return {str(file.relative_to(self.snapshot)) for file in self.snapshot.rglob("*") if file.is_file()}


@pytest.mark.parametrize(
    "weights",
    [["model.safetensors"], ["adapter_model.safetensors"], [INDEX, *SHARDS], [INDEX, "model.safetensors"]],
)
def test_one_set_of_weights_is_fetched(weights: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = json.dumps({"weight_map": {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[0]}})
    hub = Hub(tmp_path, [*SETTINGS, *COPIES, *weights], index)
    monkeypatch.setattr(models, "snapshot_download", hub.download)
    folder, commit = models._folder("team/model", None, "spec.model")
    assert (folder, commit) == (hub.snapshot, COMMIT)
    assert hub.fetched == {*SETTINGS, *weights}


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
MAPS = st.dictionaries(st.text(), st.text() | JSON)


@given(st.text() | JSON.map(json.dumps) | MAPS.map(lambda names: json.dumps({"weight_map": names})))
@settings(max_examples=cases(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_index_lists_names_or_is_bad_input(tmp_path: Path, index: str) -> None:
    (tmp_path / INDEX).write_text(index, encoding="utf-8", errors="surrogatepass")
    with suppress(BadInput):
        assert shards(tmp_path) == sorted(set(json.loads(index)["weight_map"].values()))


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": {"a": 1}}', "[" * 100_000])
def test_a_damaged_index_is_bad_input(index: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(BadInput, match=r"index\.json is no index of weights .*copy the model again"):
        shards(tmp_path)

"""Which files of a repository are fetched: one set of weights, however many formats lie beside each
other."""

import json
import os
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_trainer.hub.repositories import Hub, Repository
from grpo_trainer.preflight.model_checks import _read_config
from grpo_trainer.runtime.errors import BadInput
from grpo_trainer.weights import model_files
from grpo_trainer.weights.checkpoint_files import INDEX, open_weights, shards
from grpo_trainer.weights.model_files import Source
from tests.generated import cases
from tests.trainer.hub import hub_server, use

pytestmark = pytest.mark.realtime

SETTINGS = [
    "config.json",
    "tokenizer.json",
    "chat_template.jinja",
    "modeling.py",
    "additional/tool.jinja",
]
COPIES = [
    "consolidated.safetensors",
    "consolidated-00001-of-00002.safetensors",
    "original/model.safetensors",
]
COPIES += [
    "onnx/model.onnx",
    "model-Q4.gguf",
    "pytorch_model.bin",
    "model.fp16.safetensors",
    "model-00009-of-00009.safetensors",
]
SHARDS = ["model-00001-of-00002.safetensors", "part [2].safetensors"]


@pytest.mark.parametrize(
    "weights",
    [
        ["model.safetensors"],
        ["adapter_model.safetensors"],
        [INDEX, *SHARDS],
        [INDEX, "model.safetensors"],
    ],
)
def test_one_set_of_weights_is_fetched(
    weights: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = json.dumps({"weight_map": {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[0]}})
    names = [*SETTINGS, *COPIES, *weights]
    with hub_server() as server:
        use(monkeypatch, server.url, tmp_path)
        server.add(
            "model",
            "team/model",
            {name: index.encode() if name == INDEX else b"{}" for name in names},
        )
        folder, _ = Hub().snapshot(
            Repository("model", "team/model", None, "model"), model_files._download
        )
    fetched = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert fetched == {*SETTINGS, *weights}


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
    with pytest.raises(
        BadInput, match=r"index\.json is no index of weights .*copy the model again"
    ):
        shards(tmp_path)


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    with pytest.raises(BadInput, match=r"model\.safetensors is a pointer of Git LFS.*lfs pull`"):
        open_weights(tmp_path)


@pytest.mark.parametrize("closed", [INDEX, "."])
def test_an_index_that_may_not_be_read_is_bad_input(closed: str) -> None:
    with TemporaryDirectory() as name:  # everybody may enter those above it, unlike tmp_path's
        folder = Path(name) / "model"
        folder.mkdir()
        (folder / INDEX).write_text("{}")
        Path(name).chmod(0o755)
        (folder / closed).chmod(0o700)
        os.seteuid(65534)
        try:
            with pytest.raises(
                BadInput, match=r"can't be read by user 65534; `chmod -R a\+rX` its"
            ):
                open_weights(folder)
        finally:
            os.seteuid(0)


def test_a_configuration_that_may_not_be_read_is_bad_input() -> None:
    with TemporaryDirectory() as name:  # everybody may enter it, unlike tmp_path
        folder = Path(name)
        (folder / "config.json").write_text("{}")
        folder.chmod(0o755)
        (folder / "config.json").chmod(0o600)
        os.seteuid(65534)
        try:
            with pytest.raises(BadInput, match=r"config\.json can.t be read by user 65534; `chmod"):
                _read_config(Source("own", folder, "", "float32"))
        finally:
            os.seteuid(0)

"""Where a model's shape comes from: config.json, the spec, the catalogue, a declared size; and GPU products."""

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_api.model import ModelSpec
from grpo_cli.config_file import ConfigUnreadable, fetch_config, local_config, read_config
from grpo_planner.hardware import products
from grpo_planner.model import catalogue
from grpo_planner.model.architecture import resolve
from grpo_planner.result import PlanReason, SpecRejected

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192, "vocab_size": 128256,
    "tie_word_embeddings": True,
}  # fmt: skip
ARCHITECTURE = {
    "layers": 16, "hiddenSize": 2048, "attentionHeads": 32, "keyValueHeads": 8, "headDim": 64,
    "intermediateSize": 8192, "vocabSize": 128256, "tieWordEmbeddings": True,
}  # fmt: skip


def model(name: str, **fields: Any) -> ModelSpec:
    """spec.model."""
    return ModelSpec.model_validate({"name": name} | fields)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("meta-llama/Llama-3.2-1B-Instruct", "llama-3.2-1b"), ("meta-llama/Meta-Llama-3.1-8B", "llama-3.1-8b"),
        ("Qwen/Qwen2.5-0.5B-Instruct", "qwen2.5-0.5b"), ("Qwen/Qwen2.5-Coder-7B", "qwen2.5-coder-7b"),
        ("google/gemma-3-1b-it", "gemma-3-1b"), ("/models/Qwen3-4B/", "qwen3-4b"),
        ("HuggingFaceTB/SmolLM2-135M", "smollm2-135m"), ("microsoft/phi-4", "phi-4"),
    ],
)  # fmt: skip
def test_names_are_found_in_the_catalogue(name: str, known: str) -> None:
    found = resolve(model(name))
    assert found.shape == catalogue.shapes()[known]
    assert found.source == "Catalogue"


@pytest.mark.parametrize("name", ["my/llama", "Qwen/Qwen2.5-0.75B", "qwen3-40b"])
def test_other_names_are_not(name: str) -> None:
    with pytest.raises(SpecRejected, match=r"set spec\.model\.parameters") as rejected:
        resolve(model(name))
    assert rejected.value.reason == PlanReason.UNKNOWN_MODEL


def test_the_nearest_source_wins() -> None:
    named = model("meta-llama/Llama-3.2-1B", architecture=ARCHITECTURE | {"layers": 8})
    assert resolve(named).shape.layers == 8
    assert resolve(named).source == "Exact"
    assert resolve(named, LLAMA).shape == catalogue.shapes()["llama-3.2-1b"]


def test_a_contradicting_size_makes_it_another_model() -> None:
    pruned = resolve(model("meta-llama/Llama-3.2-1B", parameters="800M"))
    assert (pruned.source, pruned.shape.parameters, pruned.label) == ("Estimated", 800_000_000, "800M")
    assert "estimated from 800M" in pruned.note
    assert resolve(model("meta-llama/Llama-3.2-1B", parameters="1.2B")).source == "Catalogue"


@pytest.mark.parametrize("size", ["1K", "77K", "1M", "30M", "60M", "600M", "7B", "40B", "500B"])
def test_any_size_has_a_shape(size: str) -> None:
    shape = resolve(model("mine", parameters=size)).shape
    assert shape.counted / shape.parameters > 0.15 or size == "1K"
    assert shape.counted / shape.parameters < 3 or size == "1K"


def test_configs_of_other_families() -> None:
    qwen3 = resolve(model("x"), LLAMA | {"model_type": "qwen3"}).shape
    assert (qwen3.qk_norm, qwen3.qkv_bias) == (True, False)
    qwen2 = resolve(model("x"), LLAMA | {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False})
    assert (qwen2.shape.qkv_bias, qwen2.shape.sliding_window) == (True, 0)
    kinds = ["sliding_attention"] * 15 + ["full_attention"]
    text = LLAMA | {"model_type": "gemma3_text", "sliding_window": 512, "layer_types": kinds}
    gemma = resolve(model("x"), {"model_type": "gemma3", "text_config": text}).shape
    assert (gemma.norms, gemma.wide_norms, gemma.sliding_window, gemma.full_attention_layers) == (4, True, 512, 1)
    mixtral = resolve(model("x"), LLAMA | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2})
    assert (mixtral.shape.experts, mixtral.shape.active_experts) == (8, 2)
    periodic = resolve(model("x"), LLAMA | {"sliding_window": 512, "sliding_window_pattern": 4}).shape
    assert periodic.full_attention_layers == 4


def test_a_config_of_something_else_is_rejected() -> None:
    with pytest.raises(SpecRejected, match="num_attention_heads"):
        resolve(model("x"), {"model_type": "resnet"})


def test_configs_are_read_from_folders_and_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert local_config(str(folder)) is None
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert local_config(str(folder)) == LLAMA == read_config(folder)
    snapshot = tmp_path / "hub" / "models--a--b" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("[]")
    with pytest.raises(ConfigUnreadable, match="is not a JSON object"):
        local_config("a/b")
    (snapshot / "config.json").write_text("{")
    with pytest.raises(ConfigUnreadable, match="is not JSON"):
        local_config("a/b")
    with pytest.raises(ConfigUnreadable, match="No such file"):
        read_config(tmp_path / "nowhere")


def test_products_match_by_their_longest_beginning() -> None:
    assert products.lookup("NVIDIA-H100-80GB-HBM3-x") == products.table()["NVIDIA-H100-80GB-HBM3"]
    assert products.lookup("NVIDIA-A10").memory_mib == 23028
    assert products.lookup("NVIDIA-H200-NVL").teraflops < products.lookup("NVIDIA-H200").teraflops
    assert products.lookup("NVIDIA-A1000") == products.UNKNOWN
    assert not products.lookup("Tesla-T4").bfloat16


def test_the_hub_is_asked_as_it_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from threading import Thread

    seen = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append((self.path, self.headers["Authorization"]))
            known = "known" in self.path
            self.send_response(200 if known else 401)
            self.end_headers()
            self.wfile.write(json.dumps(LLAMA).encode() if known else b"")

        def log_message(self, *_args: Any) -> None:
            """Silent."""

    server = HTTPServer(("127.0.0.1", 0), Hub)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        assert fetch_config("org/known", "v1", "secret") == LLAMA
        with pytest.raises(ConfigUnreadable, match="HTTP 401"):
            fetch_config("org/gated")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert seen == [
        ("/org/known/resolve/v1/config.json", "Bearer secret"), ("/org/gated/resolve/main/config.json", None)
    ]  # fmt: skip
    with pytest.raises(ConfigUnreadable, match="refused"):
        fetch_config("org/known")

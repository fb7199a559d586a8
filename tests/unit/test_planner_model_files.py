"""What is read of a model's files: config.json from folders and the hub, headers of weights; and
GPU products."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from grpo_cli.inputs.plan_inputs import fetch_config, read_config, read_facts, stored_parameters
from grpo_cli.show.errors import InventoryError
from grpo_planner.hardware import products
from tests.unit.operator_world import make_job
from tests.unit.test_planner_model import LLAMA


def test_configs_are_read_from_folders(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    assert read_config(tmp_path) == read_config(file) == LLAMA
    file.write_text("[]")
    with pytest.raises(InventoryError, match=f"^{file} is not a JSON object$"):
        read_config(file)
    file.write_text("{")
    with pytest.raises(InventoryError, match=f"^{file} is not JSON: "):
        read_config(file)
    with pytest.raises(InventoryError, match="No such file"):
        read_config(tmp_path / "nowhere")


def test_weights_are_counted_by_their_headers(tmp_path: Path) -> None:
    def shard(name: str, **shapes: list[int]) -> None:
        tensors = {
            key: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]}
            for key, shape in shapes.items()
        }
        header = json.dumps({"__metadata__": {"format": "pt"}} | tensors).encode()
        (tmp_path / name).write_bytes(len(header).to_bytes(8, "little") + header)

    assert stored_parameters(tmp_path, {}) == 0
    shard("model.safetensors", a=[2, 3], b=[4])
    assert stored_parameters(tmp_path, {}) == 10
    index = {
        "metadata": {"total_size": 44},
        "weight_map": {"a": "one.safetensors", "b": "two.safetensors"},
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert stored_parameters(tmp_path, {"dtype": "bfloat16"}) == 22
    assert stored_parameters(tmp_path, {}) == 0
    shard("one.safetensors", a=[5])
    shard("two.safetensors", b=[7, 3])
    assert stored_parameters(tmp_path / "config.json", {"dtype": "bfloat16"}) == 26
    (tmp_path / "two.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(InventoryError, match="can't be understood"):
        stored_parameters(tmp_path, {})


def test_products_match_by_their_longest_beginning() -> None:
    assert (
        products.lookup_product("NVIDIA-H100-80GB-HBM3-x")
        == products.table()["NVIDIA-H100-80GB-HBM3"]
    )
    assert products.lookup_product("NVIDIA-A10").memory_mib == 23028
    assert (
        products.lookup_product("NVIDIA-H200-NVL").teraflops
        < products.lookup_product("NVIDIA-H200").teraflops
    )
    assert products.lookup_product("NVIDIA-A1000") == products.UNKNOWN
    assert not products.lookup_product("Tesla-T4").has_bfloat16


@pytest.mark.realtime
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
        with pytest.raises(InventoryError, match="HTTP 401"):
            fetch_config("org/gated")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert seen == [
        ("/org/known/resolve/v1/config.json", "Bearer secret"),
        ("/org/gated/resolve/main/config.json", None)
    ]  # fmt: skip
    with pytest.raises(InventoryError, match="refused"):
        fetch_config("org/known")


def test_a_folder_in_the_pods_is_not_asked_of_the_hub() -> None:
    spec = make_job({"model": {"name": "/models/demo", "parameters": "1B"}}).spec
    assert spec
    with pytest.raises(InventoryError, match=r"/models/demo is a folder in the pods.* --config"):
        read_facts(Namespace(config=None, fetch_config=True), spec)

"""What engines compile: pods share it as whole archives, and nothing of that can end a start."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_api.plan.plan import ExecutionPlan, TrainingPlan
from grpo_operator.pods.manifests import training_plan
from grpo_trainer.process.compile_cache import CompileCache, archive_path
from tests.unit.operator_world import ENGINE, GPU_PLAN, SERVED_GPU_PLAN, SPEC
from tests.unit.test_operator_engine_pods import attempt

CACHED = {"model": SPEC["model"] | {"cache": {"claimName": "hub"}}}
COLOCATED = GPU_PLAN.model_copy(update={"engine": ENGINE.model_copy(update={"kind": "Colocated"})})
FILES = {
    "vllm/torch_compile_cache/0a/rank_0_0/vllm_compile_cache.py": b"{}",
    "triton/KEY/kernel.cubin": bytes(range(256)) * 9,
    "inductor/xy/code.py": b"",
}


def plan(execution: ExecutionPlan = COLOCATED, **spec: Any) -> TrainingPlan:
    return training_plan(attempt(execution, **(CACHED | spec)))


def path(
    execution: ExecutionPlan = COLOCATED,
    node: int | None = 0,
    image: str = "trainer:1",
    **spec: Any,
) -> Path:
    made = plan(execution, **spec)
    found = archive_path(made.model, made.execution, node, image, Path("/v"))
    assert found is not None
    return found


def pod(folder: Path, name: str) -> CompileCache:
    """The cache of one of several pods that share a volume."""
    return CompileCache(folder / name, folder / "volume/compiled/image/H100/node-0.zip")


def compile_in(cache: CompileCache, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        file = cache.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def content(cache: CompileCache) -> dict[str, bytes]:
    files = [file for file in cache.folder.rglob("*") if file.is_file()]
    return {str(file.relative_to(cache.folder)): file.read_bytes() for file in files}


def test_pods_share_by_image_product_model_and_rank() -> None:
    h100 = COLOCATED
    l4 = h100.model_copy(update={"gpu_product": "NVIDIA-L4"})
    kept = path()
    assert kept.is_relative_to("/v/compiled")
    assert path() == kept
    assert "NVIDIA-H100-80GB-HBM3" in kept.parts
    others = {
        path(l4), path(node=1), path(image="trainer:2"), path(SERVED_GPU_PLAN, None),
        path(model=CACHED["model"] | {"name": "another/model"}),
    }  # fmt: skip
    assert len(others | {kept}) == 6


def test_without_a_volume_or_an_engine_nothing_is_shared() -> None:
    for made in (plan(GPU_PLAN), plan(model=SPEC["model"])):
        assert archive_path(made.model, made.execution, 0, "trainer:1") is None


@given(product=st.text(max_size=128), image=st.text(max_size=300))
def test_names_from_outside_lead_to_no_other_folder(product: str, image: str) -> None:
    named = COLOCATED.model_copy(update={"gpu_product": product})
    found = path(named, image=image)
    assert ".." not in found.parts
    assert len(found.relative_to("/v/compiled").parts) == 3
    assert found.name.isascii()


def test_a_later_pod_finds_what_an_earlier_one_compiled(tmp_path: Path) -> None:
    first, second = pod(tmp_path, "first"), pod(tmp_path, "second")
    first.restore()
    compile_in(first, FILES)
    first.publish()
    second.restore()
    assert content(second) == FILES
    assert first.archive is not None
    before = first.archive.stat().st_ino
    second.publish()
    assert first.archive.stat().st_ino == before, "it has nothing new"
    compile_in(second, {"triton/OTHER/kernel.cubin": b"new"})
    second.publish()
    third = pod(tmp_path, "third")
    third.restore()
    assert content(third) == FILES | {"triton/OTHER/kernel.cubin": b"new"}
    assert {file.name for file in first.archive.parent.iterdir()} == {"node-0.zip"}


def test_a_container_that_starts_again_keeps_what_its_pod_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = pod(tmp_path, "first"), pod(tmp_path, "second")
    compile_in(first, FILES)
    first.publish()
    own = {"vllm/own.py": b"own"}
    compile_in(second, own)
    for _ in range(2):
        second.restore()
    assert content(second) == own
    assert caplog.text == "", "the archive is good"


def test_the_variables_lead_into_the_pods_folder(tmp_path: Path) -> None:
    cache = pod(tmp_path, "first")
    assert cache.variables.keys() == {
        "VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR",
    }  # fmt: skip
    assert all(Path(value).parent == cache.folder for value in cache.variables.values())


@given(
    place=st.floats(0, 1), damage=st.binary(max_size=40), truncated=st.booleans(), data=st.data()
)
def test_a_damaged_archive_is_used_whole_or_not_at_all(
    tmp_path_factory: pytest.TempPathFactory,
    place: float,
    damage: bytes,
    truncated: bool,
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("pods")
    first, second = pod(folder, "first"), pod(folder, "second")
    compile_in(first, FILES)
    first.publish()
    assert first.archive is not None
    whole = first.archive.read_bytes()
    at = int(place * len(whole))
    rest = b"" if truncated else whole[at + len(damage) :]
    first.archive.write_bytes(whole[:at] + damage + rest)
    second.restore()
    # Damage to a name or to what nobody reads may pass; a file's content never changes.
    assert set(content(second).values()) <= set(FILES.values())
    assert not (folder / "second.part").exists()
    first.publish()


def test_an_archive_can_write_nowhere_else(tmp_path: Path) -> None:
    from zipfile import ZipFile

    cache = pod(tmp_path, "first")
    assert cache.archive is not None
    cache.archive.parent.mkdir(parents=True)
    with ZipFile(cache.archive, "w") as archive:
        archive.writestr("../../outside", "x")
        archive.writestr("/absolute", "x")
    cache.restore()
    assert content(cache) == {"outside": b"x", "absolute": b"x"}
    assert {entry.name for entry in tmp_path.iterdir()} == {"first", "volume"}


def test_a_volume_that_can_not_be_written_costs_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As root, every folder can be written: a file stands in the folder's place."""
    cache = pod(tmp_path, "first")
    (tmp_path / "volume").write_text("")
    cache.restore()
    compile_in(cache, FILES)
    cache.publish()
    assert caplog.text.count("compile cache: ") == 2
    assert content(cache) == FILES


def test_an_archive_does_not_grow_without_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_trainer.process.compile_cache.MAX_BYTES", 100)
    cache = pod(tmp_path, "first")
    compile_in(cache, FILES)
    cache.publish()
    assert cache.archive is not None
    assert not cache.archive.exists()
    assert "are more than 100" in caplog.text

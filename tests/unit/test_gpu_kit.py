"""The kit for a bare GPU machine: what is in it, how large it may be, and the page that shows a
result.

Wheels are downloaded and built by `make gpu-kit` only, for the tests have no network.
"""

import json
import re
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_acceptance.findings import CHECKS, PEAK_LIMIT, cases
from grpo_acceptance.report import NEVER_BEGUN, PAGE
from harness.programs.processes import ClusterError
from tools.gpu import engine_archive, kit, page
from tools.gpu.import_closure import import_closure, modules_of

RUN_PATH = (
    *modules_of("grpo_acceptance"),
    "grpo_trainer.__main__",
    "grpo_trainer.training.worker",
    "grpo_trainer.training.training_run",
    "grpo_trainer.training.build_run",
    "grpo_trainer.training.reference_trainer",
)
LIBRARIES = ["cpu", "cuda118", "cuda128", "cuda130", "cuda132", "rocm72", "xpu2026"]


def test_a_run_without_a_store_hub_or_signing_key_imports_none_of_their_libraries() -> None:
    third_party = import_closure(RUN_PATH, inside_functions=False).third_party
    assert {"torch", "trl", "pydantic"} <= third_party.keys()
    assert {"obstore", "httpx2", "cryptography", "vllm"} & third_party.keys() == set()


def test_the_import_closure_follows_functions_only_when_asked() -> None:
    at_import, when_called = (
        import_closure(["grpo_trainer.stores.run_store"], inside_functions=on)
        for on in (False, True)
    )
    assert "obstore" not in at_import.third_party
    assert when_called.third_party["obstore"] == {"grpo_trainer.stores.store_client"}
    assert {"grpo_trainer", "grpo_trainer.stores", "grpo_api.plan.plan"} <= at_import.first_party


def wheel_of_bitsandbytes(path: Path) -> Path:
    """A wheel with the names of the real one."""
    names = [
        "bitsandbytes/__init__.py",
        *(f"bitsandbytes/libbitsandbytes_{name}.so" for name in LIBRARIES),
    ]
    record = "bitsandbytes-1.dist-info/RECORD"
    with zipfile.ZipFile(path, "w") as wheel:
        for name in names:
            wheel.writestr(name, f"content of {name}")
        wheel.writestr(record, "".join(f"{name},sha256=x,1\n" for name in names) + f"{record},,\n")
    return path


def test_bitsandbytes_keeps_two_libraries_and_a_list_of_what_is_there(tmp_path: Path) -> None:
    wheel = wheel_of_bitsandbytes(tmp_path / "bitsandbytes-1-py3-none-any.whl")
    kit.slim(wheel)
    with zipfile.ZipFile(wheel) as small:
        names = small.namelist()
        assert [name for name in names if name.endswith(".so")] == [
            "bitsandbytes/libbitsandbytes_cpu.so",
            "bitsandbytes/libbitsandbytes_cuda130.so",
        ]
        recorded = small.read("bitsandbytes-1.dist-info/RECORD").decode().splitlines()
        assert [row.partition(",")[0] for row in recorded] == names
        assert small.read("bitsandbytes/__init__.py") == b"content of bitsandbytes/__init__.py"


def test_a_kit_over_forty_megabytes_is_refused_with_its_largest_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in {"a": 10, "b": 30, "c": 20, "d": 5}.items():
        (tmp_path / f"{name}.whl").write_bytes(bytes(size))
    monkeypatch.setattr(kit, "LIMIT_BYTES", 65)
    kit.require_small(tmp_path.glob("*.whl"))
    monkeypatch.setattr(kit, "LIMIT_BYTES", 64)
    with pytest.raises(
        ClusterError, match=r"the largest: b.whl 0.0 MB, c.whl 0.0 MB, a.whl 0.0 MB"
    ):
        kit.require_small(tmp_path.glob("*.whl"))


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_the_kit_holds_what_the_checks_import_and_the_machine_lacks(python: str) -> None:
    contents = kit.contents(python)
    assert {
        "bitsandbytes",
        "datasets",
        "deepspeed",
        "peft",
        "pydantic",
        "pydantic-core",
        "trl",
    } <= contents
    assert {*kit.MACHINE, *kit.LEFT_OUT} & contents == set()
    assert contents <= kit.pinned().keys(), "the kit has the image's versions"


def test_nothing_is_left_out_that_a_check_needs_when_it_is_imported() -> None:
    at_import, when_called = (
        import_closure(RUN_PATH, inside_functions=on).third_party for on in (False, True)
    )
    assert kit.LEFT_OUT.keys() <= when_called.keys(), "each is imported somewhere"
    assert kit.LEFT_OUT.keys() & at_import.keys() == set()
    assert kit.LOADED_BY_NAME.keys() & when_called.keys() == set(), "else the statement suffices"


@pytest.mark.parametrize(
    ("name", "packages"), [("machine", kit.MACHINE), ("engine machine", engine_archive.MACHINE)]
)
def test_the_page_lists_what_a_machine_has(name: str, packages: tuple[str, ...]) -> None:
    section = re.search(
        rf"<!-- {name} -->\n(.*?)\n<!-- /{name} -->", page.PAGE.read_text(), re.DOTALL
    )
    assert section is not None
    assert tuple(re.findall(r"`([\w-]+)`", section[1])) == packages


@pytest.mark.realtime
def test_the_kit_is_installed_beside_what_the_machine_has(tmp_path: Path) -> None:
    script = tmp_path / "kit" / "install"
    script.parent.mkdir()
    script.write_text(kit.INSTALL)
    (tmp_path / "kit" / "one.whl").touch()
    told = ["sh", str(script), "site"]
    done = subprocess.run(
        told,
        env={"PYTHON": "echo", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--no-index --no-deps" in done.stdout
    assert done.stdout.endswith(f"--target site {tmp_path}/kit/one.whl\n")
    alone = subprocess.run(told[:2], capture_output=True, text=True, check=False)
    assert (alone.returncode != 0, "usage: install FOLDER" in alone.stderr) == (True, True)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_only_a_gpu_s_result_becomes_the_last_one(tmp_path: Path, device: str) -> None:
    result: dict[str, Any] = {
        "machine": "Python 3.12", "device": device, "versions": {}, "different": {},
        "summary": "1 passed",
        "checks": [{"check": "gpu", "seconds": 1.0, "findings": [
            {"what": "GPU", "state": "passed", "message": "1 × H100",
            "numbers": {"product": "H100"}}]}],
    }  # fmt: skip
    (tmp_path / "result.json").write_text(json.dumps(result))
    target = tmp_path / PAGE
    target.write_text("before\n<!-- acceptance -->\nThere is none.\n<!-- /acceptance -->\nafter\n")
    assert page.publish([tmp_path / "result.json"], target) is (device == "cuda")
    text = target.read_text()
    assert ("There is none." in text) is (device == "cpu")
    assert ("| GPU | passed | 1 × H100; product H100 |" in text) is (device == "cuda")
    assert text.startswith("before\n")
    assert text.endswith("after\n")


def test_the_page_has_a_place_for_the_result() -> None:
    section = re.search(
        r"<!-- acceptance -->\n(.*?)\n<!-- /acceptance -->", page.PAGE.read_text(), re.DOTALL
    )
    assert section is not None
    assert section[1].startswith(("There is none.", "1", "2", "3", "4", "5", "6", "7", "8", "9"))


def gpu_part(*checks: tuple[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """A part of a result of a GPU."""
    return {
        "machine": "Python 3.12", "device": "cuda", "versions": {}, "different": {}, "summary": "",
        "checks": [
            {"check": name, "seconds": 1.0, "findings": findings} for name, findings in checks
        ],
    }  # fmt: skip


def row(what: str, state: str, message: str = "seen", **numbers: float) -> dict[str, Any]:
    """A finding as it lies in a result."""
    return {"what": what, "state": state, "message": message, "numbers": numbers}


def test_a_result_in_parts_has_of_each_check_the_last_part_that_ran_it() -> None:
    first = gpu_part(
        ("gpu", [row("GPU", "passed", "first")]), ("proof", [row("proof", "not run", "time")])
    )
    second = gpu_part(
        ("gpu", [row("GPU", "not run", "time")]), ("proof", [row("proof", "failed", "second")])
    )
    whole = page.merged([first, second])
    found = {check["check"]: check["findings"][0] for check in whole["checks"]}
    assert list(found) == [check.name for check in CHECKS]
    assert (found["gpu"]["message"], found["proof"]["message"]) == ("first", "second")
    assert found["sigterm"]["message"] == NEVER_BEGUN
    assert whole["summary"].startswith("1 passed, 1 failed")


@given(share=st.floats(0.5, 2.0))
def test_measured_memory_is_held_against_the_predictions_of_today(share: float) -> None:
    case = cases()[3]
    measured = {f"measured {name}": share * size for name, size in case["phases"].items()}
    old = row("memory", "passed", "before", device=case["device_bytes"], **measured)
    (check,) = (
        check
        for check in page.merged([gpu_part(("memory-4", [old]))])["checks"]
        if check["check"] == "memory-4"
    )
    (finding,) = check["findings"]
    is_close = abs(1 / share - 1) <= PEAK_LIMIT
    assert finding["state"] == ("passed" if is_close else "failed")
    assert finding["numbers"]["error"] == pytest.approx(1 / share - 1, abs=1e-3)

"""`grpo plan` as users meet it: outputs, exit codes, what-if, and every wrong input's sentence."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_api.report.preflight import PreflightProblem, PreflightReport
from grpo_cli.__main__ import main
from grpo_cli.inputs import local_preflight
from grpo_cli.inputs.local_preflight import LocalPreflight
from grpo_planner.result.result import PlanResult
from tests.samples import changed, job
from tests.unit.planning import BARE, H100, LLAMA_1B, QWEN_32B
from tests.unit.test_planner_model import ARCHITECTURE

EIGHT = ["--gpus", f"8x{H100}"]
INVENTORY = {
    "nodes": [{"count": 2, "gpuProduct": H100, "gpusPerNode": 8, "hostMemoryGiB": 1024, "cpu": 128}]
}


@pytest.fixture
def manifest(tmp_path: Path) -> Any:
    """Writes a job's file and returns its path."""

    def write(model: str = LLAMA_1B, **changes: Any) -> str:
        dotted = {key.replace("__", "."): value for key, value in changes.items()}
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump(job("mine", changed({"model.name": model} | dotted, BARE))))
        return str(path)

    return write


@pytest.fixture
def no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kubectl that knows no cluster."""
    script = tmp_path / "kubectl.py"
    script.write_text(
        "import sys\nsys.exit('no cluster ' + sys.argv[1].removeprefix('--context='))"
    )
    monkeypatch.setenv("KUBECTL", f"{sys.executable} {script}")


def test_the_table_says_what_is_chosen_and_why_not_otherwise(
    manifest: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "-f", manifest(), *EIGHT]) == 0
    out = capsys.readouterr().out
    assert "mine  planned  full DDP, Clone on 2 x NVIDIA-H100-80GB-HBM3" in out
    assert "CHOSEN" in out
    assert "faster, but" in out
    assert "GiB allocated on one GPU, by phase: load" in out
    assert "more with --all" in out
    assert main(["plan", "-f", manifest(), *EIGHT, "--all"]) == 0
    assert "more with --all" not in capsys.readouterr().out


def test_json_and_yaml_are_the_result(manifest: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "-f", manifest(), *EIGHT, "-o", "json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert PlanResult.model_validate(printed).feasible
    assert printed["chosen"]["memory"]["phases"]["backward"] > 0
    assert {"strategy", "method", "zeroStage", "offload", "gpus", "nodes", "gpusPerNode",
    "gpuProduct", "microBatch",
            "gradientAccumulation", "gradientCheckpointing", "optimizer", "dtype", "memory",
            "estimatedStepSeconds"} <= set(printed["chosen"])  # fmt: skip
    assert printed["candidates"][0] == printed["chosen"] | {"rejected": None}
    assert {"reason", "phase", "needBytes", "haveBytes"} <= set(
        printed["candidates"][1]["rejected"]
    )
    assert printed["candidates"][1]["rejected"]["needBytes"] > 0
    assert main(["plan", "-f", manifest(), *EIGHT, "-o", "yaml"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == printed


def test_plans_of_several_jobs_are_items_of_one_document_and_a_picture_is_of_one(
    manifest: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(manifest())
    path.write_text(f"{path.read_text()}---\n{path.read_text()}")
    for form, read in (("json", json.loads), ("yaml", yaml.safe_load)):
        assert main(["plan", "-f", str(path), *EIGHT, "-o", form]) == 0
        first, second = read(capsys.readouterr().out)["items"]
        assert first["feasible"]
        assert first == second


def test_an_option_that_is_wrong_for_a_later_job_is_refused_before_anything_is_printed(
    manifest: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = Path(manifest()).read_text()
    second = Path(manifest(placement={"accelerator": "CPU"})).read_text()
    both = tmp_path / "jobs.yaml"
    both.write_text(f"{first}---\n{second.replace('mine', 'second')}")
    assert main(["plan", "-f", str(both), *EIGHT, "--sizes"]) == 2
    printed = capsys.readouterr()
    assert (printed.out, "spec.placement.accelerator is CPU" in printed.err) == ("", True)


def test_nothing_fits_is_3_with_table_and_fixes(
    manifest: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = manifest(QWEN_32B, adapter__use="Never")
    assert main(["plan", "-f", path, "--gpus", f"1x{H100}"]) == 3
    out = capsys.readouterr().out
    assert "OnlyAdapterFits" in out
    assert "needs" in out
    assert "fix  set spec.adapter.use to IfNeeded" in out


def test_a_wrong_spec_is_2(manifest: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "-f", manifest("unknown/model"), *EIGHT]) == 2
    assert "spec.model.parameters" in capsys.readouterr().out
    assert main(["plan", "-f", manifest(training__beta=-1.0), *EIGHT]) == 2
    assert "spec.training.beta" in capsys.readouterr().err


def test_what_if_shows_the_difference(manifest: Any, capsys: pytest.CaptureFixture[str]) -> None:
    changes = ["numGenerations=16", "max_completion_length=1024", "gpus=4"]
    changes += ["spec.training.beta=0.0", "training.dtype=bfloat16"]
    flags = [flag for change in changes for flag in ("--what-if", change)]
    assert main(["plan", "-f", manifest(), *EIGHT, *flags]) == 0
    out = capsys.readouterr().out
    assert all(f"what if {change}" in out for change in changes)
    assert "needed per GPU" in out
    assert "2 x NVIDIA-H100-80GB-HBM3 becomes 4 x NVIDIA-H100-80GB-HBM3" in out


@pytest.mark.parametrize(
    ("given", "change", "left_out"),
    [
        ({"engine": "Servers", "servers": {"replicas": 2}}, "engine=Transformers",
        "spec.generation.servers"),
        ({"engine": "Servers", "servers": {"replicas": 2}}, "engine=Colocated",
        "spec.generation.servers"),
        ({"engine": "Colocated", "memoryShare": 0.4}, "generation.engine=Servers",
        "spec.generation.memoryShare"),
        ({"sleep": True, "maxModelLength": 2048}, "engine=Transformers",
         "spec.generation.sleep, spec.generation.maxModelLength"),
        ({"engine": "Servers", "servers": {"replicas": 2}}, "engine=Auto", ""),
        ({"engine": "Servers", "servers": {"replicas": 2}}, "engine=null", ""),
        ({"engine": "Servers", "servers": {"replicas": 2}}, "beta=0.1", ""),
    ],
)  # fmt: skip
def test_another_engine_comes_without_the_settings_of_the_one_before(
    given: Any, change: str, left_out: str, manifest: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "-f", manifest(generation=given), *EIGHT, "--what-if", change]) == 0
    _, _, then = capsys.readouterr().out.partition(f"what if {change}")
    said = f"without {left_out}, which another engine knows"
    assert (said in " ".join(then.split())) is bool(left_out)
    assert "without spec" not in then or left_out


def test_an_engine_that_there_is_not_is_still_refused(
    manifest: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    served = manifest(generation={"engine": "Servers", "servers": {"replicas": 2}})
    assert main(["plan", "-f", served, *EIGHT, "--what-if", "engine=Turbo"]) == 2
    assert "--what-if engine=Turbo: spec.generation.engine: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--what-if", "numGenerations"], "has no value"),
        (["--what-if", "nonsense=1"], "is no field of training"),
        (["--what-if", "numGenerations=1"], "spec.training.numGenerations"),
        (["--what-if", "numGenerations=16", "-o", "json"], "leave out -o"),
        (["--what-if", "numGenerations=["], "'[' is no YAML value"),
        (
            ["--what-if", "numGenerations=2.5"],
            "--what-if numGenerations=2.5: spec.training.numGenerations: ",
        ),
        (["--what-if", "learnigRate=1e-6"], "did you mean learningRate?"),
        (["--what-if", "lr=1e-6"], "did you mean spec.training.learningRate?"),
        (["--what-if", "spec.rewards.0.weight=2"], "rewards is [{"),
        (["--what-if", "spec.model.name.first=2"], "which has no fields to set"),
    ],
)
def test_a_wrong_what_if_is_2(
    flags: list[str], sentence: str, manifest: Any, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    assert main(["plan", "-f", manifest(), *EIGHT, *flags]) == 2
    shown = capsys.readouterr()
    assert (shown.out, sentence in shown.err) == ("", True)


def test_a_cpu_job_needs_no_inventory(manifest: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = manifest(placement__accelerator="CPU")
    assert main(["plan", "-f", path]) == 0
    assert "no GPUs" in capsys.readouterr().out


def test_an_inventory_file_is_read_strictly(
    manifest: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "inventory.yaml"
    flags = ["plan", "-f", manifest(), "--inventory", str(path)]
    path.write_text(yaml.safe_dump(INVENTORY))
    assert main(flags) == 0
    for document, sentence in (
        ({"nodes": [{"gpuProduct": H100}]}, "nodes[0].hostMemoryGiB: is required"),
        ({"nodes": [INVENTORY["nodes"][0] | {"gpus": 8}]}, "nodes[0].gpus"),
        ([], "inventory"),
    ):
        path.write_text(yaml.safe_dump(document))
        assert main(flags) == 2
        assert sentence in capsys.readouterr().err
    for broken in ("nodes: [", "nodes: 2026-13-45", "[" * 2000):
        path.write_text(broken)
        assert main(flags) == 2
    path.unlink()
    assert main(flags) == 2
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ([], "which GPUs?"),
        (["--gpus", "0xL4"], "write L4, 8xL4"),
        (["--gpus", "00xL4"], "write L4, 8xL4"),
        (["--gpus", "80xL4"], "gpusPerNode: must be at most 64"),
        ([*EIGHT, "--host-memory", "9E"], "hostMemoryGiB: must be at most"),
        (["--host-memory", "1Ti"], "--host-memory goes with --gpus"),
        (
            [*EIGHT, "--host-memory", "much"],
            "--host-memory much is no amount of memory",
        ),
        ([*EIGHT, "--completion-length", "9"], "to compare, add --what-if maxCompletionLength=9"),
        ([*EIGHT, "--config", "/nowhere"], "No such file"),
    ],
)
def test_missing_sources_are_2(
    flags: list[str], sentence: str, manifest: Any, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    assert main(["plan", "-f", manifest(), *flags]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.realtime
@pytest.mark.usefixtures("no_cluster")
def test_a_cluster_that_does_not_answer_is_4(
    manifest: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "-f", manifest(), "--context", "x"]) == 4
    assert "no cluster x" in capsys.readouterr().err


def test_a_given_config_is_exact(
    manifest: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = {"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16,
    "num_attention_heads": 32,
              "intermediate_size": 8192, "vocab_size": 128256}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert (
        main(["plan", "-f", manifest("my/own"), *EIGHT, "--config", str(tmp_path), "-o", "json"])
        == 0
    )
    assert json.loads(capsys.readouterr().out)["architecture"] == "Exact"


@pytest.mark.realtime
def test_a_cluster_is_seen_through_kubectl(
    manifest: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """The answers are those of a real API server, cut down; tests/integration asks a real one."""
    labels = {"nvidia.com/gpu.product": H100, "nvidia.com/gpu.memory": "81559"}
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    offers = {"nvidia.com/gpu": "8", "cpu": "128", "memory": "1024Gi"}

    def node(name: str, **spec: Any) -> dict[str, Any]:
        return {
            "metadata": {"name": name, "labels": labels},
            "spec": spec,
            "status": ready | {"allocatable": offers},
        }

    takes = {"nodeName": "n1", "containers": [{"resources": {"requests": {"nvidia.com/gpu": "7"}}}]}
    pod = {
        "metadata": {"namespace": "a", "name": "p"},
        "status": {"phase": "Running"},
        "spec": takes,
    }
    memory = {"backward": {"predictedBytes": 40 * 2**30, "neededBytes": 2 * 42 * 2**30}}
    tried = {
        "attempt": 1,
        "where": "backward",
        "tried": "micro-batch 4",
        "neededBytes": 84 * 2**30,
        "usableBytes": 1,
    }
    shape = ARCHITECTURE | {"modelType": "llama"}
    status = {
        "learned": {"memory": memory, "shortfalls": [tried], "architecture": shape, "later": 1}
    }
    answers: dict[str, Any] = {
        "nodes": {"items": [node("n1"), node("n2", unschedulable=True)]}, "pods": {"items": [pod]},
        "grpojobs.grpo.dev": {"items": [{"status": status}]},
        "grpojobclasses.grpo.dev": {"items": []},
    }  # fmt: skip
    (tmp_path / "answers.json").write_text(json.dumps(answers))
    script = tmp_path / "kubectl.py"
    script.write_text(
        "import json, sys\nanswers = json.load(open(sys.argv[0].replace('kubectl.py', "
        "'answers.json')))\n"
        "print(json.dumps(next(answers[word] for word in sys.argv if word in answers)))"
    )
    monkeypatch.setenv("KUBECTL", f"{sys.executable} {script}")
    assert main(["plan", "-f", manifest(), "--context", "."]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "shape: exact, from the preflight or a former attempt" in out
    assert "learned backward: 40.0 GiB predicted, 84.0 GiB needed or more" in out
    assert "learned attempt 1 ran out at backward: micro-batch 4, needed 84.0 GiB or more" in out
    assert main(["plan", "-f", manifest(), "--context", ".", "--sizes"]) == 0
    sizes = capsys.readouterr().out.split("GPU-s/step")[1]
    answers["grpojobs.grpo.dev"]["items"].clear()
    (tmp_path / "answers.json").write_text(json.dumps(answers))
    needed = re.findall(r"needs ([0-9.]+) GiB", out)
    assert main(["plan", "-f", manifest(), "--context", "."]) == 0
    out = capsys.readouterr().out
    assert "learned" not in out
    assert needed != re.findall(r"needs ([0-9.]+) GiB", out)
    assert "on 1 x NVIDIA-H100-80GB-HBM3: " in out
    assert "node n2: left out, not ready or cordoned" in out
    assert main(["plan", "-f", manifest(), "--context", ".", "--sizes"]) == 0
    assert sizes != capsys.readouterr().out.split("GPU-s/step")[1]


PROMPT = LocalPreflight(PreflightReport(), "<|user|>2+2?\x1b[31m<|assistant|>")
AWAY = PreflightProblem(path="spec.dataset.name", message="nobody answers")


@pytest.mark.parametrize(
    "answer",
    [
        (PROMPT, 0, "first prompt:\n<|user|>2+2?\\x1b[31m<|assistant|>\n"),
        (LocalPreflight(PreflightReport(problems=[AWAY]), ""), 2, "nobody answers"),
        (LocalPreflight(PreflightReport(), "x" * 5000), 0, "its first 4,000 of 5,000 characters"),
    ],
)
def test_the_first_prompt_is_shown_or_why_there_is_none(
    manifest: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    answer: tuple[LocalPreflight, int, str],
) -> None:
    found, code, says = answer
    asked: list[Any] = []

    def check(*job: Any, **options: Any) -> LocalPreflight:
        asked.append((job[0], options))
        return found

    monkeypatch.setattr(local_preflight, "check_here", check)
    assert main(["plan", "-f", manifest(), *EIGHT, "--show-prompt"]) == code
    assert asked == [("mine", {"only_prompt": True})]
    assert says in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([LLAMA_1B, *EIGHT], "name its file by -f"),
        (["-f", "FILE", *EIGHT, "-o", "json"], "leave out -o"),
        (["-f", "FILE", *EIGHT], "not installed here: grpo_trainer, transformers, datasets"),
    ],
)
def test_a_prompt_that_can_t_be_shown_is_said_before_anything_is_printed(
    manifest: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    says: str,
) -> None:
    monkeypatch.setattr(local_preflight, "find_spec", lambda _: None)
    given = [manifest() if one == "FILE" else one for one in arguments]
    assert main(["plan", *given, "--show-prompt"]) == 2
    printed = capsys.readouterr()
    assert says in printed.err
    assert printed.out == ""

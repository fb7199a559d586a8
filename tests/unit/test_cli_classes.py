"""Commands show a job with its GRPOJobClass, from a file or as the status of the job has it."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_api.effective_spec import applied_class, resolve
from grpo_api.job import parse_spec
from grpo_cli.__main__ import main
from grpo_cli.cluster import kubectl
from grpo_cli.inputs.job_classes import class_in_cluster
from grpo_cli.show.errors import KubectlError
from tests.class_samples import job_class
from tests.unit.cli_world import Cluster, options
from tests.unit.operator_world import SPEC, active_status, job_object

EXAMPLE = "examples/13-job-class.yaml"
SIXTEEN = ["--gpus", "2x8xH100"]


def test_render_and_plan_show_what_the_class_makes_of_a_job(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["-f", EXAMPLE, *SIXTEEN]
    assert main(["render", *given, "-n", "team"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "# gsm8k-by-class: GRPOJobClass h100-rdma; its pods need the restricted pod security"
    )
    claim, gang = (
        one for one in yaml.safe_load_all(out) if one["kind"] in ("PersistentVolumeClaim", "Job")
    )
    assert claim["spec"]["storageClassName"] == "shared"
    (container,) = gang["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["rdma/hca"] == "8"
    assert main(["plan", *given, "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["chosen"]["gpuHourPrice"] == 2.49
    assert main(["plan", *given]) == 0
    assert "GRPOJobClass h100-rdma" in capsys.readouterr().out


def test_a_class_that_no_flag_finds_or_that_refuses_the_job_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    documents = list(yaml.safe_load_all(Path(EXAMPLE).read_text()))
    alone = tmp_path / "job.yaml"
    alone.write_text(yaml.safe_dump(documents[1]))
    assert main(["plan", "-f", str(alone), *SIXTEEN]) == 2
    assert "give its file by --class FILE, or the cluster that" in capsys.readouterr().err
    file = tmp_path / "class.yaml"
    file.write_text(yaml.safe_dump(job_class("h100-rdma", {"limits": {"gpus": 8}})))
    assert main(["plan", "-f", EXAMPLE, *SIXTEEN, "--class", str(file)]) == 2
    assert "gpus.max asks for 16 GPUs; at most 8 are allowed" in capsys.readouterr().err
    file.write_text(yaml.safe_dump(job_class("other", {})))
    assert main(["plan", "-f", EXAMPLE, *SIXTEEN, "--class", str(file)]) == 2
    assert "has no GRPOJobClass h100-rdma" in capsys.readouterr().err
    assert main(["plan", "-f", EXAMPLE, *SIXTEEN, "--class", str(alone)]) == 2
    assert "job.yaml holds no GRPOJobClass" in capsys.readouterr().err
    annotations = {"grpojobclass.grpo.dev/is-default-class": True}
    named = {"name": "h100-rdma", "annotations": annotations}
    wrong_metadata: list[Any] = [{}, {"name": 5}, [], named]
    for wrong in wrong_metadata:
        file.write_text(yaml.safe_dump(job_class("h100-rdma", {}) | {"metadata": wrong}))
        assert main(["plan", "-f", EXAMPLE, *SIXTEEN, "--class", str(file)]) == 2
        assert (
            "class.yaml has a GRPOJobClass with a wrong field: metadata" in capsys.readouterr().err
        )


def test_a_change_that_the_class_refuses_is_no_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "class.yaml"
    file.write_text(yaml.safe_dump(job_class("h100-rdma", {"limits": {"gpus": 16}})))
    given = ["plan", "-f", EXAMPLE, *SIXTEEN, "--class", str(file), "--what-if"]
    assert main([*given, "gpus=8"]) == 0
    assert "what if gpus=8" in capsys.readouterr().out
    assert main([*given, "gpus=32"]) == 2
    assert "gpus.max asks for 32 GPUs; at most 16 are allowed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"limits": {"gpus": -1}}, "limits.gpus: must be at least 1 (got -1)"),
        ({"limits": {"gpu": 8}}, "limits.gpu: unknown field; did you mean gpus?"),
        (
            {"fixed": {"env": {"A": "b"}}},
            "fixed.env: must be a list, with items such as `- name: …`",
        ),
        (
            {"default": {"generation": {"engine": "vllm"}}},
            "default.generation.engine: must be one of Transformers, Colocated, Servers; did you "
            "mean Colocated?",
        ),
        (
            {"platform": {"gpuHourPrices": {"H100 80GB": 2}}},
            "platform.gpuHourPrices.H100 80GB: must be the value of a label",
        ),
    ],
)
def test_a_slip_in_a_class_is_answered_with_what_to_write(spec: dict[str, Any], says: str) -> None:
    (problem,) = resolve(parse_spec(SPEC), applied_class("h100", 1, spec), {}).problems
    assert problem.startswith(f"GRPOJobClass h100 can't be read by this version: spec.{says}")


def test_a_class_that_no_job_has_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "class.yaml"
    file.write_text(yaml.safe_dump(job_class("small", {"limits": {"gpus": 1}})))
    job_file = tmp_path / "job.yaml"
    documents = list(yaml.safe_load_all(Path(EXAMPLE).read_text()))
    del documents[1]["spec"]["jobClassName"]
    job_file.write_text(yaml.safe_dump(documents[1]))
    assert main(["plan", "-f", str(job_file), *SIXTEEN, "--class", str(file)]) == 0
    says = f"grpo: no class of {file} is used: spec.jobClassName is unset, and none there is the"
    assert capsys.readouterr().err.startswith(says)


def test_a_job_of_the_cluster_is_shown_with_the_class_of_its_attempt() -> None:
    applied = applied_class("h100", 1, {"default": {"image": "old:1"}})
    fields = applied.model_dump(mode="json", by_alias=True)
    found = job_object({"jobClassName": "h100"}, active_status(jobClass=fields))
    _, shown = kubectl.read_job(found)
    assert shown.spec.image == "old:1"


def test_a_cluster_that_does_not_answer_may_have_a_default_class(
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec = parse_spec(SPEC)
    with Cluster(None, fault="busy").as_kubectl(), pytest.raises(KubectlError, match="too many"):
        class_in_cluster(options(), spec)
    with Cluster(None, fault="forbidden").as_kubectl():
        assert class_in_cluster(options(), spec) is None
    assert "no default GRPOJobClass is known" in capsys.readouterr().err

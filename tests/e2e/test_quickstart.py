"""A newcomer's way from `make demo` on a cluster that is there already, one `kubectl apply`, to a
model in hand.

The cluster has no shared file system and no hub: what a laptop's has. Nothing is lost on the way,
and nothing is left.
"""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.report import Outcome
from grpo_api.text.contract import DATA_MOUNT_ENV, PLAN_ANNOTATION
from grpo_trainer.evaluation.held_out import evaluate_held_out
from grpo_trainer.evaluation.score import is_within_noise, reported_reward
from harness import stack
from harness.access import Access
from harness.cluster import Cluster
from harness.fixtures import AnyCluster
from harness.images import recipes as images
from harness.jobs import Jobs, Object, is_true
from harness.nodes.storage import FOLDER
from harness.programs.build import user_commands
from harness.programs.processes import until
from tests.e2e.conftest import grpo

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart.yaml"
PAGE = ROOT / "docs/tutorials/bring-your-own.md"
NAMESPACE = "newcomer"
TRAINING, EVALUATION = "quickstart", "quickstart-evaluation"
DOCUMENTS: list[Object] = list(yaml.safe_load_all(QUICKSTART.read_text()))
ROWS = next(document["data"] for document in DOCUMENTS if document["kind"] == "ConfigMap")


@dataclass(frozen=True)
class Newcomer:
    """What the demo printed, and the namespace that it worked in."""

    jobs: Jobs
    output: str


@pytest.fixture(scope="module")
def newcomer(installed: AnyCluster, trainer_image: images.Image) -> Iterator[Newcomer]:
    """The demo, run to its end on a cluster that can pull the images."""
    stack.create_namespace(installed, NAMESPACE)
    context = installed.kubectl("config", "current-context").strip()
    command = [
        "make",
        "-s",
        "demo",
        f"CONTEXT={context}",
        "PYTHON=/usr/bin/python3",
        f"NAMESPACE={NAMESPACE}",
    ]
    command += [f"IMAGE={trainer_image.name}", f"OPERATOR_IMAGE={images.operator_image().name}"]
    path = f"{user_commands()}{os.pathsep}{os.environ['PATH']}"
    environment = {
        name: value for name, value in installed.environment.items() if name != "PYTHONPATH"
    }
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    yield Newcomer(Jobs(installed, NAMESPACE, {}, Path()), done.stdout)
    installed.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", "--wait=false")


@pytest.fixture(scope="module")
def model(newcomer: Newcomer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, brought to this machine."""
    folder = tmp_path_factory.mktemp("quickstart") / "model"
    grpo(newcomer.jobs.access, "export", TRAINING, "--namespace", NAMESPACE, "--to", str(folder))
    return folder


@pytest.fixture(scope="module")
def plan(newcomer: Newcomer) -> TrainingPlan:
    """The evaluation's plan: its dataset, rewards and sampling."""
    child = json.loads(newcomer.jobs.kubectl("get", "job", f"{EVALUATION}-1", "--output", "json"))
    return TrainingPlan.model_validate_json(
        child["spec"]["template"]["metadata"]["annotations"][PLAN_ANNOTATION]
    )


def test_one_apply_trains_and_evaluates(newcomer: Newcomer) -> None:
    for name in (TRAINING, EVALUATION):
        job = newcomer.jobs.get(name)
        assert is_true(job, "Succeeded")
        assert (job["status"]["attempt"], job["status"]["restarts"]) == (1, 0)
        assert job["status"]["outcome"]["message"] in newcomer.output
    assert "within the noise" in newcomer.output


def test_the_model_was_saved_on_a_volume_of_the_default_class(newcomer: Newcomer) -> None:
    claim = json.loads(newcomer.jobs.kubectl("get", "pvc", TRAINING, "--output", "json"))
    assert (
        "storageClassName"
        not in next(one for one in DOCUMENTS if one["kind"] == claim["kind"])["spec"]
    )
    assert claim["status"]["phase"] == "Bound"
    assert claim["status"]["accessModes"] == ["ReadWriteOnce"]


def test_the_exported_model_answers_what_it_was_not_trained_on(model: Path) -> None:
    policy = AutoModelForCausalLM.from_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    rows = [json.loads(line) for line in ROWS["held-out.jsonl"].splitlines()]
    seen = {json.dumps(json.loads(line)["prompt"]) for line in ROWS["train.jsonl"].splitlines()}
    assert seen.isdisjoint(json.dumps(row["prompt"]) for row in rows)
    chats = [row["prompt"] for row in rows]
    encoded = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )
    tokens = policy.generate(**encoded, do_sample=False, max_new_tokens=48)[
        :, encoded["input_ids"].size(1) :
    ]
    answers = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    right = sum(answer == row["answer"] for answer, row in zip(answers, rows, strict=True))
    assert right >= 0.9 * len(rows), answers


def test_it_earns_the_reward_that_the_job_reported_within_noise(
    newcomer: Newcomer,
    model: Path,
    plan: TrainingPlan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "held-out.jsonl").write_text(ROWS["held-out.jsonl"])
    monkeypatch.setenv(DATA_MOUNT_ENV, str(tmp_path))
    found = evaluate_held_out(plan, model, seed=7)
    outcome = Outcome.model_validate(newcomer.jobs.get(TRAINING)["status"]["outcome"])
    job = reported_reward(outcome, plan.training.prompts_per_step, found.spread)
    assert job is not None
    assert is_within_noise(found.reward, job), (found, job)
    told = newcomer.jobs.get(EVALUATION)["status"]["metrics"]["reward"]
    assert float(told) == pytest.approx(found.reward.mean, abs=2 * found.reward.margin)


def test_what_it_was_made_of_lies_beside_it(newcomer: Newcomer, model: Path) -> None:
    assert TRAINING in grpo(newcomer.jobs.access, "verify", str(model))
    weights = model / "model.safetensors"
    genuine = weights.read_bytes()
    weights.write_bytes(genuine[:-1] + bytes([genuine[-1] ^ 1]))
    with pytest.raises(AssertionError):
        grpo(newcomer.jobs.access, "verify", str(model))
    weights.write_bytes(genuine)


@pytest.mark.slow
def test_the_page_for_ones_own_things_does_what_it_says(newcomer: Newcomer, tmp_path: Path) -> None:
    """Its files and commands in their order, as somebody types them whose context has the
    namespace."""
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(newcomer.jobs.access.kubeconfig.read_text())
    kubectl = Access(kubeconfig)
    kubectl.kubectl("config", "set-context", "--current", "--namespace", NAMESPACE)
    environment = kubectl.environment | {
        "PATH": f"{user_commands()}{os.pathsep}{os.environ['PATH']}"
    }
    said = ""
    for name, text in re.findall(
        r"^```(?:sh|\w+ (\S+))\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE
    ):
        if name:
            (tmp_path / name).write_text(text)
            continue
        command = ["bash", "-e", "-c", text]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (text, done.stdout, done.stderr)
        said += done.stdout
    assert "held-out reward" in said
    assert "2 rows, 16 completions each" in said
    left = newcomer.jobs.kubectl(
        "get", "grpojobs", "--output", "jsonpath={.items[*].metadata.name}"
    )
    assert left.split() == [TRAINING, EVALUATION]


def test_deleting_it_leaves_nothing_but_the_model_on_this_machine(
    newcomer: Newcomer, model: Path
) -> None:
    jobs = newcomer.jobs
    volume = jobs.kubectl("get", "pvc", TRAINING, "--output", "jsonpath={.spec.volumeName}")
    jobs.kubectl("delete", "--filename", str(QUICKSTART))
    jobs.kubectl("wait", "--for=delete", "jobs,pods,pvc", "--all", "--timeout", "120s")
    jobs.kubectl("wait", "--for=delete", f"pv/{volume}", "--timeout", "120s")
    if isinstance(jobs.access, Cluster):
        folders = list(
            jobs.access.directory.glob(
                f"nodes/*/overlay-var-lib/upper/{FOLDER.removeprefix('/var/lib/')}"
            )
        )
        assert folders
        until(
            "the folder of the volume to be gone",
            lambda: not any(any(folder.iterdir()) for folder in folders),
        )
    assert AutoModelForCausalLM.from_pretrained(model)

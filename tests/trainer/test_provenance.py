"""What an export says it was made of: read by `grpo verify`, signed without the key ever being in
the trainer."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from peft import get_peft_model

from grpo_api.plan.plan import TrainingPlan
from grpo_api.provenance.provenance import (
    ENVELOPE_FILE,
    STATEMENT_FILE,
    Dependency,
    RunRecord,
    Statement,
)
from grpo_api.report.artifacts import SUMS
from grpo_api.report.report import Outcome, Progress, Result
from grpo_api.report.revisions import DATASET_FINGERPRINT
from grpo_api.text.contract import IMAGE_ENV, SIGNING_KEY_ENV
from grpo_cli.__main__ import main
from grpo_trainer.checkpoints.provenance import ProvenanceFacts, write_provenance
from grpo_trainer.checkpoints.signing_key import __name__, require_key
from grpo_trainer.process.outcome import keep_outcome
from grpo_trainer.runtime.errors import BadInput
from grpo_trainer.weights.model_files import Source
from grpo_trainer.weights.models import LoadedModel, load_policy
from grpo_trainer.weights.proof import Proof
from tests.exported_model import KEYS, private, public
from tests.support.ranks import demo_model, runs
from tests.support.ranks.checkpoint_plans import claim_folder, export_model

pytestmark = pytest.mark.realtime

KEY = KEYS["P-256"]
COMMIT = "c0" * 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_model.save_policy(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture
def signing_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = private(tmp_path / "private.pem", KEY)
    monkeypatch.setenv(SIGNING_KEY_ENV, str(path))
    return path


def changed(plan: TrainingPlan, **sections: Any) -> TrainingPlan:
    """The plan with other sections."""
    return TrainingPlan.model_validate(
        {**plan.model_dump(by_alias=True, exclude_none=True), **sections}
    )


def signed(plan: TrainingPlan) -> TrainingPlan:
    """The plan of a job that wants its export signed."""
    return changed(
        plan, export={"to": "Volume", "signingKeySecretRef": {"name": "key", "key": "key.pem"}}
    )


def finished(plan: TrainingPlan, source: Source) -> ProvenanceFacts:
    """A run of seven steps."""
    progress = Progress(
        attempt=plan.job.attempt,
        step=7,
        resumed_from_step=4,
        revisions={DATASET_FINGERPRINT: "ab" * 32, "model": COMMIT},
    )
    proof = Proof(
        what="policy",
        parameters=30,
        converted=0,
        across_ranks=0,
        bytes=9,
        seconds=0.1,
        fingerprint="cd" * 16,
    )
    return ProvenanceFacts(plan=plan, source=source, proofs=[proof], progress=progress, started=0.0)


def export(plan: TrainingPlan) -> Path:
    """The plan's model as it is exported at the end of a run, without the run."""
    claim_folder(plan)
    loaded = load_policy(plan.model, plan.execution, plan.adapter)
    attest = partial(write_provenance, finished(plan, loaded.source))
    folder = export_model(plan, loaded.source, _save(loaded), attest=attest)
    assert folder is not None
    return folder


def _save(loaded: LoadedModel) -> Any:
    return (
        get_peft_model(loaded.model, loaded.peft_config) if loaded.peft_config else loaded.model
    ).save_pretrained


def said(folder: Path) -> Statement:
    return Statement.model_validate_json((folder / STATEMENT_FILE).read_text())


@pytest.mark.parametrize("kind", ["Full", "LoRA", "merged"])
def test_every_kind_of_export_is_signed_and_verified(
    model: Path, tmp_path: Path, signing_key: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = {"mergeOnExport": True} if kind == "merged" else {}
    strategy = "Clone" if kind == "Full" else "Adapter"
    folder = export(signed(runs.plan(model, strategy, folder=tmp_path / "run", adapter=adapter)))
    names = {subject.name for subject in said(folder).subject}
    assert ("adapter_model.safetensors" if kind == "LoRA" else "model.safetensors") in names
    assert {path.name for path in folder.iterdir()} == names | {STATEMENT_FILE, ENVELOPE_FILE}
    assert main(["verify", str(folder), "--key", str(public(tmp_path / "public.pem", KEY))]) == 0
    assert "by the given key" in capsys.readouterr().out


def test_an_export_of_which_the_provenance_fails_has_no_name(
    model: Path, tmp_path: Path, signing_key: Path
) -> None:
    signing_key.write_text("no key")
    with pytest.raises(
        BadInput, match=r"spec\.export\.signingKeySecretRef: .* holds no private key in PEM"
    ):
        export(signed(runs.plan(model, folder=tmp_path / "run")))
    assert not (tmp_path / "run" / "export").exists()


def statement(tmp_path: Path, plan: TrainingPlan) -> Statement:
    """What is said of a run of this plan that exported two small files."""
    folder = tmp_path / "export"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / SUMS).write_text("")
    write_provenance(finished(plan, Source("demo/policy", tmp_path, COMMIT, "float32")), folder)
    (folder / ENVELOPE_FILE).unlink(missing_ok=True)
    return said(folder)


def run_of(one: Statement) -> RunRecord:
    return one.predicate.run_details.grpo_run


def made_of(one: Statement) -> dict[str, Dependency]:
    return {part.name: part for part in one.predicate.build_definition.resolved_dependencies}


def test_every_attempt_is_told_with_its_ends_and_what_can_t_be_read_is_left_out(
    tmp_path: Path,
) -> None:
    """Attempt 1 failed on two ranks, 2 left dirt, 3 nothing at all but what the operator saw of it,
    4 exports."""
    plan = runs.plan(tmp_path / "model", folder=tmp_path / "run")
    (tmp_path / "run" / "attempt-1").mkdir(parents=True)
    for rank in range(2):
        keep_outcome(
            plan,
            Outcome(result=Result.OUT_OF_MEMORY, rank=rank, step=4, attempt=1, message="a secret"),
        )
    (tmp_path / "run" / "attempt-2" / "outcome-rank-0.json").mkdir(parents=True)
    for name, content in {"1": b"\xff", "2": b"{}", "3": b"", "x": b"[]"}.items():
        (tmp_path / "run" / "attempt-2" / f"outcome-rank-{name}.json").write_bytes(content)
    fourth = {**plan.job.model_dump(by_alias=True), "attempt": 4}
    told = statement(
        tmp_path, changed(plan, job=fourth, ends=[{"attempt": 3, "reason": "NodeLost"}])
    )
    assert [attempt.model_dump(exclude_defaults=True) for attempt in run_of(told).attempts] == [
        {"attempt": 1, "ends": [{"result": "OutOfMemory", "step": 4, "ranks": 2}]},
        {"attempt": 2},
        {"attempt": 3, "reason": "NodeLost"},
        {"attempt": 4, "resumedFromStep": 4},
    ]
    assert "a secret" not in told.model_dump_json()


def test_no_value_of_a_variable_and_no_credential_is_written_down(
    tmp_path: Path, signing_key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_tell_nobody")
    http = {"url": "https://user:hidden@scores.example/v1?token=hidden#hidden"}
    plan = changed(
        signed(runs.plan(tmp_path / "model", folder=tmp_path / "run")), rewards=[{"http": http}]
    )
    told = statement(tmp_path, plan)
    text = told.model_dump_json() + json.dumps(plan.model_dump(mode="json", include={"export"}))
    assert "HF_TOKEN" in run_of(told).environment.variables
    assert not [
        secret
        for secret in ("hf_tell_nobody", "hidden", "BEGIN", str(signing_key))
        if secret in text
    ]
    spec = told.predicate.build_definition.external_parameters.spec
    assert spec["rewards"][0]["http"]["url"] == "https://scores.example/v1"


def test_the_spec_is_whole_but_for_what_the_pods_are_not_told(tmp_path: Path) -> None:
    plan = runs.plan(tmp_path / "model", folder=tmp_path / "run")
    build = statement(tmp_path, plan).predicate.build_definition
    asked, told = build.external_parameters, build.internal_parameters
    assert (
        TrainingPlan.model_validate(
            {**asked.spec, **told.pod_plan, "job": told.job, "execution": told.execution}
        )
        == plan
    )
    assert {
        "model",
        "dataset",
        "rewards",
        "training",
        "reference",
        "adapter",
        "checkpoint",
        "guard",
    } <= set(asked.spec)
    assert {"placement", "podTemplate", "restarts", "image", "env"} <= set(asked.omitted)


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ("registry.example/trainer@sha256:" + "ef" * 32, {"sha256": "ef" * 32}),
        ("registry.example:5000/trainer:1.2", {}),
    ],
)
def test_an_image_s_digest_is_told_where_it_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, image: str, expected: dict[str, str]
) -> None:
    monkeypatch.setenv(IMAGE_ENV, image)
    found = made_of(statement(tmp_path, runs.plan(tmp_path / "model", folder=tmp_path / "run")))
    assert (found["image"].uri, found["image"].digest) == (f"docker://{image}", expected)
    assert bool(found["image"].annotations) != bool(expected)


def test_model_and_rows_are_named_by_what_they_were(tmp_path: Path) -> None:
    found = made_of(statement(tmp_path, runs.plan(tmp_path / "model", folder=tmp_path / "run")))
    assert found["model"].uri == f"hf://demo/policy@{COMMIT}"
    assert found["model"].digest == {"gitCommit": COMMIT}
    assert found["model"].annotations == {"xxh3_128": "cd" * 16}
    assert found["rows"].digest == {"sha256": "ab" * 32}
    assert found["dataset"].digest == {}  # nothing was resolved


@pytest.mark.parametrize(("every", "syncs", "last"), [(2, 3, 6), (7, 1, 7), (8, 0, 0)])
def test_syncs_of_the_reference_are_told(tmp_path: Path, every: int, syncs: int, last: int) -> None:
    plan = runs.plan(
        tmp_path / "model", folder=tmp_path / "run", reference={"sync": {"everySteps": every}}
    )
    told = run_of(statement(tmp_path, plan)).reference
    assert (told.sync_every_steps, told.syncs, told.last_sync_step) == (every, syncs, last)


def test_versions_are_those_of_the_image(tmp_path: Path) -> None:
    details = statement(
        tmp_path, runs.plan(tmp_path / "model", folder=tmp_path / "run")
    ).predicate.run_details
    assert {"python", "torch", "trl", "transformers"} <= set(details.builder.version)
    assert details.grpo_run.environment.command == sys.orig_argv


def pem(made: Any, password: bytes = b"") -> bytes:
    """A private key in PEM."""
    lock = (
        serialization.BestAvailableEncryption(password)
        if password
        else serialization.NoEncryption()
    )
    content: bytes = made.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock
    )
    return content


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (pem(KEY, b"open"), "has a password, which nobody could type in"),
        (
            pem(rsa.generate_private_key(65537, 2048)),
            "is of another kind than Ed25519, or ECDSA on P-256 or P-384",
        ),
        (None, "can't be read: No such file or directory"),
        (b"", "holds no private key in PEM"),
        (
            b"-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n",
            "holds no private key in PEM",
        ),
        (b"\xff\x00", "holds no private key in PEM"),
    ],
)
def test_a_wrong_key_is_told_before_anything_is_loaded_and_never_shown(
    tmp_path: Path,
    signing_key: Path,
    capfd: pytest.CaptureFixture[str],
    content: bytes | None,
    problem: str,
) -> None:
    require_key()
    signing_key.unlink()
    if content is not None:
        signing_key.write_bytes(content)
    with pytest.raises(BadInput) as caught:
        require_key()
    assert "spec.export.signingKeySecretRef: " in str(caught.value)
    assert problem in str(caught.value)
    assert "c2VjcmV0" not in str(caught.value) + "".join(capfd.readouterr())


def test_the_key_s_process_leaves_no_core(tmp_path: Path) -> None:
    """Seen while it waits for its key, which comes by a pipe."""
    pipe = tmp_path / "key.pem"
    os.mkfifo(pipe)
    command = [sys.executable, "-m", __name__, "sign", str(pipe)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        with pipe.open("wb") as writer:  # goes on when the process has opened it
            (limit,) = (
                line
                for line in Path(f"/proc/{process.pid}/limits").read_text().splitlines()
                if "core" in line
            )
            writer.write(private(tmp_path / "other.pem", KEY).read_bytes())
        told, _ = process.communicate(b"{}")
    assert limit.split()[4:6] == ["0", "0"]
    assert process.returncode == 0
    assert b"signatures" in told

"""The pod of `grpo export`, as processes: what it lists, what it sends, how it converts, and that
it ends by itself."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from grpo_api.plan.plan import TrainingPlan
from grpo_api.provenance.provenance import (
    ENVELOPE_FILE,
    STATEMENT_FILE,
    ConversionStatement,
    read_statement,
)
from grpo_api.report.artifacts import SUMS, Listing, files_of, parse_sums, sums_text, weights_hash
from grpo_api.report.history import METRICS_FILE, SAMPLES_FILE
from grpo_api.text.contract import PLAN_ENV, TERMINATION_LOG_ENV
from grpo_trainer.checkpoints.hashing import list_files, sha256_sums
from grpo_trainer.delivery import serving
from grpo_trainer.delivery.__main__ import main, send_file, send_listing
from grpo_trainer.delivery.serving import FolderSource
from grpo_trainer.runtime.durable_files import write_atomically
from grpo_trainer.runtime.errors import BadInput
from grpo_trainer.weights.models import load_policy
from tests.exported_model import KEYS, describe, public, verify
from tests.stepped_clock import SteppedClock
from tests.support.ranks import demo_model, runs
from tests.support.ranks.checkpoint_plans import claim_folder, export_model

pytestmark = pytest.mark.realtime

HASHED = "sha256sum *.safetensors | sha256sum"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's policy."""
    return demo_model.save_policy(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(params=["Clone", "Adapter"])
def plan(request: pytest.FixtureRequest, model: Path, tmp_path: Path) -> TrainingPlan:
    """A run that has exported its policy, or an adapter."""
    plan = runs.plan(model, request.param, folder=tmp_path / "run")
    claim_folder(plan)
    loaded = load_policy(plan.model, plan.execution, plan.adapter)
    trained = loaded.model
    if loaded.peft_config:
        trained = get_peft_model(trained, loaded.peft_config)
        for name, weight in trained.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(7))
    export_model(plan, loaded.source, trained.save_pretrained)
    return plan


@pytest.fixture
def pod(plan: TrainingPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The plan as a pod has it; what it served is in the folder that this names."""
    path = tmp_path / "plan.json"
    path.write_text(plan.model_dump_json())
    monkeypatch.setenv(PLAN_ENV, str(path))
    monkeypatch.setenv(TERMINATION_LOG_ENV, str(tmp_path / "termination"))
    return tmp_path / "state"


def listed(state: Path) -> Listing:
    out = io.BytesIO()
    send_listing(state, out)
    return Listing.model_validate_json(out.getvalue())


def sent(state: Path, listing: Listing) -> Iterator[tuple[str, bytes]]:
    """Every file, in two parts."""
    for name, entry in listing.files.items():
        first, rest = io.BytesIO(), io.BytesIO()
        send_file(state, name, 0, first)
        send_file(state, name, entry.bytes // 2, rest)
        yield name, first.getvalue()[: entry.bytes // 2] + rest.getvalue()


def test_what_was_exported_is_handed_out_as_it_is(plan: TrainingPlan, pod: Path) -> None:
    export = Path(str(plan.checkpoint_directory)) / "export"
    (export / "README.md").write_text("added later")
    assert serving.serve(pod, None, merge=False, idle=0) == 0
    listing = listed(pod)
    assert dict(sent(pod, listing)) == {path.name: path.read_bytes() for path in export.iterdir()}
    assert {SUMS, "README.md"} <= listing.files.keys()
    assert listing.weights_hash == weights_hash(parse_sums((export / SUMS).read_text()))


def test_a_spoiled_file_keeps_the_hash_that_the_trainer_took(plan: TrainingPlan, pod: Path) -> None:
    export = Path(str(plan.checkpoint_directory)) / "export"
    before = serving.make_listing(FolderSource(export))
    weights = next(export.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert serving.make_listing(FolderSource(export)) == before
    weights.unlink()
    with pytest.raises(BadInput, match=f"lacks {weights.name}, which SHA256SUMS names"):
        serving.make_listing(FolderSource(export))


@pytest.mark.parametrize("plan", ["Clone"], indirect=True)
def test_a_history_is_handed_out_as_it_is_now(plan: TrainingPlan, pod: Path) -> None:
    run = Path(str(plan.checkpoint_directory))
    with pytest.raises(BadInput, match="has no history: no attempt has taken a step"):
        serving.serve(pod, None, merge=False, history=True, idle=0)
    for attempt in (1, 2, 10):
        (run / f"attempt-{attempt}").mkdir(exist_ok=True)
        (run / f"attempt-{attempt}" / METRICS_FILE).write_text(f'{{"step": {attempt}}}\n')
    (run / "attempt-2" / SAMPLES_FILE).write_text("of an older attempt")
    assert serving.serve(pod, None, merge=False, history=True, idle=0) == 0
    # Rank 0 goes on while the files are fetched.
    (run / "attempt-10" / METRICS_FILE).write_text("more")
    assert dict(sent(pod, listed(pod))) == {METRICS_FILE: b'{"step": 10}\n'}


@pytest.mark.parametrize("plan", ["Adapter"], indirect=True)
def test_an_adapter_is_merged_into_its_base(plan: TrainingPlan, model: Path, pod: Path) -> None:
    assert serving.serve(pod, "float32", merge=True, idle=0) == 0
    listing = listed(pod)
    folder = pod / "model"
    assert "adapter_config.json" not in listing.files
    merged, base = (
        AutoModelForCausalLM.from_pretrained(one).state_dict() for one in (folder, model)
    )
    assert merged.keys() == base.keys()
    export = Path(str(plan.checkpoint_directory)) / "export"
    factors = load_file(export / "adapter_model.safetensors")
    prefix = next(
        name[: -len("lora_A.weight")]
        for name in sorted(factors)
        if name.endswith("q_proj.lora_A.weight")
    )
    config = json.loads((export / "adapter_config.json").read_text())
    change = (
        factors[f"{prefix}lora_B.weight"]
        @ factors[f"{prefix}lora_A.weight"]
        * config["lora_alpha"]
        / config["r"]
    )
    name = f"{prefix.removeprefix('base_model.model.')}weight"
    torch.testing.assert_close(merged[name], base[name] + change)
    assert listing.weights_hash == weights_hash(parse_sums((folder / SUMS).read_text()))


@pytest.mark.parametrize("plan", ["Clone"], indirect=True)
def test_weights_are_given_in_another_dtype(plan: TrainingPlan, pod: Path) -> None:
    export = Path(str(plan.checkpoint_directory)) / "export"
    assert serving.serve(pod, "bfloat16", merge=False, idle=0) == 0
    assert "provenance.json" not in listed(pod).files, "there is nothing that it could name"
    given = AutoModelForCausalLM.from_pretrained(pod / "model")
    exported = AutoModelForCausalLM.from_pretrained(export)
    assert given.dtype == torch.bfloat16
    for name, weight in exported.state_dict().items():
        assert torch.equal(given.state_dict()[name], weight.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("plan", "given", "says"),
    [
        ("Clone", ["--merge"], "leave --merge out"),
        ("Adapter", ["--dtype", "float32"], "--dtype needs --merge here"),
    ],
    indirect=["plan"],
)
def test_a_pod_that_can_hand_out_nothing_says_why(
    pod: Path, tmp_path: Path, given: list[str], says: str
) -> None:
    assert main(["serve", *given], pod) == 1
    assert says in (tmp_path / "termination").read_text()


def test_a_conversion_says_what_it_was_made_of_and_is_not_taken_for_what_was_signed(
    plan: TrainingPlan, pod: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export, merge = Path(str(plan.checkpoint_directory)) / "export", plan.execution.method == "LoRA"
    (export / "README.md").write_text(
        f"- hash of the weights (`{HASHED}`): ` old `\nThis adapter was trained", "utf-8"
    )
    (export / SUMS).write_text(sums_text(sha256_sums(export, list_files(export).keys() - {SUMS})))
    describe(export, KEYS["Ed25519"])
    assert serving.serve(pod, "bfloat16", merge=merge, idle=0) == 0
    folder = pod / "model"
    assert listed(pod).files.keys() == files_of(folder).keys()
    assert not (folder / ENVELOPE_FILE).exists()
    weights = listed(pod).weights_hash
    done = "merged into its base, to bfloat16" if merge else "to bfloat16"
    page = (
        f"- hash of the weights (`{HASHED}`): ` {weights} `\n- converted: {done}\nThis model "
        "was trained"
    )
    assert (folder / "README.md").read_text() == page
    hashed = {
        name: entry.sha256
        for name, entry in listed(pod).files.items()
        if name not in {SUMS, STATEMENT_FILE}
    }
    assert parse_sums((folder / SUMS).read_text()) == hashed
    statement = read_statement((folder / STATEMENT_FILE).read_bytes())
    assert isinstance(statement, ConversionStatement)
    made_of = statement.predicate.consumed_digests
    assert made_of == parse_sums((export / SUMS).read_text())
    base = [
        one.uri
        for one in statement.predicate.build_definition.resolved_dependencies
        if one.name == "base"
    ]
    assert base == ([Path(plan.model.name).as_uri()] if merge else [])
    assert verify(folder) == 0
    said = capsys.readouterr().out
    assert ("merged into its base, to bfloat16" in said) is merge
    assert f"to bfloat16, from weights {weights_hash(made_of)}" in said
    assert verify(folder, "--key", public(tmp_path / "signing.pub", KEYS["Ed25519"])) == 1
    assert "its original is signed by the given key" in capsys.readouterr().err


def test_an_export_that_was_spoiled_is_not_converted(plan: TrainingPlan, pod: Path) -> None:
    export = Path(str(plan.checkpoint_directory)) / "export"
    weights = next(export.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(BadInput, match=f"{weights.name} of .*export is not what was exported"):
        serving.serve(pod, "bfloat16", merge=plan.execution.method == "LoRA", idle=0)


@pytest.mark.parametrize("plan", ["Clone"], indirect=True)
def test_questions_are_answered_by_processes_without_torch(pod: Path) -> None:
    assert serving.serve(pod, None, merge=False, idle=0) == 0
    code = "import sys; from pathlib import Path; from grpo_trainer.delivery.__main__ import main; "
    code += f"main(sys.argv[1:], Path({str(pod)!r})); assert 'torch' not in sys.modules"
    said = subprocess.check_output([sys.executable, "-c", code, "list"])
    listing = Listing.model_validate_json(said)
    size = listing.files["config.json"].bytes
    assert (
        subprocess.check_output(
            [sys.executable, "-c", code, "send", "--", "config.json", str(size - 2)]
        )
        == b"}\n"
    )


def test_files_can_be_read_by_the_time_they_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    found: list[Path] = []

    def write_listing(path: Path, text: str) -> None:
        found.append(serving.served_source(tmp_path / "state").local_folder(tmp_path))
        write_atomically(path, text)

    monkeypatch.setattr(serving, "write_atomically", write_listing)
    (tmp_path / "state").mkdir()
    serving.publish_listing(tmp_path / "state", FolderSource(tmp_path / "model"), Listing(files={}))
    assert [path.resolve() for path in found] == [tmp_path / "model"]


def test_a_pod_that_has_prepared_for_long_does_not_end_as_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    (tmp_path / "model").mkdir()

    def let_time_pass() -> None:
        os.utime(state / "asked", (0.0, 0.0))

    def prepare_slowly(*_: object, **__: object) -> FolderSource:
        let_time_pass()
        return FolderSource(tmp_path / "model")

    monkeypatch.setattr(serving, "read_plan", lambda: None)
    monkeypatch.setattr(serving, "exported_model", prepare_slowly)
    clock = SteppedClock(after_sleep=let_time_pass)
    assert serving.serve(state, None, merge=False, clock=clock) == 0
    assert len(clock.sleeps) == 1

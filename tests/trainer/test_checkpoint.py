"""Checkpoints on disk: fencing, completeness, damage, rotation, and a crash or a full disk at every
write.

These decide whether a run can lose work. The disk errors are real: a limit on file size set by the
kernel.
"""

import errno
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import pytest

from grpo_api.plan.plan import TrainingPlan
from grpo_api.spec.keyword_arguments import Overrides
from grpo_api.spec.rewards import RewardSpec
from grpo_api.spec.training import ImportanceSamplingSpec
from grpo_trainer.checkpoints import hashing, volume_checkpoints
from grpo_trainer.checkpoints.export import describe_export
from grpo_trainer.checkpoints.hashing import damage, digests, list_files, records, split_into_parts
from grpo_trainer.checkpoints.manifest import Manifest, identity, require_same_run
from grpo_trainer.checkpoints.volume_checkpoints import complete, read_manifest
from grpo_trainer.runtime.errors import BadInput, DiskFailed, Preempted
from grpo_trainer.runtime.paths import MANIFEST
from grpo_trainer.weights.model_files import Source
from tests.support.ranks import runs
from tests.support.ranks.checkpoint_plans import begin, choose, claim, commit, export_model, rotate

pytestmark = pytest.mark.realtime


def make_plan(folder: Path, attempt: int = 1, uid: str = "a", keep: int = 2) -> TrainingPlan:
    """A plan whose checkpoints are in `folder`."""
    plan = runs.plan(Path("/models/demo"), folder=folder)
    job = plan.job.model_copy(update={"attempt": attempt, "uid": uid})
    return plan.model_copy(
        update={"job": job, "checkpoint": plan.checkpoint.model_copy(update={"keep": keep})}
    )


def save(
    plan: TrainingPlan,
    step: int,
    run: dict[str, str] | None = None,
    weights: bytes = b"weights" * 100,
) -> Path:
    """A complete checkpoint of two files."""
    folder = (
        Path(plan.checkpoint_directory or "") / f"attempt-{plan.job.attempt}" / f"checkpoint-{step}"
    )
    (folder / "global_step").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "global_step" / "rank_0.pt").write_bytes(bytes([step]) * 50)
    sizes = list_files(folder)
    files = records(sizes, digests(folder, split_into_parts(sizes)))
    commit(
        plan, folder, Manifest(attempt=plan.job.attempt, step=step, identity=run or {}, files=files)
    )
    return folder


def test_newest_is_by_step_over_all_attempts(tmp_path: Path) -> None:
    first, second = make_plan(tmp_path), make_plan(tmp_path, attempt=2)
    claim(first)
    save(first, 20)
    claim(second)
    save(second, 5)
    assert [path.name for path in complete(tmp_path)] == ["checkpoint-20", "checkpoint-5"]


def test_a_folder_whose_owner_can_not_be_read_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "owner.json").write_bytes(b"")
    with pytest.raises(BadInput, match=r"owner\.json does not say whose the folder is"):
        claim(make_plan(tmp_path))


def test_an_owner_file_of_a_newer_image_fences_as_any(tmp_path: Path) -> None:
    owner = '{"uid": "a", "attempt": 2, "fieldOfANewerImage": 1}'
    (tmp_path / "owner.json").write_text(owner, encoding="utf-8")
    for attempt, uid, error in ((1, "a", Preempted), (3, "b", BadInput)):
        with pytest.raises(error, match=r"superseded by attempt 2|belongs to the job with uid a"):
            claim(make_plan(tmp_path, attempt=attempt, uid=uid))
    claim(make_plan(tmp_path, attempt=3))


@pytest.fixture
def unwritable() -> Iterator[Path]:
    """A folder that may be read only, since the test runs as a user who owns nothing."""
    with TemporaryDirectory() as folder:  # everybody may enter those above it, unlike tmp_path's
        Path(folder).chmod(0o755)
        os.seteuid(65534)
        try:
            yield Path(folder)
        finally:
            os.seteuid(0)


def test_a_folder_that_may_not_be_written_is_bad_input_at_once(unwritable: Path) -> None:
    with pytest.raises(
        BadInput,
        match=r"can't be written by user 65534 .*: Permission denied\. Make the volume of spec",
    ):
        claim(make_plan(unwritable))


def test_a_run_that_wrote_there_before_waits_for_its_permission(unwritable: Path) -> None:
    with pytest.raises(PermissionError):
        claim(make_plan(unwritable, attempt=2))


def test_superseded_attempt_can_neither_commit_nor_claim(tmp_path: Path) -> None:
    old = make_plan(tmp_path)
    claim(old)
    claim(make_plan(tmp_path, attempt=2))
    with pytest.raises(Preempted, match="superseded by attempt 2"):
        save(old, 10)
    assert complete(tmp_path) == []
    with pytest.raises(Preempted, match="superseded"):
        claim(old)


def test_another_job_is_rejected_with_both_uids(tmp_path: Path) -> None:
    claim(make_plan(tmp_path, uid="mine"))
    with pytest.raises(BadInput, match=r"uid mine, this one is yours.*subPath"):
        claim(make_plan(tmp_path, uid="yours"))


def test_a_checkpoint_loses_its_manifest_before_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(tmp_path)
    claim(plan)
    checkpoint = save(plan, 10)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # as if the process ended there
    volume_checkpoints.remove(checkpoint)
    assert sorted(list_files(checkpoint)) == ["global_step/rank_0.pt", "model.safetensors"]
    assert complete(tmp_path) == []


def test_an_export_is_durable_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    durable: set[str] = set()
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        durable.add(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    def write(folder: str) -> None:
        Path(folder, "tokenizer").mkdir(parents=True)
        Path(folder, "model.safetensors").write_bytes(b"w" * 9)
        Path(folder, "tokenizer", "vocabulary").write_text("a b")

    plan = make_plan(tmp_path, attempt=2)
    claim(plan)
    killed, newer = tmp_path / ".export-attempt-1", tmp_path / ".export-attempt-3"
    killed.mkdir()
    newer.mkdir()
    monkeypatch.setattr(os, "fsync", noted)
    exported = export_model(plan, Source("demo", tmp_path, "", "float32"), write)
    assert exported == tmp_path / "export"
    parts = ("", "/tokenizer", "/model.safetensors", "/tokenizer/vocabulary")
    assert {f"{tmp_path}/.export-attempt-2{part}" for part in parts} | {str(tmp_path)} <= durable
    assert not killed.exists()
    assert newer.exists()
    assert sorted(list_files(exported)) == [
        "SHA256SUMS",
        "model.safetensors",
        "tokenizer/vocabulary",
    ]
    checked = subprocess.run(
        ["sha256sum", "--check", "SHA256SUMS"], cwd=exported, capture_output=True, check=False
    )
    assert (checked.returncode, len(checked.stdout.splitlines())) == (0, 2)
    told = describe_export(exported)
    one_hash = subprocess.check_output(
        "sha256sum *.safetensors | sha256sum", shell=True, cwd=exported, text=True
    )
    assert told.weights_hash == f"sha256:{one_hash.split()[0]}"
    assert (told.format, told.bytes) == ("Model", sum(list_files(exported).values()))


@pytest.mark.parametrize("name", ["model.safetensors", "global_step/rank_0.pt"])
@pytest.mark.parametrize("fault", ["missing", "truncated", "flipped"])
def test_every_damage_is_named_and_the_checkpoint_before_is_chosen(
    tmp_path: Path, name: str, fault: str
) -> None:
    plan = make_plan(tmp_path)
    claim(plan)
    run = {"model.name": '"demo"'}
    good, bad = save(plan, 10, run), save(plan, 20, run)
    path = bad / name
    content = path.read_bytes()
    path.unlink()
    if fault != "missing":
        path.write_bytes(
            content[:-1] if fault == "truncated" else bytes([content[0] ^ 1]) + content[1:]
        )
    assert name in damage(bad, read_manifest(bad).files)[0]
    assert choose(plan, run) == good


def test_nothing_undamaged_left_is_rejected(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    claim(plan)
    (save(plan, 10) / "model.safetensors").unlink()
    (save(plan, 20) / MANIFEST).write_text("{")
    (save(plan, 30) / MANIFEST).write_bytes(b'{"attempt": \xff')
    with pytest.raises(
        BadInput, match=r"every checkpoint is damaged .*manifest.json.*model.safetensors is missing"
    ):
        choose(plan, {})


def test_checkpoints_that_a_volume_does_not_give_are_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(tmp_path)
    claim(plan)
    save(plan, 10)
    (save(plan, 20) / "model.safetensors").unlink()

    def away(*_: object) -> NoReturn:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(hashing, "_digest", away)
    monkeypatch.setattr(hashing, "READ_PAUSES", ())
    with pytest.raises(DiskFailed, match=r"no checkpoint can be read .*Stale file handle"):
        choose(plan, {})


@pytest.mark.parametrize(("failures", "step"), [(2, 20), (9, 10)])
def test_a_checkpoint_that_a_volume_does_not_give_for_a_moment_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int, step: int
) -> None:
    plan = make_plan(tmp_path)
    claim(plan)
    saved = {step: save(plan, step) for step in (10, 20)}
    left, read_bytes, digest = [failures, failures], Path.read_bytes, hashing._digest

    def give(kind: int, path: Path) -> None:
        if saved[20] in path.parents and left[kind]:
            left[kind] -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    def read(path: Path) -> bytes:
        give(0, path)
        return read_bytes(path)

    def hash_part(folder: Path, part: hashing.Part) -> str:
        give(1, folder / part.name)
        return digest(folder, part)

    for module in (hashing, volume_checkpoints):
        monkeypatch.setattr(module, "READ_PAUSES", (0.0, 0.0))
    monkeypatch.setattr(hashing, "_digest", hash_part)
    monkeypatch.setattr(Path, "read_bytes", read)
    assert choose(plan, {}) == saved[step]


def test_another_runs_checkpoint_is_rejected_with_every_difference(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    claim(plan)
    folder = save(plan, 10, identity(plan, "rows"))
    other = plan.model_copy(
        update={
            "model": plan.model.model_copy(update={"name": "/models/other"}),
            "execution": plan.execution.model_copy(update={"nodes": 4, "strategy": "Offload"}),
        }
    )
    with pytest.raises(BadInput) as rejected:
        require_same_run(folder, read_manifest(folder), identity(other, "other rows"))
    for part in (
        "model.name",
        "dataset: checkpoint",
        "plan.world_size: checkpoint 1, now 4",
        "plan.strategy",
    ):
        assert part in str(rejected.value)
    require_same_run(folder, read_manifest(folder), identity(plan, "rows"))


def test_a_checkpoint_of_an_image_without_a_setting_had_its_default(tmp_path: Path) -> None:
    """Otherwise no job could be resumed once the operator and its image have been upgraded."""
    plan = make_plan(tmp_path)
    claim(plan)
    older = identity(plan, "rows")
    del older["training.importanceSampling"]
    folder = save(plan, 10, older)
    require_same_run(folder, read_manifest(folder), identity(plan, "rows"))
    changed = plan.training.model_copy(
        update={"importance_sampling": ImportanceSamplingSpec(mode="truncate")}
    )
    other = plan.model_copy(update={"training": changed})
    with pytest.raises(BadInput, match=r"training.importanceSampling: checkpoint .*mask"):
        require_same_run(folder, read_manifest(folder), identity(other, "rows"))


def test_an_override_is_part_of_what_is_trained(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    claim(plan)
    older = identity(plan, "rows")
    assert not any("overrides" in path or "Kwargs" in path for path in older)
    folder = save(plan, 10, older)
    overrides = Overrides(router_aux_loss_coef=0.1)
    changed = plan.training.model_copy(update={"overrides": overrides})
    other = plan.model_copy(update={"training": changed})
    with pytest.raises(
        BadInput, match=r"training.overrides.router_aux_loss_coef: checkpoint unset, now 0.1"
    ):
        require_same_run(folder, read_manifest(folder), identity(other, "rows"))


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Writes beyond `size` bytes of a file fail, as on a full disk (setrlimit(2); Python ignores
    SIGXFSZ)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("section", "field", "value", "told"),
    [
        ("model", "chat_template", "{{ messages }}", "model.chatTemplate: checkpoint unset, now"),
        ("model", "chat_template_kwargs", {"a": 1}, r'model.chatTemplateKwargs: .*now {"a":1}'),
        ("generation", "stop", ["</a>"], r'generation.stop: checkpoint unset, now \["</a>"\]'),
        ("generation", "kwargs", {"min_tokens": 2}, "generation.kwargs: checkpoint unset"),
    ],
)
def test_what_makes_prompts_and_ends_completions_is_part_of_the_run_where_it_is_set(
    tmp_path: Path, section: str, field: str, value: Any, told: str
) -> None:
    plan = make_plan(tmp_path)
    claim(plan)
    folder = save(plan, 10, identity(plan, "rows"))
    assert not {"model.chatTemplate", "generation.stop"} & identity(plan, "rows").keys()
    part = getattr(plan, section).model_copy(update={field: value})
    other = plan.model_copy(update={section: part})
    with pytest.raises(BadInput, match=told):
        require_same_run(folder, read_manifest(folder), identity(other, "rows"))


def test_a_full_disk_at_any_write_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    claim(plan)
    good = save(plan, 10)
    manifest_bytes = (good / MANIFEST).stat().st_size
    for limit in (1, 49, 699, manifest_bytes // 2):
        with largest_file(limit), pytest.raises(OSError, match="File too large"):
            save(plan, 20, weights=b"w" * (700 if limit < 700 else 7))
        assert complete(tmp_path) == [good], limit
        assert choose(plan, {}) == good
        rotate(plan)
        assert not (tmp_path / "attempt-1" / "checkpoint-20").exists()


def test_a_service_that_moved_belongs_to_the_same_run_and_one_that_scores_otherwise_does_not(
    tmp_path: Path,
) -> None:
    def with_service(**http: object) -> TrainingPlan:
        reward = RewardSpec.model_validate({"http": {"url": "http://old.svc/score"} | http})
        return make_plan(tmp_path).model_copy(update={"rewards": [reward]})

    plan = with_service()
    claim(plan)
    folder = save(plan, 10, identity(plan, "rows"))
    token = {"name": "judge", "key": "token"}
    moved = with_service(
        url="https://new.svc", timeoutSeconds=7, batchTimeoutSeconds=9, tokenSecretRef=token
    )
    require_same_run(folder, read_manifest(folder), identity(moved, "rows"))
    with pytest.raises(BadInput, match="rewards: checkpoint"):
        require_same_run(folder, read_manifest(folder), identity(with_service(batchSize=7), "rows"))


def test_a_run_begins_with_another_ones_newest_checkpoint_until_it_has_its_own(
    tmp_path: Path,
) -> None:
    old = make_plan(tmp_path / "old")
    claim(old)
    run = identity(old, "rows")
    save(old, 10, run)
    newest = save(old, 20, run)
    plan = make_plan(tmp_path / "new", uid="b").model_copy(
        update={"resume_from": str(tmp_path / "old")}
    )
    claim(plan)
    assert choose(plan, run) == newest
    assert choose(plan.model_copy(update={"checkpoint_directory": None}), run) == newest
    (newest / "model.safetensors").unlink()
    assert choose(plan, run) == tmp_path / "old" / "attempt-1" / "checkpoint-10"
    one = plan.model_copy(
        update={"resume_from": str(tmp_path / "old" / "attempt-1" / "checkpoint-10")}
    )
    assert choose(one, run) == tmp_path / "old" / "attempt-1" / "checkpoint-10"
    own = save(plan, 5, run)
    assert choose(plan, run) == own


def test_a_folder_without_a_checkpoint_is_no_beginning(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "new").model_copy(update={"resume_from": str(tmp_path / "gone")})
    with pytest.raises(BadInput, match=r"spec.resumeFrom: .*gone has no complete checkpoint"):
        begin(plan, {})


def test_what_another_run_must_share_is_named_with_both_values(tmp_path: Path) -> None:
    old = make_plan(tmp_path / "old")
    claim(old)
    save(old, 10, identity(old, "rows"))
    plan = make_plan(tmp_path / "new").model_copy(update={"resume_from": str(tmp_path / "old")})
    longer = plan.model_copy(
        update={"training": plan.training.model_copy(update={"max_steps": 99})}
    )
    assert choose(longer, identity(longer, "rows")) is not None
    other = longer.model_copy(update={"training": longer.training.model_copy(update={"beta": 0.5})})
    with pytest.raises(
        BadInput, match=r"spec.resumeFrom: .* training.beta: checkpoint 0.04, now 0.5\. Set these"
    ):
        choose(other, identity(other, "rows"))
    with pytest.raises(BadInput, match="dataset: checkpoint"):
        choose(longer, identity(longer, "other rows"))

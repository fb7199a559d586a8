"""The whole trainer through its real entry point: two ranks train, one is killed, one is told to
stop, the run goes on.

What a pod must survive can't be seen in parts: kill -9, SIGTERM on one rank only, another pod
layout. One chain of attempts is compared, step by step and digit by digit, with a run that nothing
disturbed.
"""

import json
import re
import signal
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from grpo_api.plan.plan import TrainingPlan
from grpo_api.provenance.provenance import STATEMENT_FILE, Statement
from grpo_api.report.history import Row
from grpo_api.report.report import MAX_STEPS, STEP_STAGES, Outcome, Progress, Result
from grpo_api.report.training_metrics import OUTCOME_KEYS
from grpo_api.text.contract import SIGNING_KEY_ENV, TRACE_QUERY, TRACKERS_ENV
from grpo_cli.__main__ import main
from harness.controlplane import free_port
from tests.exported_model import KEYS, private, public
from tests.support.facts import history
from tests.support.ranks import demo_model
from tests.support.ranks.pods import Gang

pytestmark = pytest.mark.realtime

STEPS = 12
SAVE = 4
EXACT = ("reward", "kl", "loss", "grad_norm", "entropy", "learning_rate", "completion_length")


@dataclass(kw_only=True)
class Story:
    """What was seen of all attempts."""

    calm: dict[int, dict[str, Any]]
    """Steps of the undisturbed run."""
    progress: Progress
    metrics: str
    outcomes: dict[str, list[Outcome]]
    codes: dict[str, list[int]]
    resumed: dict[str, dict[int, dict[str, Any]]]
    """Steps by attempt of the disturbed run."""
    folder: Path


def make_plan(
    folder: Path, model: Path, attempt: int = 1, nodes: int = 2, *, is_tracked: bool = True
) -> TrainingPlan:
    """Two processes in `nodes` pods, rewards that a random model sometimes earns, and event files
    by the writer of tensorboardX.py."""
    return TrainingPlan.model_validate(
        {
            "job": {"namespace": "default", "name": "story", "uid": "1234", "attempt": attempt},
            "rendezvous": {"address": "127.0.0.1", "port": free_port()},
            "model": {"name": str(model), "parameters": "84K"},
            "dataset": {"files": {"volume": {"claimName": "data"}, "paths": ["problems.jsonl"]}},
            "rewards": [
                {"format": {"pattern": "[^0-9]*[0-9].*"}},
                {"name": "tall", "format": {"pattern": ".*[bdfhkl].*"}},
            ],
            "training": {
                "learningRate": 1e-3,
                "numGenerations": 4,
                "promptsPerStep": 4,
                "maxSteps": STEPS,
            }
            | {"maxCompletionLength": 6, "warmupRatio": 0.25},
            "reference": {"sync": {"everySteps": 3}},
            "adapter": {},
            "checkpoint": {"keep": 2},
            "guard": {"hangTimeoutSeconds": 300, "rendezvousTimeoutSeconds": 300},
            "export": {
                "to": "Volume",
                "signingKeySecretRef": {"name": "signing", "key": "key.pem"},
            },
            "tracking": {"tensorboard": {}} if is_tracked else {},
            # A checkpoint at SIGTERM is taken to last three steps, and a step of this story lasts
            # as long as its tracker takes to open.
            "gracePeriodSeconds": 3600,
            "checkpointDirectory": str(folder),
            "execution": {
                "strategy": "Clone",
                "method": "Full",
                "accelerator": "CPU",
                "nodes": nodes,
                "processesPerNode": 2 // nodes,
                "microBatch": 4,
                "gradientAccumulation": 2,
                "stepsPerGeneration": 4,
                "generationSubBatch": 8,
                "dtype": "float32",
                "saveEverySteps": SAVE,
                "linkBytesPerSecond": 1_000_000,
            },
        }
    )


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """An undisturbed run; then kill -9, SIGTERM to one rank, and the end in one pod of two
    processes."""
    folder = tmp_path_factory.mktemp("story")
    model = demo_model.save_policy(folder / "model")
    rows = [{"prompt": f"say {number % 10}"} for number in range(64)] + [{"prompt": "x" * 600}]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    outcomes, codes, resumed = {}, {}, {}
    signing = {
        SIGNING_KEY_ENV: str(private(folder / "signing.pem", KEYS["Ed25519"])),
        TRACKERS_ENV: str(Path(__file__).parent),
    }
    calm_plan = make_plan(folder / "calm", model, is_tracked=False)
    with Gang(calm_plan, folder, folder / "pods-calm", environment=signing) as gang:
        gang.until(lambda: STEPS - 2 in gang.steps())
        metrics, progress = gang.get("/metrics"), gang.progress(f"?{TRACE_QUERY}=1")
        codes["calm"], calm, outcomes["calm"] = (
            gang.wait(),
            gang.steps(),
            [gang.outcome(0), gang.outcome(1)],
        )
    saved = folder / "runs" / "attempt-1" / f"checkpoint-{SAVE}" / "manifest.json"
    with Gang(
        make_plan(folder / "runs", model), folder, folder / "pods-1", environment=signing
    ) as gang:
        gang.until(lambda: saved.exists() and SAVE + 1 in gang.steps())
        gang.pods[1].kill()
        codes["killed"], resumed["killed"], outcomes["killed"] = (
            gang.wait(),
            gang.steps(),
            [gang.outcome(0)],
        )
    with Gang(
        make_plan(folder / "runs", model, attempt=2),
        folder,
        folder / "pods-2",
        traced=True,
        environment=signing,
    ) as gang:
        gang.until(lambda: any(step > SAVE for step in gang.steps()))
        # Rank 0 waits for this rank until its tracker has opened: the rows of a run that ends
        # earlier may be lost.
        gang.pods[1].send_signal(signal.SIGSTOP)
        gang.until(lambda: any(tracker.run_id for tracker in gang.progress().trackers))
        gang.pods[1].send_signal(signal.SIGTERM)
        gang.pods[1].send_signal(signal.SIGCONT)
        codes["stopped"], resumed["stopped"] = gang.wait(), gang.steps()
        outcomes["stopped"] = [gang.outcome(0), gang.outcome(1)]
    last = make_plan(folder / "runs", model, attempt=3, nodes=1)
    with Gang(
        last, folder, folder / "pods-3", fresh=True, traced=True, environment=signing
    ) as gang:
        codes["last"], resumed["last"], outcomes["last"] = (
            gang.wait(),
            gang.steps(),
            [gang.outcome(0)],
        )
    return Story(
        calm=calm,
        progress=progress,
        metrics=metrics,
        outcomes=outcomes,
        codes=codes,
        resumed=resumed,
        folder=folder,
    )


def test_the_killed_and_stopped_run_has_the_undisturbed_ones_history(story: Story) -> None:
    def alike(rows: list[Row]) -> list[Row]:
        """Without the checkpoint that SIGTERM made."""
        same = [history.without_clocks(row) for row in rows]
        return [{key: row[key] for key in row if key != "checkpoint_step"} for row in same]

    folder = story.folder
    calm_rows, calm_samples = history.of_folder(folder / "calm/export")
    rows, samples = history.of_folder(folder / "runs/export")
    assert alike(rows) == alike(calm_rows)
    assert alike(samples) == alike(calm_samples)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert {row["attempt"] for row in rows} == {1, 2, 3}
    assert len(samples[0]["groups"]) == 2


def test_undisturbed_run_succeeds(story: Story) -> None:
    assert story.codes["calm"] == [0, 0]
    assert [(outcome.result, outcome.step) for outcome in story.outcomes["calm"]] == [
        (Result.SUCCEEDED, STEPS)
    ] * 2
    assert all(
        one.message.endswith("; 1 of 65 prompts were dropped as too long")
        for one in story.outcomes["calm"]
    )
    assert sorted(story.calm) == list(range(1, STEPS + 1))


def test_killed_rank_ends_the_gang_with_the_lost_peer_named(story: Story) -> None:
    code, killed = story.codes["killed"]
    assert (code, killed) == (1, -signal.SIGKILL)
    assert story.outcomes["killed"][0].result is Result.ERROR
    assert "lost the connection to another rank" in story.outcomes["killed"][0].message


def test_sigterm_on_one_rank_stops_all_after_the_same_step(story: Story) -> None:
    assert story.codes["stopped"] == [143, 143]
    first, second = story.outcomes["stopped"]
    assert (first.result, second.result) == (Result.PREEMPTED, Result.PREEMPTED)
    assert first.step == second.step
    assert "a checkpoint was saved" in first.message


def test_every_attempt_goes_on_in_the_same_run_of_its_tracker_and_ends_it(story: Story) -> None:
    rows = [
        json.loads(line)
        for line in (story.folder / "runs/tensorboard/rows").read_text().splitlines()
    ]
    stopped = story.outcomes["stopped"][0].step
    assert [row["purge"] for row in rows if "purge" in row] == [1, SAVE + 1, stopped + 1]
    assert [row for row in rows if "closed" in row] == [{"closed": True}] * 3
    losses = {row["step"]: row["value"] for row in rows if row.get("name") == "train/loss"}
    assert losses == {step: row["loss"] for step, row in story.calm.items()}


def test_every_step_of_every_attempt_has_the_undisturbed_numbers(story: Story) -> None:
    seen: set[int] = set()
    for steps in story.resumed.values():
        for step, values in steps.items():
            assert {key: values.get(key) for key in EXACT} == {
                key: story.calm[step].get(key) for key in EXACT
            }, step
            seen.add(step)
    assert seen == set(range(1, STEPS + 1))
    assert min(story.resumed["stopped"]) == SAVE + 1
    assert min(story.resumed["last"]) == story.outcomes["stopped"][0].step + 1


def test_two_processes_in_one_pod_finish_with_one_outcome(story: Story) -> None:
    assert story.codes["last"] == [0]
    assert story.outcomes["last"][0].result is Result.SUCCEEDED


def test_only_the_newest_checkpoints_are_kept_and_owned(story: Story) -> None:
    manifests = sorted(
        path.parent.name for path in (story.folder / "runs").glob("attempt-*/*/manifest.json")
    )
    assert len(manifests) == 2
    assert f"checkpoint-{STEPS}" in manifests
    assert json.loads((story.folder / "runs" / "owner.json").read_text()) == {
        "uid": "1234",
        "attempt": 3,
    }


def test_the_export_is_a_plain_model(story: Story) -> None:
    calm = AutoModelForCausalLM.from_pretrained(story.folder / "calm" / "export").state_dict()
    resumed = AutoModelForCausalLM.from_pretrained(story.folder / "runs" / "export").state_dict()
    assert all(bool((calm[name] == resumed[name]).all()) for name in calm)


def test_the_export_is_signed_and_says_what_it_was_made_of(story: Story) -> None:
    """Attempt 1 was killed on one rank, 2 was told to stop, 3 went on from a checkpoint to the
    end."""
    key = public(story.folder / "public.pem", KEYS["Ed25519"])
    exports = [story.folder / name / "export" for name in ("calm", "runs")]
    assert [main(["verify", str(export), "--key", str(key)]) for export in exports] == [0, 0]
    calm, resumed = (
        Statement.model_validate_json((export / STATEMENT_FILE).read_text()) for export in exports
    )
    run = resumed.predicate.run_details.grpo_run
    assert [[(end.result, end.ranks) for end in attempt.ends] for attempt in run.attempts] == [
        [("Error", 1)],
        [("Preempted", 2)],
        [],
    ]
    assert run.attempts[2].resumed_from_step == int(min(story.resumed["last"])) - 1
    assert (run.steps, run.reference.syncs, run.reference.last_sync_step) == (
        STEPS,
        STEPS // 3,
        STEPS,
    )
    weights = [
        [one.digest for one in made.subject if one.name == "model.safetensors"]
        for made in (calm, resumed)
    ]
    assert weights[0] == weights[1]
    (rows,) = (
        one
        for one in resumed.predicate.build_definition.resolved_dependencies
        if one.name == "rows"
    )
    assert rows in calm.predicate.build_definition.resolved_dependencies


def test_outcomes_are_durable(story: Story) -> None:
    for attempt, result in ((2, Result.PREEMPTED), (3, Result.SUCCEEDED)):
        for rank in (0, 1):
            path = story.folder / "runs" / f"attempt-{attempt}" / f"outcome-rank-{rank}.json"
            assert Outcome.model_validate_json(path.read_text()).result is result


def test_outcomes_carry_the_last_step_s_numbers_however_the_process_ended(story: Story) -> None:
    for name, steps in {"calm": story.calm, **story.resumed}.items():
        told = max(steps)
        # A rank may lose its peer between the end of a step and the line about it.
        ends = (told, told + 1) if name == "killed" else (told,)
        for outcome in story.outcomes[name]:
            assert outcome.step in ends
            assert outcome.total_steps == STEPS
            last = {key: value for key, value in steps[told].items() if key in OUTCOME_KEYS}
            assert {"kl", "loss", "grad_norm"} <= last.keys()
            assert last.items() <= outcome.metrics.items()


def test_steps_are_told_with_what_each_spent_its_time_on(story: Story) -> None:
    told = story.progress.steps
    assert [one.step for one in told] == [
        1,
        *range(told[-1].step - MAX_STEPS + 1, told[-1].step + 1),
    ]
    assert told[-1].step in (story.progress.step - 1, story.progress.step)
    assert all(before.ended == after.began for before, after in pairwise(told[1:]))
    for one in told:
        assert one.ended.training > one.began.training
        assert (one.ended.generating > one.began.generating) == (one.step % 2 == 1), (
            "four batches for two steps"
        )
        assert (one.ended.saving > one.began.saving) == (one.step % SAVE == 0)
        assert (one.began.loading, one.began.proving) == (one.ended.loading, one.ended.proving)


def test_progress_shows_the_live_run(story: Story) -> None:
    progress = story.progress
    assert progress.stage in (*STEP_STAGES, "Saving", "Exporting")
    assert progress.step >= STEPS - 2
    assert progress.total_steps == STEPS
    assert {
        "kl",
        "reward",
        "loss",
        "grad_norm",
        "reward_by_function/tall",
        "straggler_ratio",
    } <= progress.metrics.keys()
    assert {"imports", "rendezvous", "load", "proof", "total"} <= progress.startup_seconds.keys()
    assert progress.metrics["allreduce_bytes_per_second"] > 0
    assert not progress.rdma_problem
    assert progress.memory["host"] > 0
    assert progress.architecture is not None
    assert progress.architecture.model_type == demo_model.config().model_type
    assert progress.architecture.layers == demo_model.config().num_hidden_layers
    assert progress.seconds_per_step is not None


def test_metrics_are_prometheus_text_without_what_was_not_logged(story: Story) -> None:
    assert f"grpo_training_total_steps {float(STEPS)}" in story.metrics
    assert 'grpo_training_phase_seconds_total{step_phase="generate"}' in story.metrics
    count = re.search(r"^grpo_training_step_seconds_count (\S+)$", story.metrics, re.MULTILINE)
    assert count
    # of the two pages this one was asked for first
    assert STEPS - 2 <= float(count[1]) <= story.progress.step
    assert 'grpo_training_rewards_total{reward="tall"}' in story.metrics
    assert "grpo_training_groups_total{signal=" in story.metrics
    assert 'grpo_training_reward_failures_total{reward="tall"} 0.0' in story.metrics
    assert "grpo_training_tokens_total " in story.metrics
    assert "grpo_training_nonfinite_steps_total 0.0" in story.metrics
    assert 'grpo_training_reward_unscored_ratio{reward="tall"} 0.0' in story.metrics
    assert "grpo_training_checkpoint_timestamp_seconds " in story.metrics
    assert "grpo_training_completions_total " in story.metrics
    assert "grpo_training_eta_seconds " in story.metrics
    assert "process_resident_memory_bytes " in story.metrics
    assert "grpo_training_allreduce_bytes_per_second " in story.metrics
    assert "grpo_training_allreduce_assumed_bytes_per_second 1e+06" in story.metrics
    assert 'grpo_training_memory_bytes{step_phase="generate"}' not in story.metrics, (
        "no device, no device memory"
    )


def test_no_worker_is_left(story: Story) -> None:
    marker = str(story.folder).encode()
    environments = (path / "environ" for path in Path("/proc").iterdir() if path.name.isdecimal())
    assert not [path for path in environments if marker in _read(path)]


def _read(path: Path) -> bytes:
    """Environment of a process; empty for one that has just ended, or isn't ours to read."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""

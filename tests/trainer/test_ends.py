"""Ends that others bring about: peers that never come, a worker killed from outside, a volume or
disk that fails.

Here the message is all that a user gets, so it must name what was missing and for how long.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from errno import EBUSY, ESTALE
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from grpo_api.plan.plan import ExecutionPlan, Rendezvous, TrainingPlan
from grpo_api.report.report import EXIT_CODES, Outcome, Result
from grpo_api.spec.generation import EnginePlan
from grpo_api.spec.run_policy import GuardSpec
from grpo_api.text.contract import INDEX_ENV, PLAN_ENV, PROGRESS_BIND_ENV, TERMINATION_LOG_ENV
from grpo_trainer import __main__ as training
from grpo_trainer import prefetch
from grpo_trainer.checkpoints import volume_checkpoints
from grpo_trainer.engine_pod import __main__ as engine_pod
from grpo_trainer.evaluation import __main__ as evaluation
from grpo_trainer.gang import rendezvous
from grpo_trainer.gang.interfaces import NCCL_INTERFACE
from grpo_trainer.gang.placement import Placement
from grpo_trainer.process import outcome as outcomes
from grpo_trainer.process import supervisor, watchdog
from grpo_trainer.process.outcome import ProcessEnd, keep_outcome, kept_outcomes
from grpo_trainer.process.recorder import Recorder
from grpo_trainer.runtime.durable_files import write_atomically
from grpo_trainer.runtime.errors import BadInput, RendezvousTimeout
from grpo_trainer.runtime.first_sigterm import end_on_sigterm
from harness.controlplane import free_port
from harness.programs.patience import run_to_end, wait_for_event, wait_for_exit
from tests.support.ranks import runs
from tests.support.ranks.checkpoint_plans import claim_folder
from tests.support.ranks.fork_servers import ISOLATED
from tests.support.ranks.launch import UNCHECKED, launch, tracer
from tests.support.ranks.pods import Gang

pytestmark = pytest.mark.realtime

PLAN = runs.plan(Path("/models/demo"))
MAIN, OTHER = Placement(0, 0, 1, 2), Placement(1, 0, 1, 2)


def impatient(port: int) -> tuple[Rendezvous, GuardSpec, ExecutionPlan]:
    """What a rank meets the others by that waits for nobody."""
    guard = PLAN.guard.model_copy(update={"rendezvous_timeout_seconds": 0})
    return PLAN.rendezvous.model_copy(update={"port": port}), guard, PLAN.execution


def test_a_rank_without_rank_0_says_where_it_looked() -> None:
    port = free_port()
    with pytest.raises(
        RendezvousTimeout, match=rf"rank 0 at 127\.0\.0\.1:{port} did not answer within"
    ):
        rendezvous.join_gang(*impatient(port), OTHER)


def test_a_rank_that_reaches_rank_0_only_once_says_so() -> None:
    meeting = PLAN.rendezvous.model_copy(update={"port": free_port()})
    with pytest.raises(RendezvousTimeout, match=r"rank 1 reached rank 0 .*, but not a second time"):
        rendezvous._choose_routed_interface(meeting, OTHER, gpu=False)


def test_rank_0_names_the_ranks_that_did_not_come() -> None:
    with pytest.raises(RendezvousTimeout, match=r"1 of 2 ranks came in time; missing: 1\."):
        rendezvous.join_gang(*impatient(free_port()), MAIN)


@pytest.mark.parametrize("kind", ["Servers", "Colocated"])
def test_a_pod_alone_takes_its_engines_interface_before_nccl_starts(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[str | None] = []

    def start_nccl(*_: object) -> None:
        chosen.append(os.environ.get(NCCL_INTERFACE))

    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(rendezvous, "_form_group", start_nccl)
    meeting, guard, execution = impatient(free_port())
    engine = EnginePlan.model_validate(
        {"kind": kind, "memoryShare": 0.1, "maxModelLength": 64, "maxSequences": 4}
    )
    execution = execution.model_copy(update={"accelerator": "GPU", "engine": engine})
    rendezvous.join_gang(meeting, guard, execution, Placement(0, 0, 1, 1))
    assert chosen == ["=lo" if kind == "Servers" else None]


def test_memory_that_can_not_be_locked_is_no_lack_of_gpu_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What torch raises of NCCL on a node with a limit; no GPU is here to raise it."""
    words = "ncclSystemError. Last error:\nCall to ibv_reg_mr failed with error "

    def refused(*_: object, **__: object) -> None:
        raise RuntimeError(f"{words}Cannot allocate memory")

    monkeypatch.setattr(dist, "init_process_group", refused)
    alone = Placement(0, 0, 1, 1)
    with pytest.raises(RendezvousTimeout, match=r"Cannot allocate memory.* set LimitMEMLOCK"):
        rendezvous.join_gang(*impatient(free_port()), alone)


def test_a_group_that_a_library_makes_waits_as_long_as_the_gang_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """DeepSpeed and vLLM give theirs no time, and torch's own ends a rank after half an hour."""
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        monkeypatch.setattr(distributed_c10d, name, getattr(distributed_c10d, name))
    rendezvous.join_gang(*impatient(free_port()), Placement(0, 0, 1, 1))
    try:
        group: Any = dist.new_group([0])
        timeout = group._get_backend(torch.device("cpu")).options._timeout
    finally:
        dist.destroy_process_group()
    assert timeout == rendezvous.COLLECTIVE_TIMEOUT


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            RendezvousTimeout, match=rf"the store at 127\.0\.0\.1:{port} can't be opened"
        ):
            rendezvous.join_gang(*impatient(port), MAIN)


def test_a_volume_that_shows_nothing_of_rank_0_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        volume_checkpoints, "claim", lambda *_: None
    )  # as if rank 0 wrote to another node's disk
    with pytest.raises(BadInput, match=r"owner\.json, just written by rank 0, can't be seen"):
        claim_folder(runs.plan(Path("/models/demo"), folder=tmp_path))


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    with pytest.raises(OSError, match="kept"):
        write_atomically(tmp_path / "kept", "text")
    assert [path.name for path in tmp_path.rglob("*")] == ["kept", "file"]


# Runs at the start of every process of the pod: the supervisor's, which has no LOCAL_RANK, and the
# workers'.
START = """
import os, pathlib, re, signal, time
from grpo_trainer.process import supervisor
counter = pathlib.Path(__file__).with_name("memory.events")
supervisor.CGROUP_EVENTS = counter
if os.environ.get("LOCAL_RANK") == "1":
    {act}
"""
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
OUT_OF_MEMORY = f'counter.write_text("oom 1\\noom_kill 1\\n"); {KILLED}'
STOPPED = """
    status = pathlib.Path(f"/proc/{os.getppid()}/status")
    while not int(re.search("SigCgt:\\s+(\\w+)", status.read_text())[1], 16) >> signal.SIGTERM - 1 & 1:
        time.sleep(0.01)  # until the supervisor listens
    os.kill(os.getppid(), signal.SIGTERM)
    signal.pause()
"""  # noqa: E501


def on_its_own_port(plan: TrainingPlan) -> TrainingPlan:
    """The plan for pods on this machine, where other tests' pods meet, too."""
    rendezvous_here = plan.rendezvous.model_copy(update={"port": free_port()})
    return plan.model_copy(update={"rendezvous": rendezvous_here})


@pytest.mark.parametrize(
    ("act", "result", "says"),
    [
        (KILLED, Result.ERROR, "rank 1 was ended by SIGKILL without an outcome"),
        (OUT_OF_MEMORY, Result.OUT_OF_MEMORY, "rank 1 was ended by the kernel's OOM killer"),
        (STOPPED, Result.PREEMPTED, "SIGTERM"),
    ],
    ids=["killed", "out of memory", "stopped"],
)
def test_workers_that_die_without_words_get_an_outcome(
    tmp_path: Path, act: str, result: Result, says: str
) -> None:
    execution = PLAN.execution.model_copy(update={"processes_per_node": 2})
    plan = on_its_own_port(PLAN.model_copy(update={"execution": execution}))
    (tmp_path / "plan.json").write_text(plan.model_dump_json())
    (tmp_path / "sitecustomize.py").write_text(UNCHECKED + START.format(act=act))
    (tmp_path / "memory.events").write_text("oom 0\noom_kill 0\n")
    environment = ISOLATED | {
        PLAN_ENV: str(tmp_path / "plan.json"),
        TERMINATION_LOG_ENV: str(tmp_path / "end"),
    }
    environment |= tracer() | {"PYTHONPATH": f"{tmp_path}:{ISOLATED['PYTHONPATH']}"}
    environment[PROGRESS_BIND_ENV] = f"127.0.0.1:{free_port()}"
    ended = run_to_end([sys.executable, "-m", "grpo_trainer"], 120, env=environment)
    outcome = Outcome.model_validate_json((tmp_path / "end").read_text())
    assert (outcome.result, ended.returncode) == (result, EXIT_CODES[result])
    assert says in outcome.message


def alone(folder: Path, attempt: int = 1, **execution: int) -> TrainingPlan:
    """A plan that can be given to pods, with a port of its own."""
    plan = on_its_own_port(runs.plan(Path("/models/demo"), folder=folder, execution=execution))
    job = plan.job.model_copy(update={"attempt": attempt})
    return plan.model_copy(update={"job": job})


def test_sigterm_ends_a_rank_at_once_from_its_first_moment_on(tmp_path: Path) -> None:
    environment = {
        PLAN_ENV: str(tmp_path / "plan.json"),
        INDEX_ENV: "1",
        TERMINATION_LOG_ENV: str(tmp_path / "end"),
    }
    (tmp_path / "plan.json").write_text(alone(tmp_path / "runs", nodes=2).model_dump_json())
    pod = launch("grpo_trainer", [], environment, tmp_path / "log", fresh=True, traced=True)
    try:
        while not listens_for(pod.pid, signal.SIGTERM):
            assert pod.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.01)
        pod.send_signal(signal.SIGTERM)
        assert wait_for_exit(pod, 120) == EXIT_CODES[Result.PREEMPTED]
    finally:
        pod.kill()
    outcome = Outcome.model_validate_json((tmp_path / "end").read_text())
    assert outcome.result is Result.PREEMPTED
    assert "SIGTERM during stage Starting" in outcome.message, "before torch is imported"


@pytest.mark.usefixtures("own_signals")
def test_sigterm_while_a_supervisor_starts_its_processes_reaches_each_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TERMINATION_LOG_ENV, str(tmp_path / "end"))

    def start(_place: Placement, local_rank: int, folder: Path) -> supervisor.Worker:
        if local_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        process = subprocess.Popen(["sleep", "600"])
        return supervisor.Worker(local_rank, process, folder / "outcome", folder / "stacks")

    monkeypatch.setattr(supervisor, "_start", start)
    code = supervisor.supervise(
        PLAN, Placement(node=0, local_rank=0, processes_per_node=3, nodes=1)
    )
    outcome = Outcome.model_validate_json((tmp_path / "end").read_text())
    assert (outcome.result, code) == (Result.PREEMPTED, EXIT_CODES[Result.PREEMPTED])


@pytest.mark.usefixtures("own_signals")
def test_a_folder_that_can_not_be_removed_changes_no_end_of_a_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TERMINATION_LOG_ENV, str(tmp_path / "end"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def start(_place: Placement, local_rank: int, folder: Path) -> supervisor.Worker:
        outcome, process = folder / f"outcome-{local_rank}", subprocess.Popen(["true"])
        outcome.write_text(Outcome(result=Result.SUCCEEDED, rank=local_rank).model_dump_json())
        return supervisor.Worker(local_rank, process, outcome, folder / "stacks")

    def is_busy(path: str, **_: object) -> None:
        raise OSError(EBUSY, os.strerror(EBUSY), path)

    monkeypatch.setattr(supervisor, "_start", start)
    monkeypatch.setattr(os, "rmdir", is_busy)
    place = Placement(node=0, local_rank=0, processes_per_node=2, nodes=1)
    code = supervisor.supervise(PLAN, place)
    assert code == EXIT_CODES[Result.SUCCEEDED]
    assert Outcome.model_validate_json((tmp_path / "end").read_text()).result is Result.SUCCEEDED


def listens_for(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    caught = re.search(r"SigCgt:\s+(\w+)", Path(f"/proc/{pid}/status").read_text())
    return caught is not None and bool(int(caught[1], 16) >> number - 1 & 1)


def test_an_attempt_after_the_one_that_finished_only_says_so(tmp_path: Path) -> None:
    first, second = (alone(tmp_path / "runs", attempt) for attempt in (1, 2))
    (tmp_path / "runs" / "attempt-1").mkdir(parents=True)
    end = Outcome(
        result=Result.SUCCEEDED, step=6, total_steps=6, attempt=1, message="trained 6 steps"
    )
    keep_outcome(first, end)
    with Gang(second, tmp_path, tmp_path / "pod", traced=True) as gang:
        assert gang.wait() == [0]
        outcome = gang.outcome()
    assert (outcome.result, outcome.step, outcome.attempt) == (Result.SUCCEEDED, 6, 2)
    assert outcome.message == "attempt 1 had finished already: trained 6 steps"


def test_a_success_stays_one_when_sigterm_comes_while_its_trackers_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = tmp_path / "run" / "attempt-1"
    attempt.mkdir(parents=True)
    monkeypatch.setenv(TERMINATION_LOG_ENV, str(tmp_path / "end"))
    monkeypatch.setattr("os._exit", sys.exit)
    success, preempted = (
        Outcome(result=result, attempt=1) for result in (Result.SUCCEEDED, Result.PREEMPTED)
    )
    results: list[Result] = []

    def end_tracking(result: Result) -> None:
        results.append(result)
        if len(results) == 1:
            end.abort(preempted, "")

    end = ProcessEnd(runs.plan(Path("/models/demo"), folder=tmp_path / "run"), end_tracking)
    with pytest.raises(SystemExit) as code:
        end.finish(success)
    assert (code.value.code, results) == (0, [Result.SUCCEEDED] * 2)
    assert Outcome.model_validate_json((tmp_path / "end").read_text()) == success
    assert kept_outcomes(attempt) == [success]


@pytest.mark.parametrize("result", list(Result))
@pytest.mark.parametrize("failing", ["stat", "open"])
def test_a_volume_that_fails_at_the_end_changes_neither_the_outcome_nor_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, result: Result
) -> None:
    attempt = tmp_path / "run" / "attempt-1"
    attempt.mkdir(parents=True)
    monkeypatch.setenv(TERMINATION_LOG_ENV, str(tmp_path / "end"))
    call = getattr(Path, failing)

    def fail_on_volume(path: Path, *arguments: Any, **options: Any) -> Any:
        if attempt in (path, path.parent):
            raise OSError(ESTALE, "Stale file handle")
        return call(path, *arguments, **options)

    monkeypatch.setattr(Path, failing, fail_on_volume)
    results: list[Result] = []
    end = ProcessEnd(runs.plan(Path("/models/demo"), folder=tmp_path / "run"), results.append)
    outcome = Outcome(result=result, attempt=1)
    assert (end.finish(outcome), results) == (EXIT_CODES[result], [result])
    assert Outcome.model_validate_json((tmp_path / "end").read_bytes()) == outcome


def test_a_volume_that_hangs_holds_no_process_that_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, hung = threading.Event(), list[bool]()
    monkeypatch.setenv(TERMINATION_LOG_ENV, str(tmp_path / "end"))
    monkeypatch.setattr(outcomes, "KEEP_SECONDS", 0.01)
    monkeypatch.setattr(outcomes, "keep_outcome", lambda *_: hung.append(answers.wait(20)))
    end = ProcessEnd(PLAN, lambda _: None)
    assert end.finish(Outcome(result=Result.REWARD_ERROR)) == EXIT_CODES[Result.REWARD_ERROR]
    answers.set()
    assert hung in ([], [True]), "its peers would wait for it as long as for a hang"


@pytest.fixture
def own_signals() -> Iterator[None]:
    """Puts back what a watchdog takes for itself."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)
    signal.set_wakeup_fd(-1)


@pytest.mark.usefixtures("own_signals")
def test_sigterm_while_loading_ends_the_process_at_once() -> None:
    ends: list[Outcome] = []
    ended = threading.Event()

    def end(outcome: Outcome, _stacks: str) -> None:
        ends.append(outcome)
        ended.set()
        threading.Event().wait()  # os._exit doesn't return either

    recorder = Recorder(PLAN.job.attempt, Placement(0, 0, 1, 1), 0.0)
    recorder.enter_stage("Loading")
    watchdog.Watchdog(PLAN.guard, PLAN.execution, PLAN.grace_period_seconds, recorder, end).start()
    os.kill(os.getpid(), signal.SIGTERM)
    assert wait_for_event(ended, 60)
    assert [(outcome.result, "during stage Loading" in outcome.message) for outcome in ends] == [
        (Result.PREEMPTED, True)
    ]


@pytest.mark.usefixtures("own_signals")
def test_a_peer_that_is_lost_after_sigterm_is_a_preemption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(plan: TrainingPlan, _: Placement, recorder: Recorder, *_others: object) -> None:
        def end(*_: object) -> None:
            threading.Event().wait()  # os._exit doesn't return either

        recorder.enter_stage("Training")
        watchdog.Watchdog(plan.guard, plan.execution, 0.0, recorder, end).start()
        signal.raise_signal(signal.SIGTERM)
        raise RuntimeError("Connection closed by peer [10.0.0.1]:1")

    monkeypatch.setenv(TERMINATION_LOG_ENV, str(tmp_path / "end"))
    monkeypatch.setattr(training, "hide_unused_libraries", lambda _: None)
    worker = SimpleNamespace(train=train)
    monkeypatch.setitem(sys.modules, "grpo_trainer.training.worker", worker)
    code = training.run_worker(PLAN, Placement(0, 0, 1, 2), 0.0)
    assert code == EXIT_CODES[Result.PREEMPTED]
    outcome = Outcome.model_validate_json((tmp_path / "end").read_bytes())
    assert outcome.message.startswith("Training: lost the connection to another rank")


def fail_in_worker() -> int:
    """A rank's code, which here fails before its watchdog listens for SIGTERM."""
    return training.run_worker(PLAN, Placement(0, 0, 1, 1), 0.0)


@pytest.mark.usefixtures("own_signals")
@pytest.mark.parametrize(
    ("module", "run", "result"),
    [
        (training, training.main, Result.BAD_INPUT),
        (training, fail_in_worker, Result.ERROR),
        (engine_pod, engine_pod.main, Result.BAD_INPUT),
        (evaluation, lambda: evaluation.main([]), Result.BAD_INPUT),
        (prefetch, prefetch.main, Result.BAD_INPUT),
    ],
    ids=["plan", "worker", "engine", "evaluation", "prefetch"],
)
def test_sigterm_after_an_outcome_was_announced_changes_nothing_of_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    run: Callable[[], int],
    result: Result,
) -> None:
    write, end = outcomes.write_termination_message, tmp_path / "end"

    def write_and_get_sigterm(text: str) -> None:
        write(text)
        handler = signal.getsignal(signal.SIGTERM)
        if callable(handler):
            handler(signal.SIGTERM, None)

    monkeypatch.setenv(TERMINATION_LOG_ENV, str(end))
    monkeypatch.setenv(PLAN_ENV, str(tmp_path / "no plan"))
    monkeypatch.setattr("os._exit", sys.exit)
    monkeypatch.setattr(module, "exit_process", sys.exit, raising=False)
    monkeypatch.setattr(module, "configure_logs", lambda *_, **__: None)
    monkeypatch.setattr(training, "hide_unused_libraries", lambda _: 1 / 0)
    monkeypatch.setattr(outcomes, "write_termination_message", write_and_get_sigterm)
    end_on_sigterm()
    assert run() == EXIT_CODES[result]
    assert Outcome.model_validate_json(end.read_bytes()).result is result


@pytest.mark.usefixtures("own_signals")
def test_sigterm_before_a_supervised_rank_listens_is_told_with_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = alone(tmp_path, attempt=4, nodes=2, processesPerNode=2)
    (tmp_path / "plan.json").write_text(plan.model_dump_json())
    environment = {INDEX_ENV: "1", "LOCAL_RANK": "1", TERMINATION_LOG_ENV: str(tmp_path / "end")}
    environment[PLAN_ENV] = str(tmp_path / "plan.json")
    monkeypatch.setattr("os.environ", environment)
    monkeypatch.setattr("os._exit", sys.exit)
    monkeypatch.setattr(training, "configure_logs", lambda *_, **__: None)
    monkeypatch.setattr(training, "run_worker", lambda *_: signal.raise_signal(signal.SIGTERM))
    end_on_sigterm()
    with pytest.raises(SystemExit):
        training.main()
    outcome = Outcome.model_validate_json((tmp_path / "end").read_bytes())
    assert (outcome.attempt, outcome.rank) == (4, 3)

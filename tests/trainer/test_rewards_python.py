"""The `python` reward in its own process: what a user's function may do without harming the run.

This is code nobody here has seen: it hangs, crashes, prints, forks and returns nonsense.
"""

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_api.spec.rewards import PythonReward
from grpo_trainer.rewards.python_function import (
    AsyncPythonFunction,
    FunctionProcess,
    PythonFunction,
    python_function,
)
from grpo_trainer.rewards.reward_base import RewardCounters
from grpo_trainer.runtime.errors import BadInput, RewardError

pytestmark = pytest.mark.realtime

MODULE = """
import asyncio, os, subprocess, sys, time
import helper

calls = []

def lengths(prompts, completions, answer, **kwargs):
    return [float(len(text)) + bonus for text, bonus in zip(completions, answer)]

def sibling(completions, **kwargs):
    return [helper.value] * len(completions)

def some(completions, **kwargs):
    return [None if "?" in text else 1 for text in completions]

def state(completions, trainer_state, log_metric, log_extra, **kwargs):
    print("a print must not disturb the protocol")
    log_metric("seen", trainer_state.global_step)
    log_extra("length", [len(text) for text in completions])
    return [trainer_state.global_step / trainer_state.max_steps] * len(completions)

def logs_a_key(completions, log_extra, **kwargs):
    log_extra("places", [{(1, 2): text} for text in completions])
    return [1.0] * len(completions)

def counts(completions, **kwargs):
    calls.append(1)
    return [len(calls)] * len(completions)

def hang(completions, **kwargs):
    if completions[0] == "hang":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).wait()
    return [os.getpid()] * len(completions)

def fails_on_bad(completions, **kwargs):
    for text in completions:
        if text == "bad":
            raise ValueError("cannot read 'bad'")
    return [1.0] * len(completions)

def fails_on_two(completions, **kwargs):
    if len(completions) > 1:
        raise ValueError("one at a time, please")
    return [1.0]

def spins(completions, **kwargs):
    while True:
        pass

def leaves_a_child(completions, **kwargs):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(completions[0], "w") as file:
        file.write(str(child.pid))
    os._exit(7)

def dies(completions, **kwargs):
    os._exit(7)

def short(completions, **kwargs):
    return [1.0]

def words(completions, **kwargs):
    return ["1.0"] * len(completions)

def nan(completions, **kwargs):
    return [0.0, float("nan")]

def nothing(completions, **kwargs):
    return None

async def later(completions, **kwargs):
    await asyncio.sleep(0.01)
    return [float(len(text)) for text in completions]

async def blocks(completions, **kwargs):
    time.sleep(600)

class Stateful:
    def __call__(self, completions, **kwargs):
        return [2.0] * len(completions)

stateful = Stateful()
constant = 3
"""

ARGUMENTS = {"prompts": ["p", "p"], "completion_ids": [[1], [2]], "answer": [0.5, 0.25]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a ConfigMap with two keys looks like in a pod."""
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "mine.py").write_text(MODULE)
    (folder / "helper.py").write_text("value = 4.5\n")
    (folder / "broken.py").write_text("import nonexistent_module\n")
    (folder / "leaves.py").write_text("import os\nos._exit(7)\n")
    (folder / "sleeps.py").write_text("import time\ntime.sleep(600)\n")
    return folder


@pytest.fixture
def make(folder: Path) -> Iterator[Any]:
    """Builds functions by name, and ends their processes."""
    made: list[PythonFunction] = []

    def build(
        function: str, counters: RewardCounters | None = None, seconds: float = 600.0
    ) -> PythonFunction:
        spec = PythonReward.model_validate(
            {"function": function, "configMap": {"name": "mine"}, "timeoutSeconds": seconds}
        )
        made.append(python_function("mine", spec, counters or RewardCounters(), folder))
        return made[-1]

    yield build
    for function in made:
        function.close()


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_trl_s_arguments_arrive_and_scores_come_back(make: Any) -> None:
    assert make("mine:lengths")(completions=["abc", "a"], **ARGUMENTS) == [3.5, 1.25]
    assert make("mine:sibling")(completions=["abc", "a"], **ARGUMENTS) == [4.5, 4.5]
    assert make("mine:some")(completions=["a?", "a"], **ARGUMENTS) == [None, 1.0]
    assert make("mine:stateful")(completions=["a", "b"], **ARGUMENTS) == [2.0, 2.0]


def test_state_and_logging_hooks_work_across_the_process_boundary(make: Any) -> None:
    metrics: list[tuple[str, float]] = []
    extra: list[tuple[str, list[int]]] = []
    scores = make("mine:state")(
        completions=["abc", "a"],
        trainer_state=SimpleNamespace(global_step=5, max_steps=10, log_history=[object()]),
        log_metric=lambda name, value: metrics.append((name, value)),
        log_extra=lambda column, values: extra.append((column, values)),
        **ARGUMENTS,
    )
    assert scores == [0.5, 0.5]
    assert metrics == [("seen", 5.0)]
    assert extra == [("length", [3, 1])]


def test_the_process_lives_on_between_batches(make: Any) -> None:
    function = make("mine:counts")
    assert [function(completions=["a"], prompts=["p"])[0] for _ in range(3)] == [1.0, 2.0, 3.0]


def test_a_hang_is_ended_with_its_children_counted_and_started_anew(make: Any) -> None:
    counters = RewardCounters()
    function = make("mine:hang", counters, seconds=10)
    (before,) = function(completions=["go"], prompts=["p"])
    assert function(completions=["hang", "b", "c"], prompts=["p"] * 3) == [None, None, None]
    assert counters.timeouts == 3
    assert not is_alive(int(before))
    (after,) = function(completions=["go"], prompts=["p"])
    assert after != before
    assert is_alive(int(after))
    function.close()
    assert not is_alive(int(after))


def test_what_a_crashed_function_started_is_ended_too(make: Any, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="process ended with status 7"):
        make("mine:leaves_a_child")(completions=[str(tmp_path / "pid")], prompts=["p"])
    for _ in range(600):
        if has_ended(int((tmp_path / "pid").read_text())):
            return
        time.sleep(0.05)
    raise AssertionError("the function's own child outlived it")


@pytest.mark.parametrize(
    ("function", "completions", "message"),
    [
        (
            "fails_on_bad",
            ["ok", "bad"],
            r"reward 'mine', sample 1, step 8: mine:fails_on_bad failed: ValueError: cannot",
        ),
        ("fails_on_two", ["ok", "ok"], r"reward 'mine', step 8: .*one at a time"),
        ("dies", ["a", "b"], r"reward 'mine', step 8: .*process ended with status 7"),
        ("logs_a_key", ["a", "b"], r"reward 'mine', step 8: .*TypeError: keys must be str"),
        ("short", ["a", "b"], r"reward 'mine', step 8: returned 1 rewards for 2 completions"),
        ("words", ["a", "b"], r"sample 0, step 8: .*TypeError: returned '1.0' among the rewards"),
        ("nan", ["a", "b"], r"sample 1, step 8: returned nan; return a finite number, or None"),
        ("nothing", ["a", "b"], r"TypeError: returned None; return a list"),
    ],
)
def test_failures_name_reward_sample_and_step(
    make: Any, function: str, completions: list[str], message: str
) -> None:
    state = SimpleNamespace(global_step=7)
    with pytest.raises(RewardError, match=message) as caught:
        make(f"mine:{function}")(completions=completions, trainer_state=state, **ARGUMENTS)
    assert "child.py" not in str(caught.value)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("mine:absent", "AttributeError.*absent"),
        ("mine:constant", "3 is not a function"),
        ("absent:any", "ModuleNotFoundError: No module named 'absent'"),
        ("broken:any", "No module named 'nonexistent_module'"),
        ("leaves:any", "the process ended with status 7 during the import"),
    ],
)
def test_a_function_that_is_not_there_is_bad_input(make: Any, function: str, message: str) -> None:
    with pytest.raises(
        BadInput, match=rf"reward 'mine': python.function {function} can't be imported: .*{message}"
    ):
        make(function)


@pytest.mark.slow
def test_an_import_that_takes_for_ever_is_bad_input(folder: Path) -> None:
    with pytest.raises(
        BadInput, match=r"sleeps:any can't be imported: the import took more than 10 s"
    ):
        FunctionProcess("sleeps:any", folder, start_seconds=10.0)


@pytest.mark.parametrize("module", ["json", "math"])
def test_a_file_with_the_name_of_a_module_of_python_is_named(module: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text(MODULE)
    told = rf"Python has a module '{module}' of its own, .*; rename {module}.py, such as to my_"
    with pytest.raises(BadInput, match=told):
        FunctionProcess(f"{module}:some", tmp_path)


def test_the_image_s_functions_need_no_configmap() -> None:
    spec = PythonReward(function="trl.rewards:think_format_reward")
    function = python_function("think", spec, RewardCounters(), Path("absent"))
    try:
        completions = [
            [{"role": "assistant", "content": text}] for text in ("<think>\nx\n</think>\n4", "4")
        ]
        assert function(prompts=["p", "p"], completions=completions) == [1.0, 0.0]
    finally:
        function.close()


async def test_async_functions_do_not_hold_up_the_event_loop(make: Any) -> None:
    counters = RewardCounters()
    later, blocked = make("mine:later"), make("mine:blocks", counters, seconds=10)
    assert isinstance(later, AsyncPythonFunction)
    first, second, third = await asyncio.gather(
        blocked(completions=["a"], prompts=["p"]),
        later(completions=["abc", "a"], prompts=["p", "p"]),
        asyncio.sleep(0, result="the loop runs"),
    )
    assert (first, second, third) == ([None], [3.0, 1.0], "the loop runs")
    assert counters.timeouts == 1


def test_a_function_that_spins_dies_with_its_training_process(folder: Path) -> None:
    """A killed trainer leaves no process behind, even one that never looks at its socket again."""
    reader, writer = os.pipe()
    trainer = os.fork()
    if trainer == 0:
        process = FunctionProcess("mine:spins", folder)
        process._process.connection.send({"completions": ["a"], "trainer_state": {}})
        os.write(writer, str(process._process.pid).encode())
        os._exit(0)
    os.close(writer)
    child = int(os.read(reader, 32))
    os.close(reader)
    os.waitpid(trainer, 0)
    for _ in range(600):
        if has_ended(child):
            break
        time.sleep(0.05)
    assert has_ended(child)


def has_ended(process: int) -> bool:
    """Whether a process that is not our child is gone, or only waits to be reaped."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True

"""Tests without the mark `realtime` start no process, use no socket and do not wait."""

import pytest

pytest_plugins = ("pytester",)

IMPORTS = """
import asyncio, contextlib, os, socket, subprocess, threading, time
import pytest

def sleep_and_forget():
    with contextlib.suppress(BaseException):
        time.sleep(0.001)
"""
REFUSED = {
    "starts a process": "subprocess.run(['true'])",
    "forks": "os.fork()",
    "connects a socket": "socket.create_connection(('127.0.0.1', 9))",
    "binds a socket": "socket.socket().bind(('127.0.0.1', 0))",
    "sleeps for 0.001 s": "time.sleep(0.001)",
}
REACHED_ANYWAY = {
    "by a thread": (
        "thread = threading.Thread(target=time.sleep, args=(0.001,)); thread.start(); thread.join()"
    ),
    "by a pool": "asyncio.run(asyncio.to_thread(sleep_and_forget))",
    "and suppressed": "sleep_and_forget()",
}


@pytest.fixture
def results(pytester: pytest.Pytester) -> pytest.Pytester:
    """A folder for a test file, with the mark."""
    pytester.makeini(
        "[pytest]\nmarkers =\n    realtime\nasyncio_default_fixture_loop_scope = function\n"
    )
    return pytester


def run(pytester: pytest.Pytester, code: str) -> pytest.RunResult:
    pytester.makepyfile(IMPORTS + code)
    return pytester.runpytest_inprocess(
        "-p", "tests.real_world", "-p", "no:hypothesispytest", "-W", "ignore"
    )


@pytest.mark.parametrize(("words", "action"), REFUSED.items(), ids=REFUSED)
def test_an_unmarked_test_is_refused_and_named(
    results: pytest.Pytester, words: str, action: str
) -> None:
    result = run(results, f"def test_pure(): {action}\n")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [f"*::test_pure {words}, but is not marked realtime: inject the clock*"]
    )


@pytest.mark.parametrize("action", REACHED_ANYWAY.values(), ids=REACHED_ANYWAY)
def test_it_fails_even_if_the_refusal_does_not_reach_it(
    results: pytest.Pytester, action: str
) -> None:
    run(results, f"def test_pure(): {action}\n").assert_outcomes(failed=1)


def test_a_marked_test_may_do_all_of_it(results: pytest.Pytester) -> None:
    actions = "; ".join(
        [*REACHED_ANYWAY.values(), REFUSED["binds a socket"], REFUSED["starts a process"]]
    )
    run(results, f"@pytest.mark.realtime\ndef test_real(): {actions}\n").assert_outcomes(passed=1)


def test_what_does_not_leave_the_process_is_allowed(results: pytest.Pytester) -> None:
    run(results, "def test_pure(): asyncio.run(asyncio.sleep(0)); time.sleep(0)\n").assert_outcomes(
        passed=1
    )


def test_what_a_module_does_while_it_is_imported_is_not_the_test(results: pytest.Pytester) -> None:
    module = "import subprocess\ndef run(): subprocess.run(['true'])\nrun()\n"
    results.makepyfile(of_processes=module)
    results.syspathinsert()
    run(results, "def test_pure(): import of_processes\n").assert_outcomes(passed=1)
    later = "def test_pure(): import of_processes; of_processes.run()\n"
    run(results, later).assert_outcomes(failed=1)


def test_a_fixture_that_starts_a_process_needs_a_marked_test(results: pytest.Pytester) -> None:
    code = """
@pytest.fixture(scope='session')
def cluster():
    subprocess.run(['true'])

@pytest.mark.realtime
def test_real(cluster): pass
"""
    run(results, code).assert_outcomes(passed=1)
    run(results, code.replace("@pytest.mark.realtime", "")).assert_outcomes(errors=1)


def test_the_end_of_a_shared_fixture_and_its_threads_are_not_the_last_test(
    results: pytest.Pytester,
) -> None:
    code = """
@pytest.fixture(scope='session')
def cluster():
    over = threading.Event()
    def watch():
        while not over.is_set():
            time.sleep(0.001)
    thread = threading.Thread(target=watch)
    thread.start()
    yield thread
    over.set()
    thread.join()
    subprocess.run(['true'], check=True)

@pytest.mark.realtime
def test_real(cluster): pass

def test_pure(cluster):
    before = os.times().elapsed
    while os.times().elapsed < before + 0.05: pass
    assert cluster.is_alive()
"""
    run(results, code).assert_outcomes(passed=2)

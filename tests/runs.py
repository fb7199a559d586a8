"""The three runs of the tests, which `make check`, `make test` and `make test-all` start.

A test's marks decide on its runs: `make check` has the pure ones, `make test` all but `slow`, `make
test-all` all. Its file decides on its part: `make test PART=…` and `make test-all PART=…` run the
tests of that part alone. A stage that fails does not keep the next one from running, so that one
run shows everything that is broken.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]
COVERAGE_DATA = ROOT / ".coverage-parts"
PURE = "not realtime and not slow and not soak"
GATE = "not slow and not soak"
ALL = "not soak"
TWO_WORKERS = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")


@dataclass(frozen=True)
class Part:
    """The test files that match one of the patterns and none of an earlier part."""

    name: str
    content: str
    patterns: tuple[str, ...]
    workers: int = 2


UNIT_PART = "unit"
PARTS = (
    Part(UNIT_PART, "pure logic, and the client's side of wires", ("unit/*",)),
    Part("memory", "the memory model against counted and live memory", ("trainer/test_memory_*",)),
    Part(
        "gpu-kit",
        "the GPU kit, installed and run on a bare machine",
        ("trainer/test_gpu_kit_*",),
        workers=1,
    ),
    Part("trainer", "the trainer on real TRL and DeepSpeed", ("trainer/*",)),
    Part("kueue", "Kueue's real manager and its stand-in", ("integration/test_kueue*",)),
    Part("chaos", "100 faults of all kinds", ("integration/test_chaos*",), workers=1),
    Part(
        "pictures",
        "what browsers show: dashboards, and the site's search",
        ("integration/test_pictures*",),
        workers=1,
    ),
    Part(
        "release",
        "what a release publishes",
        ("integration/test_release*", "e2e/test_release*"),
        workers=1,
    ),
    Part(
        "upgrade",
        "from version to version",
        ("integration/test_chart_upgrade*", "integration/test_api_versions*"),
    ),
    Part("api", "the operator, CRD and chart on a real API server", ("integration/*",)),
    Part("nodes", "the harness's own nodes", ("e2e/test_harness_nodes*",), workers=1),
    Part(
        "e2e",
        "jobs on real kubelets; and the trainer's image with vLLM, which is built for it and takes "
        "30 GB of disk more",
        ("e2e/*",),
        workers=1,
    ),
)
LINT_PART, COVERAGE_PART = "lint", "coverage"
NAMES = (LINT_PART, *(part.name for part in PARTS), COVERAGE_PART)
INTERRUPTED = 130


@dataclass(frozen=True)
class Stage:
    """One command of a run, with what it adds to the environment."""

    name: str
    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()

    def start(self, output: IO[bytes] | None = None) -> "Running":
        """Start the command; its output goes to the terminal or into the file."""
        sys.stdout.flush()
        variables = os.environ | dict(self.environment)
        process = subprocess.Popen(
            self.command, cwd=ROOT, env=variables, stdout=output, stderr=output
        )
        return Running(self, process, time.monotonic())


@dataclass(frozen=True)
class Running:
    """A stage that has been started."""

    stage: Stage
    process: subprocess.Popen[bytes]
    started: float

    def wait(self) -> "Result":
        """Wait for the command's end."""
        try:
            code, core_seconds = self._ending()
        except KeyboardInterrupt:
            self._ending()  # the terminal has interrupted it, too, and it removes its clusters
            raise
        seconds = time.monotonic() - self.started
        return Result(self.stage.name, code == 0, seconds, core_seconds)

    def _ending(self) -> tuple[int, float]:
        """Exit code, and the processor time of the command and of all that it waited for."""
        _, status, usage = os.wait4(self.process.pid, 0)
        self.process.returncode = os.waitstatus_to_exitcode(status)
        return self.process.returncode, usage.ru_utime + usage.ru_stime


@dataclass(frozen=True)
class Result:
    """How a stage ended."""

    name: str
    passed: bool
    seconds: float
    core_seconds: float


def files_of(part: Part) -> list[str]:
    """Return the part's test files, as paths from the repository's root."""
    return [path for path, owner in part_of_files().items() if owner is part]


def part_of_files() -> dict[str, Part]:
    """Return every test file of the tree with its part, by path.

    Raises:
        LookupError: a file belongs to none, so no run would have it.
    """
    tests = ROOT / "tests"
    owners = {}
    for path in sorted(tests.rglob("test_*.py")):
        matching = [
            part
            for part in PARTS
            if any(path.match(f"tests/{pattern}.py") for pattern in part.patterns)
        ]
        if not matching:
            raise LookupError(
                f"{path.relative_to(ROOT)} belongs to no part of PARTS in tests/runs.py"
            )
        owners[str(path.relative_to(ROOT))] = matching[0]
    return owners


def lint() -> Stage:
    """Return the stage of linters, types, import layers and generated files."""
    return Stage("lint", ("make", "--no-print-directory", "lint"))


def pytest_stage(name: str, files: Sequence[str], marks: str, workers: int, *options: str) -> Stage:
    """Return a stage that runs the files' tests with these marks."""
    distribution = TWO_WORKERS if workers > 1 else ()
    durations = ("--durations=8", "--durations-min=5")
    return Stage(
        name,
        (sys.executable, "-m", "pytest", *files, "-m", marks, *distribution, *durations, *options),
    )


def covered_stages(part: Part) -> list[Stage]:
    """Return the stages of `make test-all` that run a part's tests, with coverage in a file of the
    part's own.

    Coverage takes pure code 2.6 times its time on Python 3.11, and the further cases of generated
    tests hardly reach a line that the first ones don't. So all cases of pure tests run without
    coverage, and those of `make test` once more with it.
    """
    files = files_of(part)
    all_cases = "--hypothesis-profile=all"
    # A part alone covers little; the limit is for all of them together.
    coverage = ("--cov", "--cov-report=", "--cov-fail-under=0")
    data = (("COVERAGE_FILE", str(COVERAGE_DATA / part.name)),)
    if part.name != UNIT_PART:
        stage = pytest_stage(part.name, files, ALL, part.workers, all_cases, *coverage)
        return [Stage(stage.name, stage.command, data)]
    covered = pytest_stage(f"{part.name}: coverage", files, GATE, part.workers, *coverage)
    return [
        pytest_stage(part.name, files, ALL, part.workers, all_cases),
        Stage(covered.name, covered.command, data),
    ]


def coverage_stages() -> list[Stage]:
    """Return the stages that put the parts' coverage together and fail below the limit."""
    coverage = (sys.executable, "-m", "coverage")
    data = [
        str(COVERAGE_DATA / part.name) for part in PARTS if (COVERAGE_DATA / part.name).exists()
    ]
    reports = {
        "all packages": (),
        "grpo_kube": ("--include=*/grpo_kube/*",),
        "trainer": ("--include=*/grpo_trainer/*,*/grpo_acceptance/*",),
        "codegen": ("--include=*/grpo_codegen/*",),
    }
    combine = Stage("coverage: data", (*coverage, "combine", "--keep", *data))
    return [
        combine,
        *(
            Stage(f"coverage: {name}", (*coverage, "report", "--skip-covered", *only))
            for name, only in reports.items()
        ),
    ]


def gate_stages() -> tuple[Stage, list[Stage]]:
    """Return the stages of `make test`: the one that keeps the cores busy, and those beside it.

    Tests with an API server or with kubelets wait for most of their time. In one stage with the
    others they left a third of both cores idle. The pure tests have one process of their own: each
    worker collects all files of its stage, and theirs take it 20 s of processor time.
    """
    pure: list[str] = []
    training: list[str] = []
    api_server: list[str] = []
    end_to_end: list[str] = []
    for path, part in part_of_files().items():
        if part.name == UNIT_PART:
            pure.append(path)
        elif path.startswith("tests/trainer/"):
            training.append(path)
        elif path.startswith("tests/integration/") or part.name == "nodes":
            api_server.append(path)
        else:
            end_to_end.append(path)
    beside = [
        pytest_stage("API server tests", api_server, GATE, 2),
        pytest_stage("end-to-end tests", end_to_end, GATE, 1),
        pytest_stage("pure tests", pure, GATE, 1),
        lint(),
    ]
    return pytest_stage("trainer tests", training, GATE, 2), beside


def long_stages() -> tuple[list[Stage], list[list[Stage]]]:
    """Return the stages of `make test-all`: those that keep the cores busy, and beside them a row
    of those with an API server and a row of those with kubelets, which mostly wait."""
    computing = [lint()]
    api_server = []
    end_to_end = []
    for part in PARTS:
        stages = covered_stages(part)
        folder = part.patterns[0].partition("/")[0]
        if folder == "e2e":
            end_to_end += stages
        elif folder == "integration":
            api_server += stages
        else:
            computing += stages
    return computing, [api_server, end_to_end]


def run_in_turn(stages: Sequence[Stage], output: IO[bytes] | None = None) -> list[Result]:
    """Run each stage to its end, whatever became of the one before. Their output goes to the
    terminal or into the file."""
    results = []
    for stage in stages:
        if output is None:
            print(f"== {stage.name}")
        else:
            output.write(f"== {stage.name}\n".encode())
        results.append(stage.start(output).wait())
    return results


def run_beside(background: Sequence[Sequence[Stage]], foreground: Sequence[Stage]) -> list[Result]:
    """Run the stages of the foreground in turn, and beside them those of each row of the
    background in turn. The background's output is printed after the foreground's."""
    with contextlib.ExitStack() as files:
        outputs = [files.enter_context(tempfile.TemporaryFile(buffering=0)) for _ in background]
        # A thread waits for each row, so that its seconds end when it ends. After an interrupt
        # they wait, too: the stages have got it from the terminal, and remove their clusters.
        with ThreadPoolExecutor(max_workers=len(background)) as waiting:
            rows = [
                waiting.submit(run_in_turn, row, output)
                for row, output in zip(background, outputs, strict=True)
            ]
            results = run_in_turn(foreground)
        for row, output in zip(rows, outputs, strict=True):
            results += row.result()
            sys.stdout.flush()
            output.seek(0)
            sys.stdout.buffer.write(output.read())
    return results


def check() -> list[Result]:
    """Run lint beside the pure tests."""
    pure_tests = pytest_stage("pure tests", files_of(_part(UNIT_PART)), PURE, 2)
    return run_beside([[lint()]], [pure_tests])


def test(only: str) -> list[Result]:
    """Run all tests but the slow ones, or those of one part."""
    if only:
        return run_in_turn([_single(only)])
    computing, beside = gate_stages()
    return run_beside([[stage] for stage in beside], [computing])


def test_all(only: str) -> list[Result]:
    """Run every test with coverage and judge that, or one part alone."""
    COVERAGE_DATA.mkdir(exist_ok=True)
    if only == COVERAGE_PART:
        return run_in_turn(coverage_stages())
    if only:
        return run_in_turn([lint()] if only == LINT_PART else covered_stages(_part(only)))
    for file in COVERAGE_DATA.iterdir():
        file.unlink()
    computing, beside = long_stages()
    results = run_beside(beside, computing)
    return [*results, *run_in_turn(coverage_stages())]


def _single(name: str) -> Stage:
    if name == LINT_PART:
        return lint()
    part = _part(name)
    return pytest_stage(part.name, files_of(part), GATE, part.workers)


def _part(name: str) -> Part:
    return next(part for part in PARTS if part.name == name)


def main() -> int:
    """Run what the command line names, print how each stage ended, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.runs", description=__doc__)
    parser.add_argument("run", choices=["check", "test", "test-all"])
    parser.add_argument("--part", choices=("", *NAMES), default="")
    options = parser.parse_args()
    runs = {"check": lambda _: check(), "test": test, "test-all": test_all}
    try:
        results = runs[options.run](options.part)
    except KeyboardInterrupt:
        return INTERRUPTED
    print(f"== make {options.run}")
    for result in results:
        ending = "passed" if result.passed else "FAILED"
        spent = f"{result.seconds:6.0f} s  {result.core_seconds:6.0f} core-s"
        print(f"{ending}  {spent}  {result.name}")
    return 0 if all(result.passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())

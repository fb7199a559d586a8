"""The first example on the real cluster: two pods on two nodes train, and everything that a user
looks at is there.

One job, made once for the file; the tests look at what it left.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from prometheus_client.parser import text_string_to_metric_families

from grpo_api.report import training_metrics
from grpo_api.report.report import STEP_PHASES, Progress
from grpo_api.status.status import MetricsStatus
from grpo_api.text.contract import PROGRESS_PORT
from harness import stack
from harness.access import CommandError
from harness.jobs import Jobs, Object, condition, is_true, progress, selected

NAME = "first"
STEPS = 12
HELD = """
import pathlib, time
from grpo_trainer.__main__ import exit_process, main
code = main()
while not pathlib.Path("/tmp/looked-at").exists():
    time.sleep(0.1)
exit_process(code)
"""
"""The trainer's entry point, which ends its process when somebody has seen what it serves after the
last step."""
ASKS = """
import sys, urllib.request
print(urllib.request.urlopen(sys.argv[1], timeout=60).read().decode())
"""


@dataclass(frozen=True)
class LastWords:
    """What rank 0 served when all was done, and the job as the operator told it by then."""

    page: str
    progress: Progress
    job: Object


@pytest.fixture(scope="module")
def last_words(jobs: Jobs) -> LastWords:
    """The job after its last step, before its pods end."""
    jobs.create(NAME, {"maxSteps": STEPS}, command=["python", "-c", HELD])
    last = jobs.wait(
        NAME,
        "at its last step",
        lambda job: progress(job)["step"] == STEPS and finishing(jobs, job),
    )
    said = Progress.model_validate_json(served(jobs, last, "progress"))
    # A step is told a moment before its numbers: the operator may have asked in between.
    told = jobs.wait(
        NAME,
        "told of the last step's numbers",
        lambda job: MetricsStatus.model_validate(job["status"]["metrics"]) == told_of(said.metrics),
    )
    return LastWords(served(jobs, told, "metrics"), said, told)


def finishing(jobs: Jobs, job: Object) -> bool:
    """Whether rank 0 has nothing left to train or to save."""
    try:
        return Progress.model_validate_json(served(jobs, job, "progress")).stage == "Exporting"
    except CommandError:
        return False


def served(jobs: Jobs, job: Object, page: str) -> str:
    """A page of rank 0, asked for from within."""
    pod = next(pod["name"] for pod in job["status"]["pods"] if pod["index"] == 0)
    address = f"http://127.0.0.1:{PROGRESS_PORT}/{page}"
    return jobs.kubectl("exec", pod, "--", "python", "-c", ASKS, address)


@pytest.fixture(scope="module")
def finished(jobs: Jobs, last_words: LastWords) -> Object:
    """The job, followed to its end."""
    for pod in last_words.job["status"]["pods"]:
        jobs.kubectl("exec", pod["name"], "--", "touch", "/tmp/looked-at")
    return jobs.wait_succeeded(NAME)


def scraped(page: str) -> dict[tuple[str, ...], float]:
    """Value by the family's name and the values of labels."""
    samples = (
        sample for family in text_string_to_metric_families(page) for sample in family.samples
    )
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


def told_of(metrics: Mapping[str, float]) -> MetricsStatus:
    """What the status tells of a run without an engine whose rank 0 says this."""
    digits = {key: f"{value:.4g}" for key, value in metrics.items()}
    assert "engine_mismatch" not in digits
    phases = {phase: digits[f"phase_seconds/{phase}"] for phase in STEP_PHASES}
    short = {key: digits[key] for key in MetricsStatus.model_fields if key in digits}
    return MetricsStatus(**short, phase_seconds=phases)


def test_scrape_and_progress_agree_on_every_number_after_the_last_step(
    last_words: LastWords,
) -> None:
    said, page = last_words.progress, scraped(last_words.page)
    numbers: dict[str, tuple[str, ...]] = {
        metric.key: (metric.name,) for metric in training_metrics.TRAINING
    }
    for metric in training_metrics.LABELLED:
        keys = [key for key in said.metrics if key.startswith(f"{metric.key}/")]
        numbers |= {key: (metric.name, key.partition("/")[2]) for key in keys}
    # What is counted is told to Prometheus as sums, and to the operator as the last step's.
    counted = {metric.key for metric in training_metrics.COUNTED}
    told = {
        key: value for key, value in said.metrics.items() if key.partition("/")[0] not in counted
    }
    assert {key: page[numbers[key]] for key in told} == told
    assert page[f"{training_metrics.STEP_SECONDS.name}_count",] == STEPS
    assert {
        "kl",
        "reward",
        "reward_by_function/accuracy",
        "phase_seconds/generate",
    } <= said.metrics.keys()
    run = [page[metric.name,] for metric in (training_metrics.STEP, training_metrics.TOTAL_STEPS)]
    assert run == [said.step, said.total_steps] == [STEPS, STEPS]
    assert page[training_metrics.MEMORY_BESIDE["host"].name,] == said.memory["host"]


def test_the_status_says_the_same_before_the_pods_end_and_after(
    last_words: LastWords, finished: Object
) -> None:
    said = last_words.progress
    for status in (last_words.job["status"], finished["status"]):
        assert MetricsStatus.model_validate(status["metrics"]) == told_of(said.metrics)
        assert [status["progress"][key] for key in ("step", "totalSteps")] == [
            said.step,
            said.total_steps,
        ]
        assert status["attempt"] == said.attempt


def test_it_succeeds_on_two_nodes_at_the_first_attempt(finished: Object) -> None:
    status = finished["status"]
    assert status["phase"] == "Succeeded"
    assert status["outcome"]["result"] == "Succeeded"
    assert (status["attempt"], status["restarts"]) == (1, 0)
    assert progress(finished)["summary"] == f"{STEPS}/{STEPS}"
    assert len({pod["node"] for pod in status["pods"]}) == 2
    assert status["plan"]["strategy"] == "Clone"


def test_its_conditions_and_metrics_tell_the_story(finished: Object) -> None:
    for kind in ("Admitted", "Planned", "Succeeded", "Recoverable"):
        assert is_true(finished, kind), condition(finished, kind)
        assert condition(finished, kind)["observedGeneration"] == finished["metadata"]["generation"]
    assert not is_true(finished, "Failed")
    assert float(finished["status"]["metrics"]["kl"]) > 0
    assert 0 <= float(finished["status"]["metrics"]["reward"]) <= 1


def test_kubectl_waits_and_prints_as_its_users_expect(jobs: Jobs, finished: Object) -> None:
    jobs.kubectl("wait", "--for=condition=Finished", f"grpojob/{NAME}", "--timeout", "5s")
    header, line = jobs.kubectl("get", "grpo", NAME).splitlines()
    columns = [
        "NAME",
        "PHASE",
        "REASON",
        "MODEL",
        "SIZE",
        "REFERENCE",
        "GPUS",
        "STEP",
        "KL",
        "REWARD",
        "RESTARTS",
        "AGE",
    ]
    assert header.split() == columns
    name, size = (finished["spec"]["model"][field] for field in ("name", "parameters"))
    # A job that is well has no reason, and one on CPUs no GPUs.
    assert line.split()[:6] == [NAME, "Succeeded", name, size, "Clone", f"{STEPS}/{STEPS}"]
    assert f"GRPOJob {finished['metadata']['namespace']}/{NAME}".split("/")[1] in jobs.kubectl(
        "describe", "grpo", NAME
    )


def test_every_step_is_one_json_line_of_rank_zero(jobs: Jobs, finished: Object) -> None:
    lines = jobs.step_lines(finished)
    assert [line["step"] for line in lines if "reward" in line] == list(range(1, STEPS + 1))
    assert all(line["totalSteps"] == STEPS for line in lines)


def test_the_status_after_the_end_is_final(jobs: Jobs, finished: Object) -> None:
    """The numbers are those of the last step and not of the last pull, and no pod runs any more."""
    last = jobs.step_lines(finished)[-1]
    told = finished["status"]["metrics"]
    assert last["step"] == STEPS
    assert {key: told[key] for key in ("kl", "reward")} == {
        key: f"{last[key]:.4g}" for key in ("kl", "reward")
    }
    over = jobs.wait(
        NAME, "over", lambda job: all(pod["phase"] == "Succeeded" for pod in job["status"]["pods"])
    )
    assert len(over["status"]["pods"]) == 2


def test_a_finished_job_leaves_no_pod_running_and_deleting_it_takes_its_children(
    jobs: Jobs, finished: Object
) -> None:
    jobs.kubectl(
        "wait",
        "--for=jsonpath={.status.phase}=Succeeded",
        "pods",
        "--timeout",
        "60s",
        *selected(NAME),
    )
    jobs.kubectl("delete", "grpojob", NAME)
    jobs.kubectl("wait", "--for=delete", "jobs,pods", "--timeout", "60s", *selected(NAME))


@pytest.mark.slow
def test_an_acceptance_run_is_a_job_that_succeeds(jobs: Jobs) -> None:
    """Of its checks one that a CPU can show; the operator is told as by the trainer."""
    command = ["python", "-m", "grpo_acceptance", "--output", "/tmp/acceptance"]
    only = ["--device", "cpu", "--only", "gpu", "fused-head"]
    placement = {"accelerator": "CPU", "nodes": 1}
    jobs.create("acceptance", command=[*command, *only], placement=placement, restarts={"limit": 0})
    job = jobs.wait_succeeded("acceptance")
    assert job["status"]["outcome"]["message"] == "acceptance: 2 passed, 0 failed, 1 not run"
    assert "| fused head, float32 | passed |" in jobs.kubectl(
        "logs", job["status"]["pods"][0]["name"]
    )


@pytest.mark.slow
def test_helm_upgrade_and_uninstall_leave_live_jobs_alone(jobs: Jobs) -> None:
    jobs.create("live", {"maxSteps": STEPS})
    jobs.wait_step("live", 1)
    before = {pod["metadata"]["uid"] for pod in jobs.list("pods", "live")}
    stack.configure_operator(jobs.access, "logLevel=debug")
    jobs.access.helm(
        "rollback",
        stack.RELEASE,
        "--namespace",
        stack.SYSTEM_NAMESPACE,
        "--wait",
        "--timeout",
        "120s",
    )
    values = jobs.access.helm(
        "get", "values", stack.RELEASE, "--namespace", stack.SYSTEM_NAMESPACE, "--output", "json"
    )
    jobs.access.helm("uninstall", stack.RELEASE, "--namespace", stack.SYSTEM_NAMESPACE, "--wait")
    assert {pod["metadata"]["uid"] for pod in jobs.list("pods", "live")} == before
    jobs.access.helm(
        "install",
        stack.RELEASE,
        str(stack.CHART),
        "--namespace",
        stack.SYSTEM_NAMESPACE,
        "--values",
        "-",
        "--wait",
        "--timeout",
        "120s",
        input=values,
    )
    job = jobs.wait_succeeded("live")
    assert job["status"]["attempt"] == 1

"""The first example on the real cluster: two pods on two nodes train, and everything that a user looks at is there.

One job, made once for the file; the tests look at what it left.
"""

import pytest

from harness import stack
from harness.jobs import Jobs, Object, condition, is_true, progress, selected

NAME = "first"
STEPS = 12


@pytest.fixture(scope="module")
def finished(jobs: Jobs) -> Object:
    """The job, followed to its end."""
    jobs.create(NAME, {"maxSteps": STEPS})
    return jobs.wait_succeeded(NAME)


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
    jobs.kubectl("wait", "--for=condition=Succeeded", f"grpojob/{NAME}", "--timeout", "5s")
    header, line = jobs.kubectl("get", "grpo", NAME).splitlines()
    columns = ["NAME", "PHASE", "MODEL", "SIZE", "REFERENCE", "GPUS", "STEP", "KL", "REWARD", "RESTARTS", "AGE"]
    assert header.split() == columns
    model = finished["spec"]["model"]["name"]
    assert line.split()[:7] == [NAME, "Succeeded", model, "77K", "Clone", "0", f"{STEPS}/{STEPS}"]
    assert f"GRPOJob {finished['metadata']['namespace']}/{NAME}".split("/")[1] in jobs.kubectl("describe", "grpo", NAME)


def test_every_step_is_one_json_line_of_rank_zero(jobs: Jobs, finished: Object) -> None:
    lines = jobs.step_lines(finished)
    assert [line["step"] for line in lines if "reward" in line] == list(range(1, STEPS + 1))
    assert all(line["totalSteps"] == STEPS for line in lines)


def test_the_status_after_the_end_is_final(jobs: Jobs, finished: Object) -> None:
    """The numbers are those of the last step and not of the last pull, and no pod runs any more."""
    last = jobs.step_lines(finished)[-1]
    told = finished["status"]["metrics"]
    assert last["step"] == STEPS
    assert {key: told[key] for key in ("kl", "reward")} == {key: f"{last[key]:.4g}" for key in ("kl", "reward")}
    over = jobs.wait(NAME, "over", lambda job: all(pod["phase"] == "Succeeded" for pod in job["status"]["pods"]))
    assert len(over["status"]["pods"]) == 2


def test_a_finished_job_leaves_no_pod_running_and_deleting_it_takes_its_children(jobs: Jobs, finished: Object) -> None:
    jobs.kubectl("wait", "--for=jsonpath={.status.phase}=Succeeded", "pods", "--timeout", "60s", *selected(NAME))
    jobs.kubectl("delete", "grpojob", NAME)
    jobs.kubectl("wait", "--for=delete", "jobs,pods", "--timeout", "60s", *selected(NAME))


def test_an_acceptance_run_is_a_job_that_succeeds(jobs: Jobs) -> None:
    """Of its checks one that a CPU can show; the operator is told as by the trainer."""
    command = ["python", "-m", "grpo_trainer.acceptance", "--output", "/tmp/acceptance"]
    only = ["--device", "cpu", "--only", "gpu", "fused-head"]
    placement = {"accelerator": "CPU", "nodes": 1}
    jobs.create("acceptance", command=[*command, *only], placement=placement, restarts={"limit": 0})
    job = jobs.wait_succeeded("acceptance")
    assert job["status"]["outcome"]["message"] == "acceptance: 2 passed, 0 failed, 1 not run"
    assert "| fused head, float32 | passed |" in jobs.kubectl("logs", job["status"]["pods"][0]["name"])


def test_helm_upgrade_and_uninstall_leave_live_jobs_alone(jobs: Jobs) -> None:
    jobs.create("live", {"maxSteps": STEPS})
    jobs.wait_step("live", 1)
    before = {pod["metadata"]["uid"] for pod in jobs.list("pods", "live")}
    stack.configure_operator(jobs.access, "logLevel=debug")
    jobs.access.helm("rollback", stack.RELEASE, "--namespace", stack.SYSTEM_NAMESPACE, "--wait", "--timeout", "120s")
    values = jobs.access.helm("get", "values", stack.RELEASE, "--namespace", stack.SYSTEM_NAMESPACE, "--output", "json")
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

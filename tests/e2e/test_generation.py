"""The first example with its completions sampled by vLLM, on the real cluster: beside the trainer,
and in another pod.

The engine's pod is killed on the way.
"""

from collections.abc import Iterator

import pytest

from grpo_api.plan.plan import ExecutionPlan
from grpo_api.report.report import STEP_PHASES
from grpo_api.status.status import MetricsStatus
from grpo_api.text.contract import ENGINE_SUFFIX
from harness.fixtures import AnyCluster
from harness.images import recipes as images
from harness.jobs import Jobs, Object, attempt, progress

pytestmark = pytest.mark.slow

STEPS = 20
LONG = 4 * STEPS
"""Steps of the run whose engine is killed: it still trains when the test has seen it train."""
CLOSE = 1e-4
"""How far the log-probabilities of engine and trainer may be apart in float32, in nats, and their
ratio from 1."""
NOISE = 0.1
"""How far the mean rewards of two runs may be apart whose sums were rounded in another order."""


@pytest.fixture(scope="module")
def image(node_cluster: AnyCluster) -> images.Image:
    """The trainer's image with an engine, on every node."""
    image = images.engine_trainer_image()
    node_cluster.load(image.archive)
    return image


@pytest.fixture(autouse=True, scope="module")
def room(jobs: Jobs) -> Iterator[None]:
    """Leaves no job behind: the next one needs the machine."""
    yield
    jobs.kubectl("delete", "grpojobs", "--all")
    jobs.kubectl(
        "wait", "--for=delete", "pods", "--timeout", "120s", "--selector", "grpo.dev/job-name"
    )


@pytest.fixture(scope="module")
def colocated(jobs: Jobs, image: images.Image) -> list[Object]:
    """Steps of two training pods on two nodes, with an engine in each."""
    jobs.create(
        "colocated", {"maxSteps": STEPS}, image=image.name, generation={"engine": "Colocated"}
    )
    return steps_of(jobs, jobs.wait_succeeded("colocated"), "Colocated", STEPS)


def steps_of(jobs: Jobs, job: Object, engine: str, count: int) -> list[Object]:
    """What a run has logged that made all `count` steps in one attempt, by this engine."""
    assert (attempt(job), progress(job)["step"]) == (1, count)
    plan = ExecutionPlan.model_validate(job["status"]["plan"])
    assert plan.engine is not None
    assert plan.engine.kind == engine
    steps = jobs.step_lines(job)
    assert len(steps) == count
    check_told(job, steps[-1])
    return steps


def check_told(job: Object, last: Object) -> None:
    """The status has the numbers of the last step, and says how long one took by part."""
    told = MetricsStatus.model_validate(job["status"]["metrics"])
    assert told.engine_mismatch == f"{last['engine_mismatch']:.4g}"
    assert told.weights_version is not None
    assert told.weights_version // 10**9 == attempt(job)
    assert told.phase_seconds is not None
    assert told.phase_seconds.keys() == set(STEP_PHASES)
    assert float(told.phase_seconds["sync"]) > 0


def mean_reward(steps: list[Object]) -> float:
    """Of these steps."""
    rewards = [float(step["reward"]) for step in steps]
    return sum(rewards) / len(rewards)


def check_exact(steps: list[Object]) -> None:
    """The engine sampled from the trainer's own policy, after every sync."""
    assert max(step["engine_mismatch_max"] for step in steps) < CLOSE
    assert all(
        abs(step[f"importance_ratio_{end}"] - 1) < CLOSE for step in steps for end in ("min", "max")
    )


def test_a_job_learns_from_what_an_engine_beside_the_trainer_samples(
    colocated: list[Object],
) -> None:
    check_exact(colocated)
    assert mean_reward(colocated[-5:]) > mean_reward(colocated[:5])


def test_an_engine_that_is_killed_costs_no_step(
    jobs: Jobs, image: images.Image, colocated: list[Object]
) -> None:
    jobs.create(
        *("served", {"maxSteps": LONG}),
        image=image.name,
        generation={"engine": "Servers"},
        placement={"accelerator": "CPU", "nodes": 1},
    )
    jobs.wait_step("served", STEPS // 4)
    (engine,) = [
        pod for pod in jobs.list("pods", "served") if ENGINE_SUFFIX in pod["metadata"]["name"]
    ]
    jobs.kubectl("delete", "pod", engine["metadata"]["name"], "--grace-period=0", "--force")
    job = jobs.wait_succeeded("served")
    steps = steps_of(jobs, job, "Servers", LONG)
    check_exact(steps)
    assert abs(mean_reward(steps[:STEPS]) - mean_reward(colocated)) < NOISE

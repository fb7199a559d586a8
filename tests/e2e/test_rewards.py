"""Rewards of the user's own on the real cluster: the examples' function from a ConfigMap and their
HTTP service.

Only in a pod do mounts, a read-only root, the cluster's DNS and another user's permissions meet.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.fixtures import AnyCluster
from harness.images.recipes import python_image
from harness.jobs import Jobs, Object

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEPS = 4


def documents(example: str) -> tuple[list[Object], Object]:
    """The objects beside an example's GRPOJob, with an image that the nodes have; and the
    GRPOJob."""
    text = (EXAMPLES / example).read_text().replace("python:3.11-slim", python_image().name)
    *others, job = yaml.safe_load_all(text)
    return others, job


def test_a_function_from_a_config_map_and_a_service_score_completions(
    installed: AnyCluster, jobs: Jobs
) -> None:
    installed.load(python_image().archive)
    http, judged = documents("05-http-reward.yaml")
    python, brief = documents("07-python-reward.yaml")
    beside = json.dumps({"apiVersion": "v1", "kind": "List", "items": http + python})
    jobs.kubectl("apply", "--filename", "-", stdin=beside)
    rewards: list[Any] = judged["spec"]["rewards"] + brief["spec"]["rewards"]
    jobs.kubectl("rollout", "status", "deployment/judge", "--timeout", "60s")
    jobs.create("rewarded", {"maxSteps": STEPS}, rewards=rewards)
    job = jobs.wait_succeeded("rewarded")
    steps = [line for line in jobs.step_lines(job) if "reward" in line]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    for reward in rewards:
        scores = [step[f"reward_by_function/{reward['name']}"] for step in steps]
        assert all(0 < score <= 1 for score in scores), reward["name"]
    assert job["status"]["restarts"] == 0
    jobs.kubectl("delete", "grpojob", "rewarded")
    jobs.kubectl("delete", "--filename", "-", "--wait=false", stdin=beside)

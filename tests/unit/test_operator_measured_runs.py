"""The operator's ConfigMap of measured runs: which jobs add a row, what is written when, and that
nothing that stands there or happens to it does harm."""

import asyncio
import json
from typing import Any

import pytest

from grpo_api.plan.learned import Learned, MeasuredStep
from grpo_kube.objects.errors import Conflict, Forbidden, NotFound
from grpo_kube.objects.resources import ObjectKey
from grpo_operator.admission.plan_cache import Plans
from grpo_operator.loop.measured_run_store import DATA_KEY, WRITE_PAUSE, MeasuredRunStore
from grpo_operator.records.parsing import grpojob_record
from grpo_operator.records.records import GRPOJobRecord
from grpo_planner.time.measured_runs import MeasuredRuns
from tests.unit.operator_world import at, condition, job_object
from tests.unit.planning import H100, L4, LLAMA_1B, QWEN_7B, inventory, nodes, plan, spec

KEY = ObjectKey("grpo-system", "measured-runs")
PLAN = plan(spec(QWEN_7B), nodes(1, 8, H100))
STEP = MeasuredStep(
    gpu_product=H100, completion_length=150, generation_seconds=30.0, training_seconds=8.0,
    predicted_generation_seconds=10.0, predicted_training_seconds=8.0,
)  # fmt: skip


def job(name: str, ended: float | None, step: MeasuredStep | None = STEP) -> GRPOJobRecord:
    """A GRPOJob on GPUs that ended then, by the operator's clock."""
    status: dict[str, Any] = {
        "attempt": 1,
        "plan": PLAN.model_dump(mode="json"),
        "learned": Learned(step=step).model_dump(mode="json", exclude_none=True),
    }
    if ended is not None:
        finished = condition("Succeeded", reason="Succeeded")
        status |= {"completionTime": at(ended), "phase": "Succeeded", "conditions": [finished]}
    body = job_object(
        {"model": {"name": QWEN_7B, "parameters": None}, "placement": {"accelerator": "GPU"}},
        status,
        name=name,
    )
    body["spec"]["placement"].pop("nodes", None)
    return grpojob_record(body)


class Server:
    """An API server with one ConfigMap at most."""

    def __init__(self, text: str | None = None) -> None:
        self.text = text
        self.version = 1
        self.writes: list[float] = []
        self.problems: list[Exception] = []

    @property
    def rows(self) -> list[dict[str, Any]]:
        """What is stored."""
        found: list[dict[str, Any]] = json.loads(self.text or "{}")["runs"]
        return found

    async def get(self, *_: Any) -> dict[str, Any]:
        if self.text is None:
            raise NotFound("it is not there", 404)
        return {"metadata": {"resourceVersion": str(self.version)}, "data": {DATA_KEY: self.text}}

    async def create(self, _: Any, __: str, body: dict[str, Any]) -> None:
        self._take(body)

    async def patch(self, _: Any, __: str, ___: str, body: dict[str, Any]) -> None:
        if body["metadata"]["resourceVersion"] != str(self.version):
            raise Conflict("the object has been modified", 409)
        self._take(body)

    def _take(self, body: dict[str, Any]) -> None:
        self.writes.append(asyncio.get_running_loop().time())
        if self.problems:
            raise self.problems.pop()
        self.text = body["data"][DATA_KEY]
        self.version += 1


class World:
    """A store that leads."""

    def __init__(self, server: Server, *jobs: GRPOJobRecord) -> None:
        self.server = server
        self.heard: list[MeasuredRuns] = []
        cluster: Any = server
        self.store = MeasuredRunStore(cluster, KEY, jobs, self.heard.append)

    async def lead(self, seconds: float, *ends: GRPOJobRecord) -> None:
        """Lead for so long, in which these jobs end one after the other."""
        task = asyncio.create_task(self.store.run())
        for ended in ends:
            await asyncio.sleep(1)
            self.store.record(job(ended.key.name, None), ended.status)
        await asyncio.sleep(seconds)
        task.cancel()


async def test_jobs_that_end_add_rows_in_one_write_a_minute() -> None:
    server = Server()
    world = World(server)
    await world.lead(3 * WRITE_PAUSE, *(job(f"job-{number}", number) for number in range(5)))
    # One write of all five, as the first minute was over.
    assert len(server.writes) == 1
    assert len(server.rows) == 3, "the newest of one setting stay"
    newest = server.rows[0]
    assert (newest["source"], newest["date"]) == ("team-a/job-4", at(4))
    assert (newest["seconds"]["generation"], newest["completion"]) == (30.0, 150)
    assert [len(runs.rows) for runs in world.heard] == [3]


async def test_jobs_without_a_measured_step_or_on_other_gpus_add_none() -> None:
    world = World(Server())
    elsewhere = STEP.model_copy(update={"gpu_product": L4})
    await world.lead(2 * WRITE_PAUSE, job("a", 1, None), job("b", 2, elsewhere))
    assert world.server.text is None


async def test_a_new_leader_adds_what_the_one_before_did_not_come_to() -> None:
    server = Server()
    await World(server).lead(2 * WRITE_PAUSE, job("first", 10))
    after = World(server, job("first", 10), job("missed", 20), job("runs", None))
    await after.lead(WRITE_PAUSE)
    assert [row["source"] for row in server.rows] == ["team-a/missed", "team-a/first"]
    writes = len(server.writes)
    await World(server, job("first", 10), job("missed", 20)).lead(5 * WRITE_PAUSE)
    assert len(server.writes) == writes, "what is stored is not written again"


@pytest.mark.parametrize("date", ["2026-99-99T00:00:00Z", "2026-11-21T25:00:00Z", "2026-1-1"])
async def test_a_row_whose_date_is_none_is_replaced_and_ends_no_operator(date: str) -> None:
    server = Server()
    await World(server).lead(2 * WRITE_PAUSE, job("first", 10))
    server.text = json.dumps({"runs": [server.rows[0] | {"date": date}]})
    await World(server, job("first", 10)).lead(2 * WRITE_PAUSE)
    assert [row["date"] for row in server.rows] == [at(10)]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"runs": 1}', '{"runs": [{"a": 1}]}', "[" * 9999])
async def test_whatever_stands_there_is_replaced_by_what_is_known(text: str) -> None:
    server = Server(text)
    await World(server, job("done", 10)).lead(WRITE_PAUSE)
    assert [row["source"] for row in server.rows] == ["team-a/done"]


@pytest.mark.parametrize("problem", [Forbidden("no", 403), Conflict("modified", 409)])
async def test_a_write_that_fails_is_tried_again_without_hurry(problem: Exception) -> None:
    server = Server()
    server.problems = [problem]
    await World(server, job("done", 10)).lead(2.5 * WRITE_PAUSE)
    assert [row["source"] for row in server.rows] == ["team-a/done"]
    assert len(server.writes) == 2
    assert server.writes[1] - server.writes[0] >= WRITE_PAUSE


class Busy(Server):
    """A job ends while the first write is under way, in the second of the one before."""

    store: MeasuredRunStore

    async def create(self, _: Any, __: str, body: dict[str, Any]) -> None:
        self._take(body)
        self.store.record(job("second", None), job("second", 10).status)


async def test_a_row_that_comes_during_a_write_is_in_the_next() -> None:
    server = Busy()
    world = World(server)
    server.store = world.store
    await world.lead(3 * WRITE_PAUSE, job("first", 10))
    assert {row["source"] for row in server.rows} == {"team-a/first", "team-a/second"}


async def test_rows_that_the_api_server_never_takes_do_not_pile_up() -> None:
    server = Server()
    server.problems = [Forbidden("no", 403) for _ in range(100)]
    world = World(server, job("first", 10), job("second", 20))
    await world.lead(50 * WRITE_PAUSE)
    assert len(world.store._new) == 2


async def test_the_queue_plans_by_the_rows_and_again_only_for_their_model() -> None:
    world = World(Server(), job("done", 10))
    await world.lead(WRITE_PAUSE)
    (runs,) = world.heard
    plans, there = Plans(), inventory(nodes(1, 8, H100))
    before = plans.plan(spec(QWEN_7B), there).chosen
    plans.plan(spec(LLAMA_1B), there)
    assert before is not None
    own = runs.of_namespace("team-a")
    after = plans.plan(spec(QWEN_7B), there, None, own).chosen
    assert after is not None
    assert "measured on this cluster" in after.reason
    assert after.step_runs == [runs.rows[0].id]
    made = plans.made
    assert plans.plan(spec(QWEN_7B), there, None, own).chosen == after
    assert plans.made == made

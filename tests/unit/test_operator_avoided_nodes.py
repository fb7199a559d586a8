"""Nodes on which attempts keep dying: admission counts without them, unless the gang fits nowhere
else."""

from dataclasses import replace

from grpo_operator.decide.decisions import Action
from tests.unit.queue_world import ASKED, answered, cluster, gang, gpu_pod, job, judged, own_pod

BLAMED = replace(ASKED, avoided_nodes=("node-0",))


async def test_a_restart_goes_to_another_node_and_waits_for_one() -> None:
    again = job("a", gang(1, 4), active=True)
    own = own_pod(again, 4, "node-0")
    decision = await answered([again], cluster(4, 4, pods=[own]), again, BLAMED)
    assert (decision.action, decision.avoided_nodes) == (Action.COMMIT, ("node-0",))
    taken = cluster(4, 4, pods=[own, gpu_pod("p", 4, "node-1")])
    decision = await answered([again], taken, again, BLAMED)
    assert (decision.action, decision.avoided_nodes) == (Action.QUEUE, ("node-0",))
    assert "0 free, 4 held by team-a/p" in decision.message


async def test_a_gang_that_fits_nowhere_else_goes_back_to_where_it_died() -> None:
    again = job("a", gang(1, 4), active=True)
    decision = await answered(
        [again], cluster(4, 2, pods=[own_pod(again, 4, "node-0")]), again, BLAMED
    )
    assert (decision.action, decision.avoided_nodes) == (Action.COMMIT, ())


async def test_one_that_waits_is_let_back_when_the_other_nodes_are_gone() -> None:
    waiting = job("a", gang(1, 4)).avoiding(["node-0"])
    decision = await answered([waiting], cluster(4, 4), waiting, replace(ASKED, ended=None))
    assert (decision.action, decision.avoided_nodes) == (Action.COMMIT, None)
    decision = await answered([waiting], cluster(4), waiting, replace(ASKED, ended=None))
    assert (decision.action, decision.avoided_nodes) == (Action.COMMIT, ())


def test_what_is_let_back_holds_its_place_there() -> None:
    first, second = job("a", gang(1, 4), age=20).avoiding(["node-0"]), job("b", gang(1, 4), age=10)
    found = judged([first, second], cluster(4))
    assert (found["uid-a"].admitted, found["uid-a"].avoids, found["uid-b"].admitted) == (
        True,
        False,
        False,
    )


def test_an_avoided_node_is_named_to_those_who_miss_it() -> None:
    waiting = job("a", gang(1, 4)).avoiding(["node-0"])
    assert waiting.spec is not None
    found = judged([waiting], cluster(4, 4, pods=[gpu_pod("p", 1, "node-1")]))
    assert not found["uid-a"].admitted

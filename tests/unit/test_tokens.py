"""Who may read what a pod says: tokens of attempts, the keys that make them, and the Secret that
these are in."""

import base64
import hmac
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.text import contract
from grpo_kube.objects.errors import AlreadyExists, ClusterError, Forbidden, NotFound, Unavailable
from grpo_kube.objects.json_reader import Unreadable
from grpo_kube.objects.resources import ObjectKey
from grpo_kube.pacing import Backoff
from grpo_operator.loop import tokens as keys
from grpo_operator.loop.tokens import LEAST_KEY, Tokens
from tests.generated import cases
from tests.unit.dirty_objects import VALUES, dirty

KEYS = st.lists(
    st.binary(min_size=LEAST_KEY, max_size=40), min_size=1, max_size=contract.MOST, unique=True
)
ATTEMPTS = st.tuples(st.text(min_size=1, max_size=40), st.integers(1, 10**6))
HEADERS = st.lists(st.text(st.characters(), max_size=80), max_size=4)
"""Of any characters, halves of a surrogate pair among them."""
PLACE = ObjectKey("grpo-system", "keys")


def header(made: Tokens, attempt: tuple[str, int]) -> str:
    return made.headers(*attempt)[contract.HEADER]


@settings(max_examples=cases(200))
@given(found=KEYS, attempt=ATTEMPTS, other=ATTEMPTS, noise=HEADERS, place=st.integers(0, 3))
def test_a_token_opens_its_own_attempt_whichever_key_made_it(
    found: list[bytes],
    attempt: tuple[str, int],
    other: tuple[str, int],
    noise: list[str],
    place: int,
) -> None:
    shown = header(Tokens(found), attempt)
    for count in range(1, len(found) + 1):
        wanted = Tokens(found[:count]).digest(*attempt)
        assert contract.is_shown([shown], wanted)
        assert contract.is_shown([shown, shown], wanted)
        assert contract.is_shown([f"  {shown.replace(',', ' , ')} "], wanted)
        assert (
            contract.is_shown([header(Tokens(found), other), shown], wanted)
            or len(found) * 2 > contract.MOST
        )
        assert contract.is_shown([header(Tokens(found), other)], wanted) is (attempt == other)
        short = [part for text in noise for part in text.split(",")][:place]
        assert contract.is_shown(
            [*short, header(Tokens(found[:1]), attempt)], Tokens(found[:1]).digest(*attempt)
        )


@settings(max_examples=cases(300))
@given(headers=HEADERS, attempt=ATTEMPTS)
def test_nothing_else_opens_it(headers: list[str], attempt: tuple[str, int]) -> None:
    made = Tokens([b"k" * LEAST_KEY])
    wanted = made.digest(*attempt)
    known = [*headers, wanted, wanted.encode().hex(), header(Tokens([b"l" * LEAST_KEY]), attempt)]
    for one in known:
        assert not contract.is_shown([one], wanted)
        assert not contract.is_shown([one], "")
    assert not contract.is_shown([], wanted)
    assert not contract.is_shown(["", ","], "")
    assert not contract.is_shown([f"{header(made, attempt)}x"], wanted)


def test_every_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hmac's comparison, and all of them: which one was right, and where it stood, takes no
    other time."""
    asked: list[tuple[bytes, bytes]] = []

    def compared(left: bytes, right: bytes) -> bool:
        asked.append((left, right))
        return hmac_compare(left, right)

    hmac_compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", compared)
    made = Tokens([b"k" * LEAST_KEY])
    for order in (["x", header(made, ("a", 1))], [header(made, ("a", 1)), "x"]):
        asked.clear()
        assert contract.is_shown(order, made.digest("a", 1))
        assert {len(one) for pair in asked for one in pair} == {64}
        assert len(asked) == 2


def test_an_endless_header_costs_little() -> None:
    made = Tokens([b"k" * LEAST_KEY])
    own = header(made, ("a", 1))
    assert contract.is_shown([",".join(["x"] * (contract.MOST - 1)), own], made.digest("a", 1))
    assert not contract.is_shown([",".join(["x"] * contract.MOST), own], made.digest("a", 1))


def test_without_a_key_there_is_no_token() -> None:
    assert (Tokens().digest("a", 1), Tokens().headers("a", 1)) == ("", {})


def test_the_newest_keys_are_shown_where_there_are_too_many() -> None:
    many = Tokens([bytes([number]) * LEAST_KEY for number in range(contract.MOST + 3)])
    assert contract.is_shown([header(many, ("a", 1))], many.digest("a", 1))


def secret(**data: bytes) -> dict[str, Any]:
    return {
        "metadata": {"name": "keys"},
        "data": {name: base64.b64encode(key).decode() for name, key in data.items()},
    }


def test_the_last_name_is_the_newest_key() -> None:
    assert keys.read(secret(b=b"2" * 32, a=b"1" * 32)) == [b"1" * 32, b"2" * 32]


@settings(max_examples=cases(200))
@given(item=dirty(secret(a=b"1" * 32, b=b"2" * 16)) | VALUES)
def test_a_secret_has_keys_or_is_unreadable(item: Any) -> None:
    try:
        found = keys.read(item)
    except Unreadable:
        return
    assert found
    assert all(len(key) >= LEAST_KEY for key in found)


class Server:
    """An API server that answers with these, one after the other."""

    def __init__(self, gets: Sequence[Any], creates: Sequence[Any] = ()) -> None:
        self.answers = {"get": list(gets), "create": list(creates)}
        self.made: dict[str, Any] = {}

    def _answer(self, verb: str) -> dict[str, Any]:
        answer = self.answers[verb].pop(0)
        if isinstance(answer, ClusterError):
            raise answer
        assert isinstance(answer, dict)
        return answer

    async def get(self, *_: Any) -> dict[str, Any]:
        return self._answer("get")

    async def create(self, _: Any, __: str, body: dict[str, Any]) -> dict[str, Any]:
        self.made = body
        return self._answer("create") or body


async def loaded(server: Server) -> list[bytes]:
    found: Any = server
    return await keys.load(found, PLACE)


GONE = NotFound("there is none", 404)


async def test_the_first_operator_makes_the_secret() -> None:
    servers = [Server([GONE], [{}]) for _ in range(2)]
    made = [await loaded(server) for server in servers]
    assert [len(key) for found in made for key in found] == [keys.KEY_BYTES] * 2
    assert made[0] != made[1]
    assert servers[0].made["metadata"]["namespace"] == PLACE.namespace


async def test_one_that_came_first_is_taken() -> None:
    assert await loaded(Server([GONE, secret(a=b"1" * 32)], [AlreadyExists("there", 409)])) == [
        b"1" * 32
    ]


@pytest.mark.parametrize(
    ("gets", "creates"),
    [
        ([Forbidden("no", 403)], []),
        ([GONE], [Forbidden("no", 403)]),
        ([secret(a=b"short")], []),
        ([{"data": {}}], []),
    ],
)
async def test_without_it_the_operator_works(gets: list[Any], creates: list[Any]) -> None:
    assert await loaded(Server(gets, creates)) == []


async def test_an_outage_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def soon(_: Any) -> None:
        """No pause."""

    monkeypatch.setattr(Backoff, "wait", soon)
    assert await loaded(
        Server([Unavailable("away"), Unavailable("away"), secret(a=b"1" * 32)])
    ) == [b"1" * 32]

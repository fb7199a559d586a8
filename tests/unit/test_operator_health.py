"""What watches tell: the one unheard the longest speaks for its kind, and one that is not served
for none."""

from types import SimpleNamespace
from typing import Any

from grpo_operator.process import metrics_server


def informers(**heard_at: float | None) -> Any:
    named = {"pods_a": "pods/a", "pods_b": "pods/b", "jobs": "jobs/*"}
    served = {"not_served": "", "forbidden": False, "optional": False}
    return {named[name]: SimpleNamespace(heard_at=at, **served) for name, at in heard_at.items()}


def test_a_kind_was_heard_of_when_the_namespace_was_where_that_is_longest_ago() -> None:
    found = metrics_server.last_update_times(
        informers(pods_a=90.0, pods_b=40.0, jobs=99.0), 100.0, 1_700_000_100.0
    )
    assert found == {"pods": 1_700_000_040.0, "jobs": 1_700_000_099.0}


def test_a_watch_that_is_being_tried_is_neither_heard_of_nor_deaf() -> None:
    watched = informers(pods_a=None, jobs=10.0)
    assert metrics_server.last_update_times(watched, 100.0, 1e9) == {"jobs": 1e9 - 90.0}
    assert (
        metrics_server.silent_watches_message(watched, 100.0, 60.0)
        == "nothing received for 60 s from: jobs/*"
    )
    assert metrics_server.silent_watches_message(watched, 100.0, 95.0) == ""


def test_what_is_not_served_is_named() -> None:
    watched = informers(jobs=None)
    watched["jobs/*"].not_served = "forbidden"
    assert metrics_server.not_served(watched) == "not served now: jobs/*: forbidden"
    watched["jobs/*"].optional = True
    assert metrics_server.not_served(watched) == "", "a cluster may well not know the kind"
    watched["jobs/*"].forbidden = True
    assert metrics_server.not_served(watched)

"""A status write stands on the version that was looked at: no decision overwrites what it has not seen."""

from typing import Any

import pytest

from grpo_kube.objects.errors import Conflict, Denied
from grpo_kube.objects.resources import Object, Resource
from grpo_operator.loop.reconcile import Reconciler
from tests.unit.operator_world import make_job

JOB = make_job(resourceVersion="41")


class Api:
    """Takes a status patch only on the version that stands, and denies what pods reported, if it is told to."""

    def __init__(self, version: str, *, denies: str = "") -> None:
        self.version = version
        self.denies = denies
        self.taken: list[Object] = []

    async def patch(self, _kind: Resource, _namespace: str, _name: str, patch: Object, _subresource: str) -> Object:
        """As the API server does."""
        if patch.get("metadata", {}).get("resourceVersion", self.version) != self.version:
            raise Conflict("the object has been modified", 409)
        if self.denies in patch["status"]:
            raise Denied(f"status.{self.denies}: Invalid value", 422)
        self.taken.append(patch)
        return patch


async def written(api: Api, patch: Object) -> None:
    """Write a status patch for JOB."""
    reconciler = Reconciler.__new__(Reconciler)
    reconciler._cluster = api  # type: ignore[assignment]
    await reconciler._patch(JOB, patch)


async def test_a_status_is_written_on_the_version_that_was_looked_at() -> None:
    api = Api("41")
    await written(api, {"attempt": 2})
    assert api.taken == [{"metadata": {"resourceVersion": "41"}, "status": {"attempt": 2}}]


@pytest.mark.parametrize("denies", ["", "progress"])
async def test_a_status_is_not_written_over_what_came_since(denies: str) -> None:
    api = Api("42", denies=denies or "nothing")
    with pytest.raises(Conflict):
        await written(api, {"attempt": 2, "progress": {"step": 3}})
    assert api.taken == []


async def test_what_pods_reported_is_left_out_where_it_is_denied_and_the_version_stays() -> None:
    patch: dict[str, Any] = {"attempt": 2, "progress": {"step": 3}}
    api = Api("41", denies="progress")
    await written(api, patch)
    assert api.taken == [{"metadata": {"resourceVersion": "41"}, "status": {"attempt": 2}}]

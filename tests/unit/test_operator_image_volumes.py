"""Models from images: the volume in the pod, what excludes it, and what a user of an older cluster
is told."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.job import SpecInvalid, parse_spec
from grpo_operator.pods.manifests import IMAGES_NEED, images_need
from tests.generated import cases
from tests.unit.operator_world import SPEC
from tests.unit.test_operator_manifests import mounts, pod

IMAGE = {"reference": "registry.example/models/tiny@sha256:" + "0" * 64}
NAME = {"name": "/models/tiny", "parameters": "77K"}
FROM_IMAGE: dict[str, Any] = {**NAME, "image": IMAGE}


def judge(**more: Any) -> list[dict[str, Any]]:
    return [
        {"format": {"pattern": "a"}},
        {"model": {"name": "/rewards/1", "parameters": "77K", **more}},
    ]


@settings(max_examples=cases(50))
@given(
    reference=st.from_regex(r"[\x21-\x7e]{1,60}", fullmatch=True),
    policy=st.sampled_from([None, "Always", "IfNotPresent", "Never"]),
)
def test_the_image_is_a_volume_of_the_pod_and_read_only(reference: str, policy: str | None) -> None:
    source = {"reference": reference} | ({"pullPolicy": policy} if policy else {})
    fields: dict[str, Any] = {"model": {**NAME, "image": source}, "rewards": judge(image=source)}
    volumes = {one["name"]: one for one in pod(**fields)["volumes"]}
    assert volumes["model"] == {"name": "model", "image": source}
    assert volumes["reward-1"] == {"name": "reward-1", "image": source}
    found = mounts(**fields)
    assert (found["/models"], found["/rewards/1"]) == (("model", True), ("reward-1", True))


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"model": {**FROM_IMAGE, "volume": {"claimName": "models"}}}, "spec.model"),
        ({"rewards": judge(image=IMAGE, volume={"claimName": "models"})}, "spec.rewards[1].model"),
    ],
)
def test_a_claim_and_an_image_exclude_each_other(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(SpecInvalid) as refused:
        parse_spec({**SPEC, **fields})
    assert refused.value.problems == [
        f"{path}: set at most one of volume, image: both would be mounted on the same folder"
    ]


@pytest.mark.parametrize("fields", [{"model": FROM_IMAGE}, {"rewards": judge(image=IMAGE)}])
def test_who_is_refused_by_an_older_server_is_told_what_images_need(fields: dict[str, Any]) -> None:
    assert images_need(parse_spec({**SPEC, **fields})) == IMAGES_NEED
    assert images_need(parse_spec({**SPEC, "rewards": judge(volume={"claimName": "models"})})) == ""

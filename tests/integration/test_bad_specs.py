"""The real API server rejects every bad spec with the field's path and what is allowed, and accepts
the good ones.

A schema is only as good as the server's reading of it: CEL, defaulting, pruning and ratcheting run
nowhere else. The specs are those of tests/samples.py.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from grpo_api.job import parse_spec
from harness.access import CommandError
from harness.client import ApiClient, ApiStatusError
from harness.fixtures import AnyCluster
from tests.container_samples import NORMALISED
from tests.integration.operator_bench import GRPOJOBS
from tests.samples import BAD, GOOD, SPEC, Bad, changed, job

MEGABYTE = 1 << 20
JOBS = GRPOJOBS.format("default")
DRY_RUN = f"{JOBS}?dryRun=All&fieldValidation=Strict"
"""What kubectl asks for, too."""
SHOWN = ("unknown-field", "quoted-integer", "negative-beta", "model-from-two-places", "no-rewards")
"""A bad spec of each kind of refusal, to be seen through kubectl."""


@pytest.fixture(scope="module")
def server(crd_cluster: AnyCluster) -> Iterator[AnyCluster]:
    """The API server with our CRD; in the end nothing that was refused is stored."""
    yield crd_cluster
    assert crd_cluster.kubectl("get", "grpojobs", "-o", "name") == ""


def refusal(api: ApiClient, document: dict[str, Any]) -> str:
    """The message with which the server refuses a GRPOJob."""
    return refusal_at(api, DRY_RUN, document)


def refusal_at(api: ApiClient, path: str, document: dict[str, Any]) -> str:
    """The message with which the server refuses the object."""
    with pytest.raises(ApiStatusError) as caught:
        api.request("POST", path, document)
    text = str(caught.value)
    return str(json.loads(text[text.index("{") :])["message"])


def kubectl_refusal(server: AnyCluster, verb: str, document: dict[str, Any]) -> str:
    """What kubectl says when the server refuses the object."""
    with pytest.raises(CommandError) as caught:
        server.kubectl(verb, "-f", "-", input=json.dumps(document))
    return caught.value.stderr


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_a_bad_spec_is_refused_with_its_path(api: ApiClient, bad: Bad) -> None:
    answer = refusal(api, job(bad.name, bad.spec))
    assert bad.path in answer
    assert re.search(bad.says, answer)


@pytest.mark.parametrize("verb", ["create", "apply"])
@pytest.mark.parametrize("bad", [bad for bad in BAD if bad.name in SHOWN], ids=lambda bad: bad.name)
def test_kubectl_shows_the_refusal_and_stores_nothing(
    server: AnyCluster, bad: Bad, verb: str
) -> None:
    answer = kubectl_refusal(server, verb, job(bad.name, bad.spec))
    assert bad.path in answer
    assert re.search(bad.says, answer)


@pytest.mark.parametrize("name", GOOD)
def test_a_good_spec_is_accepted(api: ApiClient, name: str) -> None:
    api.request("POST", DRY_RUN, job(name, changed(GOOD[name])))


@pytest.mark.parametrize("name", NORMALISED)
def test_what_may_be_written_otherwise_is_read_as_the_models_read_it(
    server: AnyCluster, name: str
) -> None:
    document = job(name, changed(NORMALISED[name]))
    flags = ("create", "--dry-run=server", "-o", "json", "-f", "-")  # kubectl writes 2.0 as 2
    stored = json.loads(server.kubectl(*flags, input=json.dumps(document)))["spec"]
    assert parse_spec(stored) == parse_spec(document["spec"])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("a" * 53, "at most 52 characters"),
        ("with.dot", "no dot"),
        ("größe", "RFC 1123"),
        ("under_score", "RFC 1123"),
    ],
)
def test_a_name_that_its_pods_cannot_carry_is_refused(api: ApiClient, name: str, says: str) -> None:
    answer = refusal(api, job(name, SPEC))
    assert "metadata.name" in answer
    assert says in answer


def test_a_megabyte_of_text_is_refused(api: ApiClient) -> None:
    answer = refusal(api, job("megabyte", changed({"rewards.0.format.pattern": "x" * MEGABYTE})))
    assert "spec.rewards[0].format.pattern: Too long: may not be more than 4096" in answer
    assert len(answer) < 4096, "the text itself is not thrown back at the user"


@pytest.mark.parametrize("verb", ["create", "apply"])
def test_more_than_the_server_reads_is_refused(server: AnyCluster, verb: str) -> None:
    answer = kubectl_refusal(
        server, verb, job("huge", changed({"dataset.systemPrompt": "数" * MEGABYTE}))
    )
    assert "Request entity too large" in answer


def test_a_big_valid_spec_is_created_but_too_big_for_apply(
    server: AnyCluster, api: ApiClient
) -> None:
    document = job(
        "big", changed({"env": [{"name": f"V{n}", "value": "x" * 4096} for n in range(64)]})
    )
    assert "metadata.annotations: Too long" in kubectl_refusal(server, "apply", document)
    api.request("POST", DRY_RUN, document)


def test_a_status_given_at_creation_is_dropped(api: ApiClient) -> None:
    stored = api.request("POST", DRY_RUN, job("forged", SPEC) | {"status": {"attempt": 7}})
    assert stored["status"] == {"observedGeneration": 0}, "the default alone"

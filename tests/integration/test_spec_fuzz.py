"""The CLI and the API server judge generated specs alike: each is accepted or refused by both, and
read alike.

The server is asked as kubectl asks it: kubectl writes a number without a fraction as an integer.
"""

import json
import random
import re
from typing import Any

import pytest

from grpo_api.job import GRPOJobSpec, SpecInvalid, parse_spec
from grpo_cli.show.kubectl_yaml import load_documents
from harness.client import ApiClient, ApiStatusError
from tests.generated import cases, gated
from tests.integration.test_bad_specs import DRY_RUN
from tests.samples import job
from tests.spec_fuzz import dirty_spec

BATCHES = 10
SPECS = cases(1000, gate=250)
"""Specs of a batch; the gate has one batch."""
REFUSED = (400, 422)


def as_kubectl_sends(value: Any) -> Any:
    """The value after kubectl's way from a file to JSON."""
    if isinstance(value, dict):
        return {key: as_kubectl_sends(part) for key, part in value.items()}
    if isinstance(value, list):
        return [as_kubectl_sends(part) for part in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e21:
        return int(value)
    return value


def on_server(api: ApiClient, document: dict[str, Any]) -> dict[str, Any] | str:
    """The spec as the API server would store it, or why it refuses it."""
    try:
        stored: dict[str, Any] = api.request("POST", DRY_RUN, as_kubectl_sends(document))["spec"]
    except ApiStatusError as error:
        if error.status not in REFUSED:
            raise
        return str(error)
    return stored


JUDGED_IN_PYTHON = re.compile(
    r"spec\.model\.chatTemplateKwargs: |spec\.generation\.kwargs: |spec\.generation: kwargs\."
    r"|spec: generation\.kwargs\."
)
"""Problems of maps with any JSON, which the API server keeps as they are."""


def in_cli(document: dict[str, Any]) -> GRPOJobSpec | str | None:
    """The spec as `grpo plan -f` reads it, or why it refuses it; None where the API server can't
    see why."""
    (read,) = load_documents(json.dumps(document))
    try:
        return parse_spec(read["spec"], creating=True)
    except SpecInvalid as error:
        if all(map(JUDGED_IN_PYTHON.match, error.problems)):
            return None
        return str(error)


def disagreement(api: ApiClient, spec: dict[str, Any]) -> str:
    """How the two differ about a spec; empty where they agree."""
    document = job("fuzz", spec)
    served, read = on_server(api, document), in_cli(document)
    if read is None:
        return ""
    if isinstance(served, dict) and isinstance(read, GRPOJobSpec):
        return "" if parse_spec(served) == read else "both accept it, and read it differently"
    if isinstance(served, str) and isinstance(read, str):
        return ""
    on_server_side = served if isinstance(served, str) else "accepts"
    in_cli_side = read if isinstance(read, str) else "accepts"
    return f"server: {on_server_side}\nCLI: {in_cli_side}"


@pytest.mark.seeded
@pytest.mark.parametrize("batch", gated(range(BATCHES)))
def test_cli_and_server_agree_on_generated_specs(
    api: ApiClient, chance: random.Random, batch: int
) -> None:
    own_chance = random.Random(f"{chance.random()} {batch}")
    specs = [dirty_spec(own_chance) for _ in range(SPECS)]
    differing = [(spec, why) for spec in specs if (why := disagreement(api, spec))]
    assert differing == []

"""The storm itself: 5 faults in `make test`, 100 in `make test-all`, and with a new seed a
thousand in `make soak`.

`make chaos SEED=… FAULTS=…` runs exactly one, and tells each fault as it strikes.
"""

import random
from pathlib import Path

import pytest

from tests.generated import cases, gated
from tests.integration.chaos.run import storm


@pytest.mark.seeded
@pytest.mark.parametrize("faults", gated([5, 100]))
def test_whatever_goes_wrong_no_job_is_lost_and_every_story_is_true(
    chance: random.Random, tmp_path: Path, faults: int
) -> None:
    report = storm(cases(faults, gate=faults), chance.randrange(10**6), tmp_path, print)
    assert not report.violations, f"{report.command()}\n" + "\n".join(report.violations)
    assert report.faults == cases(faults, gate=faults)

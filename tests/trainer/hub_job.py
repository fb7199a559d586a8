"""What another job does that shares a cache: run as a module, with the address of a hub and the
folder of the cache, it fetches the model of test_hub_shared.py."""

import sys
from pathlib import Path

import pytest

from grpo_trainer.hub.repositories import Hub, Repository
from tests.trainer.hub import use

if __name__ == "__main__":
    use(pytest.MonkeyPatch(), sys.argv[1], Path(sys.argv[2]))
    Hub().snapshot(
        Repository("model", "team/model", None, "model"), lambda fetch: fetch(["*.json"])
    )

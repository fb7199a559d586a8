"""What draws the pictures is the same everywhere: exact versions, from whatever registry a machine
is set up for."""

import json
import re

from grpo_codegen.dashboards import DASHBOARDS
from grpo_codegen.dashboards.page import PICTURED
from grpo_codegen.stories import STORIES
from harness.programs.nodejs import major
from tools.pictures.browser import FOLDER, LOCK


def test_the_lock_pins_every_package_by_its_content_and_names_no_registry() -> None:
    packages = json.loads((FOLDER / "package-lock.json").read_text())["packages"]
    ours = packages.pop("")
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in ours["dependencies"].values())
    assert [name for name, package in packages.items() if "integrity" not in package] == []
    assert [name for name, package in packages.items() if "resolved" in package] == []


def test_the_cache_knows_the_lock_by_all_that_npm_reads() -> None:
    assert {file.name for file in LOCK} == {
        file.name for file in FOLDER.iterdir() if "npm" in file.name or "package" in file.name
    }


def test_each_dashboard_is_pictured_in_a_story_that_there_is() -> None:
    assert PICTURED.keys() == DASHBOARDS.keys()
    assert set(PICTURED.values()) <= {story.name for story in STORIES}


def test_nodes_version_is_read() -> None:
    assert major("v20.20.2\n") == 20

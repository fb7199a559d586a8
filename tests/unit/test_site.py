"""The documentation site has every page of the index, and asks no other host for anything."""

import json
import re
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

from tools.site.hooks import PAGES, for_site, navigation

ROOT = Path(__file__).parents[2]
REQUEST = re.compile(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=\"?(?:https?:)?//[^>]*>")
"""An element for which a browser asks another host while it shows the page."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True)
    build(config)
    return folder


def test_no_page_asks_another_host_for_anything(site: Path) -> None:
    requests = {
        str(page.relative_to(site)): found
        for page in site.rglob("*.html")
        if (found := REQUEST.findall(page.read_text()))
    }
    assert requests == {}


def test_the_search_finds_every_page_without_a_server(site: Path) -> None:
    index = (site / "search/search_index.js").read_text()
    entries = json.loads(re.sub(r"^var __index = ", "", index))["docs"]
    found = {entry["location"].partition("#")[0] for entry in entries}
    pages = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    expected = {path.with_suffix(".html").as_posix() for path in pages}
    assert found >= {page.replace("README", "index") for page in expected}


def test_the_navigation_has_the_index_s_headings_and_pages() -> None:
    index = """# Title
[No entry](x.md)
## First
- [One](a/one.md): what it says
### Inner
- [Two](a/two.md)
## Last
- [Chart values](../charts/grpo-operator/README.md)
"""
    assert navigation(index) == [
        {"First": [{"One": "a/one.md"}, {"Inner": [{"Two": "a/two.md"}]}]},
        {"Last": [{"Chart values": PAGES["charts/grpo-operator/README.md"]}]},
    ]


@pytest.mark.parametrize(
    ("link", "resolved"),
    [
        ("[b](b.md#part)", "[b](b.md#part)"),
        ("[far](../../reference/api.md)", "[far](../../reference/api.md)"),
        (
            "[values](../../../charts/grpo-operator/README.md)",
            "[values](../../reference/chart-values.md)",
        ),
        ("[the test](../../../tests/runs.py)", "the test (`tests/runs.py`)"),
        ("[`examples`](../../../examples)", "`examples`"),
        (
            "[web](https://example.com/a.md) [here](#x)",
            "[web](https://example.com/a.md) [here](#x)",
        ),
    ],
)
def test_a_link_leads_to_a_page_of_the_site_or_names_the_file(link: str, resolved: str) -> None:
    assert for_site(link, "docs/how-to/train/a.md") == resolved

"""The documentation site's search, in a real browser that opens the site from a folder: what is
typed is found, and its page opens."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

from harness.programs.processes import ClusterError, until
from tools.pictures.browser import Browser, browser

pytestmark = [pytest.mark.slow, pytest.mark.realtime]

ROOT = Path(__file__).parents[2]
RESULT = ".md-search-result__item a"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True))
    return folder


@pytest.fixture
def reader(site: Path) -> Iterator[Browser]:
    """A browser that shows the site's first page, with the cursor in its search."""
    with browser(site / "index.html") as shown:
        shown.evaluate('document.querySelector(".md-search__input").focus()')
        yield shown


def value(shown: Browser, expression: str) -> Any:
    """The expression's value; None while the page is being left."""
    try:
        return shown.evaluate(expression)
    except ClusterError:
        return None


@pytest.mark.parametrize(
    ("word", "page"),
    [("Trackio", "how-to/train/tracking.html"), ("OpenShift", "how-to/operate/openshift.html")],
)
def test_a_word_that_is_typed_finds_its_page_which_opens(
    reader: Browser, word: str, page: str
) -> None:
    reader.type_keys(word)
    results = f'[...document.querySelectorAll("{RESULT}")]'
    link = f'{results}.find(one => one.href.includes("{page}"))'
    # looked for and clicked at once: each letter that is still being searched for makes a new list
    click = f"(one => !!one && (one.click(), true))({link})"
    until("the result", lambda: value(reader, click))
    is_open = f'location.pathname.endsWith("/{page}") && document.readyState === "complete"'
    until("the page", lambda: value(reader, is_open))
    assert word in reader.evaluate("document.body.innerText")


def test_a_word_that_no_page_has_finds_nothing(reader: Browser) -> None:
    reader.type_keys("xyzzyplugh")
    meta = 'document.querySelector(".md-search-result__meta")?.innerText'
    until("the answer", lambda: value(reader, meta) == "No matching documents")
    assert reader.evaluate(f'document.querySelectorAll("{RESULT}").length') == 0

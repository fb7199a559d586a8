"""MkDocs' hooks: the site's navigation is docs/index.md, and links that leave docs/ stay readable.

On a forge every link of a page works, since the whole repository is there. The site has the pages
alone: a link to another file of the repository becomes the name of that file.
"""

import os
import posixpath
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tools.site.pages import cli_page, fields_page

ROOT = Path(__file__).parents[2]
PAGES = {
    "charts/grpo-operator/README.md": "reference/chart-values.md",
    "tests/README.md": "internals/tests.md",
    "CHANGELOG.md": "internals/changelog.md",
    "CONTRIBUTING.md": "internals/contributing.md",
}
"""Pages that the repository has elsewhere, and their place in the site."""
MADE: dict[str, tuple[str, Callable[[], str]]] = {
    "operator/grpo_cli/__main__.py": ("reference/cli.md", cli_page),
    **{
        f"crds/{crd.name}": (f"reference/{crd.stem}.md", partial(fields_page, f"crds/{crd.name}"))
        for crd in sorted((ROOT / "crds").glob("grpojob*.yaml"))
    },
}
"""Pages that are made of a file of the repository, to which links lead there."""
PLACES = PAGES | {source: place for source, (place, _) in MADE.items()}
_LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<target>(?!\w+:|#)[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")
_HEADING = re.compile(r"(?P<level>##+) (?P<title>.+)")
_ENTRY = re.compile(r"- \[(?P<title>[^\]]+)\]\((?P<target>[^)]+)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Take the navigation from docs/index.md."""
    index = (Path(config.docs_dir) / "index.md").read_text()
    config.nav = [{"Home": "index.md"}, *navigation(index)]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that the repository has elsewhere."""
    for source, place in PAGES.items():
        text = (ROOT / source).read_text()
        files.append(File.generated(config, place, content=for_site(text, source)))
    for place, page in MADE.values():
        files.append(File.generated(config, place, content=page()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Resolve the links that leave docs/."""
    source = page.file.src_uri
    if source in PLACES.values():
        return markdown
    return for_site(markdown, f"docs/{source}")


def navigation(index: str) -> list[dict[str, Any]]:
    """Return the entries of index.md: a list for each heading, with those of the headings below."""
    entries: list[dict[str, Any]] = []
    open_lists: dict[int, list[dict[str, Any]]] = {1: entries}
    level = 1
    for line in index.splitlines():
        if heading := _HEADING.match(line):
            level = len(heading["level"])
            open_lists[level] = []
            open_lists[level - 1].append({heading["title"]: open_lists[level]})
        elif entry := _ENTRY.match(line):
            path = posixpath.normpath(posixpath.join("docs", entry["target"]))
            open_lists[level].append({entry["title"]: _place(path)})
    return entries


def for_site(text: str, source: str) -> str:
    """Return a page of the repository with its links as the site has them."""
    place = PLACES.get(source) or source.removeprefix("docs/")

    def resolve(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link["target"]))
        if path in PLACES or path.startswith("docs/"):
            target = os.path.relpath(_place(path), posixpath.dirname(place) or ".")
            return f"[{link['text']}]({target}{link['anchor'] or ''})"
        return link["text"] if link["text"].strip("`") == path else f"{link['text']} (`{path}`)"

    return _LINK.sub(resolve, text)


def _place(path: str) -> str:
    """Return where the site has a page of the repository."""
    return PLACES.get(path) or path.removeprefix("docs/")

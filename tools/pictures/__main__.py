"""Draws the dashboards of all stories, or of some: `python -m tools.pictures --to FOLDER [--story
NAME]…`.

With `--documents` only the first screens that docs/reference/dashboards.md shows, into
docs/pictures.
"""

import argparse
import tempfile
from pathlib import Path

from grpo_codegen.dashboards import DASHBOARDS
from grpo_codegen.dashboards.page import PICTURED
from grpo_codegen.stories import STORIES
from grpo_codegen.stories.story import Story

from .browser import HEIGHT, Browser, browser, page
from .drawing import View, draw, scraped

DOCUMENTS = Path(__file__).parents[2] / "docs" / "pictures"


def main() -> None:
    """Write `<story>-<dashboard>.png` for each, and say what can't be read on it."""
    parser = argparse.ArgumentParser(prog="python -m tools.pictures", description=__doc__)
    parser.add_argument("--to", type=Path, default=Path("pictures"), help="folder for the pictures")
    parser.add_argument(
        "--story", action="append", choices=[story.name for story in STORIES], help="only this one"
    )
    parser.add_argument(
        "--documents", action="store_true", help="only those of the documents, into docs/pictures"
    )
    parser.add_argument(
        "--page", action="store_true", help="only make the page that draws, for `make tools-all`"
    )
    options = parser.parse_args()
    if options.page:
        page()
        return
    with browser(page()) as one:
        if options.documents:
            _draw_documents(one)
            return
        options.to.mkdir(parents=True, exist_ok=True)
        for story in STORIES:
            if not options.story or story.name in options.story:
                _draw_all(one, story, options.to)


def _draw_documents(one: Browser) -> None:
    stories = {story.name: story for story in STORIES}
    for board, name in PICTURED.items():
        with (
            tempfile.TemporaryDirectory() as temporary,
            scraped(stories[name], Path(temporary)) as server,
        ):
            draw(one, server, board, View.of(stories[name]), is_open=False)
            (DOCUMENTS / f"{board}.png").write_bytes(one.picture(HEIGHT))


def _draw_all(one: Browser, story: Story, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary, scraped(story, Path(temporary)) as server:
        for name in DASHBOARDS:
            drawing = draw(one, server, name, View.of(story))
            path = folder / f"{story.name}-{name}.png".replace(" ", "-").lower()
            path.write_bytes(one.picture(drawing.height))
            print(
                path,
                *drawing.errors,
                *(fault for panel in drawing.panels for fault in panel["faults"]),
                sep="\n  ",
            )


if __name__ == "__main__":
    main()

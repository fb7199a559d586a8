"""User pages have short sentences and the words of docs/internals/style.md."""

from operator import itemgetter
from pathlib import Path

import pytest

from tests.prose import MOST_WORDS, read_page, replacements

ROOT = Path(__file__).parents[2]
MOST_WORDS_OF_ALL_PAGES = 14_500
WORDS = replacements(ROOT / "docs/internals/style.md")
PAGES = sorted(
    path
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
    if "internals" not in path.parts
)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_user_page_has_short_sentences(path: Path) -> None:
    long = read_page(path.read_text()).long_sentences
    assert not long, "\n".join(long)


def test_all_user_pages_together_stay_short() -> None:
    words = {path.name: read_page(path.read_text()).words for path in PAGES}
    assert sum(words.values()) <= MOST_WORDS_OF_ALL_PAGES, sorted(words.items(), key=itemgetter(1))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_user_page_has_no_word_that_the_style_page_replaces(path: Path) -> None:
    found = read_page(path.read_text()).found_words(WORDS)
    assert not found, "\n".join(found)


def test_sentences_are_split_and_code_tables_and_comments_are_left_out() -> None:
    page = read_page(
        """# A heading of many words that is not a sentence
<!-- a comment -->
One [link](far/away.md) and `some code here`. Two: *it* ends! [Three](x.md) begins
here.

- First item of a list
- Second item, told again

| a table | is not read |
|---|---|

```sh
neither is code. At all.
```
"""
    )
    assert page.sentences == (
        "One link and `x`.",
        "Two: *it* ends!",
        "Three begins here.",
        "First item of a list",
        "Second item, told again",
    )
    assert page.words == 19
    assert page.found_words({"told": "reported"}) == [
        "told (write reported): Second item, told again"
    ]


def test_a_long_sentence_and_the_words_of_the_style_page_are_found() -> None:
    assert {"told", "mend", "anew"} <= WORDS.keys()
    long = " ".join(["word"] * (MOST_WORDS + 1))
    assert read_page(f"{long}. Short one.").long_sentences == [f"{long}."]

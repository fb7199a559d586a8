"""How hard a page of Markdown is to read: its sentences, and words that style.md replaces.

Code, tables and comments are left out: they are scanned, not read.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MOST_WORDS = 25
_LEFT_OUT = re.compile(r"<!--.*?-->|^```.*?^```|^\|.*?$|^#.*?$|^!\[.*?$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_CODE = re.compile(r"`[^`]*`")
_ITEM = re.compile(r"^\s*(?:[-*]|\d+\.)\s+", re.MULTILINE)
_END = re.compile(r"(?<=[.!?])[*_\"')]*\s+(?=[\"'(*_]*[A-Z`\[])")


@dataclass(frozen=True)
class Page:
    """The prose of one page."""

    sentences: tuple[str, ...]

    @property
    def words(self) -> int:
        """Words of all sentences."""
        return sum(len(sentence.split()) for sentence in self.sentences)

    @property
    def long_sentences(self) -> list[str]:
        """Sentences of more than MOST_WORDS words, the longest first."""
        long = [text for text in self.sentences if len(text.split()) > MOST_WORDS]
        return sorted(long, key=lambda text: -len(text.split()))

    def found_words(self, replacements: dict[str, str]) -> list[str]:
        """Return where a word of the replacements stands, with what to write instead."""
        return [
            f"{word} (write {instead}): {sentence}"
            for sentence in self.sentences
            for word, instead in replacements.items()
            if re.search(rf"\b{word}\b", sentence, re.IGNORECASE)
        ]


def read_page(markdown: str) -> Page:
    """Return the sentences of a page."""
    text = _LEFT_OUT.sub("\n\n", markdown)
    text = _LINK.sub(r"\1", text)
    text = _CODE.sub("`x`", text)
    text = _ITEM.sub("\n\n", text)
    return Page(tuple(_sentences(text)))


def _sentences(text: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", text):
        for sentence in _END.split(" ".join(paragraph.split())):
            if len(sentence.split()) > 1:
                yield sentence


def replacements(style_page: Path) -> dict[str, str]:
    """Return the words that the style page replaces, from its table under "Words"."""
    section = style_page.read_text().partition("\n## Words\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|`]+) \| ([^|]+) \|", section, re.MULTILINE)
    return {word: instead for word, instead in rows[1:] if not set(word) <= {"-", " "}}

"""Puts measured text between the markers of a page in docs/.

Pages are written by hand, their numbers are not.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STRATEGIES = ROOT / "docs/internals/strategy-measurements.md"


def replace_section(page: Path, name: str, text: str) -> None:
    """Replaces what is between `<!-- name -->` and `<!-- /name -->`.

    Raises:
        ValueError: the page has no such markers.
    """
    before, marker, rest = page.read_text().partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- /{name} -->")
    if not (marker and end):
        raise ValueError(f"{page} has no section {name}")
    page.write_text(f"{before}{marker}{text.rstrip()}\n{end}{after}")


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"

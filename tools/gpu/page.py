"""docs/internals/gpu.md's last result, written from the result of an acceptance run on a GPU.

Nobody types a measured number.
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.pages import ROOT, replace_section
from grpo_acceptance.report import markdown_page

PAGE = ROOT / "docs/internals/gpu.md"
SECTION = "acceptance"


def publish(result: Path, target: Path = PAGE) -> bool:
    """Put the result into the page; false, and nothing is written, if it isn't a GPU's."""
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    if found["device"] != "cuda":
        return False
    replace_section(target, SECTION, markdown_page(found))
    return True

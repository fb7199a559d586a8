"""Makes a Python script of a Jupyter notebook, so that `grpo init --from-trl` reads it like one.

Most public GRPO examples are notebooks. What IPython adds to Python (magics, shell commands, help)
can't be parsed as Python and sets nothing of a run, so that it becomes `pass`.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from .interpreter.syntax import parse
from .trl_run import TrlError

SUFFIX = ".ipynb"
_CELL_MAGIC = re.compile(r"%%(\w+).*")
_ENV = re.compile(r"^(\s*)%(?:set_)?env\s+(\w+)[=\s].*")
_LINES = re.compile(r"\blines? [1-9]\d*(?:, [1-9]\d*)*")
"""Lines in a message."""
_IPYTHON = re.compile(r"^(\s*)(?:[\w., ]+=\s*)?(?:[%!?].*|pip .*|[\w.]+\?{1,2}\s*)$")
"""A line of IPython's own: `pip install trl`, `files = !ls`, `?GRPOConfig`, `GRPOConfig?`."""


def code_cells(text: str, source: str) -> list[str]:
    """The code cells of a notebook as Python; `source` is its name for messages.

    Raises:
        TrlError: it is no notebook of nbformat 4.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TrlError(f"{source} is no notebook: it is not JSON") from error
    cells = document.get("cells") if isinstance(document, dict) else None
    if not isinstance(cells, list):
        raise TrlError(
            f"{source} is no notebook of format 4: it has no list of cells; save it again by "
            "Jupyter"
        )
    return [
        _code(cell) for cell in cells if isinstance(cell, dict) and cell.get("cell_type") == "code"
    ]


def name_cells(message: str, cells: Sequence[str]) -> str:
    """The message with the code cells of its lines, which are those of all cells together; the same
    message where there are no cells."""
    if not cells:
        return message
    starts = list(accumulate((cell.count("\n") + 1 for cell in cells[:-1]), initial=1))

    def name_cell(match: re.Match[str]) -> str:
        line = int(match[0])
        cell = bisect_right(starts, line)
        return f"{line - starts[cell - 1] + 1} of code cell {cell}"

    return _LINES.sub(lambda lines: re.sub(r"\d+", name_cell, lines[0]), message)


def _code(cell: dict[str, Any]) -> str:
    source = cell.get("source")
    # nbformat allows a text or its lines.
    text = "".join(map(str, source)) if isinstance(source, list) else str(source or "")
    magic = _CELL_MAGIC.match(text)
    if magic and magic[1] not in ("capture", "prun", "time", "timeit"):
        return ""  # a whole cell of another language, such as %%bash
    return _without_ipython(text[magic.end() :] if magic else text)


def _without_ipython(text: str) -> str:
    """The cell with `pass` for each line of IPython's own.

    Only a line at which Python stops is replaced: the same letters may be part of a prompt.
    """
    lines = text.split("\n")  # not splitlines, which breaks at more characters than Python
    for _ in lines:
        try:
            parse("\n".join(lines))
        except SyntaxError as error:
            index = min((error.lineno or 1), len(lines)) - 1
            while index > 0 and lines[index - 1].endswith("\\"):
                index -= 1  # Python may stop where a shell command goes on
            line = lines[index]
            if not _IPYTHON.match(line):
                break
            _blank_continuations(lines, index)
            variable = _ENV.match(line)
            replaced = r'\1os.environ["\2"] = ""' if variable else r"\1pass"
            lines[index] = (_ENV if variable else _IPYTHON).sub(replaced, line)
        except (ValueError, RecursionError, MemoryError):
            break  # the reader of the whole script says what is wrong
        else:
            break
    return "\n".join(lines)


def _blank_continuations(lines: list[str], index: int) -> None:
    """Empty the lines on which a shell command goes on that ends with a backslash."""
    goes_on = lines[index].endswith("\\")
    for following in range(index + 1, len(lines)):
        if not goes_on:
            return
        goes_on = lines[following].endswith("\\")
        lines[following] = ""

"""`python -m benchmarks` lists the benchmarks; `python -m benchmarks NAME [options]` runs one."""

import ast
import importlib
import re
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = FOLDER.parent / "operator"
"""Has grpo_codegen, which no installation has, with the stories that some benchmarks run."""


def benchmarks() -> dict[str, str]:
    """Return the first sentence of each benchmark's docstring by name. A benchmark is a module with
    a function `main`."""
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        # Read and not imported: some import torch, and a list should come at once.
        module = ast.parse(path.read_text(encoding="utf-8"))
        functions = {
            statement.name for statement in module.body if isinstance(statement, ast.FunctionDef)
        }
        if "main" in functions and path != Path(__file__):
            first_paragraph = (ast.get_docstring(module) or "").partition("\n\n")[0]
            first_sentence, *_ = re.split(r"(?<=\.)\s", first_paragraph)
            found[path.stem] = " ".join(first_sentence.split())
    return found


def main() -> int:
    """Print the list, or run the benchmark that the command line names. Returns the exit code."""
    known = benchmarks()
    name, *options = sys.argv[1:] or [""]
    if name in known:
        # argparse shows this name in the usage
        sys.argv = [f"python -m benchmarks {name}", *options]
        sys.path.append(str(SOURCES))
        return int(importlib.import_module(f"benchmarks.{name}").main() or 0)
    if name not in ("", "-h", "--help"):
        sys.stderr.write(f"there is no benchmark {name}: `python -m benchmarks` lists them\n")
        return 2
    print(
        "python -m benchmarks NAME [options], or make bench NAME=… OPTIONS=…; NAME --help shows "
        "the options\n"
    )
    for benchmark, summary in known.items():
        print(f"  {benchmark:17} {summary}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

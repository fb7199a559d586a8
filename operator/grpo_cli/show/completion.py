"""Completes the command line in a shell: `grpo` by argcomplete, and `kubectl grpo` by the program
that kubectl asks.

https://kubernetes.io/docs/tasks/extend-kubectl/kubectl-plugins/#command-completion
"""

import argparse
import os
from collections.abc import Callable

NO_FILES, FILES_TOO = ":4", ":0"
"""Cobra's directives after the last completion: without files of the folder, or with them."""


def is_completion() -> bool:
    """Return True if a shell has started this process to ask for completions."""
    return "_ARGCOMPLETE" in os.environ


def words_to_complete() -> list[str]:
    """Return the words of the line that the shell completes."""
    return os.environ.get("COMP_LINE", "").split()


def complete_words(parser: argparse.ArgumentParser) -> None:
    """Give the shell its completions, and end the process."""
    import argcomplete

    argcomplete.autocomplete(parser)


def completions(parser: argparse.ArgumentParser, arguments: list[str]) -> list[str]:
    """Return the values that the last argument may have, in alphabetical order."""
    from argcomplete.completers import SuppressCompleter
    from argcomplete.finders import CompletionFinder

    finder = CompletionFinder(parser, default_completer=SuppressCompleter())
    *before, prefix = arguments or [""]
    # Its public call writes into a file descriptor of the shell and ends the process.
    ask: Callable[..., list[str]] = finder._get_completions
    answers = ask([parser.prog, *before], prefix, "", None)
    return sorted({word.strip() for word in answers})


def kubectl_answer(parser: argparse.ArgumentParser, arguments: list[str]) -> str:
    """Return the lines that kubectl reads: a completion each, and a directive at the end."""
    answers = completions(parser, arguments)
    return "\n".join([*answers, NO_FILES if answers else FILES_TOO])

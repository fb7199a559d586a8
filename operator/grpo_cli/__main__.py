# PYTHON_ARGCOMPLETE_OK
"""The command line `grpo`, also installed as `kubectl-grpo` (`kubectl grpo …`).

Each command is a module with `register(parser)`, which adds its arguments, and `run(options) ->
exit code`. It is imported when it is named: what one command needs costs the others, and `--help`,
nothing.

Shells complete `grpo` by argcomplete, and `kubectl grpo` by the program that kubectl asks
(https://kubernetes.io/docs/tasks/extend-kubectl/kubectl-plugins/#command-completion).
"""

import argparse
import os
import signal
from collections.abc import Callable
from contextlib import suppress

_raises_interrupt = signal.getsignal(signal.SIGINT) is signal.default_int_handler
# Ctrl-C while the modules below are imported ends the program without a traceback.
with suppress(ValueError):  # imported by another thread than the main one
    if _raises_interrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

import errno
import gc
import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from grpo_api.text.messages import printable_text

from .show.errors import ENDED_BADLY, EXIT_CODES, WRONG, CliError, OptionError

with suppress(ValueError):
    if _raises_interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Command(NamedTuple):
    """Where a command is."""

    summary: str
    room: str = ""
    """Its folder in commands/; unset: commands/ itself."""
    module: str = ""
    """Unset: the command's name."""


COMMANDS = {
    "init": Command("write a job to begin with, or the one that trains what a TRL script trains"),
    "plan": Command("plan a job and say why: strategy, GPUs, memory, time"),
    "gpus": Command("list the GPU products that the planner knows, and their short names"),
    "render": Command("print the objects that the operator would create"),
    "preflight": Command("find a job's mistakes before it is applied"),
    "run": Command("run a job's trainer as processes of this machine"),
    "prefetch": Command("fill a job's cache of the hub before the job runs"),
    "submit": Command("create the jobs of a file, and wait for their end if asked to", "jobs"),
    "list": Command("list jobs: what each does and how far it is", "jobs"),
    "why": Command("say in a few lines why a job is where it is, and what to do", "jobs"),
    "wait": Command("wait for a job's end and say it by the exit code", "jobs"),
    "suspend": Command("let a job save a checkpoint and give its GPUs back", "jobs", "change"),
    "resume": Command("let a suspended job go on", "jobs", "change"),
    "retry": Command("try a failed job again", "jobs", "change"),
    "delete": Command("delete a job", "jobs", "change"),
    "status": Command("show one job on one screen"),
    "calibrate": Command("collect finished jobs' step times, which correct those of plans", "runs"),
    "usage": Command("tell what became of the GPUs' time, and what it cost"),
    "logs": Command("print the log of a rank"),
    "diagnose": Command("say what is wrong with a run, by its logged steps", "runs"),
    "history": Command("print or draw the logged steps of a run", "runs"),
    "reward": Command("score a file of completions with a job's rewards", "runs"),
    "samples": Command("show what the policy wrote, with rewards", "runs"),
    "export": Command("bring a job's trained model to this machine"),
    "verify": Command(
        "check an exported model against its provenance, and say what it was made of"
    ),
}
INTERRUPTED, PIPE_CLOSED = 130, 141
"""Exit codes that shells give a program which SIGINT or SIGPIPE has ended."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns its exit code, that of its CliError, 130 after Ctrl-C, or 141 after
    the reader of its output has closed it."""
    _open_missing_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Half of a surrogate pair has no UTF-8, and a terminal may have another encoding.
        sys.stdout.reconfigure(errors="replace")
    # Looking for plug-ins of pydantic reads the metadata of every installed package.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    if "_ARGCOMPLETE" in os.environ:
        _complete_line()
    try:
        _check_command(sys.argv[1:] if arguments is None else arguments)
        with _without_garbage_collection():
            options = command_parser().parse_args(arguments)
        code: int = options.run(options)
        sys.stdout.flush()
    except CliError as error:
        for problem in error.problems:
            print(f"grpo: {printable_text(problem)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        if error.errno in (errno.EPIPE, errno.ENOSPC):
            return _end_output(error)
        if error.filename is None:
            raise
        # Such as a folder that only others may read, or a name that is too long.
        print(f"grpo: {printable_text(str(error.filename))}: {error.strerror}", file=sys.stderr)
        return WRONG
    return code


def _check_command(words: Sequence[str]) -> None:
    """Refuse a word that is no command and name the one that is meant; argparse lists all."""
    word = words[0] if words else "-"
    if word.startswith("-") or word in COMMANDS:
        return
    from difflib import get_close_matches

    close = get_close_matches(word, COMMANDS, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise OptionError(f"{word} is no command; {hint}`grpo --help` lists them")


def _open_missing_streams() -> None:
    """Put an empty file in the place of what `<&-`, `>&-` or `2>&-` has closed; without stderr,
    `print` would take stdout."""
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115


def _end_output(error: OSError) -> int:
    """Return the exit code after a closed pipe or a full disk, to which Python would otherwise
    write once more at its end."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno == errno.EPIPE:
        return PIPE_CLOSED
    print(f"grpo: {error.strerror}", file=sys.stderr)
    return ENDED_BADLY


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Imports what a command needs without garbage collections, and keeps it out of later ones.

    They would walk through all modules and pydantic's models again and again, a quarter of the time
    of `grpo plan`.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def complete_for_kubectl() -> int:
    """Answers kubectl, which asks `kubectl_complete-grpo` for what may follow `kubectl grpo …`."""
    arguments = sys.argv[1:]
    print(kubectl_answer(command_parser(arguments), arguments))
    return 0


class _Command(argparse.ArgumentParser):
    """A command's parser, which is built when something of it is needed: the others are only
    listed, and building all of them takes as long as reading a folder of runs."""

    _add: Callable[[argparse.ArgumentParser], None] | None = None

    def __init__(self, add: Callable[[argparse.ArgumentParser], None], **settings: Any) -> None:
        self._add = add
        self._settings = settings

    def __repr__(self) -> str:
        """Its name: argcomplete writes parsers into messages that nobody sees."""
        return str(self._settings["prog"])

    def build(self) -> None:
        """Be a parser with the command's arguments from now on."""
        add, self._add = self._add, None
        if add:
            super().__init__(**self._settings)
            add(self)

    def __getattr__(self, name: str) -> Any:
        """Build the parser when an attribute is read that it gets then; Python 3.14's `add_parser`
        reads some."""
        if self._add is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        self.build()
        return getattr(self, name)


class _Version(argparse.Action):
    """Prints the version; looked up only then, as that reads the metadata of what is installed."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Prints and ends."""
        from importlib.metadata import version

        print(version("grpo-operator"))
        parser.exit()


def command_parser(line_words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of all commands. Those among the words have their arguments already, which
    completion needs before it parses."""
    parser = argparse.ArgumentParser(
        prog="grpo",
        description="Plans, renders and watches GRPO training jobs.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and end")
    commands = parser.add_subparsers(
        title="commands", required=True, metavar="COMMAND", parser_class=_Command
    )
    for name, where in COMMANDS.items():
        command = commands.add_parser(name, help=where.summary, add=_registration(name))
        if name in line_words:
            command.build()
    return parser


def _registration(name: str) -> Callable[[argparse.ArgumentParser], None]:
    """Return the function that adds a command's arguments; its module is imported by the call. One
    of several in a module has `register_NAME`, which sets its `run`, too."""
    where = COMMANDS[name]
    rooms = f".{where.room}" if where.room else ""

    def register(parser: argparse.ArgumentParser) -> None:
        module = import_module(f"{__package__}.commands{rooms}.{where.module or name}")
        if where.module:
            getattr(module, f"register_{name}")(parser)
        else:
            module.register(parser)
            parser.set_defaults(run=module.run)

    return register


NO_FILES, FILES_TOO = ":4", ":0"
"""Cobra's directives after the last completion: without files of the folder, or with them."""


def _complete_line() -> None:
    """Give the shell that has started this process the completions of its line, and end."""
    import argcomplete

    line_words = os.environ.get("COMP_LINE", "").split()
    argcomplete.autocomplete(command_parser(line_words))


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


if __name__ == "__main__":
    sys.exit(main())

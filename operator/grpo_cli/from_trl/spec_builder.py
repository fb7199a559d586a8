"""A spec in the making: values by path, each with the line of the script that it comes from.

A value that the spec's types reject is taken out again, and becomes a note: the job that is written
always parses.
"""

import re
from typing import Any

from pydantic.alias_generators import to_camel

from grpo_api.job import GRPOJobSpec, SpecInvalid, parse_spec

from .trl_run import Given, TrlRun

MAX_TRIES = 20
"""Rounds of taking rejected values out; each removes one at least."""


class SpecBuilder:
    """Collects the fields of a spec."""

    def __init__(self, run: TrlRun) -> None:
        self.run = run
        self.spec: dict[str, Any] = {}
        self._origins: dict[str, tuple[str, Given]] = {}
        """TRL's name and value of what was put at a path."""

    def put(self, path: str, value: Any, name: str = "", given: Given | None = None) -> None:
        """Set a field, such as `training.beta`; `name` and `given` say where it comes from."""
        *sections, field = path.split(".")
        place = self.spec
        for section in sections:
            place = place.setdefault(section, {})
        place[field] = value
        if given is not None:
            self._origins[path] = (name, given)

    def get(self, path: str) -> Any:
        """The value at a path; None where there is none."""
        place: Any = self.spec
        for part in path.split("."):
            place = place.get(part) if isinstance(place, dict) else None
        return place

    def finish(self) -> dict[str, Any]:
        """The spec without what its types reject; each rejected value is a note.

        What is wrong between several fields stays, and is a note, too.
        """
        for _ in range(MAX_TRIES):
            problems = error_messages(self.spec)
            rejected = [self._reject(problem) for problem in problems]
            if not any(rejected) and not any(self._reject_between(problem) for problem in problems):
                break
        for problem in error_messages(self.spec):
            self.run.note(0, "the job", "", f"{problem}; correct it before it is applied")
        sections = map(to_camel, GRPOJobSpec.model_fields)
        return {section: self.spec[section] for section in sections if section in self.spec}

    def _reject(self, problem: str) -> bool:
        """Take out the value that a problem is about; False if it is about none."""
        for path, (name, given) in list(self._origins.items()):
            where = f"spec.{path}"
            if problem.startswith((f"{where}:", f"{where}.", f"{where}[")):
                self._remove(path)
                advice = f"not allowed: {problem.removeprefix(where).lstrip(':. ')}"
                self.run.note(given.line, name, given.value, advice)
                return True
        return False

    def _reject_between(self, problem: str) -> bool:
        """Take out the first value that a problem between several fields names, if it is over
        then."""
        section, _, message = problem.partition(": ")
        words = re.findall(r"\w+", message)
        fields = {path: path.rpartition(".")[2] for path in self._origins}
        named = [
            path
            for path, field in fields.items()
            if f"spec.{path}".startswith(f"{section}.") and field in words
        ]
        for path in sorted(named, key=lambda path: words.index(fields[path])):
            value = self.get(path)
            name, given = self._remove(path)
            if problem not in error_messages(self.spec):
                self.run.note(given.line, name, given.value, f"not allowed here: {message}")
                return True
            self.put(path, value, name, given)
        return False

    def _remove(self, path: str) -> tuple[str, Given]:
        *sections, field = path.split(".")
        place = self.spec
        for section in sections:
            place = place[section]
        del place[field]
        return self._origins.pop(path)


def error_messages(spec: dict[str, Any]) -> list[str]:
    """What is wrong with a spec, a sentence for each field."""
    try:
        parse_spec(spec, creating=True)
    except SpecInvalid as error:
        return error.problems
    return []

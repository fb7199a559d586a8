"""Declares an alert: an expression with thresholds, texts for the person on call, and the stories
where it fires."""

from dataclasses import dataclass
from typing import Literal

PER_JOB = "max by (namespace, grpojob)"
"""A job has one value, whatever pods and attempts it has had."""
JOB = "{{ $labels.namespace }}/{{ $labels.grpojob }}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One rule: it fires when `expression` has been true for the time `for_`, such as `5m`.

    `<name>` in the two is a threshold of the chart's values.
    """

    name: str
    expression: str
    for_: str
    severity: Literal["warning", "critical"]
    """A user's job is never critical: nobody is woken for it."""
    summary: str
    """One line, with the labels."""
    description: str
    """What it means and the first thing to do."""
    runbook: tuple[str, ...]
    """What to look at and do, in order, for docs/alerts.md."""
    fires_in: tuple[str, ...]
    """Names of the stories in which it fires; in all others it is silent."""

"""Declares an alert: an expression with thresholds, and texts for the person on call."""

from dataclasses import dataclass
from typing import Literal

from grpo_api.spec.run_policy import FindingName

PER_JOB = "max by (cluster, namespace, grpojob)"
"""A job has one value, whatever pods and attempts it has had."""
PER_OPERATOR = "by (cluster, job)"
"""Two operators of a cluster that watch different namespaces have different scrape jobs."""
JOB = "{{ $labels.namespace }}/{{ $labels.grpojob }}"
TRAINING_UID, FLEET_UID, OPERATOR_UID = "grpo-training", "grpo-fleet", "grpo-operator"
"""The dashboards' names in their addresses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One rule: it fires when `expression` has been true for the time `for_`, such as `5m`.

    `<name>` in the two is a threshold of the chart's values.
    """

    name: str
    expression: str
    for_: str
    severity: Literal["warning", "critical"] = "warning"
    """A user's job is never critical: nobody is woken for it."""
    summary: str
    """One line, with the labels."""
    description: str
    """What it means and the first thing to do."""
    runbook: tuple[str, ...]
    """What to look at and do, in order, for docs/reference/alerts.md."""
    dashboard: str = TRAINING_UID
    """Where the reader of the alert looks first."""
    info_findings: tuple[FindingName, ...] = ()
    """Values of the label `finding` with which its severity is only `info`."""

"""The checks of a preflight, in order: what is quick and sure first, code of users last."""

from collections.abc import Callable
from dataclasses import replace

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.preflight import PreflightReport

from ..hub.repositories import Hub
from .dataset_checks import check_dataset
from .findings import Findings
from .image_checks import check_image
from .model_checks import check_policy
from .place_checks import check_places
from .reward_checks import check_rewards
from .scope import Preflight, Scope


def run_checks(
    plan: TrainingPlan,
    scope: Scope,
    on_report: Callable[[PreflightReport], None] = lambda _: None,
) -> PreflightReport:
    """All that is wrong with the job of a plan.

    `on_report` is given what is known before code of users runs: that may take the memory of the
    whole pod, which ends without another word.
    """
    findings = Findings()
    hub = Hub(plan.revisions, longest_wait=scope.wait_seconds, takes_leases=False)
    findings.revisions = hub.commits
    if scope.is_whole and scope.is_in_cluster:
        check_image(plan, findings)
    preflight = Preflight(plan, scope, hub, findings)
    tokenizer = check_policy(preflight)
    first = check_dataset(preflight, tokenizer)
    check_places(preflight)
    on_report(_before_rewards(plan, findings))
    check_rewards(preflight, first)
    return findings.report()


def _before_rewards(plan: TrainingPlan, findings: Findings) -> PreflightReport:
    """What is left behind by a preflight that a reward ends."""
    known = replace(findings, skipped=list(findings.skipped))
    for position, reward in enumerate(plan.rewards):
        if reward.python:
            reason = "the pod ended while rewards were called"
            known.skip(f"spec.rewards[{position}].python.function", reason)
    return known.report()

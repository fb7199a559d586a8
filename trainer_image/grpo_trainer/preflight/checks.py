"""The checks of a preflight, in order: what is quick and sure first, code of users last."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.preflight import PreflightReport
from grpo_api.spec.rewards import RewardSpec

from ..hub.repositories import Hub
from .dataset_checks import check_dataset
from .findings import Findings, Preflight, Scope
from .model_checks import check_policy
from .reward_checks import check_rewards
from .storage_checks import check_image, check_places
from .tracking_checks import check_tracking


def run_checks(
    plan: TrainingPlan,
    scope: Scope,
    on_report: Callable[[PreflightReport], None] = lambda _: None,
    on_prompt: Callable[[str], None] = lambda _: None,
    *,
    only_prompts: bool = False,
) -> PreflightReport:
    """All that is wrong with the job of a plan.

    `on_report` is given what is known before code of users runs: that may take the memory of the
    whole pod, which ends without another word. `on_prompt` is given what the model reads of the
    first row, which no report has: it is the user's data. `only_prompts` checks model and dataset
    alone.
    """
    findings = Findings()
    hub = Hub(plan.revisions, longest_wait=scope.wait_seconds, takes_leases=False)
    findings.revisions = hub.commits
    preflight = Preflight(plan, scope, hub, findings)
    if scope.is_whole and scope.is_in_cluster and not only_prompts:
        check_image(preflight)
    tokenizer = check_policy(preflight)
    first = check_dataset(preflight, tokenizer)
    on_prompt(findings.first_prompt)
    if only_prompts:
        return findings.report()
    check_places(preflight)
    check_tracking(preflight)
    on_report(_before_rewards(plan.rewards, findings))
    check_rewards(preflight, first)
    return findings.report()


def _before_rewards(rewards: Sequence[RewardSpec], findings: Findings) -> PreflightReport:
    """What is left behind by a preflight that a reward ends."""
    interim_findings = replace(findings, skipped=list(findings.skipped))
    for position, reward in enumerate(rewards):
        if reward.python:
            reason = "the pod ended while rewards were called"
            interim_findings.skip(f"spec.rewards[{position}].python.function", reason)
    return interim_findings.report()

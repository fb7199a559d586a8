"""The findings of a run: every rule, judged step by step.

A finding begins when its rule has been beyond the limit for some steps in a row. It ends when the
rule has been clearly within the limit for as long. The trainer adds each step as it happens. After
a restart it adds the history again, so the beginning of a run stays the baseline. `grpo diagnose`
does the same with anybody's file.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..report.report import Finding
from ..spec.run_policy import FindingName
from . import learning_rules, running_rules
from .run_numbers import SMOOTH, RunNumbers, Verdict
from .step_row import StepRow, rows_in_order

Rule = Callable[[RunNumbers], Verdict | None]
BEGINS_AFTER = 5
"""Steps in a row beyond the limit after which a finding begins."""
FAR_BEYOND = 1.5
"""Share of the limit from which a row counts as all of the steps that it is the mean of."""
ENDS_AFTER = 4 * BEGINS_AFTER
"""Steps in a row within it after which a finding ends: two levels' worth, so that the noise of one
does not end and begin it again and again."""
LEAST_STEPS = 2 * SMOOTH
"""Steps that most rules need: a beginning, and a level to compare with it."""
WITHIN = 0.8
"""Share of the limit below which a run counts as within it again."""


class RuleSet(NamedTuple):
    """A rule under its name."""

    judge: Rule
    advice: str
    begins_after: int = BEGINS_AFTER
    ends_after: int = ENDS_AFTER
    costs: Literal["Run", "Time"] = "Run"
    """`Time`: the run gets as good as it would, only later."""


RULES: dict[FindingName, RuleSet] = {
    "NoReward": RuleSet(
        running_rules.no_reward,
        "No completion has a reward, or one has an infinite reward: check the columns and the "
        "service that the rewards read.",
        begins_after=1,
        ends_after=BEGINS_AFTER,
    ),
    "EntropyCollapsed": RuleSet(
        learning_rules.entropy_collapsed,
        "The policy repeats itself: raise training.epsilonHigh (0.28), add an entropy bonus, raise "
        "training.temperature, lower training.learningRate, or go back to an earlier checkpoint.",
    ),
    "EntropyExploding": RuleSet(
        learning_rules.entropy_exploding,
        "The policy forgets: lower training.learningRate or the entropy bonus, raise "
        "training.beta, or go back to an earlier checkpoint.",
    ),
    "NoSignal": RuleSet(
        learning_rules.no_signal,
        "Rewards don't tell answers apart: where the task is solved, stop or take harder prompts. "
        "Where no answer is right, read samples: does the reward read them? Otherwise take easier "
        "prompts or a finer reward.",
    ),
    "Truncating": RuleSet(
        learning_rules.truncating,
        "Answers are cut before their end: raise training.maxCompletionLength, set "
        "training.maskTruncatedCompletions, or reward shorter answers.",
    ),
    "LengthExploding": RuleSet(
        learning_rules.length_exploding,
        "Answers get longer and not better: use lossType dapo or dr_grpo, penalise length, or look "
        "for a reward that counts words.",
    ),
    "RewardFalling": RuleSet(
        learning_rules.reward_falling,
        "The reward has been higher: look whether the data or a reward changed. Otherwise go back "
        "to the best step's checkpoint with a lower training.learningRate or a higher "
        "training.beta.",
    ),
    "RewardHacking": RuleSet(
        learning_rules.reward_hacking,
        "What is rewarded costs another reward or the evaluation: read samples of both. Change the "
        "reward that is gamed or its weight, raise training.beta, or go back to the best "
        "evaluation's checkpoint.",
    ),
    "NotLearning": RuleSet(
        learning_rules.not_learning,
        "The reward has not risen since the start: raise training.learningRate, look at "
        "gradNorm and at which weights are trained, or read samples of what the reward prefers.",
    ),
    "KLRising": RuleSet(
        learning_rules.kl_rising,
        "The policy leaves its reference without a better reward: raise training.beta, lower "
        "training.learningRate, or stop at the best checkpoint.",
    ),
    "StepsTooLarge": RuleSet(
        learning_rules.steps_too_large,
        "Steps are too large: lower training.learningRate, training.maxGradNorm or "
        "training.numIterations.",
    ),
    "WaitingForRewards": RuleSet(
        running_rules.waiting_for_rewards,
        "GPUs wait for the rewards: give the reward service more replicas, or send more of a batch "
        "at a time.",
        costs="Time",
    ),
    "EngineDrift": RuleSet(
        running_rules.engine_drift,
        "The engine computes otherwise than the trainer: set kvCacheDtype auto, training.dtype "
        "float32, or generation.engine Transformers.",
    ),
    "Straggler": RuleSet(
        running_rules.straggler,
        "One rank is slower than the others: look at the temperature and clocks of its GPU, and at "
        "what else runs on its node; a restart avoids the node once it has been so for long.",
        ends_after=BEGINS_AFTER,
        costs="Time",
    ),
    "CheckpointSlow": RuleSet(
        running_rules.checkpoint_slow,
        "Training stands still for checkpoints: raise checkpoint.everySteps, or take a faster "
        "volume.",
        costs="Time",
    ),
    "CheckpointFailing": RuleSet(
        running_rules.checkpoint_failing,
        "A checkpoint could not be written: look for a full volume or changed credentials; a "
        "restart loses all steps since the last one.",
        begins_after=1,
        ends_after=1,
    ),
}
"""Every rule, the most urgent first."""
TIME_FINDINGS = tuple(name for name, rule in RULES.items() if rule.costs == "Time")


NO_VERDICT = Verdict(0.0, {})


@dataclass(slots=True)
class _State:
    """Where one rule stands."""

    streak: int = 0
    """Steps in a row that call for a change."""
    beyond_since: int | None = None
    """Step since which the run has been beyond the limit; None where it is not."""
    is_active: bool = False
    verdict: Verdict = NO_VERDICT


class Diagnosis:
    """The findings of a run whose steps are added in order."""

    def __init__(self, max_kl: float | None = None) -> None:
        """`max_kl` is guard.maxKL of the run's spec."""
        self._run = RunNumbers(max_kl)
        self._states = {name: _State() for name in RULES}
        self._last_step: int | None = None

    def add(self, row: StepRow) -> None:
        """Judge one more step, or the mean of the steps since the last one."""
        num_steps = 1 if self._last_step is None else max(1, row.step - self._last_step)
        self._last_step = row.step
        self._run.add(row)
        for name, rule in RULES.items():
            verdict = rule.judge(self._run)
            if verdict is not None and math.isfinite(verdict.score):
                _update(self._states[name], verdict, row.step, num_steps, rule)

    @property
    def findings(self) -> list[Finding]:
        """What is wrong at the last step, the most urgent first."""
        return [_finding(name, state) for name, state in self._states.items() if state.is_active]


def _update(state: _State, verdict: Verdict, step: int, num_steps: int, rule: RuleSet) -> None:
    # TRL logs the mean of ten steps by default. What is beyond a limit by little must stay so in as
    # many rows.
    counted_steps = num_steps if verdict.score >= FAR_BEYOND else 1
    is_beyond, is_within = verdict.score >= 1.0, verdict.score < WITHIN
    if is_beyond and state.beyond_since is None:
        state.beyond_since = step
    if state.is_active:
        state.streak = state.streak + 1 if is_within else 0
        if not is_within:
            state.verdict = verdict
    else:
        state.streak = state.streak + counted_steps if is_beyond else 0
        state.verdict = verdict
        if not is_beyond:
            state.beyond_since = None
    needed = rule.ends_after if state.is_active else rule.begins_after
    if state.streak >= needed:
        state.is_active, state.streak = not state.is_active, 0
        if not state.is_active:
            state.beyond_since = None


def _finding(name: FindingName, state: _State) -> Finding:
    assert state.beyond_since is not None
    score = max(1.0, state.verdict.score)
    confidence = 1.0 - 0.5 / score
    rounded = {key: float(f"{value:.4g}") for key, value in state.verdict.evidence.items()}
    # The largest numbers are rounded up to infinity.
    evidence = {key: value for key, value in rounded.items() if math.isfinite(value)}
    return Finding(
        finding=name,
        since=state.beyond_since,
        confidence=round(min(confidence, 0.99), 2),
        evidence=evidence,
        advice=RULES[name].advice,
    )


def diagnose(rows: Iterable[StepRow], max_kl: float | None = None) -> list[Finding]:
    """The findings at the last of these steps, which may come in any order."""
    diagnosis = Diagnosis(max_kl)
    for row in rows_in_order(rows):
        diagnosis.add(row)
    return diagnosis.findings


UNSEEN = "Unseen"
UNSEEN_MEANING = (
    "Rank 0 runs, and the operator gets no answer of it: nobody knows how the run learns."
)
UNSEEN_ADVICE = (
    "Read rank 0's log (`grpo logs`), and let NetworkPolicies pass the operator to the pod."
)


def unseen_finding(step: int) -> Finding:
    """What the operator finds in place of rank 0, which has answered last after this step."""
    return Finding(finding=UNSEEN, since=step, confidence=1.0, advice=UNSEEN_ADVICE)


def finding_message(finding: Finding) -> str:
    """One line for a person: what, since when, where, by which numbers."""
    most_telling = list(finding.evidence.items())[:4]
    details = [f"{key} {value:g}" for key, value in most_telling] + _places(finding)
    shown = f" ({', '.join(details)})" if details else ""
    return f"{finding.finding} since step {finding.since}{shown}"


def place_message(finding: Finding) -> str:
    """`rank 3, pod run-1-1-x7k2p, node gpu-7`; empty for a finding that is of no rank."""
    rank = finding.evidence.get("rank")
    ranks = [] if rank is None else [f"rank {rank:g}"]
    return ", ".join(ranks + _places(finding))


def _places(finding: Finding) -> list[str]:
    places = {"pod": finding.pod, "node": finding.node}
    return [f"{kind} {name}" for kind, name in places.items() if name]

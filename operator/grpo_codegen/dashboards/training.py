"""Training health: whether one run learns, where its time and memory go, and what broke."""

from grpo_api.findings import thresholds as limits
from grpo_api.report import metrics as operator
from grpo_api.report import training_metrics as trainer
from grpo_api.report.metrics import Metric
from grpo_api.report.report import Result
from grpo_api.status.status import ConditionType

from ..alerts.alert import TRAINING_UID
from . import engines, first_row, job_progress, usage, vllm
from .panels import Annotation, Dashboard, Panel, Query, Row, Variable
from .promql import (
    CLUSTER,
    JOB,
    MEAN_WINDOW,
    highest,
    largest,
    new_maximum,
    of_job,
    of_job_by,
    per_second,
    per_step,
    quantiles,
    select,
)

_KL, _REWARD, _STD = of_job("kl"), of_job("reward"), of_job("reward_std")
_NO_KL = "No KL reported"
_NO_MEMORY = "No GPU memory reported"
_TOKENS = per_second(trainer.TOKENS)
_PARTS = per_step(operator.STEP_PHASE, trainer.PHASE_SECONDS)
_SIGNALS = f"sum by (signal) (increase({select(trainer.GROUPS, JOB)}{MEAN_WINDOW}))"
_REWARD_PART = f'{JOB},{operator.STEP_PHASE}="reward"'


def _seconds(where: str = JOB) -> str:
    """Seconds of steps within 15 minutes, of all parts or of one."""
    return f"sum(increase({select(trainer.PHASE_SECONDS, where)}{MEAN_WINDOW}))"


_CURVES = (
    Panel(
        title="Reward",
        description=(
            "TRL's `reward`, the mean of the last generation, and one `reward_std` around it, its "
            "standard deviation. A band that closes leaves nothing to learn from."
        ),
        height=6,
        queries=(
            Query(_REWARD, "mean"),
            Query(f"{_REWARD} + {_STD}", "mean + std", "band"),
            Query(f"{_REWARD} - {_STD}", "mean − std", "edge"),
        ),
    ),
    Panel(
        title="KL from the reference",
        description=(
            "TRL's `kl`, nats per token. A slow rise with the reward is learning. KLRising is "
            f"found without a better reward, near guard.maxKL, and from {limits.KL_ABSURD.value:g} "
            "on. Marks show where reference.sync moved the reference."
        ),
        height=6,
        queries=(
            Query(_KL, "KL"),
            Query(of_job(trainer.MAX_KL), "guard.maxKL", "limit"),
            Query(
                f"{limits.KL_GUARD_SHARE.value:g} * {of_job(trainer.MAX_KL)}",
                "KLRising from here",
                "limit",
            ),
        ),
        bounds=((limits.KL_ABSURD.value, "red"),),
        empty=_NO_KL,
    ),
    Panel(
        title="Entropy of the policy",
        description=(
            "TRL's `entropy`, nats per token. EntropyCollapsed is found only below the line: all "
            "completions of a group are then alike, and nothing is explored."
        ),
        height=6,
        queries=(Query(of_job("entropy"), "entropy"),),
        base="red",
        bounds=((limits.ENTROPY_LOW.value, "green"),),
        reach=2 * limits.ENTROPY_LOW.value,
    ),
    Panel(
        title="Zero-std groups, clipped completions",
        description=(
            "TRL's `frac_reward_zero_std`, the groups whose rewards are all equal, which teach "
            "nothing, and `completions/clipped_ratio`, those cut at the limit. Lines: NoSignal "
            f"from {limits.DEAD_GROUPS.value:g} of the former, Truncating from "
            f"{limits.TRUNCATED.value:g} of the latter."
        ),
        height=6,
        unit="percentunit",
        queries=(
            Query(of_job("zero_variance_groups"), "zero-std groups"),
            Query(of_job("completion_clipped_ratio"), "clipped completions"),
        ),
        bounds=((limits.TRUNCATED.value, "orange"), (limits.DEAD_GROUPS.value, "red")),
        reach=1,
    ),
    Panel(
        title="Gradient norm",
        description=(
            "TRL's `grad_norm`, before clipping. StepsTooLarge is found only above the line, at "
            f"{limits.GRADIENT_GROWTH.value:g} times the norm of the first steps."
        ),
        height=6,
        queries=(Query(of_job("grad_norm"), "norm"),),
        bounds=((limits.GRADIENT_LEAST.value, "orange"),),
        reach=1.1 * limits.GRADIENT_LEAST.value,
    ),
    Panel(
        title="Share of a step that waits for rewards",
        description=(
            "Seconds of the reward functions over those of all parts, in 15 minutes. "
            "WaitingForRewards is found above the line: GPUs wait longer than they work."
        ),
        height=6,
        unit="percentunit",
        queries=(
            Query(
                f"{_seconds(_REWARD_PART)} / {_seconds()}",
                "rewards",
            ),
        ),
        bounds=((limits.REWARD_WAIT.value, "orange"),),
        reach=1,
    ),
)
"""What findings are mostly about, each with the limit of its finding."""


def _by_function(counter: Metric) -> str:
    return f"topk(6, sum by (reward) (increase({select(counter, JOB)}{MEAN_WINDOW})))"


def _given(sign: str = "") -> str:
    """The rewards of the time shown by function: their number, or the sum of those of a sign."""
    if not sign:
        return f"sum by (reward) (increase({select(trainer.REWARDS, JOB)}[$__range]))"
    chosen = select(trainer.REWARD_SUM, f'{JOB},sign="{sign}"')
    return f"sum by (reward) (increase({chosen}[$__range]))"


_LEARNING = (
    Panel(
        title="Reward by function",
        description=(
            "Mean of each reward before weighting, the twelve largest. One that rises "
            "alone is being gamed."
        ),
        queries=(Query(largest("reward", trainer.REWARD), "{{reward}}"),),
    ),
    Panel(
        title="Reward std by function",
        description=(
            "Over a generation, the twelve largest. A function whose std is 0 gives every "
            "completion the same."
        ),
        queries=(Query(largest("reward", trainer.REWARD_STD), "{{reward}}"),),
    ),
    Panel(
        kind="bargauge",
        title="Mean reward by function, exact",
        description="Of all completions of the time shown, before weighting; the twelve largest.",
        queries=(
            Query(
                f"topk(12, ({_given('positive')} - {_given('negative')}) / {_given()})",
                "{{reward}}",
            ),
        ),
        base="blue",
        empty="No reward in this time",
    ),
    Panel(
        title="Groups by what they teach",
        description=(
            "Of 15 minutes: mixed rewards teach; equal ones do not, high (solved), low (too_hard) "
            "or missing (unscored)."
        ),
        unit="percentunit",
        queries=(Query(f"{_SIGNALS} / on () group_left () (sum({_SIGNALS}) > 0)", "{{signal}}"),),
        stacked=True,
    ),
    Panel(
        title="Clip ratio",
        description=(
            "TRL's `clip_ratio/region_mean`, `low_mean` and `high_mean`: share of tokens whose "
            "ratio left the trust region. StepsTooLarge is found where the region's has risen by "
            "the line's value since the beginning."
        ),
        unit="percentunit",
        queries=(
            Query(of_job("clip_ratio"), "region"),
            Query(of_job("clip_ratio_low"), "low"),
            Query(of_job("clip_ratio_high"), "high"),
        ),
        bounds=((limits.CLIPPED.value, "orange"),),
        reach=1.1 * limits.CLIPPED.value,
    ),
    Panel(
        title="Loss",
        description="GRPO's loss says little by itself; look for jumps.",
        queries=(Query(of_job("loss"), "loss"),),
    ),
    Panel(
        title="Learning rate",
        description="TRL's `learning_rate`, of the last step.",
        queries=(Query(of_job("learning_rate"), "learning rate"),),
    ),
    Panel(
        title="Completion length",
        description=(
            "TRL's `completions/…_length`: tokens of the last generation against "
            "training.maxCompletionLength."
        ),
        unit="short",
        queries=(
            Query(of_job("completion_length"), "mean"),
            Query(of_job("completion_terminated_length"), "mean, terminated"),
            Query(of_job("completion_length_min"), "min"),
            Query(of_job("completion_length_max"), "max"),
            Query(of_job(trainer.MAX_COMPLETION), "limit", "limit"),
        ),
    ),
    Panel(
        title="Completions without a reward, by function",
        description=(
            "Share of ten generations whose function or service failed or took too long, "
            "the twelve largest."
        ),
        unit="percentunit",
        queries=(Query(largest("reward", trainer.UNSCORED), "{{reward}}"),),
        bounds=((0.01, "orange"), (0.05, "red")),
        reach=0.06,
        empty="No completion reported",
    ),
    Panel(
        title="Failures and time-outs of rewards",
        description="Completions without a reward within 15 minutes, by function.",
        unit="short",
        queries=(
            Query(_by_function(trainer.REWARD_FAILURES), "{{reward}} failed"),
            Query(_by_function(trainer.REWARD_TIMEOUTS), "{{reward}} timed out"),
        ),
        empty="No completion reported",
    ),
)
_SPEED = (
    Panel(
        title="Time of a step by its parts",
        description=(
            "Slowest rank's time, mean of the last 15 minutes' steps. What is high costs most: "
            "generate is memory's speed, reward is your service."
        ),
        unit="s",
        queries=(Query(per_step(operator.STEP_PHASE, trainer.PHASE_SECONDS), "{{step_phase}}"),),
        stacked=True,
    ),
    Panel(
        title="Tokens per second",
        description=(
            "Prompt and completion tokens of 15 minutes per second, by all ranks, and by each GPU."
        ),
        unit="short",
        queries=(
            Query(_TOKENS, "all ranks"),
            Query(f"{_TOKENS} / (sum({of_job_by('product', operator.JOB_GPUS)}) > 0)", "per GPU"),
        ),
    ),
    Panel(
        title="Duration of a step",
        description="Median, p95 and p99 of the steps that ended within 15 minutes.",
        unit="s",
        queries=quantiles(trainer.STEP_SECONDS, JOB, MEAN_WINDOW),
        empty="No step in this time",
    ),
    Panel(
        kind="bargauge",
        title="All-reduce bandwidth",
        description=(
            "Measured before the first step, against what the plan's times assume. Much less "
            "points at the network: see NetworkSlow in docs/reference/conditions.md."
        ),
        unit="Bps",
        queries=(
            Query(of_job(trainer.ALLREDUCE), "measured"),
            Query(of_job(trainer.ALLREDUCE_ASSUMED), "assumed"),
        ),
        base="blue",
        empty="No bandwidth reported",
    ),
    Panel(
        title="Slowest rank over the median",
        description=("Own work in a step, outside collectives. Above the line Straggler is found."),
        queries=(Query(of_job("straggler_ratio"), "slowest over median"),),
        bounds=((limits.SLOW_RANK.value, "orange"),),
        reach=2.2,
        empty="No ratio of ranks reported",
    ),
    Panel(
        kind="table",
        title="Slow rank",
        description="The rank that the finding Straggler names; a restart avoids its node.",
        queries=(
            Query(
                f"max by (rank, rank_pod, rank_node) ({select(trainer.STRAGGLER, JOB)})",
                "",
            ),
        ),
        columns={
            "rank": "Rank",
            "rank_pod": "Pod",
            "rank_node": "Node",
            "Value": "Over median",
        },
        empty="No slow rank reported",
    ),
)
_MEMORY = (
    Panel(
        title="Peak memory by phase",
        description=(
            "Peak of allocated bytes of the fullest GPU, under what a GPU has for torch. Near the "
            "limit, fragments can end the run; the operator then plans with less."
        ),
        unit="bytes",
        queries=(
            Query(of_job_by(operator.STEP_PHASE, trainer.MEMORY), "{{step_phase}}"),
            Query(of_job(trainer.USABLE_MEMORY), "limit", "limit"),
        ),
        empty=_NO_MEMORY,
    ),
    Panel(
        kind="bargauge",
        title="Predicted over measured memory",
        description=(
            "By phase. The plan is made for completions as long as the limit: before one came near "
            "it, a high ratio says nothing."
        ),
        unit="percentunit",
        queries=(
            Query(
                f"{of_job_by(operator.STEP_PHASE, trainer.PREDICTED_MEMORY)} / "
                f"{of_job_by(operator.STEP_PHASE, trainer.MEMORY)}",
                "{{step_phase}}",
            ),
        ),
        base="orange",
        bounds=((0.95, "green"),),
        empty=_NO_MEMORY,
    ),
    Panel(
        title="Memory beside tensors",
        description=(
            "What the allocator holds, what the fullest GPU has in use with all that is not "
            "torch's, and the anonymous resident memory of the host's largest rank. Steady growth "
            "of the last is a leak, often of a reward."
        ),
        unit="bytes",
        queries=(
            Query(of_job(trainer.MEMORY_BESIDE["reserved"]), "held by the allocator"),
            Query(of_job(trainer.MEMORY_BESIDE["device"]), "used on the GPU"),
            Query(of_job(trainer.MEMORY_BESIDE["host"]), "host, largest rank"),
        ),
    ),
)
_OOM = f'{ConditionType.DEGRADED}",reason="{Result.OUT_OF_MEMORY}'
_SYNCS, _SYNCS_BEFORE = (
    f"floor({steps} / {of_job(trainer.REFERENCE_EVERY)})"
    for steps in (of_job(trainer.STEP), highest(trainer.STEP))
)
_FINDING = select(trainer.FINDING, JOB)
_ANNOTATIONS = (
    Annotation(
        "Finding",
        f"max by (finding) ({_FINDING}) == 1 unless max by (finding) ({_FINDING} offset 1m) == 1",
        "A finding began",
        "red",
    ),
    Annotation("Attempt", new_maximum(operator.JOB_ATTEMPTS), "A gang started", "orange"),
    Annotation(
        "Restart",
        new_maximum(operator.JOB_RESTARTS),
        "An attempt failed and the next follows",
        "purple",
    ),
    Annotation("Checkpoint", new_maximum("checkpoint_step"), "A checkpoint was sealed", "green"),
    Annotation(
        "Out of memory",
        of_job(operator.JOB_CONDITION, f'type="{_OOM}"'),
        "An attempt ran out of memory",
        "purple",
    ),
    Annotation(
        "Reference",
        f"{_SYNCS} > 0 unless {_SYNCS} <= {_SYNCS_BEFORE}",
        "reference.sync moved it",
        "blue",
    ),
)
_INFO = operator.JOB_INFO.name
DASHBOARD = Dashboard(
    uid=TRAINING_UID,
    title="GRPO / Training health",
    description="One job: whether it learns, where its time and memory go, and what broke.",
    since="now-3h",
    variables=(
        Variable("cluster", "Cluster", _INFO, "cluster", many=True),
        Variable("namespace", "Namespace", f"{_INFO}{{{CLUSTER}}}", "namespace", many=False),
        Variable(
            "job", "Job", f'{_INFO}{{{CLUSTER},namespace="$namespace"}}', "grpojob", many=False
        ),
    ),
    annotations=_ANNOTATIONS,
    rows=(
        Row("What is wrong now?", first_row.PANELS),
        Row("Does it learn?", _CURVES),
        Row("Does it get on?", job_progress.PANELS, is_collapsed=True),
        Row("What does it learn from?", _LEARNING, is_collapsed=True),
        Row("Where does the time go?", _SPEED, is_collapsed=True),
        Row("How do its engines do?", engines.PANELS, is_collapsed=True),
        Row("What does vLLM say?", vllm.PANELS, is_collapsed=True),
        Row("Does it fit?", _MEMORY, is_collapsed=True),
        Row("What did its GPUs do?", usage.OF_JOB, is_collapsed=True),
    ),
)

"""Training health: whether one run learns, where its time and memory go, and what broke."""

from grpo_api.plan.plan import MemoryPhases
from grpo_api.report import metrics as operator
from grpo_api.report import training_metrics as trainer
from grpo_api.report.report import Result
from grpo_api.status.status import ConditionType

from . import engines, usage, verdicts, vllm
from .grafana import TRAINING_UID
from .panels import Annotation, Dashboard, Panel, Query, Row, Variable
from .promql import CLUSTER, highest, largest, new_maximum, of_job, per_second, per_step

_KL, _REWARD, _STD = of_job("kl"), of_job("reward"), of_job("reward_std")
_TOKENS = per_second(trainer.TOKENS)
_NO_KL = "No KL: training.beta is 0, so there is no reference"
_CPU = "No GPU: this run is on CPUs"
_LEARNING = (
    Panel(
        title="Reward: mean and spread",
        description=(
            "Mean of the last generation, and one standard deviation within a group around it. A "
            "band that closes "
            "leaves nothing to learn from."
        ),
        unit="none",
        queries=(
            Query(_REWARD, "mean"),
            Query(f"{_REWARD} + {_STD}", "mean + spread", "band"),
            Query(f"{_REWARD} - {_STD}", "mean − spread", "edge"),
        ),
    ),
    Panel(
        title="Reward by function",
        description=(
            "Mean of each reward before weighting, the twelve largest. One that rises "
            "alone is being gamed."
        ),
        unit="none",
        queries=(Query(largest("reward", trainer.REWARD), "{{reward}}"),),
    ),
    Panel(
        title="Distance from the reference (KL)",
        description=(
            "Nats per token. A slow rise is learning, a jump is divergence: lower "
            "training.learningRate or raise "
            "training.beta. Marks show where reference.sync moved the reference."
        ),
        unit="none",
        queries=(Query(_KL, "KL"), Query(of_job(trainer.MAX_KL), "guard.maxKL", "limit")),
        empty=_NO_KL,
    ),
    Panel(
        title="Loss",
        description="GRPO's loss says little by itself; look for jumps.",
        unit="none",
        queries=(Query(of_job("loss"), "loss"),),
        width=6,
    ),
    Panel(
        title="Size of the gradient",
        description="Norm before clipping. Growth without end, or spikes, come before divergence.",
        unit="none",
        queries=(Query(of_job("grad_norm"), "norm"),),
        width=6,
    ),
    Panel(
        title="Entropy of the policy",
        description=(
            "Nats per token. Near 0 all completions of a group are alike, and nothing is explored."
        ),
        unit="none",
        queries=(Query(of_job("entropy"), "entropy"),),
        width=6,
    ),
    Panel(
        title="Tokens that were clipped",
        description=(
            "Share of tokens whose ratio left the trust region. Above a fifth, steps are too large."
        ),
        unit="percentunit",
        queries=(
            Query(of_job("clip_ratio_low"), "below"),
            Query(of_job("clip_ratio_high"), "above"),
        ),
        width=6,
        base="green",
        bounds=((0.2, "orange"),),
        reach=0.25,
    ),
)
_COMPLETIONS = (
    Panel(
        title="Length of completions",
        description="Tokens of the last generation against training.maxCompletionLength.",
        unit="short",
        queries=(
            Query(of_job("completion_length"), "mean"),
            Query(of_job("completion_length_min"), "shortest"),
            Query(of_job("completion_length_max"), "longest"),
            Query(of_job(trainer.MAX_COMPLETION), "limit", "limit"),
        ),
    ),
    Panel(
        title="Truncated, and groups without signal",
        description=(
            "Completions cut at the limit, and groups whose rewards are all equal, which teach "
            "nothing. Raise the "
            "limit for the former; the latter find the task solved or too hard."
        ),
        unit="percentunit",
        queries=(
            Query(of_job("completion_clipped_ratio"), "truncated"),
            Query(of_job("zero_variance_groups"), "groups without signal"),
        ),
        base="green",
        bounds=((0.5, "orange"), (0.95, "red")),
        reach=1,
    ),
    Panel(
        title="Completions without a reward, by function",
        description=(
            "Share of ten generations whose function or service failed or took too long, "
            "the twelve largest."
        ),
        unit="percentunit",
        queries=(Query(largest("reward", trainer.UNSCORED), "{{reward}}"),),
        base="green",
        bounds=((0.01, "orange"), (0.05, "red")),
        reach=0.06,
        empty="No completion scored yet",
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
            Query(f"{_TOKENS} / ({of_job(operator.JOB_GPUS)} > 0)", "per GPU"),
        ),
    ),
    Panel(
        title="Slowest rank over the median",
        description=(
            "Own work in a step, outside collectives. 2 means that all wait half of the time for "
            "one: the finding Straggler names it."
        ),
        unit="none",
        queries=(Query(of_job("straggler_ratio"), "slowest over median"),),
        base="green",
        bounds=((1.5, "orange"), (2, "red")),
        reach=2.2,
        empty="One rank alone",
    ),
)


def _memory(phase: str) -> Panel:
    of_phase = f'{operator.STEP_PHASE}="{phase}"'
    return Panel(
        title=f"Memory: {phase}",
        description=(
            "Peak of allocated bytes of the fullest GPU, as planned and as measured, under what a "
            "GPU has for torch. "
            "Near the limit, fragments can end the run; the operator then plans with less."
        ),
        unit="bytes",
        queries=(
            Query(of_job(trainer.PREDICTED_MEMORY, of_phase), "planned"),
            Query(of_job(trainer.MEMORY, of_phase), "measured"),
            Query(of_job(trainer.USABLE_MEMORY), "limit", "limit"),
        ),
        height=7,
        empty=_CPU,
    )


_MEMORY = (
    *map(_memory, MemoryPhases.model_fields),
    Panel(
        title="Memory beside tensors",
        description=(
            "What the allocator holds, and what the fullest GPU has in use with all that "
            "is not torch's."
        ),
        unit="bytes",
        queries=(
            Query(of_job(trainer.MEMORY_BESIDE["reserved"]), "held by the allocator"),
            Query(of_job(trainer.MEMORY_BESIDE["device"]), "used on the GPU"),
        ),
        height=7,
        empty=_CPU,
    ),
    Panel(
        title="Memory of the host",
        description=(
            "Anonymous resident memory of the largest rank. Steady growth is a leak, "
            "often of a reward."
        ),
        unit="bytes",
        queries=(Query(of_job(trainer.MEMORY_BESIDE["host"]), "largest rank"),),
        height=7,
    ),
)
_OOM = f'{ConditionType.DEGRADED}",reason="{Result.OUT_OF_MEMORY}'
_SYNCS, _SYNCS_BEFORE = (
    f"floor({steps} / {of_job(trainer.REFERENCE_EVERY)})"
    for steps in (of_job(trainer.STEP), highest(trainer.STEP))
)
_ANNOTATIONS = (
    Annotation("Attempt", new_maximum(operator.JOB_ATTEMPTS), "A gang started", "orange"),
    Annotation(
        "Restart",
        new_maximum(operator.JOB_RESTARTS),
        "An attempt failed and the next follows",
        "red",
    ),
    Annotation("Checkpoint", new_maximum("checkpoint_step"), "A checkpoint was sealed", "green"),
    Annotation(
        "Out of memory",
        of_job(operator.JOB_CONDITION, f'type="{_OOM}"'),
        "An attempt ran out of memory",
        "red",
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
        Row("Is it well?", verdicts.PANELS),
        Row("Does it learn?", _LEARNING),
        Row("What does it write?", _COMPLETIONS),
        Row("Where does the time go?", _SPEED),
        Row("How do its engines do?", engines.PANELS),
        Row("Engine (vLLM)", vllm.PANELS, collapsed=True),
        Row("Does it fit?", _MEMORY),
        Row("What did its GPUs do?", usage.OF_JOB),
    ),
)

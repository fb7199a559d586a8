"""Every metric that rank 0 of a training gang exports; its names, units and labels are declared
here alone.

What the trainer logs, what /progress carries by `key` and what Prometheus scrapes by `name` can't
disagree that way.
"""

from typing import Literal

from .metrics import STEP_PHASE, Kind, Metric
from .report import MAX_METRICS


def _family(
    name: str,
    unit: str,
    text: str,
    *labels: str,
    kind: Kind = "gauge",
    key: str = "",
    trl: str = "",
) -> Metric:
    total = "_total" if kind == "counter" else ""
    return Metric(f"grpo_training_{name}{total}", kind, unit, text, labels, key=key, trl=trl)


def _training(
    key: str, unit: str, text: str, *, trl: str = "", name: str = "", kind: Kind = "gauge"
) -> Metric:
    return _family(name or key, unit, text, kind=kind, key=key, trl=trl)


def _counter(key: str, unit: str, text: str, trl: str = "") -> Metric:
    return _training(key, unit, text, trl=trl, kind="counter")


def _by_reward(key: str, text: str, kind: Kind = "gauge") -> Metric:
    return _family(key, "1", text, "reward", kind=kind, key=key)


def _by_engine(key: str, unit: str, text: str, kind: Kind = "gauge") -> Metric:
    return _family(key, unit, text, "engine", kind=kind, key=key)


ALLREDUCE = _training(
    "allreduce_bytes_per_second",
    "bytes per second",
    "Bus bandwidth of an all-reduce of all ranks before the first step.",
)
PROMPTS = _training("prompts", "prompts", "Prompts that are trained on.")
PROMPTS_DROPPED = _training(
    "prompts_dropped", "prompts", "Prompts left out because they are too long."
)
PROMPTS_DUPLICATE = _training(
    "prompts_duplicate",
    "prompts",
    "Prompts that occurred before, kept or left out as dataset.onDuplicatePrompt says.",
)
CHECKPOINT_STEP = _training(
    "checkpoint_step",
    "steps",
    "Step of the newest complete checkpoint, which a restart goes back to.",
)
CHECKPOINT_TIME = _training(
    "checkpoint_timestamp_seconds",
    "unix seconds",
    "When the newest complete checkpoint was sealed.",
)
CHECKPOINT_SECONDS = _training(
    "checkpoint_seconds", "seconds", "How long training stood still for that checkpoint."
)
CHECKPOINTS = _counter("checkpoints", "1", "Checkpoints that this attempt has sealed.")
CHECKPOINT_FAILURES = _counter(
    "checkpoint_failures", "1", "Checkpoints that this attempt could not write."
)
KL_OVERFLOW = _counter(
    "kl_overflow_tokens",
    "tokens",
    "Tokens whose KL overflowed and was limited in this attempt.",
    trl="kl_overflow_tokens",
)
NONFINITE_STEPS = _counter(
    "nonfinite_steps",
    "steps",
    "Steps of this attempt with a loss, gradient norm, KL, reward or entropy that was infinite "
    "or no number.",
)
COMPLETIONS = _counter(
    "completions", "completions", "Completions of this attempt that were put to the rewards."
)
TOKENS = _counter(
    "tokens",
    "tokens",
    "Tokens of prompts and completions that all ranks have processed in this attempt.",
    trl="num_tokens",
)
STEP_SECONDS = _training(
    "step_seconds",
    "seconds",
    "Durations of the steps of this attempt, of the slowest rank, without their checkpoints.",
    trl="step_time",
    kind="histogram",
)
STEP_SECONDS_BUCKETS = (1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
WEIGHTS_VERSION = _training(
    "weights_version",
    "1",
    "Number of the weights that engines sample with, higher with every sync and never used "
    "again; absent without any.",
)
WEIGHT_SYNC_SECONDS = _training(
    "weight_sync_seconds",
    "seconds",
    "Time of the last weight sync into the engines, without its proof.",
)
WEIGHT_PROOF_SECONDS = _training(
    "weight_proof_seconds",
    "seconds",
    "Time of the last proof that the engines have the trainer's weights.",
)
ENGINE_MISMATCH = _training(
    "engine_mismatch",
    "nats",
    "Mean difference between the engine's and the trainer's log-probability of the last "
    "generation's tokens.",
    trl="sampling/sampling_logp_difference/mean",
)
ENGINE_MISMATCH_MAX = _training(
    "engine_mismatch_max",
    "nats",
    "Largest difference between the engine's and the trainer's log-probability of a token of "
    "the last generation.",
    trl="sampling/sampling_logp_difference/max",
)
COMPLETION_LENGTH = _training(
    "completion_length",
    "tokens",
    "Mean length of completions.",
    trl="completions/mean_length",
    name="completion_mean_tokens",
)
ENGINE_PROOF_FAILURES = _counter(
    "engine_proof_failures",
    "1",
    "Weight syncs of this attempt after which an engine did not have the trainer's weights.",
)
FROM_ZERO = (CHECKPOINTS, CHECKPOINT_FAILURES, KL_OVERFLOW, NONFINITE_STEPS)
"""Counters that stand at 0 when training begins: the increase to 1 is what is asked about."""
TRAINING = (
    _training("kl", "nats per token", "Mean KL between policy and reference (k3 estimate) of the "
              "last step.", trl="kl"),
    _training("reward", "1", "Mean weighted reward of the last generation.", trl="reward"),
    _training("reward_std", "1", "Standard deviation of the last generation's rewards.",
              trl="reward_std"),
    _training("loss", "1", "GRPO loss of the last step.", trl="loss"),
    _training("grad_norm", "1", "Norm of the gradient before clipping.", trl="grad_norm"),
    ENGINE_MISMATCH,
    WEIGHTS_VERSION,
    _training("learning_rate", "1", "Learning rate of the last step.", trl="learning_rate"),
    _training("entropy", "nats", "Mean entropy of the policy's token distribution.", trl="entropy"),
    _training("epoch", "1", "Passes over the dataset.", trl="epoch"),
    _training("clip_ratio_low", "1", "Share of tokens clipped below.",
              trl="clip_ratio/low_mean", name="clipped_low_ratio"),
    _training("clip_ratio_high", "1", "Share of tokens clipped above.",
              trl="clip_ratio/high_mean", name="clipped_high_ratio"),
    COMPLETION_LENGTH,
    _training("completion_length_max", "tokens", "Longest completion.",
              trl="completions/max_length", name="completion_max_tokens"),
    _training("completion_clipped_ratio", "1", "Share of completions cut at the limit.",
              trl="completions/clipped_ratio"),
    _training("zero_variance_groups", "1", "Share of groups whose rewards are all equal.",
              trl="frac_reward_zero_std", name="zero_variance_group_ratio"),
    KL_OVERFLOW,
    TOKENS,
    _training("completion_length_min", "tokens", "Shortest completion.",
              trl="completions/min_length", name="completion_min_tokens"),
    _training("straggler_ratio", "1", "Slowest rank's own seconds in the last measured step, "
              "outside collectives, over the median rank's."),
    PROMPTS,
    PROMPTS_DROPPED,
    PROMPTS_DUPLICATE,
    STEP_SECONDS,
    ALLREDUCE,
    NONFINITE_STEPS,
    COMPLETIONS,
    ENGINE_MISMATCH_MAX,
    _training("importance_ratio_min", "1", "Least weight of a token of the last generation for "
              "the difference between engine and trainer.",
              trl="sampling/importance_sampling_ratio/min"),
    _training("importance_ratio_max", "1", "Largest weight of a token of the last generation for "
              "the difference between engine and trainer.",
              trl="sampling/importance_sampling_ratio/max"),
    WEIGHT_SYNC_SECONDS,
    WEIGHT_PROOF_SECONDS,
    ENGINE_PROOF_FAILURES,
    CHECKPOINT_STEP,
    CHECKPOINT_TIME,
    CHECKPOINT_SECONDS,
    CHECKPOINTS,
    CHECKPOINT_FAILURES,
    _training("completion_terminated_length", "tokens", "Mean length of the completions that "
              "ended before the limit; 0 where none did.",
              trl="completions/mean_terminated_length", name="completion_terminated_mean_tokens"),
    _training("clip_ratio", "1", "Share of tokens clipped on either side.",
              trl="clip_ratio/region_mean", name="clipped_ratio"),
)  # fmt: skip
"""Metrics with one value each, reported at most once per step and absent until known; the most
informative first."""
OUTCOME_KEYS = tuple(metric.key for metric in TRAINING[:MAX_METRICS])
"""Keys of those that an Outcome carries, which is short."""
MUST_BE_FINITE = ("loss", "grad_norm", "kl", "reward", "entropy")
"""Keys whose value makes a step count as NONFINITE_STEPS; others, as a reward with nothing to say,
may be no number."""

STEP = _family("step", "steps", "Finished optimizer steps.")
TOTAL_STEPS = _family("total_steps", "steps", "Optimizer steps of the whole run.")
STAGE = _family("stage_seconds", "seconds", "For how long rank 0 has been in its stage.", "stage")
ETA = _family(
    "eta_seconds",
    "seconds",
    "Time to the last step, if steps go on taking what the recent ones took.",
)
MEMORY = _family(
    "memory_bytes", "bytes", "Peak of allocated GPU memory of any rank by phase.", STEP_PHASE
)
MEMORY_BESIDE = {
    "reserved": _family(
        "memory_reserved_bytes", "bytes", "Most GPU memory that any rank's allocator has held."
    ),
    "device": _family(
        "device_memory_bytes", "bytes", "Used memory of the fullest GPU after the last step."
    ),
    "host": _family(
        "host_memory_bytes",
        "bytes",
        "Anonymous resident memory of the largest rank after the last step.",
    ),
}
"""What Progress.memory has beside the phases, by its key."""
MAX_KL = _family("guard_max_kl", "nats per token", "guard.maxKL; absent when unset.")
ALLREDUCE_ASSUMED = _family(
    "allreduce_assumed_bytes_per_second",
    "bytes per second",
    "Bus bandwidth that the plan's times assume; absent for one process and on CPUs.",
)
MAX_COMPLETION = _family("completion_limit_tokens", "tokens", "training.maxCompletionLength.")
SAVE_EVERY = _family(
    "checkpoint_every_steps",
    "steps",
    "Steps between checkpoints; absent without a volume for them.",
)
REFERENCE_EVERY = _family(
    "reference_sync_every_steps",
    "steps",
    "Steps between two moves of the reference; absent when it stays.",
)
USABLE_MEMORY = _family(
    "memory_usable_bytes", "bytes", "What the GPU has for torch, as planned; absent on CPUs."
)
PREDICTED_MEMORY = _family(
    "memory_predicted_bytes",
    "bytes",
    "Peak of allocated memory of one GPU by phase, as planned; absent on CPUs.",
    STEP_PHASE,
)
MAX_ENGINE_MISMATCH = _family(
    "guard_max_engine_mismatch",
    "nats",
    "Largest mean difference that the attempt goes on with (guard.maxEngineMismatch or its "
    "default); absent without an engine, and where a larger one is only printed.",
)
LIMITS = (
    MAX_KL,
    MAX_ENGINE_MISMATCH,
    ALLREDUCE_ASSUMED,
    MAX_COMPLETION,
    SAVE_EVERY,
    REFERENCE_EVERY,
    USABLE_MEMORY,
    PREDICTED_MEMORY,
)
"""What the plan sets, beside what is measured against it."""
REWARD = _by_reward("reward_by_function", "Mean of one reward function before weighting.")
REWARD_STD = _by_reward(
    "reward_std_by_function", "Standard deviation of one reward function over a generation."
)
PHASE_SECONDS = _family(
    "phase_seconds",
    "seconds",
    "Time of this attempt's steps by part of the step, the slowest rank's of each step.",
    STEP_PHASE,
    kind="counter",
    key="phase_seconds",
)
REWARDS = _family(
    "rewards",
    "1",
    "Finite rewards that a function has given in this attempt.",
    "reward",
    kind="counter",
)
REWARD_SUM = _family(
    "reward_sum",
    "1",
    "Sum of these rewards' absolute values before weighting, by their sign: a sum that may fall is "
    "no counter.",
    "reward",
    "sign",
    kind="counter",
)
GroupSignal = Literal["mixed", "solved", "too_hard", "unscored"]
"""Whether the rewards of a group differ; if not, whether they are high or low ones of those that
the attempt has seen."""
GROUPS = _family(
    "groups",
    "1",
    "Groups of this attempt by what they teach: mixed, or nothing since all rewards are high "
    "(solved), low (too_hard) or missing (unscored).",
    "signal",
    kind="counter",
)
COUNTED = (STEP_SECONDS, PHASE_SECONDS, TOKENS, REWARDS, REWARD_SUM, GROUPS)
"""Families that rank 0 adds up for Prometheus alone: /progress has the last step's numbers."""
REWARD_FAILURES = _by_reward(
    "reward_failures",
    "Completions of this attempt that got no reward because its function or service failed.",
    "counter",
)
REWARD_TIMEOUTS = _by_reward(
    "reward_timeouts",
    "Completions of this attempt that got no reward because its time was up.",
    "counter",
)
FINDING = _family(
    "finding",
    "1",
    "1 while the run has this finding (docs/reference/findings.md), 0 otherwise.",
    "finding",
    key="finding",
)
STRAGGLER = _family(
    "straggler",
    "1",
    "Own seconds of the rank that the finding Straggler names, over the median rank's; absent "
    "without one.",
    "rank",
    "rank_pod",
    "rank_node",
)
UNSCORED = _by_reward(
    "reward_unscored_ratio",
    "Share of the last ten generations' completions that got no reward for failures and time-outs.",
)
TRACKING_LOST = _family(
    "tracking_lost_rows",
    "1",
    "Logged steps of this attempt that a tracker of spec.tracking did not get.",
    "tracker",
    kind="counter",
)
ENGINE_UP = _by_engine(
    "engine_up", "1", "1 while an engine has the newest weights, proven; 0 while it has not."
)
ENGINE_VERSION = _by_engine(
    "engine_version", "1", "Number of the weights that an engine was last proven to have."
)
ENGINE_WAITING = _by_engine(
    "engine_waiting_requests", "1", "Prompts that wait in an engine for their turn."
)
ENGINE_CACHE = _by_engine(
    "engine_cache_used_ratio", "1", "Share of an engine's cache for keys and values in use."
)
ENGINE_TOKENS = _by_engine(
    "engine_tokens_per_second",
    "tokens per second",
    "Tokens that an engine sampled in the last generation per second of it.",
)
ENGINE_LOSSES = _by_engine(
    "engine_losses", "1", "Times that an engine of this attempt was given up.", "counter"
)
BY_ENGINE = (ENGINE_UP, ENGINE_VERSION, ENGINE_WAITING, ENGINE_CACHE, ENGINE_TOKENS, ENGINE_LOSSES)
"""Of engines in pods of their own, by their pods' index; absent for engines that share the training
processes."""
LABELLED = (
    REWARD, REWARD_STD, REWARD_FAILURES, REWARD_TIMEOUTS, UNSCORED, FINDING, *BY_ENGINE
)  # fmt: skip
"""Families whose values stand in Progress.metrics as `key/label`."""
BUILD_INFO = Metric(
    "grpo_trainer_build_info",
    "gauge",
    "1",
    "1, with the trainer's versions as labels.",
    ("version", "torch", "trl"),
)
TRAINER = (
    *(metric for metric in TRAINING if metric not in COUNTED),
    *COUNTED,
    *(STEP, TOTAL_STEPS, STAGE, ETA),
    *LABELLED,
    STRAGGLER,
    TRACKING_LOST,
    MEMORY,
    *MEMORY_BESIDE.values(),
    *LIMITS,
    BUILD_INFO,
)
"""Everything that rank 0 of a training pod exports, beside prometheus_client's `process_*`."""

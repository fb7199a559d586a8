"""`spec.rewards`: the reward functions, each item exactly one kind with a weight."""

import re
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from ..text.base import Model, exactly_one
from ..text.names import (
    ONE_VOLUME,
    ConfigMapFiles,
    ImageVolume,
    Repository,
    Revision,
    RewardName,
    SecretKeySelector,
    VolumeClaim,
)
from ..text.quantity import PATTERN_HINT, ParameterCount
from .dataset import Column

Score = Annotated[float, Field(ge=-1e6, le=1e6)]
BatchTimeout = Annotated[int, Field(ge=1, le=86400)]
MAX_REWARDS = 32
JUDGED_GENERATIONS = 10
"""Generations, the last ones, that maxFailureShare is a share of: one that is lost whole, as by a
restart of a service, is within the default."""
MAX_QUOTED = 24
"""Characters of a wrong pattern that an error quotes."""
REWARD_KINDS = ("format", "accuracy", "python", "http", "model")


def _require_regular_expression(pattern: str) -> str:
    """Reject what is not a regular expression before anything is started; the API server can't, it
    knows only RE2."""
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        part = _part_not_understood(pattern, error)
        raise ValueError(f"not a regular expression at {part!r}: {error}") from error
    return pattern


_SUSPECTS = r"\(\?<[=!][^)]*\)?|\{[0-9,]{9,}\}"
"""A look-behind, or a huge count: of these Python's error names no position."""


def _part_not_understood(pattern: str, error: Exception) -> str:
    """The part of a pattern that an error is about."""
    position = getattr(error, "pos", None)
    if position is None:
        suspect = re.search(_SUSPECTS, pattern)
        position = suspect.start() if suspect else 0
    end = position + MAX_QUOTED
    return pattern[position:end] or pattern[-MAX_QUOTED:]


class FormatReward(Model):
    """Scores completions whose whole text matches a regular expression."""

    pattern: Annotated[
        str, Field(min_length=1, max_length=4096), AfterValidator(_require_regular_expression)
    ]
    """Python regular expression; it must match the whole completion, surrounding white space
    ignored. `.` does not match a line break: write `[\\s\\S]`."""
    score: Score = 1.0
    """Reward of a match; anything else gets 0. Unset: 1."""
    timeout_seconds: Annotated[int, Field(ge=1, le=60)] = 1
    """Time for one completion; past it the completion gets no reward and is counted. Unset: 1 s."""
    batch_timeout_seconds: BatchTimeout = 10
    """Time for all completions of one process and generation; past it the rest gets no reward and
    is counted. Unset: 10 s."""


class AccuracyReward(Model):
    """Scores completions whose extracted answer equals the row's."""

    answer_column: Column = "answer"
    """Column with the right answer; text after `####` is taken where it occurs. Unset: `answer`."""
    extract: Literal["Auto", "XML", "Hash", "Boxed", "None"] = "Auto"
    """How the answer is found in a completion: the last `<answer>` tag, the text after `####`, the
    last `\\boxed{}`, or the whole text (None). Auto: the first of these that occurs, else the whole
    text."""
    compare: Literal["Exact", "Numeric", "Math"] = "Exact"
    """Exact: same text without surrounding space; Numeric: same number (`1,000` = `1000.0`); Math:
    math-verify. Unset: Exact."""
    score: Score = 1.0
    """Reward of a right answer; anything else gets 0. Unset: 1."""
    timeout_seconds: Annotated[int, Field(ge=1, le=60)] = 5
    """Time for one comparison by math-verify; past it the completion gets no reward and is counted.
    Unset: 5 s."""
    batch_timeout_seconds: BatchTimeout = 60
    """Time for all comparisons of one process and generation; past it the rest gets no reward and
    is counted. Unset: 60 s."""


class PythonReward(Model):
    """Calls a Python function with TRL's reward signature."""

    function: Annotated[
        str,
        Field(
            max_length=256,
            pattern=r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*$",
            json_schema_extra={
                PATTERN_HINT: "write it as module:function, such as my_reward:digits"
            },
        ),
    ]
    """`module:function`, found in `configMap` or in the image; sync or async. It runs in a process
    of its own."""
    config_map: ConfigMapFiles | None = None
    """ConfigMap whose keys are Python files, put first on the import path. Unset: the image's
    modules only."""
    timeout_seconds: Annotated[int, Field(ge=1, le=86400)] = 60
    """Time for all completions of one process and generation; past it the function's process is
    ended and started again, and they get no reward and are counted. Unset: 60 s."""


class HTTPReward(Model):
    """POSTs `{"prompts", "completions", "columns"}` to a service that answers `{"rewards":
    [...]}`."""

    REACHED_BY: ClassVar[tuple[str, ...]] = (
        "url",
        "tokenSecretRef",
        "timeoutSeconds",
        "batchTimeoutSeconds",
    )
    """Fields, as users write them, that say how the service is reached and not what it scores: a
    run may go on with others."""

    url: Annotated[
        str,
        Field(
            max_length=2048,
            pattern=r"^https?://[\x21-\x7e]+$",
            json_schema_extra={PATTERN_HINT: "write it as http://HOST/PATH"},
        ),
    ]
    """Address of the service."""
    token_secret_ref: SecretKeySelector | None = None
    """Bearer token. Unset: no Authorization header."""
    timeout_seconds: Annotated[int, Field(ge=1, le=3600)] = 30
    """Time for one try of one request. Unset: 30 s."""
    batch_timeout_seconds: BatchTimeout = 300
    """Time for all requests of one process and generation. A request that fails is tried again,
    with growing pauses, until this is over; then its completions get no reward and are counted.
    Unset: 300 s."""
    max_concurrency: Annotated[int, Field(ge=1, le=1024)] = 8
    """Requests of one process at a time. Unset: 8."""
    batch_size: Annotated[int, Field(ge=1, le=4096)] = 32
    """Completions per request. Unset: 32."""


class ModelReward(Model):
    """A frozen sequence-classification model with one label."""

    RULES = (ONE_VOLUME,)

    name: Repository
    """Hub id, or absolute path of a folder in the pods."""
    revision: Revision | None = None
    """Commit, tag or branch on the hub. Unset: the default branch."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the weights, whatever the policy's. Unset: bfloat16."""
    batch_size: Annotated[int, Field(ge=1, le=4096)] = 8
    """Completions per forward pass. Unset: 8."""
    parameters: ParameterCount | None = None
    """Size, for planning memory. Unset: the catalogue's by name; an unknown model is rejected."""
    volume: VolumeClaim | None = None
    """Volume with the model, mounted read-only at /rewards/<position in the list>. Unset: none."""
    image: ImageVolume | None = None
    """Image with the model, mounted there. Unset: none."""


class RewardSpec(Model):
    """One reward: exactly one kind, and its weight in the sum."""

    RULES = (exactly_one(*REWARD_KINDS),)
    JUDGED_BY: ClassVar[tuple[str, ...]] = ("maxFailureShare",)
    """Fields, as users write them, that decide when a run ends and not what it computes: it may go
    on with others."""

    name: RewardName | None = None
    """Name in metrics. Unset: the kind, numbered where a kind occurs twice."""
    weight: Annotated[float, Field(ge=-1e6, le=1e6)] = 1.0
    """Factor in the weighted sum of rewards. Unset: 1."""
    max_failure_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of the completions of the last ten generations, of all processes, that may get no
    reward because scoring them failed or took too long; beyond it the attempt ends with
    RewardError. A completion on which the reward itself has no opinion is not counted. 1: never.
    Unset: 0.1."""
    format: FormatReward | None = None
    """A regular expression over the completion."""
    accuracy: AccuracyReward | None = None
    """Comparison with the dataset's answer."""
    python: PythonReward | None = None
    """A Python function."""
    http: HTTPReward | None = None
    """An HTTP service."""
    model: ModelReward | None = None
    """A reward model."""

    @property
    def kind(self) -> str:
        """Which of the kinds is set."""
        return next(kind for kind in REWARD_KINDS if getattr(self, kind) is not None)


def reward_names(rewards: list[RewardSpec]) -> list[str]:
    """A distinct name for each reward: its own, or its kind, numbered from the second of a kind
    on."""
    names: list[str] = []
    for reward in rewards:
        name = base = reward.name or reward.kind
        number = 2
        while name in names:
            name, number = f"{base}_{number}", number + 1
        names.append(name)
    return names

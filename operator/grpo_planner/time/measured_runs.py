"""Runs that were measured on a cluster, and by how much they correct the time model there.

The time model says how a step's time depends on the model, the GPUs and the lengths. No data sheet
says what one cluster's network, software and data add. So each measured row has what the model
predicted beside what was measured. The nearest and newest rows of the same model on the same
product give two factors, for sampling and for training.

Rows come from other people's jobs and from files. They are bounded where they are read, and each
run has an id by which a plan names the rows that it rests on. Published runs (calibration.yaml)
have the same fields, so that one can be held against the other.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from hashlib import sha256
from math import exp, log
from statistics import median
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, ValidationError

from grpo_api.plan.learned import MOST_FACTOR, MeasuredStep
from grpo_api.text.base import Model, dotted_path
from grpo_api.text.problems import requirement
from grpo_api.text.quantity import MAX_COUNT
from grpo_api.text.timing import Time

from ..memory.setup import Engine
from .constants import FITTED

Part = Literal["step", "training", "generation", "scoring", "sync", "token"]
"""What was timed: a whole step, its update, its sampling, its log-probabilities, one sync of
weights, or one decoded token of all sequences."""

Seconds = Annotated[float, Field(ge=1e-6, le=1e9)]
_Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
_Positive = Annotated[int, Field(ge=1, le=MAX_COUNT)]


class RunRow(Model):
    """One run."""

    source: Annotated[str, Field(min_length=1, max_length=320)]
    """Where its numbers are from: the key of a publication, or `namespace/job`."""
    model: Annotated[str, Field(min_length=1, max_length=512)]
    gpu: Annotated[str, Field(min_length=1, max_length=128)]
    """Label of the GPU product; `CPU` for a run on CPUs."""
    gpus: _Positive
    """GPUs that trained, or processes on CPUs."""
    sequences: _Positive
    """Completions of one step; for a token, those that are decoded at a time."""
    prompt: _Count
    completion: _Positive
    """Mean tokens of a completion."""
    limit: _Positive
    updates: _Positive = 1
    """Optimizer steps on these completions."""
    scores: _Count = 0
    """Passes for log-probabilities beside the update."""
    recompute: bool = True
    lora: bool = False
    zero: Literal[0, 2, 3] = 3
    split: _Positive = 1
    """GPUs that share one copy of the model beside ZeRO: tensor and pipeline parallelism."""
    tensor_parallel: _Positive = 1
    """GPUs of one engine."""
    graphs: bool = True
    """Whether the engine has CUDA graphs."""
    pass_tokens: _Positive = 16384
    """Tokens of one packed micro-batch."""
    seconds: dict[Part, Seconds]


Sampler = Literal["Transformers", "vLLM"]

OWN_SPREAD = 0.1
"""Share by which a step differs from what near runs on these GPUs say, at least (assumed)."""
FAR_SPREAD = 0.25
"""The same of runs that had far fewer or more GPUs, other lengths or another sampler (assumed)."""
NEAR = 0.5
"""Distance up to which a run is near; all rows that are so much farther than the nearest count as
near as that one."""
NEWEST = 5
"""Rows that are taken of those equally near: runs before an upgrade predict little."""
OTHERS_FACTOR = 3.0
"""Largest factor that is believed of another namespace's jobs, whose pods may report anything."""
SEVERAL_NODES = log(4.0)
"""Distance between one node and several: only the latter have a network between their GPUs."""
OTHER_MODEL = 0.7
"""Distance between two models of the same size."""
SAME_SIZE = 0.1
"""Share by which the sizes of two models may differ that are taken for the same size: by a name
such as 7B or by counting, and fine-tunes of one family."""
OTHER_SAMPLER = 1.0
"""Distance between transformers' generate and an engine."""
MOST_ROWS, MOST_PER_SETTING = 400, 3
"""Rows of a file or ConfigMap, about 250 KB, and those of one setting: the newest stay."""


FORMULA = 5
"""Version of the time model's terms: 2 counts the passes that an engine is compared by, 3 the
launches of a micro-batch, and experts by what they move, 4 the longest of all completions of an
engine that samples a part of them at a time, 5 a host link that is not PCIe."""


def fit_id() -> str:
    """The terms and constants that predictions were made with, in eight letters."""
    constants = ",".join(f"{name}={value:.6g}" for name, value in asdict(FITTED).items())
    text = f"{FORMULA}:{constants}"
    return sha256(text.encode()).hexdigest()[:8]


FIT = fit_id()
"""The fit of this version."""


class MeasuredRow(RunRow):
    """One run that was measured on a cluster."""

    kind: Literal["measured"] = "measured"
    cluster: Annotated[str, Field(max_length=253)] = ""
    """Name of the cluster; empty in the operator's own rows."""
    date: Annotated[Time, Field(pattern=r"^[0-9]{4}-[0-9-]{5}T[0-9:]{8}Z$")]
    """When the run ended."""
    nodes: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    parameters: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    """Parameters of the model."""
    active: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    """Those that a token passes, which are fewer in mixtures of experts."""
    sampler: Sampler
    predicted: dict[Part, Seconds]
    """What the time model said of the same run with these lengths, uncorrected."""
    fit: Annotated[str, Field(max_length=8)] = FIT
    """The constants that it was predicted with; another fit's rows correct nothing."""

    @cached_property
    def id(self) -> str:
        """Eight letters that name the row."""
        return sha256(self.model_dump_json().encode()).hexdigest()[:8]

    @property
    def setting(self) -> tuple[object, ...]:
        """What rows share of which the newest stay."""
        return (
            self.parameters, self.gpu, self.gpus, self.nodes, self.zero, self.lora, self.sampler,
            self.tensor_parallel,
        )  # fmt: skip

    def ratio(self, part: Part) -> float | None:
        """Measured by predicted; None where either is missing."""
        measured, predicted = self.seconds.get(part), self.predicted.get(part)
        if measured is None or predicted is None:
            return None
        return min(MOST_FACTOR, max(1 / MOST_FACTOR, measured / predicted))


class StepCorrection(NamedTuple):
    """By how much steps take longer than the time model says, as measured."""

    generation: float
    training: float
    spread: float
    """Share by which a corrected time may be off."""
    runs: tuple[str, ...] = ()
    """Ids of the rows that say so; none where the job's own steps do."""

    @classmethod
    def of_step(cls, step: MeasuredStep) -> Self:
        """What the job's own steps say."""
        return cls(step.generation_factor, step.training_factor, OWN_SPREAD)

    def with_training(self, training: "StepCorrection") -> "StepCorrection":
        """This one of the sampling with that of the training."""
        runs = tuple(dict.fromkeys((*self.runs, *training.runs)))
        spread = max(self.spread, training.spread)
        return StepCorrection(self.generation, training.training, spread, runs)


def sampler_of(engine: Engine | None) -> Sampler:
    """What samples in a plan with that engine."""
    return "vLLM" if engine else "Transformers"


class Setting(NamedTuple):
    """A run that is to be predicted."""

    product: str
    gpus: int
    nodes: int
    completion: int
    sampler: Sampler | None
    """None where it is not known yet, and does not count."""


@dataclass(frozen=True, slots=True)
class MeasuredRuns:
    """Rows, newest first, each once."""

    rows: tuple[MeasuredRow, ...] = ()
    namespace: str | None = None
    """Whose jobs' rows are believed whole; None: all."""
    parameters: int = 0
    """Of the model that they are asked about."""
    _corrections: dict[Setting, StepCorrection | None] = field(
        default_factory=dict, compare=False, repr=False
    )

    @classmethod
    def newest(cls, rows: Iterable[MeasuredRow]) -> Self:
        """The newest rows of each setting, as many as are kept."""
        unique = {row.id: row for row in rows}
        ordered = sorted(unique.items(), key=lambda item: (item[1].date, item[0]), reverse=True)
        count: dict[tuple[object, ...], int] = {}
        stay = []
        for _, row in ordered:
            count[row.setting] = count.get(row.setting, 0) + 1
            if count[row.setting] <= MOST_PER_SETTING:
                stay.append(row)
        return cls(tuple(stay[:MOST_ROWS]))

    def of_namespace(self, namespace: str) -> "MeasuredRuns":
        """All rows, for a job of a namespace."""
        return MeasuredRuns(self.rows, namespace)

    def of_model(self, parameters: int, active: int) -> "MeasuredRuns":
        """The rows of models of the same size that this fit predicted; a token passes the `active`
        parameters."""
        rows = (
            row
            for row in self.rows
            if row.fit == FIT
            and _is_same_size(row.parameters, parameters)
            and _is_same_size(row.active, active)
        )
        return MeasuredRuns(tuple(rows), self.namespace, parameters)

    def completion(self, limit: int) -> int | None:
        """Mean tokens of the model's completions whose limit was nearest, by the newest row; None
        without rows."""
        rows = [row for row in self.rows if row.parameters == self.parameters]
        rows = self._own_rows(rows) or rows
        if not rows:
            return None
        nearest = min(rows, key=lambda row: abs(log(row.limit / limit)))
        return nearest.completion

    def correction(self, setting: Setting) -> StepCorrection | None:
        """What the nearest and newest rows say of a run; None without a row on its product."""
        if not self.rows:
            return None
        if setting not in self._corrections:
            self._corrections[setting] = self._nearest_correction(setting)
        return self._corrections[setting]

    def _nearest_correction(self, setting: Setting) -> StepCorrection | None:
        rows = [row for row in self.rows if row.gpu == setting.product]
        rows = self._own_rows(rows) or rows
        if not rows:
            return None
        distances = {row.id: self._distance(row, setting) for row in rows}
        least = min(distances.values())
        near = [row for row in rows if distances[row.id] <= least + NEAR][:NEWEST]
        training = self._factor(near, "training")
        generation = self._factor(near, "generation")
        factors: dict[Part, float] = {"training": training, "generation": generation}
        errors = [abs(log(error)) for row in near if (error := _error(row, factors))]
        least_spread = OWN_SPREAD if least <= NEAR else FAR_SPREAD
        spread = min(MOST_FACTOR, max(least_spread, exp(max(errors, default=0.0)) - 1))
        runs = tuple(row.id for row in near)
        return StepCorrection(generation, training, round(spread, 2), runs)

    def _distance(self, row: MeasuredRow, setting: Setting) -> float:
        """How unlike a row is to a run of the model."""
        other_model = 0.0 if row.parameters == self.parameters else OTHER_MODEL
        return other_model + _distance(row, setting)

    def _own_rows(self, rows: Sequence[MeasuredRow]) -> list[MeasuredRow]:
        """The rows of the namespace's own jobs."""
        return [row for row in rows if self._is_own(row)]

    def _is_own(self, row: MeasuredRow) -> bool:
        return self.namespace is None or row.source.partition("/")[0] == self.namespace

    def _factor(self, rows: Sequence[MeasuredRow], part: Part) -> float:
        """The middle of what rows say of a part; 1 where none says anything."""
        ratios = []
        for row in rows:
            ratio = row.ratio(part)
            if ratio is None:
                continue
            most = MOST_FACTOR if self._is_own(row) else OTHERS_FACTOR
            ratios.append(log(min(most, max(1 / most, ratio))))
        return exp(median(ratios)) if ratios else 1.0


NO_RUNS = MeasuredRuns()


def _is_same_size(parameters: int, other: int) -> bool:
    return abs(log(parameters / max(1, other))) <= SAME_SIZE


def _distance(row: MeasuredRow, setting: Setting) -> float:
    """How unlike two runs on one product are, in factors of e."""
    distance = abs(log(row.gpus / setting.gpus))
    distance += abs(log(row.completion / setting.completion)) / 2
    if (row.nodes > 1) != (setting.nodes > 1):
        distance += SEVERAL_NODES
    if setting.sampler and row.sampler != setting.sampler:
        distance += OTHER_SAMPLER
    return distance


def _error(row: MeasuredRow, factors: dict[Part, float]) -> float | None:
    """Measured by corrected seconds of all parts that the row has; None without any."""
    parts = [part for part in factors if row.ratio(part) is not None]
    if not parts:
        return None
    measured = sum(row.seconds[part] for part in parts)
    corrected = sum(row.predicted[part] * factors[part] for part in parts)
    return measured / corrected


def read_rows(document: object) -> tuple[list[MeasuredRow], list[str]]:
    """The rows of `{runs: [...]}`, and what is wrong with those that can't be read."""
    runs = document.get("runs") if isinstance(document, dict) else None
    if not isinstance(runs, list):
        return [], ["runs: a list of measured rows is missing; `grpo calibrate` writes one"]
    rows, problems = [], []
    for index, fields in enumerate(runs):
        try:
            rows.append(MeasuredRow.model_validate(fields))
        except (ValidationError, RecursionError) as error:
            problems.append(f"runs[{index}]{_problem(error)}")
    return rows, problems


def _problem(error: Exception) -> str:
    """The first problem of a row."""
    if not isinstance(error, ValidationError):
        return ": can't be read"
    first = error.errors(include_url=False)[0]
    path = dotted_path(first["loc"])
    allowed = requirement(first, {})
    return f".{path}: {allowed}" if path else f": {allowed}"


def written_rows(rows: Iterable[MeasuredRow]) -> list[dict[str, Any]]:
    """The rows as plain values, without what is unset."""
    return [row.model_dump(mode="json", by_alias=False) for row in rows]

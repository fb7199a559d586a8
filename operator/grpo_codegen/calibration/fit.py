"""Fits the time model's constants to published runs, and says how far off it is on unseen ones.

The fit is least squares of log(predicted / published), by Levenberg and Marquardt's method with
Huber's weights. A run that is twice as slow as the model for a reason of its own must not bend it.
Constants are fitted as logarithms, since none may be negative, and drawn weakly to where they are:
one that no row tells of stays. Shares stay below 1.

A run's own rows are worth nothing for its error: each source's runs of one model are predicted by a
fit without them. The stored errors are in errors.yaml, which docs/internals/step-times.md shows.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from math import exp, log
from statistics import mean, median

from grpo_api.text.base import Model
from grpo_planner.tables import read_data
from grpo_planner.time.constants import Constants, StoredFit

from .rows import Prediction, Row, predictions


class Errors(Model):
    """How far predictions were from what was published."""

    count: int
    """Published numbers."""
    median: float
    """Factor that half of them are within."""
    near: float
    """Share of them within 1.5 times."""
    worst: float
    """Largest factor."""
    bias: float
    """Median of predicted by published."""


class FitErrors(Model):
    """The errors of predictions by fits that knew neither source nor model of the run."""

    parts: dict[str, Errors]
    """By what was timed."""
    left_out: dict[str, Errors]
    """By source and model."""


@cache
def stored_errors() -> FitErrors:
    """The errors as the last fit stored them."""
    return FitErrors.model_validate(read_data(__package__, "errors.yaml"))


NEAR = 1.5
"""Factor that a good prediction is within."""
HUBER = log(1.5)
"""Error from which a row counts less."""
PRIOR = 0.15
"""Weight of where a constant is, in rows per factor of e."""
STEP_WEIGHT, PART_WEIGHT = 1.0, 0.5
"""A whole step counts as much as two of its parts, which are in it."""
SHARES = frozenset({"utilisation", "blackwell", "read_share", "runaway"})
"""Constants that are at most 1."""
ROUNDS = 100
DIFFERENCE = 1e-4
CONVERGED = 1e-8
START = Constants(
    utilisation=0.65, moved_bytes=150.0, expert_bytes=150.0, blackwell=0.5, step_seconds=1.0,
    lora_passes=2.5, read_share=0.75, token_seconds=2e-3, sampling_seconds=1e-5,
    sync_gb_per_s=10.0, layer_seconds=9e-4, runaway=0.01,
)  # fmt: skip
"""Where a fit begins: what the parts of the model were assumed to be before there was one."""

Vector = list[float]


def fit(rows: Sequence[Row], start: Constants = START) -> Constants:
    """The constants that fit these rows best."""
    origin = [log(value) for value in asdict(START).values()]
    point, damping = [log(value) for value in asdict(start).values()], 1e-2
    residuals = _residuals(rows, point, origin)
    for _ in range(ROUNDS):
        jacobian = _jacobian(rows, point, origin, residuals)
        change = _solve(jacobian, residuals, damping)
        moved = _bounded([value + step for value, step in zip(point, change, strict=True)])
        after = _residuals(rows, moved, origin)
        gain = _square(residuals) - _square(after)
        if gain <= 0:
            damping *= 8
            if damping > 1e6:
                break
            continue
        point, residuals, damping = moved, after, damping / 4
        if gain < CONVERGED * _square(residuals):
            break
    return _constants(point)


def leave_out(rows: Sequence[Row], fitted: Constants) -> list[Prediction]:
    """Each row's predictions by a fit to the rows of other sources and models."""
    predicted: list[Prediction] = []
    for key in dict.fromkeys(row.key for row in rows):
        others = [row for row in rows if row.key != key]
        constants = fit(others, fitted)
        for row in rows:
            if row.key == key:
                predicted += predictions(row, constants)
    return predicted


def errors_of(predicted: Sequence[Prediction]) -> Errors:
    """The errors of predictions."""
    ratios = [prediction.ratio for prediction in predicted]
    factors = [max(ratio, 1 / ratio) for ratio in ratios]
    near = sum(factor <= NEAR for factor in factors)
    return Errors(
        count=len(ratios),
        median=round(median(factors), 2),
        near=round(near / len(factors), 3),
        worst=round(max(factors), 2),
        bias=round(median(ratios), 2),
    )


def expected_share(rows: Sequence[Row]) -> float:
    """Mean share of its limit that a mean length has, one of each model and limit."""
    shares = {
        (row.model, row.limit): row.completion / row.limit
        for row in rows
        if row.seconds.keys() & {"step", "generation"}
    }
    return round(mean(shares.values()), 2)


def fit_with_errors(rows: Sequence[Row]) -> tuple[StoredFit, FitErrors]:
    """The fit to these rows and its errors, as they are stored."""
    constants = fit(rows)
    unseen = leave_out(rows, constants)
    steps = sorted(1 / each.ratio for each in unseen if each.part == "step")
    tenth = len(steps) // 10
    by_part = _grouped(unseen, lambda each: each.part)
    by_key = _grouped(unseen, lambda each: each.row.key)
    fitted = StoredFit(
        constants={name: float(f"{value:.4g}") for name, value in asdict(constants).items()},
        runs=len(steps),
        low=round(steps[tenth], 2),
        high=round(steps[-1 - tenth], 2),
        share=expected_share(rows),
    )
    return fitted, FitErrors(
        parts={part: errors_of(predicted) for part, predicted in sorted(by_part.items())},
        left_out={key: errors_of(predicted) for key, predicted in by_key.items()},
    )


def _grouped(
    predicted: Sequence[Prediction], key: Callable[[Prediction], str]
) -> dict[str, list[Prediction]]:
    groups: dict[str, list[Prediction]] = {}
    for each in predicted:
        groups.setdefault(key(each), []).append(each)
    return groups


def _constants(point: Sequence[float]) -> Constants:
    names = asdict(START)
    values = (exp(value) for value in point)
    return Constants(**dict(zip(names, values, strict=True)))


def _bounded(point: Vector) -> Vector:
    """The point with shares of at most 1."""
    names = asdict(START)
    return [
        min(value, 0.0) if name in SHARES else value
        for name, value in zip(names, point, strict=True)
    ]


def _residuals(rows: Sequence[Row], point: Vector, origin: Vector) -> Vector:
    """Weighted logarithms of predicted by published, and how far constants are from the origin."""
    constants = _constants(point)
    residuals = []
    for row in rows:
        for prediction in predictions(row, constants):
            weight = STEP_WEIGHT if prediction.part == "step" else PART_WEIGHT
            residuals.append(weight * _huber(log(prediction.ratio)))
    residuals += [PRIOR * (value - before) for value, before in zip(point, origin, strict=True)]
    return residuals


def _huber(error: float) -> float:
    """The number whose square is Huber's loss of an error."""
    size = abs(error)
    if size <= HUBER:
        return error
    root: float = (HUBER * (2 * size - HUBER)) ** 0.5
    return root if error > 0 else -root


def _jacobian(
    rows: Sequence[Row], point: Vector, origin: Vector, residuals: Vector
) -> list[Vector]:
    """How each residual moves with each constant, by differences; one list for each constant."""
    columns = []
    for index in range(len(point)):
        moved = [*point]
        moved[index] += DIFFERENCE
        after = _residuals(rows, moved, origin)
        columns.append(
            [
                (moved_residual - residual) / DIFFERENCE
                for moved_residual, residual in zip(after, residuals, strict=True)
            ]
        )
    return columns


def _solve(columns: list[Vector], residuals: Vector, damping: float) -> Vector:
    """The step `(J'J + d diag(J'J)) s = -J'r`, by Gauss's elimination."""
    size = len(columns)
    matrix = [[_product(columns[i], columns[j]) for j in range(size)] for i in range(size)]
    for index in range(size):
        matrix[index][index] *= 1 + damping
    right = [-_product(column, residuals) for column in columns]
    for index in range(size):
        pivot = max(range(index, size), key=lambda row: abs(matrix[row][index]))
        matrix[index], matrix[pivot] = matrix[pivot], matrix[index]
        right[index], right[pivot] = right[pivot], right[index]
        for below in range(index + 1, size):
            share = matrix[below][index] / matrix[index][index]
            for column in range(index, size):
                matrix[below][column] -= share * matrix[index][column]
            right[below] -= share * right[index]
    solution = [0.0] * size
    for index in reversed(range(size)):
        solved_terms = sum(matrix[index][k] * solution[k] for k in range(index + 1, size))
        solution[index] = (right[index] - solved_terms) / matrix[index][index]
    return solution


def _product(first: Vector, second: Vector) -> float:
    return sum(a * b for a, b in zip(first, second, strict=True))


def _square(vector: Vector) -> float:
    return _product(vector, vector)

"""Imports every reward and calls it on two samples, in the process in which it runs in training.

A reward that needs more than a preflight has is left out, and is no problem. It may need memory, a
GPU, a library that only the image has, or time.
"""

import asyncio
import os
import re
import socket
from pathlib import Path
from typing import Any

from yarl import URL

from grpo_api.spec.rewards import HTTPReward, PythonReward, reward_names
from grpo_api.text.contract import reward_token_env

from ..rewards.builtin_rewards import FormatFunction
from ..rewards.http_service import HTTPFunction
from ..rewards.python_function import (
    FunctionFailed,
    FunctionProcess,
    picklable_arguments,
    where_message,
)
from ..rewards.reward_base import Deadline, RewardCounters, checked_scores, reward_arguments
from ..rewards.reward_set import check_answers, check_chat_template, reward_root
from ..runtime.errors import BadInput, Transient
from .dataset_checks import FirstRows
from .findings import NotChecked, Preflight, Scope
from .model_checks import check_reward_model

SAMPLES = 2
SAMPLE_COMPLETION = "The answer is 42."
CONNECT_SECONDS = 5.0
"""Patience with a service's host, which takes a connection at once."""
NEEDS_MORE = re.compile(
    r"took more than|ended with status -9\b|No module named '(torch|vllm)'|CUDA|cuda|NVIDIA|"
    r"MemoryError|out of memory|Cannot allocate memory|libcud|HIP error"
)
"""What Python, the kernel and torch say where memory, a GPU, time or a library is missing."""
_PLACE = re.compile(r'File "(?:[^"]*/)?([^"/<>]+)", line (\d+)')
"""Where a frame of a traceback is."""


def check_rewards(preflight: Preflight, first: FirstRows | None) -> None:
    """Check every reward of the spec."""
    rewards, findings = preflight.plan.rewards, preflight.findings
    max_steps = preflight.plan.training.max_steps
    samples = sample_arguments(first, max_steps) if first and first.prompts else None
    deadline = Deadline(preflight.scope.reward_seconds)
    for position, (reward, name) in enumerate(zip(rewards, reward_names(rewards), strict=True)):
        path = f"rewards[{position}]"
        if reward.accuracy and first:
            with findings.check(f"spec.{path}.accuracy.answerColumn"):
                check_answers(name, reward.accuracy, first.trained_on)
        if reward.format:
            with findings.check(f"spec.{path}.format.pattern"):
                FormatFunction(name, reward.format, RewardCounters())
        if reward.model:
            tokenizer = check_reward_model(reward.model, f"{path}.model", preflight)
            if tokenizer is not None and first:
                with findings.check(f"spec.{path}.model.name"):
                    check_chat_template(name, tokenizer, is_chat=first.has_chats)
        if reward.python:
            with findings.check(f"spec.{path}.python.function"):
                folder = _function_folder(reward.python, position, preflight)
                _check_function(reward.python, folder, samples, deadline)
        if reward.http and samples and preflight.scope.is_whole:
            with findings.check(f"spec.{path}.http.url"):
                token = _service_token(reward.http, position, preflight)
                _check_service(reward.http, token, samples, preflight.scope)


def sample_arguments(first: FirstRows, max_steps: int | None) -> dict[str, Any]:
    """What TRL gives a reward for one completion of each of the rows with the shortest
    prompts."""
    # Long rows may be dropped, and what training drops need not suit a function.
    shortest = sorted(range(len(first.prompts)), key=lambda row: len(str(first.prompts[row])))
    sample_rows = shortest[:SAMPLES]
    prompts = [first.prompts[row] for row in sample_rows]
    text: Any = SAMPLE_COMPLETION
    if first.has_chats:
        text = [{"role": "assistant", "content": SAMPLE_COMPLETION}]
    count = len(prompts)
    columns = first.table[sample_rows]
    return reward_arguments(columns, prompts, [text] * count, [[0]] * count, max_steps)


def _function_folder(spec: PythonReward, position: int, preflight: Preflight) -> Path | None:
    """Where the files of the function's ConfigMap are; None if it is the image's."""
    if spec.config_map is None:
        return None
    folder = reward_root() / str(position)
    preflight.require_input(f"ConfigMap {spec.config_map.name}", is_there=folder.is_dir())
    return folder


def _check_function(
    spec: PythonReward, folder: Path | None, samples: dict[str, Any] | None, deadline: Deadline
) -> None:
    process = _start(spec, folder, deadline)
    try:
        if samples is not None:
            _call(process, spec, samples, deadline)
    finally:
        process.close()


def _start(spec: PythonReward, folder: Path | None, deadline: Deadline) -> FunctionProcess:
    """The function in its process, as training starts it."""
    try:
        return FunctionProcess(spec.function, folder, _seconds_left(deadline))
    except BadInput as error:
        _require_means(str(error))
        problem = f"{_last_place(str(error))}; {where_message(spec, folder)}"
        raise BadInput(problem) from error


def _seconds_left(deadline: Deadline) -> float:
    """Seconds for the rewards that are left. Raises NotChecked where there are none."""
    seconds = deadline.seconds_left()
    if seconds <= 0:
        raise NotChecked("importing and calling rewards took all the time of the preflight")
    return seconds


def _call(
    process: FunctionProcess, spec: PythonReward, samples: dict[str, Any], deadline: Deadline
) -> None:
    seconds = min(_seconds_left(deadline), spec.timeout_seconds)
    try:
        answer = process.call(picklable_arguments(samples), seconds)
    except TimeoutError as error:
        message = f"{spec.function} did not return within {seconds:.0f} s for {SAMPLES} samples"
        raise NotChecked(message) from error
    except FunctionFailed as failure:
        _require_means(str(failure))
        raise BadInput(
            f"{spec.function} failed on a sample: {_last_place(str(failure))}; correct the function"
        ) from failure
    expected = len(samples["completions"])
    checked_scores(answer["scores"], name=spec.function, step=1, expected=expected)


def _require_means(problem: str) -> None:
    """Distinguish a function that is wrong from a pod that is too small for it."""
    if NEEDS_MORE.search(problem):
        raise NotChecked(f"it needs more than the preflight has: {problem.splitlines()[0]}")


def _last_place(problem: str) -> str:
    """The error alone, and the file and line that it came from."""
    places = _PLACE.findall(problem)
    where = f" ({places[-1][0]} line {places[-1][1]})" if places else ""
    return f"{problem.splitlines()[0]}{where}"


def _service_token(spec: HTTPReward, position: int, preflight: Preflight) -> str | None:
    token = os.environ.get(reward_token_env(position), "").strip()
    has_token = bool(token) or spec.token_secret_ref is None
    preflight.require_input("the Secret of http.tokenSecretRef", is_there=has_token)
    return token


def _check_service(
    spec: HTTPReward, token: str | None, samples: dict[str, Any], scope: Scope
) -> None:
    """Ask the service for the samples' rewards. Raises BadInput where it refuses, Transient where
    it gives none, and NotChecked where training waits longer for them."""
    seconds = int(scope.wait_seconds)
    limit = {"batch_timeout_seconds": min(spec.batch_timeout_seconds, seconds)}
    counters = RewardCounters()
    service = HTTPFunction("preflight", spec.model_copy(update=limit), counters, token)
    asyncio.run(service(**samples))
    if counters.timeouts and not scope.is_in_cluster:
        raise NotChecked(f"{counters.last_problem}. The cluster may reach it; add --in-cluster")
    is_silent = bool(counters.timeouts) and not service.last_try
    if is_silent and seconds < spec.timeout_seconds and _takes_connections(spec.url):
        raise NotChecked(
            f"the service gave no answer for {SAMPLES} samples within {seconds} s; training waits "
            f"for timeoutSeconds = {spec.timeout_seconds}"
        )
    if counters.timeouts:
        raise Transient(
            f"{counters.last_problem}. Check the service and the pods' egress, or correct the URL"
        )
    if counters.failures:
        raise BadInput(f"{counters.last_problem}. Correct the URL, the token or the service")


def _takes_connections(url: str) -> bool:
    """Whether there is a service, which may take its time for an answer."""
    address = URL(url)
    try:
        socket.create_connection((address.host, address.port), CONNECT_SECONDS).close()
    except OSError:
        return False
    return True

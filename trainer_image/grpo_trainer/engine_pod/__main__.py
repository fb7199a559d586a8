"""`python -m grpo_trainer.engine_pod`: the entry point of an engine pod.

Starts vLLM with dummy weights and serves until the attempt ends: the trainer brings the weights,
proves them and asks for completions. Of the model it needs the folder with its configuration only.
Like a training pod it ends with an Outcome and its exit code, whatever happens.
"""

import asyncio
import importlib.util
import logging
import os
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from grpo_api.plan.hang_timeouts import hang_timeout_seconds
from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.report import EXIT_CODES, Outcome, Result
from grpo_api.report.termination_message import truncate_to_fit
from grpo_api.spec.model import ModelSpec
from grpo_api.text.contract import ENGINE_BIND_ENV, INDEX_ENV, PROGRESS_BIND_ENV, PROGRESS_PORT

from ..gang.interfaces import split_address
from ..hub.repositories import CONFIG_FILES, Hub, Repository
from ..process.compile_cache import CompileCache
from ..process.outcome import announce_outcome
from ..process.process_setup import set_defaults
from ..runtime.clock import SYSTEM_CLOCK
from ..runtime.errors import BadInput, EngineMissing, Transient, classify_error, engine_cause
from ..runtime.logs import configure_logs, vllm_logging
from ..runtime.plan_file import read_plan
from .engine_start import error_for_choice, start_engine
from .messages import attempt_of
from .vllm_arguments import NO_VLLM, engine_environment, gpu_capability, vllm_arguments

if TYPE_CHECKING:
    from .sampler import Sampler

log = logging.getLogger("grpo_trainer")

WORKER = "grpo_trainer.engine_pod.weight_receiver.ReceivingWorker"


def model_folder(model: ModelSpec, hub: Hub) -> Path:
    """The folder with the model's configuration.

    Raises:
        BadInput: it does not exist.
        Transient: the hub can't be asked now, or there is no room.
    """
    folder = Path(model.name)
    if folder.is_dir():
        return folder
    if folder.is_absolute():
        raise BadInput(
            f"spec.model.name: folder {folder} does not exist in the engine's pod; mount it with "
            "model.volume"
        )
    repository = Repository("model", model.name, model.revision, "model")
    # The weights come from the trainer.
    return hub.snapshot(repository, lambda fetch: fetch(CONFIG_FILES))[0]


def engine_settings(
    plan: TrainingPlan, folder: Path, capability: tuple[int, int] | None
) -> dict[str, Any]:
    """Keyword arguments of vLLM's AsyncEngineArgs, of a plan with engines in pods of their own;
    arguments as those of vllm_arguments."""
    return vllm_arguments(plan, folder, capability) | {"worker_extension_cls": WORKER}


ENVIRONMENT = {
    # A forked worker can't use CUDA if anything in the main process has.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # The folder of the model has all that vLLM reads.
    "HF_HUB_OFFLINE": "1",
}
"""Variables that the job may override."""
CHECK_SECONDS = 1.0


def main() -> int:
    """Run this engine to its end; returns the exit code."""
    signal.signal(signal.SIGTERM, _stop)
    configure_logs()
    try:
        plan = read_plan()
        configure_logs(plan.job, engine=int(os.environ.get(INDEX_ENV, "0")))
        error: BaseException = asyncio.run(serve(plan, start_sampler(plan)))
    except BaseException as raised:
        log.exception("ended by an error")
        error = raised
    result, message = classify_error(error)
    outcome = Outcome(result=result, engine_cause=engine_cause(error))
    return announce_outcome(truncate_to_fit(outcome, f"engine: {message}"))


def start_sampler(plan: TrainingPlan) -> "Sampler":
    """vLLM with the plan's settings.

    Raises:
        EngineMissing: the image has no vLLM; BadInput where Transformers may not sample instead.
        EngineNotStarted: vLLM raised an error.
        TrainingError: the model can't be found, or the hub not be asked.
    """
    if importlib.util.find_spec("vllm") is None:
        raise error_for_choice(EngineMissing(NO_VLLM), plan.generation)
    folder = model_folder(plan.model, Hub(plan.revisions))
    cache = CompileCache.of_pod(plan.model, plan.execution)
    cache.restore()
    engine = plan.execution.engine
    assert engine is not None  # the operator starts such a pod for such a plan alone
    # Before vLLM is imported, whose modules and processes read these variables.
    set_defaults(os.environ, ENVIRONMENT | engine_environment(engine) | cache.variables)
    set_defaults(os.environ, vllm_logging(Path(tempfile.gettempdir())))
    began = SYSTEM_CLOCK.now()

    def make_sampler() -> "Sampler":
        from .sampler import Sampler

        return Sampler(engine_settings(plan, folder, gpu_capability()))

    sampler = start_engine(make_sampler)
    log.info(f"engine: started and compiled in {SYSTEM_CLOCK.now() - began:.1f} s")
    cache.publish()
    return sampler


async def serve(plan: TrainingPlan, sampler: "Sampler") -> Exception:
    """Answer until there is a reason not to; returns it."""
    from .engine_http import EngineServer, metrics_application, serve_application

    assert plan.engines is not None  # as in start_sampler
    server = EngineServer(sampler, attempt_of(plan.job))
    host, port = split_address(os.environ.get(ENGINE_BIND_ENV, f":{plan.engines.port}"))
    await serve_application(server.application(), host or None, port)
    address = os.environ.get(PROGRESS_BIND_ENV, f":{PROGRESS_PORT}")
    try:
        metrics_host, metrics_port = split_address(address)
        await serve_application(metrics_application(), metrics_host or None, metrics_port)
    except OSError as error:  # an engine without metrics is still of use
        log.info(f"no metrics: {address} can't be bound: {error}")
    # Rank 0 polls its engines also during long steps, so twice a step's patience of silence means
    # that it is gone.
    limit = 2 * hang_timeout_seconds("Training", plan.guard, plan.execution)
    while not server.end_reason.done():
        await asyncio.wait([server.end_reason], timeout=CHECK_SECONDS)
        await sampler.check()
        silent = server.silent_seconds()
        if silent > limit:
            return Transient(
                f"no word from rank 0 at {plan.rendezvous.address} for {silent:.0f} s: it is "
                "probably gone"
            )
    return Transient(f"given up by rank 0: {server.end_reason.result()}")


def _stop(_number: int, _frame: object) -> None:
    """At SIGTERM: there is nothing to save, and what is being sampled is sampled again
    elsewhere."""
    exit_process(
        announce_outcome(truncate_to_fit(Outcome(result=Result.PREEMPTED), "engine: SIGTERM"))
    )


def exit_process(code: int) -> None:
    """End with all of vLLM's processes, which would outlive this one, and without interpreter
    teardown."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended since it was listed
            child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    try:
        exit_process(main())
    except BaseException:
        log.exception("ended by an error")
        exit_process(EXIT_CODES[Result.ERROR])

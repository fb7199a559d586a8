"""Makes a colocated engine fail to start, or compute wrong numbers: a fault for tests.

Put this folder on PYTHONPATH of the training container; Python imports a module of this name by
itself when it starts. HARNESS_ENGINE_FAULT is a key of ERRORS, of NUMBERS, or one of `missing`,
`worker`, `unprovable` and `sample`. Nothing of the product knows of it.
"""

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

FAULT_ENV = "HARNESS_ENGINE_FAULT"
ENGINES = "grpo_trainer.generation.colocated"
ERRORS: dict[str, Exception] = {
    "cache": ValueError("No available memory for the cache blocks"),
    "core": TimeoutError("Timed out waiting for engine core processes to start"),
    "compiler": OSError("Could not find nvcc"),
    "graphs": RuntimeError("CUDA error: operation not permitted when stream is capturing"),
}
"""What vLLM's constructor raises, by fault."""
NUMBERS = {
    "temperature": {"temperature": 1.5},
    "penalty": {"repetition_penalty": 1.5},
    "nan": {},
}
"""What the engine samples with instead of what it is asked for; `nan` tells no numbers at all."""
CAUSES = ("missing", *ERRORS, "worker", "unprovable", "sample", *NUMBERS)


class Strike(MetaPathFinder):
    """Lets the module of the engines be imported, and puts the fault into it."""

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own spec, with a loader that does more."""
        if name != ENGINES:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        assert spec is not None, "it is being imported"
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            strike(module, os.environ[FAULT_ENV])

        loader.exec_module = exec_module
        return spec


def strike(module: Any, fault: str) -> None:
    """Replaces how the module starts its engine."""
    start = module._start_engine

    def started(setup: Any) -> Any:
        if fault in ERRORS:
            import vllm

            vllm.LLM = raising(ERRORS[fault])
        llm = start(setup)
        if fault == "worker":
            llm.collective_rpc = raising(AttributeError("no attribute 'model'"))
        if fault == "unprovable":
            llm.collective_rpc = lambda *_, **__: [({}, ["layers.0.mlp"])]
        if fault == "sample":
            llm.generate = raising(RuntimeError("Triton Error: invalid device function"))
        if fault in NUMBERS:
            llm.generate = wrong(llm.generate, NUMBERS[fault])
        return llm

    module._start_engine = started


def raising(error: Exception) -> Any:
    """A function that raises the error, whatever it is given."""

    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


def wrong(generate: Any, changes: dict[str, float]) -> Any:
    """The engine's `generate` with other settings; without any it tells numbers that are none."""

    def generate_wrongly(prompts: Any, parameters: Sequence[Any], **more: Any) -> Any:
        for sampling in parameters:
            for name, value in changes.items():
                setattr(sampling, name, value)
        answers = generate(prompts, parameters, **more)
        for answer in () if changes else answers:
            for step in answer.outputs[0].logprobs:
                for logprob in step.values():
                    logprob.logprob = float("nan")
        return answers

    return generate_wrongly


if os.environ.get(FAULT_ENV):
    sys.meta_path.insert(0, Strike())
if os.environ.get(FAULT_ENV) == "missing":
    # Then find_spec finds none, and an import fails, as in an image without vLLM.
    sys.modules["vllm"] = None  # type: ignore[assignment]

"""An engine pod's process in which something goes wrong when a test says so: `python -m
tests.trainer.faulty_engine`.

It is the real one, with real vLLM, but for what is struck. A fault is a file in the folder
ENGINE_FAULTS; it strikes once, or, beside a file `always`, each time.
"""

import os
import signal
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

from grpo_trainer.engine_pod import __main__ as program
from grpo_trainer.engine_pod import engine_http
from grpo_trainer.engine_pod.messages import GeneratedCompletions
from grpo_trainer.engine_pod.weight_receiver import ReceivingWorker
from tests.trainer.engine_names import (
    DIES,
    DIES_RECEIVING,
    FLIPPED,
    FLIPPED_LATER,
    OTHER_BUFFER,
    SKIPPED,
    STOPS,
    STOPS_LATER,
    WRONG_VERSION,
)

FOLDER = "ENGINE_FAULTS"
WEIGHT = "model.layers.1.self_attn.k_proj.weight"


def strikes(fault: str) -> bool:
    """Whether this fault strikes now."""
    folder = Path(os.environ[FOLDER])
    if not (folder / fault).exists():
        return False
    if not (folder / "always").exists():
        (folder / fault).unlink()
    return True


class FaultyWorker(ReceivingWorker):
    """A worker that loses a weight, or a bit of one, or whose rotary table changes."""

    _has_other_buffer = False

    def weights_load(self, name: str, tensor: torch.Tensor) -> None:
        """Load a weight, unless it is lost."""
        if name == WEIGHT and strikes(DIES_RECEIVING):
            os.killpg(os.getpgrp(), signal.SIGKILL)
        if name == WEIGHT and strikes(SKIPPED):
            return
        super().weights_load(name, tensor)
        if name == WEIGHT and strikes(FLIPPED):
            self.weights_flip()

    def weights_flip(self) -> None:
        """One bit of the fused weight that this one is a part of, where an earlier one lies that
        stays."""
        fused = self.model_runner.model.get_parameter("model.layers.1.self_attn.qkv_proj.weight")
        fused.data.view(torch.int32)[0, 3] ^= 1 << 9

    def weights_change_buffer(self) -> None:
        """The rotary table becomes another, until it was hashed once."""
        self._scale_buffers(0.5)  # exact, so that doubling restores every bit
        self._has_other_buffer = True

    def weights_prints(self, seed: int) -> dict[str, list[int]]:
        """The real hashes; afterwards the rotary table is right again."""
        prints = super().weights_prints(seed)
        if self._has_other_buffer:
            self._scale_buffers(2.0)
            self._has_other_buffer = False
        return prints

    def _scale_buffers(self, factor: float) -> None:
        for name, buffer in self.model_runner.model.named_buffers():
            if "cos_sin_cache" in name:
                buffer.mul_(factor)


class FaultyServer(engine_http.EngineServer):
    """A server that ends at a request, or answers it with the completions of another version."""

    async def _generate(self, request: web.Request) -> web.Response:
        if strikes(DIES):
            os.killpg(os.getpgrp(), signal.SIGKILL)
        if strikes(STOPS):
            os.kill(os.getpid(), signal.SIGTERM)
        answer = await super()._generate(request)
        if strikes(FLIPPED_LATER):
            await self._sampler.call("weights_flip")
        if strikes(OTHER_BUFFER):
            await self._sampler.call("weights_change_buffer")
        if strikes(WRONG_VERSION):
            body: Any = answer.body
            told = GeneratedCompletions.model_validate_json(body)
            answer = engine_http._json(told.model_copy(update={"version": told.version - 1}))
        return answer

    async def _prove(self, request: web.Request) -> web.Response:
        if self._served.version is not None and strikes(STOPS_LATER):
            os.kill(os.getpid(), signal.SIGTERM)
        return await super()._prove(request)


if __name__ == "__main__":
    os.setsid()  # so that one signal reaches all of its processes, as it does in a pod
    program.WORKER = "tests.trainer.faulty_engine.FaultyWorker"
    engine_http.EngineServer = FaultyServer  # type: ignore[misc]
    program.exit_process(program.main())

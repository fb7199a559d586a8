"""vLLM whose processes are forked; imported by the fork server of processes that see it.

On CPUs each process of an engine imports everything again, and so does the one that only inspects a
model's class. Here an engine's processes are forked from it, and it inspects the class itself:
there is no GPU to initialise.
"""

import multiprocessing
from collections.abc import Callable
from typing import Any

from vllm.model_executor.models import registry
from vllm.v1.engine import utils
from vllm.v1.executor import multiproc_executor


def _here(look: Callable[[], Any]) -> Any:
    return look()


for _module in (utils, multiproc_executor):
    _module.get_mp_context = lambda: multiprocessing.get_context("fork")
registry._run_in_subprocess = _here

"""vLLM whose processes are forked; imported by the fork server of processes that see it.

On CPUs each process of an engine begins by importing all anew, and so does one that only looks at a model's class. Here
the first are forked from their engine's, which itself looks at the class: there is no GPU that this would initialise.
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

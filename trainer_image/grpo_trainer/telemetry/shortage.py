"""What a process lacked memory for, from the exception that says so: the next plan needs numbers, not a sentence.

torch tells the size only in its text: `Tried to allocate 2.00 GiB` of a device (c10/cuda/CUDACachingAllocator.cpp),
`you tried to allocate 512 bytes` of the host (c10/core/impl/alloc_cpu.cpp).
"""

import re

import torch

from grpo_api.report.report import MemoryShortage, Result
from grpo_api.text.quantity import MAX_COUNT

from ..errors import classify
from .host_memory import resident_bytes
from .phases import PhaseClock

_ASKED = re.compile(r"ried to allocate ([0-9]{1,20}(?:\.[0-9]{1,9})?) (bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def shortage_of(error: BaseException, clock: PhaseClock) -> MemoryShortage | None:
    """The memory shortage that ended the run; None for another kind of end."""
    if classify(error)[0] is not Result.OUT_OF_MEMORY:
        return None
    phase, peak = clock.ran_short()
    found = {"phase": phase, "requested_bytes": requested(str(error))}
    if isinstance(error, torch.OutOfMemoryError):
        found |= {"memory": "Device", "allocated_bytes": peak}
    else:
        found |= {"memory": "Host", "allocated_bytes": resident_bytes()}
    return MemoryShortage.model_validate(found)


def requested(text: str) -> int:
    """Bytes that torch's message says were asked for; 0 where it doesn't."""
    found = _ASKED.search(text)
    return min(MAX_COUNT, round(float(found[1]) * _UNITS[found[2]])) if found else 0

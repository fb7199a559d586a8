"""A ledger of live tensor storages: what a GPU's allocator would hold, counted on fake tensors.

The planner's memory model needs a truth, and a machine without a GPU has none: the real
transformers, PEFT and TRL code runs on fake tensors, which have sizes and no data, and every
storage that comes and goes is counted.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BLOCK = 512
"""The CUDA caching allocator hands out multiples of 512 bytes."""


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all live storages, and their peak since `mark`."""

    def __init__(self) -> None:
        """Starts empty."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self.peak = 0
        self.peak_op = ""
        self._live: dict[int, weakref.ref[Any]] = {}
        self._summing_gradients = False
        self._unsettled = ""

    def add(self, *tensors: torch.Tensor) -> None:
        """Counts tensors that were made before the ledger was switched on."""
        for tensor in tensors:
            self._enter(tensor.untyped_storage())
        self._settle("added")

    def mark(self) -> None:
        """Begins a new peak at what is live now."""
        self.peak, self.peak_op = self.bytes, "mark"

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Within, sums of gradients count as in place.

        Autograd adds gradients of one tensor in place, but out of place under any dispatch mode,
        this ledger included.
        """
        self._summing_gradients = True
        try:
            yield
        finally:
            self._summing_gradients = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation and enters what it returned."""
        self._settle(self._unsettled)
        out = func(*args, **(kwargs or {}))
        name = str(func)
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._enter(leaf.untyped_storage())
        self._unsettled = name
        in_place_on_a_gpu = (
            self._summing_gradients and name == "aten.add.Tensor" and not torch.is_grad_enabled()
        )
        if not in_place_on_a_gpu:
            self._settle(name)
        return out

    def _settle(self, op: str) -> None:
        """Raises the peak to what is live now."""
        if self.bytes > self.peak:
            self.peak, self.peak_op = self.bytes, op

    def _enter(self, storage: torch.UntypedStorage) -> None:
        """Counts a storage until it is freed; views share one."""
        key = storage._cdata
        size = -(-storage.nbytes() // BLOCK) * BLOCK
        if key in self._live or not size:
            return
        self._live[key] = weakref.ref(storage, lambda _: self._leave(key, size))
        self.bytes += size

    def _leave(self, key: int, size: int) -> None:
        """A storage was freed."""
        del self._live[key]
        self.bytes -= size

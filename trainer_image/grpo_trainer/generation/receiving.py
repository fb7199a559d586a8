"""What an engine's worker process does in a sync: meets rank 0, receives tensor by tensor, loads each where it belongs.

vLLM calls these methods by name in every worker (`collective_rpc`), so that a tensor goes from rank 0 straight into the
process that holds the live model.
"""

from dataclasses import asdict
from typing import Any

import torch

from .transfer import Meeting, WeightGroup, join
from .worker_extension import WeightsWorker


class ReceivingWorker(WeightsWorker):
    """vLLM's `worker_extension_cls` for engines in pods of their own."""

    model_config: Any
    device: Any
    rank: int
    _weights_group: WeightGroup | None = None

    def weights_receive(self, meeting: dict[str, Any], version: int, tensors: list[tuple[str, list[int]]]) -> None:
        """Receives and loads all tensors in this order; joins the group first if it is a new one.

        Args:
            meeting: fields of a Meeting.
            version: of the weights, for messages.
            tensors: names and shapes.

        Raises:
            TransferFailed: a tensor did not come; what lies in the engine is of no version.
        """
        group = self._joined(Meeting(**meeting))
        try:
            for name, shape in tensors:
                buffer = torch.empty(shape, dtype=self.model_config.dtype, device=self.device)
                group.broadcast(buffer, f"{name} of version {version}")
                self.weights_load(name, buffer)
        # A group that broke off is of no use, and rank 0 would wait until this side leaves it.
        except BaseException:
            self._weights_group = None
            group.leave()
            raise

    def _joined(self, meeting: Meeting) -> WeightGroup:
        known = self._weights_group
        if known is None or asdict(known.meeting) != asdict(meeting):
            if known is not None:
                known.leave()
            self._weights_group = known = join(meeting, 1 + self.rank)
        return known

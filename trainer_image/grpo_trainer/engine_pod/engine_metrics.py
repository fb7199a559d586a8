"""vLLM's own metrics, as far as grpo_api declares them, of the engine in this process.

vLLM registers them with prometheus_client's default registry: in an engine pod, and in a training
process with a colocated engine.
"""

from collections.abc import Iterable

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from grpo_api.report.metrics import VLLM

_FAMILIES = frozenset(metric.name.removesuffix("_total") for metric in VLLM)
"""Names as prometheus_client has them: it adds the suffix of a counter to its samples."""


class EngineMetrics(Collector):
    """The declared families; none in a process without an engine."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        """`registry` is the one that vLLM uses."""
        self._registry = registry

    def collect(self) -> Iterable[Family]:
        """See Collector."""
        for family in self._registry.collect():
            if family.name in _FAMILIES:
                yield family

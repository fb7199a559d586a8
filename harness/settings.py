"""What a cluster is: the settings that `up` takes, kept as JSON in its state folder for every later
command.

Separate from the cluster itself because a node's first process and the guard read them in processes
of their own.
"""

import json
from dataclasses import KW_ONLY, asdict, dataclass, field
from pathlib import Path
from typing import Any

from .controlplane import ControlPlaneSettings

FILE = "cluster.json"


@dataclass(frozen=True)
class GpuSettings:
    """The GPUs that every node claims to have, with the labels of NVIDIA's GPU feature discovery.

    memory_mib: what the product reports as total memory.
    """

    per_node: int = 0
    product: str = "NVIDIA-H100-80GB-HBM3"
    memory_mib: int = 81559
    family: str = "hopper"

    @property
    def labels(self) -> dict[str, str]:
        """The node's labels, none without GPUs."""
        if not self.per_node:
            return {}
        labels = {"present": "true", "count": str(self.per_node), "product": self.product}
        labels |= {"memory": str(self.memory_mib), "family": self.family}
        return {f"nvidia.com/gpu.{key}": value for key, value in labels.items()}

    @property
    def capacity(self) -> dict[str, str]:
        """The extended resources that the node offers."""
        return {"nvidia.com/gpu": str(self.per_node)} if self.per_node else {}


@dataclass(frozen=True)
class ClusterSettings:
    """All that `up` takes.

    nodes: real kubelets, 0 for the API level. kwok_nodes: nodes whose pods only pretend to run.
    slot: chooses the addresses, so that several clusters fit on one machine.
    shown: host folder → path at which every container of the real nodes sees it, read-only.
    storage_class: real nodes have a default StorageClass, whose provisioner takes a minute to
    build.
    """

    nodes: int = 0
    kwok_nodes: int = 0
    _: KW_ONLY
    slot: int = 0
    shown: dict[str, str] = field(default_factory=dict)
    storage_class: bool = False
    gpus: GpuSettings = field(default_factory=GpuSettings)
    control_plane: ControlPlaneSettings = field(default_factory=ControlPlaneSettings)

    def save(self, directory: Path) -> None:
        """Write the settings to the state folder."""
        (directory / FILE).write_text(json.dumps(asdict(self), indent=1))


def load_settings(directory: Path) -> ClusterSettings:
    """Read the settings back; a folder without them (its `up` was interrupted at once) gives the
    defaults."""
    file = directory / FILE
    stored: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    gpus, plane = stored.pop("gpus", {}), stored.pop("control_plane", {})
    return ClusterSettings(
        **stored, gpus=GpuSettings(**gpus), control_plane=ControlPlaneSettings(**plane)
    )

"""Where this process runs: machine, packages, command, names of variables, GPUs. No values of
variables.

For what is written down beside a model; a variable's value may be a token.
"""

import os
import platform
import re
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import torch

from grpo_api.provenance.provenance import EnvironmentRecord

DRIVER = Path("/proc/driver/nvidia/version")


def environment(variables: Mapping[str, str] = os.environ) -> EnvironmentRecord:
    """The environment record of this process."""
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    # Of variables the names alone: a value may be a token.
    return EnvironmentRecord(
        platform=platform.platform(),
        command=sys.orig_argv,
        variables=sorted(variables),
        gpus=gpus,
        driver=driver(),
        cuda=str(torch.version.cuda or ""),
    )


def driver() -> str:
    """Version of the kernel's NVIDIA driver; empty without one."""
    version = re.search(r"\d{3,}\.[\d.]+", DRIVER.read_text()) if DRIVER.exists() else None
    return version[0] if version else ""


def packages() -> dict[str, str]:
    """Versions of Python and of every package that it finds, by name."""
    versions = {
        distribution.name.lower(): distribution.version
        for distribution in metadata.distributions()
        if distribution.name
    }
    return {"python": platform.python_version()} | dict(sorted(versions.items()))

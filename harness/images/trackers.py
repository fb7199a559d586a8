"""The packages of experiment trackers, and of their servers, for tests of `make test-all`.

The first folder has what the trainer's image would have with all trackers. The second is what reads
their data back: MLflow's and Trackio's servers, and TensorBoard. It is no part of any image.
"""

from pathlib import Path

from ..programs.cache import REPOSITORY, cache_root, cached, content_key
from ..programs.progress import progress
from ..programs.python_packages import install_packages
from .wheels import PYTHON

REQUIREMENTS = tuple(sorted((REPOSITORY / "trainer_image/trackers").glob("*.txt")))
SERVERS = ("mlflow==3.17.2", "trackio==0.43.0", "tensorboard==2.21.0")


def tracker_packages() -> Path:
    """Return a folder `site-packages` with the packages of all trackers, as in the trainer's
    image."""
    target = cache_root() / f"trackers-{content_key(*REQUIREMENTS, *PYTHON)}"
    return cached(target, lambda folder: _install(folder / "site-packages")) / "site-packages"


def tracker_servers() -> Path:
    """Return a folder `site-packages` with SERVERS and all that they need."""
    target = cache_root() / f"tracker-servers-{content_key(*SERVERS, *PYTHON)}"
    return cached(target, _install_servers) / "site-packages"


def _install(target: Path) -> None:
    target.mkdir(parents=True)
    wanted = {line for path in REQUIREMENTS for line in path.read_text().splitlines()}
    install_packages(target, *PYTHON, "--no-deps", *sorted(wanted))


def _install_servers(folder: Path) -> None:
    target = folder / "site-packages"
    target.mkdir(parents=True)
    with progress("the servers of experiment trackers"):
        install_packages(target, *PYTHON, *SERVERS)

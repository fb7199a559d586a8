"""What a run needs beside its virtual environment, built before anything else wants the cores.

`python -m harness tools`, for `make tools`, builds what `make test` needs; `make demo` needs a part
of it. The page of the pictures and the packages of a bare GPU machine are made by tools/, which
`make tools-all` starts too.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import partial

from .images import recipes
from .images.trackers import tracker_packages, tracker_servers
from .images.vllm_packages import engine_packages
from .nodes import cgroups
from .programs import object_stores, prerequisites, prometheus, registries
from .programs.build import (
    NODE_PROGRAMS,
    discard_go_folder,
    module_folder,
    toolchain,
    user_commands,
)
from .programs.cache import NO_BUILDS
from .programs.processes import ClusterError

Make = Callable[[], object]


@dataclass(frozen=True)
class Tools:
    """What one kind of run needs.

    programs: of build.PROGRAMS. content: folders and images, each by the function that makes it.
    apt: programs or files of the machine, with the Debian packages that have them. disk, memory:
    gigabytes of the cache at its largest, while Go's folder is there, and of memory to build and
    run.
    """

    programs: tuple[str, ...]
    content: tuple[Make, ...]
    _: KW_ONLY
    apt: tuple[tuple[str, str], ...] = ()
    disk: int
    memory: int


DEMO = Tools(
    (*NODE_PROGRAMS, "helm"),
    (recipes.operator_image, recipes.light_trainer_image),
    disk=12,
    memory=6,
)
TEST = Tools(
    (*DEMO.programs, "local-path-provisioner", "kwok", "versitygw", "health"),
    (
        *DEMO.content,
        engine_packages,
        recipes.gpu_stand_in_image,
        recipes.python_image,
        object_stores.moto_packages,
        partial(prometheus.program, "prometheus"),
        partial(module_folder, "prometheus-operator"),
        partial(module_folder, "kueue"),
    ),
    disk=18,
    memory=8,
)
TEST_ALL = Tools(
    (*TEST.programs, "kueue", "krew", "cosign"),
    # The image that ships, with vLLM, takes 30 GB while it is built.
    (
        *TEST.content,
        *(tracker_packages, tracker_servers),
        *(recipes.engine_trainer_image, recipes.slim_trainer_image, recipes.trainer_image),
        *(registries.registry_program, registries.skopeo, registries.index_packages),
    ),
    apt=tuple(prerequisites.PICTURE_TOOLS.items()),
    disk=56,
    memory=8,
)
RUNS = {"demo": DEMO, "test": TEST, "test-all": TEST_ALL}


def prepare(run: str) -> None:
    """Build what the run of RUNS needs and the cache lacks.

    Go's compiler and what is downloaded, unpacked and installed share the machine: neither uses all
    cores all the time.

    Raises:
        ClusterError: the machine can't run it, or something can't be built.
    """
    tools = RUNS[run]
    prerequisites.require(nodes=True, images=True)
    cgroups.require()
    prerequisites.require_tools(dict(tools.apt))
    programs: list[Make] = [partial(toolchain, (name,)) for name in tools.programs]
    missing_programs = list(_missing((*programs, user_commands)))
    missing_content = list(_missing(tools.content))
    if not missing_programs and not missing_content:
        return
    prerequisites.require_room(tools.disk, tools.memory)
    with ThreadPoolExecutor(2) as pool:
        halves = [pool.submit(_make, missing_programs), pool.submit(_make, missing_content)]
    for half in halves:
        half.result()
    if tools is not DEMO:
        discard_go_folder()


def _missing(makes: Iterable[Make]) -> Iterator[Make]:
    with _builds_forbidden():
        for make in makes:
            try:
                make()
            except ClusterError:
                yield make


@contextmanager
def _builds_forbidden() -> Iterator[None]:
    before = os.environ.get(NO_BUILDS)
    os.environ[NO_BUILDS] = "1"
    try:
        yield
    finally:
        del os.environ[NO_BUILDS]
        if before is not None:
            os.environ[NO_BUILDS] = before


def _make(makes: Iterable[Make]) -> None:
    for make in makes:
        make()

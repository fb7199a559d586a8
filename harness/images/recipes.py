"""Build the shipped Dockerfiles without a Docker daemon or a registry: buildah on a Debian base of
our own.

The Dockerfiles stay clean: what a test machine needs (the host's CA bundle and pip settings, torch
without CUDA) is mounted over the base or baked into it. Archives are cached by the content of all
inputs.
"""

import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from pathlib import Path

from ..programs import prerequisites
from ..programs.cache import KEPT, REPOSITORY, cache_root, cached, content_key, locked
from ..programs.processes import ClusterError
from ..programs.progress import progress
from .base import base_tar
from .vllm_packages import engine_environment, engine_packages
from .wheels import site_packages, torch_wheels

CA_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
MAX_STORED_IMAGES = 60  # with those of intermediate steps; beyond, the builder's storage is emptied
BUILD_ENVIRONMENT = (f"SSL_CERT_FILE={CA_BUNDLE}", f"PIP_CERT={CA_BUNDLE}")
"""Variables that only a build needs, where the host's CA bundle is mounted over the base's."""
CONTAINER_WHEELS = "/opt/wheels"
CONTAINER_SITE_PACKAGES = "/opt/dependencies/site-packages"
CONTAINER_ENGINE_PACKAGES = "/opt/engine/site-packages"
CONSTRAINTS_FILE = "constraints.txt"
# pyproject.toml is no source: of it only _package_settings reaches an image. LICENSE is copied, but
# changes nothing.
OPERATOR_SOURCES = (
    "operator/Dockerfile",
    CONSTRAINTS_FILE,
    *(
        f"operator/{package}"
        for package in ("grpo_kube", "grpo_api", "grpo_planner", "grpo_operator", "grpo_cli")
    ),
)
TRAINER_SOURCES = (
    "trainer_image/Dockerfile",
    CONSTRAINTS_FILE,
    "operator/grpo_api",
    "trainer_image/grpo_trainer",
    "trainer_image/grpo_acceptance",
    "trainer_image/trackers",
)


@dataclass(frozen=True)
class Image:
    """A built image: its name as pods write it (use imagePullPolicy Never or IfNotPresent) and its
    docker archive."""

    name: str
    archive: Path

    @property
    def repository(self) -> str:
        """The name without the tag."""
        return self.name.rpartition(":")[0]

    @property
    def tag(self) -> str:
        """The tag, which changes with the content."""
        return self.name.rpartition(":")[2]


WITHOUT_ENGINE = ("EXTRAS=trainer",)
"""Argument of the trainer's Dockerfile where no vLLM for GPUs is wanted, which is gigabytes."""


@dataclass(frozen=True)
class Recipe:
    """How to build one image.

    sources: what its content depends on, beside the package's settings. mounts: host folder →
    folder that the build's commands see. environment: baked into the base, so the image has it.
    arguments: of the build, as NAME=value. layers: keep every step for the next build; not for
    images of gigabytes, whose steps cost more than they save.
    """

    name: str
    dockerfile: str
    sources: tuple[str, ...]
    mounts: tuple[tuple[Path, str], ...] = ()
    _: KW_ONLY
    environment: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    layers: bool = True


SHIPPED = {
    "grpo-operator": Recipe("grpo-operator", "operator/Dockerfile", OPERATOR_SOURCES),
    "grpo-trainer": Recipe(
        "grpo-trainer", "trainer_image/Dockerfile", TRAINER_SOURCES, layers=False
    ),
}
"""What clusters run, by the images' names."""


def build_shipped(name: str, epoch: int, archive: Path) -> None:
    """Build an image of SHIPPED for a release, without cached layers, as a docker archive.

    Args:
        name: key of SHIPPED.
        epoch: time of the commit in seconds since 1970, so that bytecode does not depend on the
            files' times.
        archive: file to write.
    """
    prerequisites.require(nodes=False, images=True)
    recipe = replace(SHIPPED[name], arguments=(f"SOURCE_DATE_EPOCH={epoch}",), layers=False)
    _build(recipe, f"localhost/{name}:release", archive)


def run_in_image(image: Image, *command: str) -> str:
    """Return what a command prints in a container of an image, for images that are too large for
    nodes.

    Nothing of it stays in the builder's storage.
    """
    with locked(cache_root() / "buildah.lock"):
        container = _buildah("from", f"docker-archive:{image.archive}").strip()
        try:
            return _buildah("run", "--isolation", "chroot", container, "--", *command)
        finally:
            _buildah("rm", container)
            _buildah("rmi", image.name)


def python_image() -> Image:
    """Return the plain Debian base with Python 3.11, for tests that need any small image."""
    key = content_key(base_tar().name)
    name = f"localhost/grpo-python:{key}"
    return Image(
        name,
        cached(cache_root() / "images" / f"grpo-python-{key}.tar", partial(_export_base, name)),
    )


def operator_image() -> Image:
    """Return the operator's image from the shipped Dockerfile."""
    return _image(SHIPPED["grpo-operator"])


def trainer_image() -> Image:
    """Return the trainer's image from the shipped Dockerfile, as GPU clusters run it (about 9
    GB)."""
    return _image(SHIPPED["grpo-trainer"])


def slim_trainer_image() -> Image:
    """Return the shipped trainer Dockerfile's image with torch that lacks CUDA's libraries (1.9
    GB)."""
    wheels = ((torch_wheels(), CONTAINER_WHEELS),)
    slim = replace(
        SHIPPED["grpo-trainer"], name="grpo-trainer-slim", mounts=wheels, arguments=WITHOUT_ENGINE
    )
    return _image(slim)


def light_trainer_image() -> Image:
    """Return the shipped trainer Dockerfile's image without dependencies, which loads in seconds.

    It runs on nodes that show `site_packages()` to every container at CONTAINER_SITE_PACKAGES; the
    installer finds the dependencies there at build time too, and so installs only our packages.
    """
    return _light("grpo-trainer-light", ((site_packages(), CONTAINER_SITE_PACKAGES),), {})


def engine_trainer_image() -> Image:
    """Return the light trainer image with an engine: vLLM for CPUs, which nodes show at
    CONTAINER_ENGINE_PACKAGES."""
    mounts = (
        (site_packages(), CONTAINER_SITE_PACKAGES),
        (engine_packages(), CONTAINER_ENGINE_PACKAGES),
    )
    return _light("grpo-trainer-engine", mounts, engine_environment(CONTAINER_ENGINE_PACKAGES))


def _light(name: str, mounts: tuple[tuple[Path, str], ...], environment: dict[str, str]) -> Image:
    """Build the trainer's Dockerfile on folders of packages, in the order in which Python looks
    into them."""
    variables = {"PYTHONPATH": ":".join(target for _, target in mounts), **environment}
    baked = tuple(f"{variable}={value}" for variable, value in variables.items())
    shipped = replace(SHIPPED["grpo-trainer"], name=name, layers=True)
    return _image(replace(shipped, mounts=mounts, environment=baked, arguments=WITHOUT_ENGINE))


def gpu_stand_in_image() -> Image:
    """Return what holds GPUs that exist only in the API, where the trainer would find none."""
    dockerfile = "harness/images/gpu_stand_in.Dockerfile"
    return _image(Recipe("grpo-gpu-stand-in", dockerfile, (dockerfile,)))


RECIPES = {
    "operator": operator_image,
    "trainer": trainer_image,
    "trainer-slim": slim_trainer_image,
    "trainer-light": light_trainer_image,
    "trainer-engine": engine_trainer_image,
    "python": python_image,
    "gpu-stand-in": gpu_stand_in_image,
}


def _image(recipe: Recipe) -> Image:
    prerequisites.require(nodes=False, images=True)
    key = image_key(recipe, REPOSITORY)
    image = f"localhost/{recipe.name}:{key}"
    archive = cache_root() / "images" / f"{recipe.name}-{key}.tar"
    # Images without layers have gigabytes: the older one makes room for the new one.
    kept = KEPT if recipe.layers else 1
    cached(archive, lambda part: _build(recipe, image, part), kept=kept)
    return Image(image, archive)


def image_key(recipe: Recipe, repository: Path) -> str:
    """Return digits that change with what is in the image."""
    sources = [repository / name for name in recipe.sources]
    installs_package = CONSTRAINTS_FILE in recipe.sources
    settings = _package_settings(repository / "pyproject.toml") if installs_package else ""
    return content_key(*sources, settings, repr(recipe), base_tar().name)


def _package_settings(file: Path) -> str:
    """Return what of pyproject.toml an installation depends on: no tool's settings, nothing of
    developers."""
    project = tomllib.loads(file.read_text())
    extras = project["project"]["optional-dependencies"]
    extras.pop("dev")
    return repr((project["build-system"], project["project"], project["tool"]["setuptools"]))


def _export_base(name: str, archive: Path) -> None:
    with locked(cache_root() / "buildah.lock"):
        _buildah("push", "--quiet", _base(()), f"docker-archive:{archive}:{name}")


def _build(recipe: Recipe, image: str, archive: Path) -> None:
    what = progress(f"the image {recipe.name}")
    with what, locked(cache_root() / "buildah.lock"), tempfile.TemporaryDirectory() as temporary:
        _tidy()
        command: list[object] = ["build", "--quiet", "--isolation", "chroot", "--network", "host"]
        command += [
            "--build-arg",
            f"BASE_IMAGE={_base(recipe.environment)}",
            "--file",
            REPOSITORY / recipe.dockerfile,
        ]
        for argument in recipe.arguments:
            command += ["--build-arg", argument]
        for source, target in (*recipe.mounts, *_host_settings(Path(temporary))):
            command += ["--volume", f"{source}:{target}:ro"]
        destination = f"docker-archive:{archive}:{image}"
        if recipe.layers:
            _buildah(*command, "--layers", "--tag", image, REPOSITORY)
            _buildah("push", "--quiet", image, destination)
            _buildah("rmi", image)
        else:
            _buildah(*command, "--tag", destination, REPOSITORY)


def _tidy() -> None:
    """Remove what interrupted builds left, and everything when edits have filled the storage."""
    _buildah("rm", "--all")
    if len(_buildah("images", "--all", "--quiet").split()) > MAX_STORED_IMAGES:
        _buildah("rmi", "--all", "--force")


def _base(environment: tuple[str, ...]) -> str:
    """Return the name of the Debian base with these variables, made when the storage lacks it."""
    environment = (*BUILD_ENVIRONMENT, *environment)
    archive = base_tar()
    name = f"localhost/grpo-base:{content_key(archive.name, repr(environment))}"
    if name in _buildah("images", "--format", "{{.Name}}:{{.Tag}}").split():
        return name
    container = _buildah("from", "scratch").strip()
    _buildah("add", "--quiet", container, archive, "/")
    settings = [option for variable in environment for option in ("--env", variable)]
    _buildah("config", *settings, "--cmd", "/bin/sh", container)
    _buildah("commit", "--quiet", "--rm", container, name)
    return name


def _host_settings(temporary: Path) -> list[tuple[Path, str]]:
    """Return what the build's commands borrow from the host to reach a package index: CA bundle and
    pip settings."""
    config = temporary / "pip.conf"
    config.write_text(pip_config(_pip_settings()))
    mounts = [(config, "/etc/pip.conf")]
    if CA_BUNDLE.exists():
        mounts.append((CA_BUNDLE, str(CA_BUNDLE)))
    return mounts


def _pip_settings() -> str:
    """Return the output of `pip config list`; this environment may lack pip, then the system's
    knows the settings."""
    for python in (sys.executable, "/usr/bin/python3", "python3"):
        command = [python, "-m", "pip", "config", "list"]
        if (
            shutil.which(python)
            and not (
                done := subprocess.run(command, capture_output=True, text=True, check=False)
            ).returncode
        ):
            return done.stdout
    return ""


def pip_config(listed: str) -> str:
    """Return a pip.conf from the output of `pip config list`, with our folder of wheels added.

    Only the settings that choose the index matter in a container; a host's other folders do not
    exist there.
    """
    wanted = ("index-url", "extra-index-url", "trusted-host", "proxy", "timeout", "default-timeout")
    lines = [
        "[global]",
        f"find-links = {CONTAINER_WHEELS}",
        "disable-pip-version-check = 1",
        "root-user-action = ignore",
    ]
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        name = key.rpartition(".")[2]
        if name in wanted:
            lines.append(f"{name} = {value.strip().strip(chr(39))}")
    return "\n".join(lines) + "\n"


def _buildah(*arguments: object) -> str:
    """Run buildah on a storage of our own, in namespaces of its own: neither a mount nor a command
    outlives us."""
    storage = cache_root() / "buildah"
    command: list[object] = [
        "setpriv",
        "--pdeathsig",
        "KILL",
        "unshare",
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
    ]
    command += [
        "--mount-proc",
        "buildah",
        "--root",
        storage / "root",
        "--runroot",
        storage / "run",
        *arguments,
    ]
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ClusterError(
            f"`{' '.join(map(str, command))}` failed:\n{done.stderr[-4000:]}{done.stdout[-2000:]}"
        )
    return done.stdout

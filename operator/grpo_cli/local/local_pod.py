"""Translates the pod that the operator would create for a job into processes of this machine.

A local run is made from the pod's manifest, so that it differs from the pod in nothing but what is
written here. What only a cluster has (Secrets, images, services) is refused, all of it at once.
"""

import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from grpo_api.job import GRPOJobSpec
from grpo_api.plan.plan import Rendezvous, TrainingPlan
from grpo_api.pods.containers import ResourceRequirements
from grpo_api.spec.run_policy import MOST_PROCESSES, PlacementSpec
from grpo_api.text.contract import (
    CHECKPOINT_MOUNT,
    DATA_MOUNT,
    DATA_MOUNT_ENV,
    IMAGE_ENV,
    MODEL_MOUNT,
    PLAN_ENV,
    PLAN_VOLUME,
    RESUME_MOUNT,
    REWARD_MOUNT,
    REWARD_MOUNT_ENV,
    SCRATCH,
    SCRATCH_VOLUME,
    SHARED_MEMORY_VOLUME,
    SIGNING_KEY_ENV,
    SIGNING_VOLUME,
)
from grpo_api.text.messages import value_text
from grpo_api.text.names import VolumeClaim
from grpo_operator.pods.manifests import Attempt
from grpo_operator.pods.pod_spec import PodDefaults, pod_spec
from grpo_operator.pods.pod_volumes import Manifest
from grpo_operator.pods.roles import Role
from grpo_operator.records.names import COMPONENT_TRAINER, checkpoint_claim

from ..show.errors import OptionError

LOCAL_ADDRESS = "127.0.0.1"
IMAGE = "local"
"""Stands for the image of a job without spec.image, which is not looked at here."""
_MACHINE_VOLUMES = (PLAN_VOLUME, SCRATCH_VOLUME, SHARED_MEMORY_VOLUME)
"""Volumes of every pod in whose place this machine has a file or a folder of its own."""
_POD_VARIABLES = frozenset({"HOME", "USER", "HF_HOME", PLAN_ENV, IMAGE_ENV})
"""Variables that describe the container. The hub's cache is this machine's own."""
_POD_FIELDS = frozenset({"POD_NAME", "NODE_NAME"})
_TRAINER_MOUNTS = (MODEL_MOUNT, DATA_MOUNT, CHECKPOINT_MOUNT, RESUME_MOUNT, REWARD_MOUNT)
"""Mounts whose folder the trainer reads from its environment."""
_HOME_HOSTS = ("localhost", LOCAL_ADDRESS)

ConfigMaps = Mapping[str, Mapping[str, str]]
"""Files of each ConfigMap, by its name."""


_FILE_NAME = re.compile(r"[-._a-zA-Z0-9]{1,253}")


def config_map_problems(config_maps: ConfigMaps) -> Iterator[str]:
    """Sentences about what the API server would refuse of ConfigMaps."""
    for name, files in config_maps.items():
        if not isinstance(files, Mapping):
            yield f"ConfigMap {name} is {value_text(files)}; it takes file names with their texts"
            continue
        for file, text in files.items():
            if not (isinstance(file, str) and _FILE_NAME.fullmatch(file)) or file in (".", ".."):
                yield (
                    f"ConfigMap {name} has the file {value_text(file)}; its name takes letters, "
                    "digits, `-`, `_` and `.`"
                )
            if not isinstance(text, str):
                yield f"{file} of ConfigMap {name} is {value_text(text)}; it takes the file's text"


class ClaimFolder(NamedTuple):
    """A folder of a claim's volume."""

    claim: str
    sub_path: str = ""


MountSource = ClaimFolder | Mapping[str, str]
"""What is mounted: a folder of a claim, or the files of a ConfigMap."""


class LocalContainer(NamedTuple):
    """A container as a process."""

    name: str
    command: list[str]
    environment: dict[str, str]
    """What is added to this process's own."""
    mounts: dict[str, MountSource]
    """By their path in the container."""


class LocalPod(NamedTuple):
    """The containers of a pod, in the order in which they run; the last one is the trainer."""

    init_containers: list[LocalContainer]
    trainer: LocalContainer


def local_spec(
    name: str, spec: GRPOJobSpec, processes: int | None, steps: int | None
) -> GRPOJobSpec:
    """Return the spec of a job as it is planned here: on CPUs of one node, with checkpoints.

    Without a number of processes, the gang has as many as the job has on CPUs, else 1.

    Raises:
        OptionError: the gang has too many processes for one machine, or none.
    """
    placement = spec.placement
    if processes is None:
        is_cpu_job = placement.accelerator == "CPU"
        pods, processes_per_pod = placement.nodes or 1, placement.processes_per_node or 1
        processes = pods * processes_per_pod if is_cpu_job else 1
    if not (isinstance(processes, int) and 1 <= processes <= MOST_PROCESSES):
        raise OptionError(
            f"the gang of {name} has {processes!r} processes; a local run takes 1 to "
            f"{MOST_PROCESSES}: give --processes N, or processes of LocalProcess"
        )
    checkpoint = spec.checkpoint
    if not checkpoint.is_lasting:
        # The run's history is kept beside its checkpoints.
        volume = VolumeClaim(claim_name=checkpoint_claim(name))
        checkpoint = checkpoint.model_copy(update={"volume": volume})
    training = spec.training
    if steps is not None:
        training = training.model_copy(update={"max_steps": steps})
    # A memory request is the pod's; here counts what the plan predicts.
    cores = spec.resources.completed_requests.get("cpu")
    resources = ResourceRequirements(requests={"cpu": cores} if cores else {})
    # The next attempt may start in another folder of this machine.
    model_folder = Path(spec.model.name)
    model_name = str(model_folder.absolute()) if model_folder.is_dir() else spec.model.name
    local_placement = PlacementSpec(accelerator="CPU", nodes=1, processes_per_node=processes)
    changes = {
        "placement": local_placement,
        "resources": resources,
        "checkpoint": checkpoint,
        "training": training,
        "model": spec.model.model_copy(update={"cache": None, "name": model_name}),
    }
    return spec.model_copy(update=changes)


def local_pod(
    attempt: Attempt,
    config_maps: ConfigMaps,
    variables: Mapping[str, str],
    *,
    has_mounts: bool = False,
) -> LocalPod:
    """Return the processes of an attempt's only pod, of a spec that local_spec returned.

    Values of Secrets are looked for in `variables`, this process's environment. With `has_mounts`
    the files of an unknown ConfigMap are those that an attempt before has mounted.

    Raises:
        OptionError: with everything that this machine does not have.
    """
    spec = attempt.spec
    role = Role(component=COMPONENT_TRAINER, spec=spec, plan=attempt.plan)
    manifest = pod_spec(attempt.key.name, role, {}, PodDefaults(image=IMAGE), source=attempt.source)
    pod = _PodReader(manifest, spec.image or IMAGE, variables)
    pod.config_maps, pod.has_mounts = config_maps, has_mounts
    pod.problems += _missing_services(spec)
    trainer = pod.read_trainer(manifest["containers"][0])
    init_containers = [
        pod.read_init_container(container) for container in manifest.get("initContainers", ())
    ]
    if pod.problems:
        raise OptionError(*pod.problems)
    return LocalPod(init_containers, trainer)


def _missing_services(spec: GRPOJobSpec) -> Iterator[str]:
    """Sentences about addresses that only pods reach."""
    if spec.checkpoint.store:
        yield (
            f"spec.checkpoint.store is {spec.checkpoint.store.url}: a local run keeps its "
            "checkpoints in its folder; set spec.checkpoint.volume instead"
        )
    for position, reward in enumerate(spec.rewards):
        if reward.http is None:
            continue
        host = urlsplit(reward.http.url).hostname or ""
        is_service = "." not in host or host.endswith((".svc", ".cluster.local"))
        if is_service and host not in _HOME_HOSTS:
            yield (
                f"spec.rewards[{position}].http.url is {reward.http.url}: the service {host} "
                "answers in the cluster only; forward it by `kubectl port-forward` and write "
                f"http://{LOCAL_ADDRESS}:PORT"
            )


class _PodReader:
    """Reads the containers of one pod; `problems` collects what this machine does not have."""

    def __init__(
        self,
        pod: Manifest,
        image: str,
        variables: Mapping[str, str],
    ) -> None:
        self._volumes = {volume["name"]: volume for volume in pod["volumes"]}
        self._image = image
        self.config_maps: ConfigMaps = {}
        self.has_mounts = False
        self._variables = variables
        self.problems: list[str] = []

    def read_trainer(self, container: Manifest) -> LocalContainer:
        """Return the training container."""
        mounts: dict[str, MountSource] = {}
        for mount in container["volumeMounts"]:
            path, volume = mount["mountPath"], mount["name"]
            if volume in _MACHINE_VOLUMES:
                continue
            if volume == SIGNING_VOLUME and SIGNING_KEY_ENV not in self._variables:
                self.problems.append(
                    "spec.export.signingKeySecretRef names a Secret, which only the cluster has; "
                    f"set {SIGNING_KEY_ENV} to the key's file, or leave it out"
                )
            elif volume == SIGNING_VOLUME:
                continue
            elif _is_in(path, _TRAINER_MOUNTS):
                mounts |= self._mount_source(mount)
            else:
                self.problems.append(
                    f"spec.volumeMounts mounts {volume} at {path}: a process of this machine has "
                    "no mounts; leave it out and name the local folder where it is used"
                )
        self._require_no_sources("spec.envFrom", container)
        command = self._command("spec.command", container["command"])
        return LocalContainer(container["name"], command, self._environment(container), mounts)

    def read_init_container(self, container: Manifest) -> LocalContainer:
        """Return an init container of the training image."""
        path = f"spec.podTemplate.spec.initContainers[{container['name']}]"
        if container["image"] != self._image:
            self.problems.append(
                f"{path}.image is {container['image']}: images don't run here; leave the "
                "container out and run its program by hand"
            )
        if container.get("restartPolicy") == "Always":
            self.problems.append(f"{path} is a sidecar, which is not run here; leave it out")
        mounts: dict[str, MountSource] = {}
        for mount in container.get("volumeMounts", ()):
            if mount["mountPath"] != SCRATCH:
                mounts |= self._mount_source(mount)
        self._require_no_sources(f"{path}.envFrom", container)
        command_line = [*container.get("command", ()), *container.get("args", ())]
        command = self._command(f"{path}.command", command_line)
        return LocalContainer(container["name"], command, self._environment(container), mounts)

    def _mount_source(self, mount: Manifest) -> dict[str, MountSource]:
        """The mount by its path; nothing where its source is refused."""
        path, volume = mount["mountPath"], self._volumes[mount["name"]]
        if claim := volume.get("persistentVolumeClaim"):
            return {path: ClaimFolder(claim["claimName"], mount.get("subPath", ""))}
        if config_map := volume.get("configMap"):
            name = config_map["name"]
            if name in self.config_maps or self.has_mounts:
                return {path: self.config_maps.get(name, {})}
            self.problems.append(
                f"{path} is ConfigMap {name}, which is not known here; put it into the job's file, "
                "or pass its files as config_maps"
            )
            return {}
        kind = next(iter(volume.keys() - {"name"}))
        self.problems.append(
            f"{path} is a volume of type {kind}, which this machine does not have; use a claim and "
            "name its folder, or the path of a local folder"
        )
        return {}

    def _environment(self, container: Manifest) -> dict[str, str]:
        """Values of the container's variables, less those that this process has already."""
        environment = {}
        for variable in container.get("env", ()):
            name = variable["name"]
            if name in _POD_VARIABLES or name in _POD_FIELDS:
                continue
            if "valueFrom" not in variable:
                environment[name] = variable.get("value", "")
            elif name not in self._variables:
                self._refuse_source(name, variable["valueFrom"])
        return environment

    def _refuse_source(self, name: str, source: Manifest) -> None:
        """Note that a variable has no value here, unless it is optional."""
        kind, reference = next(iter(source.items()))
        if reference.get("optional"):
            return
        if kind == "secretKeyRef":
            origin = f"Secret {reference['name']}, which only the cluster has"
        else:
            origin = f"{kind}, which only a pod has"
        self.problems.append(f"the variable {name} comes from {origin}; set {name} in this shell")

    def _require_no_sources(self, path: str, container: Manifest) -> None:
        """Note the Secrets and ConfigMaps whose keys are variables."""
        for source in container.get("envFrom", ()):
            (reference,) = (part for part in source.values() if isinstance(part, dict))
            if not reference.get("optional"):
                self.problems.append(
                    f"{path} takes variables from {reference['name']}, which only the cluster has; "
                    "set them in this shell and leave it out"
                )

    def _command(self, path: str, command_line: Sequence[str]) -> list[str]:
        """The command line with this process's Python."""
        if not command_line or command_line[0] not in ("python", "python3"):
            self.problems.append(
                f"{path} is {list(command_line)!r}: a local run starts Python only; "
                "begin it with python"
            )
        return [sys.executable, *command_line[1:]]


def _is_in(path: str, mounts: Iterable[str]) -> bool:
    return any(PurePath(path).is_relative_to(mount) for mount in mounts)


def mount_variables(root: PurePath) -> dict[str, str]:
    """The variables that say where the trainer's mounts are below `root`."""
    return {DATA_MOUNT_ENV: f"{root}{DATA_MOUNT}", REWARD_MOUNT_ENV: f"{root}{REWARD_MOUNT}"}


def local_plan(
    plan: TrainingPlan, mounts: Collection[str], root: PurePath, port: int
) -> TrainingPlan:
    """A pod's plan for this machine, where the gang meets at `port`.

    What the pod has mounted is below `root`; other paths are this machine's own.
    """

    def moved_path(path: str) -> str:
        return f"{root}{path}" if _is_in(path, mounts) else path

    rewards = []
    for reward in plan.rewards:
        changes: dict[str, Any] = {}
        if reward.model:
            name = moved_path(reward.model.name)
            changes["model"] = reward.model.model_copy(update={"name": name})
        rewards.append(reward.model_copy(update=changes))
    changed_plan: dict[str, Any] = {
        "rendezvous": Rendezvous(address=LOCAL_ADDRESS, port=port),
        "model": plan.model.model_copy(update={"name": moved_path(plan.model.name)}),
        "rewards": rewards,
    }
    for field in ("checkpoint_directory", "resume_from"):
        path = getattr(plan, field)
        if path:
            changed_plan[field] = moved_path(path)
    return plan.model_copy(update=changed_plan)

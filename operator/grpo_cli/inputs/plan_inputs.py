"""Reads what a plan depends on: the GPUs, a model's config.json and its number of parameters.

GPUs come from a file, from short names such as `8xH100`, or from a cluster. All commands that plan
use the same flags for these sources.

The planner itself reads nothing. A model's config.json comes from the model's folder or, when
allowed, from the hub. Only sources that the user named are read. The operator has no files, so a
plan that depends on other files of a laptop would differ from the operator's.

Parameters are counted without reading any weights. The header of a safetensors file names every
tensor with its shape. Where only the index is there, it gives the total number of bytes.
"""

import json
import math
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from grpo_api.job import GRPOJobSpec
from grpo_api.plan.learned import Learned
from grpo_api.text.quantity import quantity_bytes
from grpo_planner.hardware.inventory import Inventory
from grpo_planner.hardware.inventory_file import parse_gpus, parse_inventory
from grpo_planner.model.architecture import ModelFacts
from grpo_planner.plan import Planner, plan_job
from grpo_planner.result.result import PlanResult
from grpo_planner.search.scaling_curve import Size

from ..cluster import kubectl
from ..show.errors import InventoryError, KubectlError
from ..show.kubectl_yaml import load_value
from .calibration_file import read_calibration
from .job_classes import MISSING_KIND


def add_arguments(parser: ArgumentParser) -> None:
    """The flags that say where the GPUs and the model's shape are."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--inventory",
        metavar="FILE",
        help="YAML file: nodes: [{count, gpuProduct, gpusPerNode, …}]",
    )
    source.add_argument(
        "--gpus",
        metavar="GPUS",
        help="[[NODESx]GPUSx]PRODUCT, such as L4, 8xL4, 4x8xH200 or 1g.10gb; `grpo gpus` lists "
        "products",
    )
    source.add_argument(
        "--context",
        metavar="NAME",
        help="the nodes of a kubeconfig's context; `.` is the current one",
    )
    parser.add_argument(
        "--host-memory", metavar="SIZE", help="with --gpus: memory built into one node, such as 1Ti"
    )
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        help="step times that `grpo calibrate` has collected, or the operator's ConfigMap",
    )
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument(
        "--config", metavar="PATH", help="the model's config.json, or a folder that holds it"
    )
    shape.add_argument(
        "--fetch-config", action="store_true", help="fetch config.json from the hub (with HF_TOKEN)"
    )


def planning_options(*, context: str | None = None) -> Namespace:
    """The options of a caller that has no command line; `context` as the flag."""
    return Namespace(
        inventory=None, gpus=None, context=context, host_memory=None, config=None,
        fetch_config=False, calibration=None,
    )  # fmt: skip


def make_plan(options: Namespace, spec: GRPOJobSpec, learned: Learned | None = None) -> PlanResult:
    """The plan of a spec on what the flags name, with what its job has learned.

    A plan carries the inventory's warnings; a refusal's go to stderr.

    Raises:
        InventoryError: a source can't be read, or a GPU job has none.
        KubectlError: kubectl is missing or fails.
    """
    there = read_inventory(options, spec)
    measured = read_calibration(options.calibration)
    facts = read_facts(options, spec)
    result = plan_job(spec, there, facts=facts, learned=learned, measured=measured)
    if result.chosen is None:
        for warning in there.assumptions + there.warnings:
            print(f"grpo: {warning}", file=sys.stderr)
    return result


def curve(options: Namespace, spec: GRPOJobSpec, learned: Learned | None = None) -> list[Size]:
    """What every number of the GPUs that the flags name would give, with what the job has learned;
    fewest first.

    Empty where nothing fits.

    Raises:
        InventoryError: a source can't be read, or a GPU job has none.
        KubectlError: kubectl is missing or fails.
        SpecRejected: the spec can't be planned at all.
    """
    measured = read_calibration(options.calibration)
    planner = Planner(spec, facts=read_facts(options, spec), learned=learned, measured=measured)
    return planner.curve(read_inventory(options, spec))


def read_inventory(options: Namespace, spec: GRPOJobSpec) -> Inventory:
    """The inventory that the flags name, with the prices of the job's class; a CPU job needs none.

    Raises:
        InventoryError: there is no such file, it is wrong, or a GPU job has no inventory.
    """
    return _named_inventory(options, spec).with_prices(spec.platform.gpu_hour_prices)


def _named_inventory(options: Namespace, spec: GRPOJobSpec) -> Inventory:
    if options.host_memory and not options.gpus:
        raise InventoryError(
            "--host-memory goes with --gpus; files and clusters say how much their nodes have"
        )
    try:
        if options.gpus:
            return parse_gpus(
                options.gpus, _bytes(options.host_memory) if options.host_memory else None
            )
        if options.inventory:
            return parse_inventory(load_value(Path(options.inventory).read_text(encoding="utf-8")))
    except OSError as error:
        raise InventoryError(f"{options.inventory}: {error.strerror}") from error
    except ValueError as error:
        where = f"{options.inventory}: " if options.inventory else ""
        raise InventoryError(f"{where}{error}") from error
    if options.context:
        return cluster_inventory(options, spec)
    if spec.placement.accelerator == "CPU":
        return Inventory(reports_disk=True)
    raise InventoryError("which GPUs? Give --gpus 8xH100, --inventory FILE or --context NAME")


def _bytes(quantity: str) -> int:
    """A byte quantity as Kubernetes writes it, or with the B of bytes, such as 1TB."""
    amount = quantity.replace(" ", "")
    without_bytes = amount[:-1] if amount[-2:-1] in tuple("KMGTPEkmgtpei") else amount
    try:
        return quantity_bytes(without_bytes if amount[-1:] in ("B", "b") else amount)
    except ValueError as error:
        raise InventoryError(
            f"--host-memory {quantity} is no amount of memory: write it as 512Gi or 1TB"
        ) from error


def cluster_inventory(options: Namespace, spec: GRPOJobSpec) -> Inventory:
    """What the job may use of a cluster, as the operator would see it.

    Raises:
        KubectlError: kubectl is missing or fails.
    """
    # The operator's own reading of a cluster; plans without a cluster don't wait for its modules.
    from grpo_operator.admission.capacity import Capacity
    from grpo_operator.admission.inventory import node_facts, pod_facts
    from grpo_operator.admission.snapshot import Snapshot

    target = Namespace(context=None if options.context == "." else options.context, namespace=None)
    nodes = tuple(map(node_facts, kubectl.get_json(target, "nodes")["items"]))
    pods = map(pod_facts, kubectl.get_json(target, "pods", "--all-namespaces")["items"])
    return Capacity(
        Snapshot(nodes=nodes, gpu_pods=tuple(pod for pod in pods if pod)), ()
    ).usable_by(spec)


def fetch_learned(options: Namespace, name: str, namespace: str | None) -> Learned | None:
    """What the job of that name has learned of its memory, where --context names a cluster that has
    it.

    Raises:
        KubectlError: kubectl is missing or fails.
    """
    if not options.context:
        return None
    target = Namespace(context=options.context, namespace=namespace)
    try:
        jobs = kubectl.get_json(target, kubectl.RESOURCE, f"--field-selector=metadata.name={name}")
    except KubectlError as error:
        if MISSING_KIND in str(error):  # the operator is not installed there
            return None
        raise
    items = jobs.get("items") or []
    status = next((item.get("status") or {} for item in items), {})
    try:
        return (
            Learned.model_validate(status["learned"], extra="ignore")
            if "learned" in status
            else None
        )
    except ValidationError as error:
        raise KubectlError(
            f"{name} was written by another version of the operator: status.learned: {error}"
        ) from error


def read_facts(options: Namespace, spec: GRPOJobSpec) -> ModelFacts:
    """Return the model's shape from the files that the flags name; without flags no files, as in
    the operator.

    Raises:
        InventoryError: a config.json was asked for and can't be read.
    """
    if options.config:
        config = read_config(Path(options.config))
        return ModelFacts(config=config, stored=stored_parameters(Path(options.config), config))
    if options.fetch_config:
        if spec.model.name.startswith("/"):
            raise InventoryError(
                f"--fetch-config: spec.model.name {spec.model.name} is a folder in the pods, not a "
                "model of the hub; name a copy of its config.json by --config"
            )
        fetched = fetch_config(spec.model.name, spec.model.revision, os.environ.get("HF_TOKEN"))
        return ModelFacts(config=fetched)
    return ModelFacts()


TIMEOUT_SECONDS = 10
"""Longest wait for the hub."""
LARGEST = 1_000_000
"""Bytes; a config.json is a few kilobytes."""
HUB = "https://huggingface.co"
"""Where HF_ENDPOINT is unset."""


def read_config(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or in the config.json of a folder.

    Raises:
        InventoryError: the file is missing, or holds no JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        return _object(file.read_bytes(), str(file))
    except OSError as error:
        raise InventoryError(f"{file}: {error.strerror or error}") from error


def fetch_config(
    model: str, revision: str | None = None, token: str | None = None
) -> dict[str, Any]:
    """The config.json of a hub id, over HTTP. Only for callers whose user allowed it.

    Raises:
        InventoryError: the hub refuses, doesn't answer in time, or sends something else.
    """
    import urllib.error
    import urllib.request  # takes as long to import as a plan to make, and few plans need it

    url = f"{os.environ.get('HF_ENDPOINT', HUB)}/{model}/resolve/{revision or 'main'}/config.json"
    request = urllib.request.Request(
        url, headers={"Authorization": f"Bearer {token}"} if token else {}
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
            return _object(answer.read(LARGEST), url)
    except urllib.error.HTTPError as error:
        raise InventoryError(f"{url}: HTTP {error.code}; for a gated model set HF_TOKEN") from error
    except OSError as error:
        raise InventoryError(f"{url}: {error}") from error


def _object(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object, or the error that says what the data is instead."""
    try:
        parsed = json.loads(data)
    except ValueError as error:
        raise InventoryError(f"{where} is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise InventoryError(f"{where} is not a JSON object")
    return parsed


INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
LARGEST_HEADER = 100_000_000
"""Bytes; the format's own limit."""
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}


def stored_parameters(folder: Path, config: Mapping[str, Any]) -> int:
    """Parameters in a model folder's safetensors files; 0 if there are none, or their number is
    unknown.

    Raises:
        InventoryError: a file is there and is damaged.
    """
    folder = folder if folder.is_dir() else folder.parent
    try:
        if (folder / INDEX).is_file():
            return _by_index(folder, json.loads((folder / INDEX).read_bytes()), config)
        return _by_header(folder / WHOLE) if (folder / WHOLE).is_file() else 0
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InventoryError(
            f"{folder}: its safetensors files can't be understood: {error}"
        ) from error


def _by_index(folder: Path, index: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """By the headers of the files that the index names, where all are there; else by what it says
    of their size."""
    shards = {folder / name for name in index["weight_map"].values()}
    if all(shard.is_file() for shard in shards):
        return sum(map(_by_header, shards))
    about = index.get("metadata") or {}
    if about.get("total_parameters"):
        return int(about["total_parameters"])
    width = DTYPE_BYTES.get(str(config.get("dtype") or config.get("torch_dtype")), 0)
    return int(about.get("total_size", 0)) // width if width else 0


def _by_header(file: Path) -> int:
    """Elements of all tensors of one file: 8 bytes with the length of a JSON object of dtypes and
    shapes come first."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > LARGEST_HEADER:
            raise ValueError(f"the header of {file.name} has {length} bytes")
        header = json.loads(stream.read(length))
    return sum(
        math.prod(map(int, about["shape"]))
        for name, about in header.items()
        if name != "__metadata__"
    )

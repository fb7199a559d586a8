"""GRPOJobs and the hardware that each is planned on: the examples, and a spread of specs."""

import json
import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.golden import render
from tests.golden.layout import InOrder, unlike
from tests.samples import BAD, GOOD, REMOVE, SPEC, changed, job
from tests.wrong_specs import CORRECTIONS

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
ONE_H100 = ("--gpus", "1xH100", "--host-memory", "200Gi")
EIGHT_H100 = ("--gpus", "8xH100", "--host-memory", "1800Gi")
MANY_H100 = ("--gpus", "4x8xH100", "--host-memory", "1800Gi")
LLAMA_1B, LLAMA_70B = "meta-llama/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.3-70B-Instruct"
QWEN_7B, QWEN_32B, QWEN_MOE = (
    "Qwen/Qwen2.5-7B-Instruct",
    "Qwen/Qwen2.5-32B-Instruct",
    "Qwen/Qwen3-30B-A3B",
)
CLAIM = {"checkpoint.volumeClaimTemplate": {"size": "500Gi"}, "export": REMOVE}
TENANT = {
    "labels": {
        "team": "rl",
        "kueue.x-k8s.io/queue-name": "rl",
        "kueue.x-k8s.io/priority-class": "high",
    },
    "annotations": {"example.com/cost-centre": "42"},
}
TWO_POOLS = ("--inventory", str(Path(__file__).parent / "two-pools.yaml"))


class Asked(NamedTuple):
    """A job and how it is planned."""

    changes: dict[str, Any]
    """Of tests.samples.SPEC."""
    flags: tuple[str, ...] = EIGHT_H100
    plans: tuple[str, ...] = ()
    """Further flags of `grpo plan`."""
    metadata: dict[str, Any] = {}


def _model(name: str, **more: Any) -> dict[str, Any]:
    """Return changes of another model, whose size the planner knows."""
    return {
        "model": {"name": name},
        **{key.replace("__", "."): value for key, value in more.items()},
    }


SPREAD: dict[str, Asked] = {
    # strategies
    "clone-1b": Asked(
        _model(LLAMA_1B, generation__engine="Transformers", **CLAIM), ONE_H100, ("--all",)
    ),
    "none-1b": Asked(_model(LLAMA_1B, training__beta=0), ONE_H100),
    "offload-1b": Asked(
        _model(LLAMA_1B, reference={"strategy": "Offload", "offload": {"target": "CPU"}}),
        ("--gpus", "4xA10G"),
    ),
    "adapter-7b-if-needed": Asked(_model(QWEN_7B), ("--gpus", "1xL4")),
    "adapter-7b-never": Asked(_model(QWEN_7B, adapter__use="Never"), ("--gpus", "1xL4")),
    "adapter-32b": Asked(
        _model(
            QWEN_32B, adapter={"use": "Always", "rank": 8, "targetModules": ["q_proj"]}, **CLAIM
        ),
        ONE_H100,
    ),
    "sharded-7b-l40s": Asked(_model(QWEN_7B), ("--gpus", "8xL40S", "--host-memory", "700Gi")),
    "sharded-32b-h200": Asked(
        _model(QWEN_32B, **CLAIM), ("--gpus", "8x8xH200", "--host-memory", "1800Gi"), ("--sizes",)
    ),
    "sharded-70b-offloaded": Asked(_model(LLAMA_70B, generation__engine="Transformers"), MANY_H100),
    "sharded-moe": Asked(_model(QWEN_MOE, generation__engine="Transformers"), MANY_H100),
    "synchronised-reference": Asked(
        _model(QWEN_7B, reference__sync={"everySteps": 64, "mixup": 0.5}), MANY_H100
    ),
    # engines
    "colocated-7b": Asked(
        _model(QWEN_7B, generation={"engine": "Colocated", "memoryShare": 0.3}),
        EIGHT_H100,
        ("--what-if", "numGenerations=16"),
    ),
    "servers-7b": Asked(
        _model(QWEN_7B, generation={"engine": "Servers", "servers": {"replicas": 2}}), MANY_H100
    ),
    "servers-on-cpu": Asked(
        {
            "placement": {"accelerator": "CPU", "nodes": 2},
            "generation": {"engine": "Servers", "servers": {"replicas": 2}},
            "resources.limits.memory": "8Gi",
        },
        (),
    ),
    "auto-70b": Asked(_model(LLAMA_70B), MANY_H100),
    # accelerators and inventories
    "cpu-processes": Asked(
        {
            "placement": {"accelerator": "CPU", "nodes": 2, "processesPerNode": 2},
            "resources.limits.memory": "16Gi",
        },
        (),
    ),
    "a100-pinned": Asked(
        _model(
            QWEN_7B,
            placement={
                "gpus": {"min": 2, "max": 8},
                "nodes": 2,
                "gpuProduct": "NVIDIA-A100-SXM4-80GB",
            },
        ),
        ("--gpus", "2x8xA100-80GB", "--host-memory", "1000Gi"),
    ),
    "mig-7b": Asked(
        _model(QWEN_7B),
        ("--gpus", "7x1xNVIDIA-A100-SXM4-80GB-MIG-1g.10gb", "--host-memory", "120Gi"),
    ),
    "created-nodes": Asked(GOOD["create-pods"]),
    "amd-7b": Asked(_model(QWEN_7B), ("--gpus", "8xMI300X", "--host-memory", "1800Gi")),
    "cheapest-of-two-pools": Asked(_model(LLAMA_1B, placement__objective="Cheapest"), TWO_POOLS),
    "servers-in-two-pools": Asked(
        _model(QWEN_7B, generation={"engine": "Servers", "servers": {"gpuProduct": "NVIDIA-L4"}}),
        TWO_POOLS,
    ),
    # tenants, volumes, pods
    "tenant": Asked(
        {**_model(QWEN_7B), "placement.queueName": "rl", **CLAIM}, MANY_H100, metadata=TENANT
    ),
    "every-reward": Asked(GOOD["every-reward"]),
    "every-volume": Asked(
        {
            "podTemplate.spec.volumes": [
                {**GOOD[name]["podTemplate.spec.volumes"][0], "name": name}
                for name in sorted(GOOD)
                if name.startswith("volume-")
            ]
        }
    ),
    "pod-settings": Asked(
        {
            **GOOD["environment"],
            **GOOD["resources"],
            **GOOD["metadata"],
            **GOOD["init-container"],
            **GOOD["affinity"],
            **GOOD["tolerant"],
            "resources.limits.memory": "256Gi",
            "sharedMemory": "8Gi",
            "podTemplate.spec.runtimeClassName": "nvidia",
            "podTemplate.spec.imagePullSecrets": [{"name": "registry"}],
        },
    ),
    "model-and-cache": Asked(
        {
            "model.image": {"reference": "models:1", "pullPolicy": "Always"},
            "model.parameters": "1.24B",
        }
    ),
    "hub-cache": Asked(GOOD["hub-cache"]),
    # checkpoints, exports, runs that begin with others'
    "store-and-rules": Asked(
        {**GOOD["object-store"], **GOOD["restart-rules"], "export.to": "ObjectStore"}
    ),
    "azure-store": Asked({**GOOD["azure-store"], "export": REMOVE}),
    "export-to-the-hub": Asked(GOOD["model-on-the-hub"]),
    "export-to-a-volume": Asked(GOOD["model-on-the-volume"]),
    "from-a-job": Asked(GOOD["from-a-job"]),
    "from-a-folder": Asked(GOOD["from-a-folder"]),
    # refusals of the planner
    "nothing-fits": Asked(_model(LLAMA_70B, adapter__use="Never"), ("--gpus", "4xL4")),
    "no-bfloat16": Asked(_model(LLAMA_1B), ("--gpus", "4xT4")),
    "unknown-size": Asked(_model("someone/unheard-of"), EIGHT_H100),
    "too-few-gpus": Asked(_model(LLAMA_1B, placement__gpus={"min": 16, "max": 16}), EIGHT_H100),
}
"""Names and jobs."""

COMMANDS: dict[str, tuple[tuple[str, ...], str]] = {
    "no inventory": (("plan", "-f", "-"), ""),
    "unknown command": (("plans", "-f", "-"), ""),
    "a duration": (("wait", "gsm8k", "--timeout", "1h"), ""),
    "the number last": (("plan", "-f", "-", "--gpus", "H100:8"), ""),
    "unknown product": (("plan", "-f", "-", "--gpus", "8xH1000"), ""),
    "no product": (("plan", "-f", "-", "--gpus", "eight"), ""),
    "host memory alone": (("plan", "-f", "-", "--host-memory", "1Ti"), ""),
    "host memory in words": (("plan", "-f", "-", "--gpus", "8xH100", "--host-memory", "much"), ""),
    "no such file": (("plan", "-f", "no-such-file.yaml", *EIGHT_H100), ""),
    "no GRPOJob": (("plan", "-f", "-", *EIGHT_H100), "kind: ConfigMap"),
    "no YAML": (("plan", "-f", "-", *EIGHT_H100), "a: ]"),
    "no name": (
        ("plan", "-f", "-", *EIGHT_H100),
        yaml.safe_dump({**job("mine", SPEC), "metadata": {}}),
    ),
    "bad name": (("plan", "-f", "-", *EIGHT_H100), yaml.safe_dump(job("Mine", SPEC))),
    "another version": (
        ("plan", "-f", "-", *EIGHT_H100),
        yaml.safe_dump({**job("a", SPEC), "apiVersion": "v9"}),
    ),
    "several problems": (
        ("render", "-f", "-", "-n", "default", *EIGHT_H100),
        yaml.safe_dump(job("mine", changed({"training.beta": -1, "rewards": [], "modell": 1}))),
    ),
    "model's option beside a file": (("plan", "-f", "-", *EIGHT_H100, "--steps", "10"), ""),
    "what-if without a value": (("plan", "-f", "-", *EIGHT_H100, "--what-if", "beta"), ""),
    "what-if of no field": (("plan", "-f", "-", *EIGHT_H100, "--what-if", "betta=1"), ""),
    "what-if of a bad value": (("plan", "-f", "-", *EIGHT_H100, "--what-if", "beta=-1"), ""),
    "no cache to prefetch": (("prefetch", "-f", "-"), ""),
    "a model by its name": (("plan", QWEN_7B, *MANY_H100, "--completion-length", "2048"), ""),
}
"""Arguments of the command line and its standard input; without one it is the base job."""


@cache
def _base() -> Any:
    """Return the job that others are compared with."""
    return render.job(_manifest({}), *EIGHT_H100)


def _manifest(changes: dict[str, Any], metadata: dict[str, Any] | None = None) -> str:
    body = job("mine", changed(changes))
    body["metadata"] |= metadata or {}
    return yaml.safe_dump(body)


def _compared(rendered: Any) -> Any:
    """Return what was rendered, without what the base job has, too."""
    if "grpo render" in rendered:
        return rendered
    compared = {"grpo plan": unlike(_narrow(rendered["grpo plan"]), _narrow(_base()["grpo plan"]))}
    for part in ("objects", "training plans"):
        alike = {key: _base()[part].get(key.split()[0]) for key in rendered[part]}
        compared[part] = {key: unlike(item, alike[key]) for key, item in rendered[part].items()}
    return {**compared, "order": list(rendered["objects"])}


def _narrow(run: Any) -> Any:
    """Return a run of the command line without what only sets columns apart, which the base job's
    own file shows."""
    return {**run, "prints": [re.sub(" {3,}", "  ", line) for line in run["prints"]]}


def _of_spread(name: str) -> Any:
    spread = SPREAD[name]
    return _compared(
        render.job(_manifest(spread.changes, spread.metadata), *spread.flags, plans=spread.plans)
    )


def _of_example(path: Path) -> Any:
    return _compared(render.job(path.read_text(), *MANY_H100))


def _as_json() -> Any:
    """Return what `grpo plan -o json` prints; docs/reference/plan-schema.json has its fields."""
    printed = render.grpo(
        "plan", "-f", "-", *ONE_H100, "-o", "json", stdin=_manifest(SPREAD["clone-1b"].changes)
    )
    return InOrder(json.loads("\n".join(printed["prints"])))


def _refused_specs() -> Any:
    """Return what is said of every bad spec of tests/samples.py."""
    return {one.name: render.problems(one.spec) for one in BAD}


def _corrections() -> Any:
    """Return what is said of a wrong spec beside what a person should write."""
    wrong = {one.name: one.spec for one in BAD}
    return {
        name: {
            "says": render.problems(wrong[name]),
            "write": {
                path: "nothing: remove it" if value is REMOVE else value
                for path, value in correction.items()
            },
        }
        for name, correction in CORRECTIONS.items()
    }


def _refused_commands() -> Any:
    """Return what the command line says of arguments and files that it can't use."""
    good = _manifest({})
    return {
        name: render.grpo(*arguments, stdin=stdin or good)
        for name, (arguments, stdin) in COMMANDS.items()
    }


def cases() -> dict[str, Callable[[], Any]]:
    """Return what renders each job, by the file's path without its suffix."""
    examples = {path.stem: path for path in sorted(EXAMPLES.glob("*.yaml"))}
    return {
        **{f"examples/{name}": partial(_of_example, path) for name, path in examples.items()},
        **{f"jobs/{name}": partial(_of_spread, name) for name in SPREAD},
        "jobs/base": _base,
        "jobs/plan-as-json": _as_json,
        "refusals/specs": _refused_specs,
        "refusals/commands": _refused_commands,
        "refusals/corrections": _corrections,
    }

"""Injects wrong weights into a gang and reports how each rank answers.

Wrong weights train without an error, and each parallelism hides them in its own way. `inject` runs
on every rank.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, TrainerCallback

from grpo_trainer.gang import ranks
from grpo_trainer.gang.placement import LOCAL_RANK_ENV
from grpo_trainer.runtime.errors import TrainingError
from grpo_trainer.weights import parameters
from grpo_trainer.weights.models import load_policy
from grpo_trainer.weights.parameters import unwrap_model

from ..ranks import demo_model, runs

STAGES = {
    "1 process": (0, "Clone"),
    "DDP": (0, "Clone"),
    "ZeRO-2": (2, "Clone"),
    "ZeRO-3": (3, "Sharded"),
}
PARAMETER = "model.layers.1.mlp.down_proj.weight"
"""The parameter that single-bit faults hit, in its last element, which under ZeRO-3 is rank 1's."""


def inject(folder: Path, parallelisms: list[str]) -> dict[str, dict[str, str]]:
    """What this rank raised, as `Class: message`, by parallelism and fault; empty where nothing was
    raised."""
    files = _prepared(folder)
    answers: dict[str, dict[str, str]] = {}
    for parallelism in parallelisms:
        for fault, (model, damage) in _faults(files).items():
            answers.setdefault(parallelism, {})[fault] = _answer(folder, model, damage, parallelism)
            runs.reset()
    return answers


def _faults(files: Path) -> dict[str, tuple[str, Callable[[PreTrainedModel], None]]]:
    """Name of each fault: the model to load on this rank, and what is done to it in memory."""
    here = ranks.rank()

    def on_one(name: str) -> str:
        return str(files / (name if here == 1 else "good"))

    return {
        "none": (str(files / "good"), untouched),
        "another file on rank 1": (on_one("other"), untouched),
        "one bit in rank 1's file": (on_one("flipped"), untouched),
        "one bit in rank 1's memory": (str(files / "good"), flip if here == 1 else untouched),
        "another revision on rank 1": ("demo/model", untouched),
        "random weights by rank": (str(files / "good"), randomise),
        "missing shard on rank 1": (on_one("missing"), untouched),
        "truncated file on rank 1": (on_one("truncated"), untouched),
    }


def _answer(
    folder: Path, model: str, damage: Callable[[PreTrainedModel], None], parallelism: str
) -> str:
    stage, strategy = STAGES[parallelism]
    job = runs.plan(Path(model), strategy, stage, ranks.world_size())
    config = runs.configuration(job, output_dir=str(folder / "output"))
    try:
        loaded = load_policy(job.model, job.execution, job.adapter)
        damage(loaded.model)
        runs.trainer(job, config, loaded)
    except TrainingError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def drifted(folder: Path, parallelisms: list[str]) -> dict[str, dict[str, Any]]:
    """What this rank raised when rank 1's policy changed by one bit just before a checkpoint, and
    what was written."""
    if ranks.rank() == 0:
        demo_model.save_policy(folder / "good")
    ranks.gather(0)
    answers: dict[str, dict[str, Any]] = {}
    for parallelism in parallelisms:
        stage, strategy = STAGES[parallelism]
        output = folder / parallelism
        settings = {"output_dir": str(output), "save_strategy": "steps", "save_steps": 2}
        trainer = runs.build(
            runs.plan(folder / "good", strategy, stage, ranks.world_size()), Drift(), **settings
        )
        try:
            trainer.train()
        except TrainingError as error:
            written = sorted(path.name for path in output.iterdir())
            answers[parallelism] = {"error": f"{type(error).__name__}: {error}", "written": written}
        runs.reset()
    return answers


class Drift(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by the type checker
    """Turns one bit of rank 1's policy at the end of step 2."""

    def on_step_end(self, _: Any, state: Any, *__: Any, model: PreTrainedModel, **___: Any) -> None:
        """After the optimizer, before the checkpoint."""
        if state.global_step == 2 and ranks.rank() == 1:
            flip(unwrap_model(model))


def untouched(_: PreTrainedModel) -> None:
    """No damage."""


def flip(model: PreTrainedModel) -> None:
    """Turns the lowest bit of the parameter's last element."""
    with parameters.local_share(model.get_parameter(PARAMETER)) as share:
        share.tensor[-1:].view(torch.int32).bitwise_xor_(1)


def randomise(model: PreTrainedModel) -> None:
    """What a model that every rank initialises by its own seed looks like."""
    torch.manual_seed(ranks.rank())
    for parameter in model.parameters():
        with parameters.local_share(parameter) as share:
            share.tensor.normal_()


def _prepared(folder: Path) -> Path:
    """Rank 0 writes the model and its damaged copies. Each rank is as on a node of its own, with a
    hub cache in which `main` is another commit."""
    os.environ[LOCAL_RANK_ENV] = "0"
    if ranks.rank() == 0:
        good = demo_model.save_policy(folder / "good", shard="100KB")
        demo_model.save_policy(folder / "other", seed=1, shard="100KB")
        for name in ("flipped", "missing", "truncated"):
            shutil.copytree(good, folder / name)
        _flip_in_file(folder / "flipped")
        shard = sorted((folder / "missing").glob("*.safetensors"))[-1].name
        (folder / "missing" / shard).unlink()
        cut = folder / "truncated" / shard
        cut.write_bytes(cut.read_bytes()[:-100])
        for rank, source in enumerate(("good", "other")):
            _cached(folder / source, folder / f"hub-{rank}", commit=str(rank) * 40)
    ranks.gather(0)
    _use_hub_cache(folder / f"hub-{ranks.rank()}")
    return folder


def _flip_in_file(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        if PARAMETER in tensors:
            tensors[PARAMETER].view(-1)[-1:].view(torch.int32).bitwise_xor_(1)
            save_file(tensors, path, {"format": "pt"})


def _cached(model: Path, hub: Path, commit: str) -> None:
    """The layout of huggingface_hub's cache for one commit of `demo/model`."""
    repository = hub / "models--demo--model"
    shutil.copytree(model, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)


def _use_hub_cache(hub: Path) -> None:
    """Points huggingface_hub, which read its environment at import, to another cache."""
    import huggingface_hub.constants

    huggingface_hub.constants.HF_HUB_CACHE = str(hub)

"""Tells, as JSON, what becomes of faults in a colocated engine, each of which must be found before
its completions are used. Run in a process of its own, with vLLM: `python -m
tests.trainer.engine_faults FOLDER`.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from vllm import SamplingParams

from grpo_acceptance.engine_checks import find_damage
from grpo_acceptance.tiny_model import save_tiny, tiny_config
from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.training_metrics import ENGINE_MISMATCH
from grpo_api.spec.generation import EnginePlan, GenerationSpec
from grpo_api.spec.keyword_arguments import VLLM
from grpo_trainer.generation.colocated import ColocatedGeneration
from grpo_trainer.generation.generation_base import EngineSetup, Sample
from grpo_trainer.generation.stop_strings import (
    StoppedCompletion,
    StopStringMatcher,
    mark_stopped,
)
from grpo_trainer.runtime.errors import EngineWeightsDiffer
from grpo_trainer.telemetry.phases import PhaseClock
from grpo_trainer.training.reference_trainer import ReferenceGRPOTrainer
from grpo_trainer.weights.models import load_policy
from harness.controlplane import free_port
from tests.support.ranks import runs
from tests.trainer.engine_names import FAULTS
from tests.trainer.engine_runs import FACTS

PROMPTS = [[7, 30, 12], [3, 9, 27, 81, 5, 40], [60], [11] * 20]
GREEDY = 48
"""Tokens of a greedy completion."""
MEAN_RATIO = "sampling/importance_sampling_ratio/mean"
NAME = "model.layers.1.self_attn.k_proj.weight"
ENGINE = EnginePlan(
    kind="Colocated", memory_share=0.1, cache_bytes=2**25, max_model_length=128, max_sequences=8
)


class Faulty(ColocatedGeneration):
    """An engine in which something goes wrong at one place, a number of times."""

    fault = ""
    times = 0

    def _strikes(self, *faults: str) -> bool:
        struck = self.fault in faults and self.times > 0
        self.times -= struck
        return struck

    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        """The sync of one weight is lost, or brings an old one."""
        if name == NAME and self._strikes("skipped"):
            return
        if name == NAME and self._strikes("stale"):
            tensor = tensor * 1.001
        super().load_weight(name, tensor)
        if name == NAME and self._strikes("flipped in the sync"):
            self.flip()

    def sample(
        self,
        prompts: list[list[int]],
        seeds: list[int],
        arguments: dict[str, Any],
        *,
        after_sampler: bool = False,
    ) -> list[Sample]:
        """A bit flips while the engine samples, or it tells another version, or it samples at
        another temperature than it is asked for."""
        if self.fault == "hotter":
            arguments = arguments | {"temperature": 1.5 * arguments["temperature"]}
        samples = super().sample(prompts, seeds, arguments, after_sampler=after_sampler)
        if self._strikes("flipped while sampling"):
            self.flip()
        if self._strikes("reloaded while sampling"):
            self.live.load_weights([(NAME, torch.zeros(self.live_shape))])
        if self._strikes("wrong version"):
            samples[0] = Sample(samples[0].tokens, samples[0].logprobs, samples[0].version - 1)
        return samples

    def greedy(self, prompts: list[list[int]]) -> list[list[int]]:
        """The likeliest tokens."""
        likeliest = SamplingParams(
            temperature=0, max_tokens=GREEDY, stop_token_ids=self.stop_tokens
        )
        answers = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], likeliest, use_tqdm=False
        )
        return [list(answer.outputs[0].token_ids) for answer in answers]

    @property
    def live(self) -> Any:
        """The engine's model."""
        return self._llm.llm_engine.model_executor.driver_worker.worker.model_runner.model

    @property
    def live_shape(self) -> Sequence[int]:
        """Shape of the weight that faults strike."""
        return tuple(self.model.get_parameter(NAME).shape)

    def flip(self) -> None:
        """One bit of a fused parameter."""
        self.live.get_parameter("model.layers.1.self_attn.qkv_proj.weight").data.view(torch.int32)[
            0, 3
        ] ^= 1 << 9


def plan(folder: Path, generation: dict[str, Any], **training: Any) -> TrainingPlan:
    """A plan with an engine."""
    execution = {"engine": ENGINE.model_dump(by_alias=True)}
    made = runs.plan(
        folder / "model", "None", training={"beta": 0.0, **training}, execution=execution
    )
    return made.model_copy(update={"generation": GenerationSpec.model_validate(generation)})


class World:
    """A policy and its engine; the fields say what telemetry was told."""

    def __init__(
        self, folder: Path, generation: dict[str, Any] | None = None, **training: Any
    ) -> None:
        self.logged: dict[str, float] = {}
        self.logs = runs.Logs()
        job = plan(folder, generation or {}, **training)
        self.setup = EngineSetup(
            job,
            folder / "model",
            PhaseClock(lambda: 0.0),
            self.logged.update,
            record_event=lambda: None,
        )
        self.trainer = self._trainer(job)
        engine = self.trainer.engine
        assert isinstance(engine, Faulty)
        self.engine = engine

    def _trainer(self, job: TrainingPlan) -> ReferenceGRPOTrainer:
        make: Callable[..., Faulty] = lambda model, stop: Faulty(self.setup, model, stop)  # noqa: E731
        loaded = load_policy(job.model, job.execution, job.adapter)
        return runs.trainer(job, runs.configuration(job), loaded, self.logs, make_engine=make)

    @contextmanager
    def fault(self, fault: str, times: int) -> Iterator[None]:
        """Something goes wrong so many times."""
        self.engine.fault, self.engine.times = fault, times
        yield
        self.engine.fault, self.engine.times = "", 0

    def drift(self) -> None:
        """The policy moves, as it does in a step."""
        with torch.no_grad():
            for parameter in self.trainer.model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.01)

    def completions(self) -> tuple[list[list[int]], float]:
        """Tokens of a generation, and how far the engine's log-probabilities are from the policy's
        at most."""
        self.engine.set_position(3, 0)
        _, tokens, scores, _ = self.engine.generate(PROMPTS, None, 1)
        found = [[one[0] for one in row] for row in scores]
        return tokens, max(
            float((torch.tensor(row) - self.scored(prompt, ids)).abs().max())
            for prompt, ids, row in zip(PROMPTS, tokens, found, strict=True)
        )

    @torch.no_grad()
    def scored(self, prompt: list[int], completion: list[int]) -> torch.Tensor:
        """The policy's log-probability of each token of a completion."""
        logits = (
            self.trainer.model(torch.tensor([prompt + completion]))
            .logits[0, len(prompt) - 1 : -1]
            .float()
        )
        chosen = logits.div(self.setup.plan.training.temperature).log_softmax(-1)
        scores: torch.Tensor = chosen.gather(1, torch.tensor(completion)[:, None])[:, 0]
        return scores


def changed_buffer(world: World) -> dict[str, Any]:
    """What a sync comes to while the engine's rotary table is another, and after it is right
    again."""
    tables = [
        buffer for name, buffer in world.engine.live.named_buffers() if "cos_sin_cache" in name
    ]
    for table in tables:
        table.mul_(0.5)  # exact, so that doubling restores every bit
    changed = sync_with_fault(world, "", 0)
    for table in tables:
        table.mul_(2)
    return {"tables": len(tables), "changed": changed, "restored": sync_with_fault(world, "", 0)}


def canary(folder: Path) -> dict[str, Any]:
    """The differences that a run logs whose completions TRL does not compare, step by step, and
    that of an engine which samples at another temperature; with and without a cut."""
    answers = {}
    for name, cut in {"cut": {"topP": 0.5}, "uncut": {}}.items():
        without: dict[str, Any] = {"importanceSampling": {"mode": "none"}, **cut}
        world = World(folder, temperature=0.7, maxSteps=2, **without)
        world.trainer.train()
        steps = [row.get(ENGINE_MISMATCH.trl) for row in world.logs.rows.values()]
        world.engine.sync_weights()
        with world.fault("hotter", 1):
            world.trainer._compare_canary(world.engine.sample_canary(PROMPTS))
        hotter = world.trainer._metrics["train"][ENGINE_MISMATCH.trl][-1]
        answers[name] = {"steps": steps, "hotter": hotter}
    return answers


def ratios(folder: Path) -> dict[str, list[float]]:
    """TRL's mean importance ratio of three steps, by how the distribution is truncated."""
    cuts: dict[str, dict[str, Any]] = {
        "topP": {"topP": 0.8},
        "topP and topK": {"topP": 0.8, "topK": 20},
        "minP at 0.7": {"minP": 0.2, "temperature": 0.7},
        "all at 1.3": {"topP": 0.8, "topK": 20, "repetitionPenalty": 1.2, "temperature": 1.3},
    }
    answers = {}
    for name, cut in cuts.items():
        world = World(folder, maxSteps=3, **cut)
        world.trainer.train()
        rows = world.logs.rows.values()
        answers[name] = [row[MEAN_RATIO] for row in rows if MEAN_RATIO in row]
    return answers


def stopped(folder: Path) -> dict[str, Any]:
    """Completions of an engine with and without stop strings, under the same seeds; what the
    matcher of Transformers makes of the second; and what TRL logs of the first."""
    whole = World(folder, maxCompletionLength=GREEDY)
    whole.engine.sync_weights()
    tokens, _ = whole.completions()
    tokenizer = whole.trainer.processing_class
    text = tokenizer.decode(tokens[0])
    stop = [text[9:11], tokenizer.decode(tokens[1][20:22]), "no such text"]
    ends = World(folder, {"stop": stop}, maxCompletionLength=GREEDY, maxSteps=1)
    ends.engine.sync_weights()
    by_engine, apart = ends.completions()
    matched = []
    for prompt, ids in zip(PROMPTS, tokens, strict=True):
        matcher = StopStringMatcher(stop, tokenizer, prompt)
        found = [matcher.is_complete(token) for token in ids]
        matched.append(ids[: found.index(True) + 1] if True in found else ids)
    ends.trainer.train()
    marked = mark_stopped(by_engine, stop, tokenizer, 1)
    return {
        "whole": tokens,
        "stopped": by_engine,
        "matched": matched,
        "apart": apart,
        "marked": [isinstance(ids, StoppedCompletion) for ids in marked],
        "row": ends.logs.rows[1],
    }


def with_arguments(folder: Path) -> dict[str, Any]:
    """Completions with further arguments of vLLM, and how far log-probabilities are apart."""
    kwargs = {
        "presence_penalty": 1.0,
        "frequency_penalty": 0.5,
        "min_tokens": GREEDY,
        "bad_words": ["a"],
        "allowed_token_ids": list(range(6, 80)),
    }
    generation = {"engine": "Colocated", "fallback": "Never", "kwargs": kwargs}
    world = World(folder, generation, maxCompletionLength=GREEDY, temperature=0.7)
    world.engine.sync_weights()
    tokens, apart = world.completions()
    words = world.trainer.processing_class.batch_decode(tokens)
    known = [name for name in VLLM if name in SamplingParams.__struct_fields__]
    return {"tokens": tokens, "apart": apart, "words": words, "known": known}


def sync_with_fault(world: World, fault: str, times: int) -> dict[str, Any]:
    """What a sync and a generation come to with a fault that strikes so many times."""
    world.drift()
    before = world.engine.failures
    with world.fault(fault, times):
        try:
            world.engine.sync_weights()
            tokens, apart = world.completions()
        except EngineWeightsDiffer as error:
            return {"error": str(error), "proven": world.engine.proven_version}
    return {
        "apart": apart,
        "failures": world.engine.failures - before,
        "tokens": sum(map(len, tokens)),
        "version": world.engine.proven_version,
    }


@torch.no_grad()
def gap(model: Any, prompt: list[int], ours: list[int], theirs: list[int]) -> float:
    """How far the two likeliest tokens lie apart, in nats, where two completions part; infinite
    where they don't."""
    at = next(
        (place for place, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]),
        None,
    )
    if at is None:
        return math.inf
    best = model(torch.tensor([prompt + theirs[:at]])).logits[0, -1].log_softmax(-1).topk(2).values
    return float(best[0] - best[1])


def greedy(world: World, folder: Path) -> dict[str, Any]:
    """The engine's greedy completions, and where they part from transformers' own, the gap
    there."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    world.engine.sync_weights()
    ours = world.engine.greedy(PROMPTS)
    theirs = [
        model.generate(torch.tensor([prompt]), max_new_tokens=GREEDY, do_sample=False)[
            0, len(prompt) :
        ].tolist()
        for prompt in PROMPTS
    ]
    gaps = [gap(model, *three) for three in zip(PROMPTS, ours, theirs, strict=True)]
    return {"engine": ours, "gaps": gaps}


def main(folder: Path) -> None:
    """All of it, a line each."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}  # as a pod's process has them
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    save_tiny(folder / "model", tiny_config(tied=False, hidden=128))
    policy = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    for parameter in policy.parameters():  # the likeliest tokens stand far apart, and change
        parameter.data.mul_(3 if parameter.dim() > 1 else 1)
    policy.save_pretrained(folder / "model")
    world = World(folder)
    again = World(folder)
    found: dict[str, Any] = {"seeds": []}
    for one in (world, again):
        one.engine.sync_weights()
        found["seeds"].append(one.completions()[0])
    found["greedy"] = greedy(World(folder), folder)
    found["once"] = {fault: sync_with_fault(world, fault, 1) for fault in FAULTS}
    found["always"] = {fault: sync_with_fault(world, fault, 99) for fault in FAULTS}
    found["buffer"] = changed_buffer(world)
    found["after"] = sync_with_fault(world, "", 0)
    found["canary"] = canary(folder)
    found["acceptance"] = find_damage(world.engine)
    found["ratios"] = ratios(folder)
    found["stop"] = stopped(folder)
    found["arguments"] = with_arguments(folder)
    settings: dict[str, dict[str, Any]] = {"cut": {"topP": 0.5}, "hot": {"temperature": 0.7}}
    settings["hot cut"] = {"topP": 0.5, "temperature": 0.7}
    for name, training in settings.items():
        found[name] = sync_with_fault(World(folder, **training), "", 0)
    (folder / FACTS).write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Checks of engines beside the policy, with vLLM: what no CPU shows of them.

That is the model runner of GPUs with its sampler, CUDA graphs, sleep and waking, and the cache's
size. Others are the hash's kernel on live weights, and how much faster a step is. A proof that
finds nothing shows little, so that weights of a live engine are also damaged and the damage must be
found.
"""

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch

from grpo_api.plan.plan import MISMATCH_LIMITS, ComputeDtype
from grpo_api.report.report import STEP_PHASES
from grpo_api.report.training_metrics import PHASE_SECONDS
from grpo_trainer.checkpoints.writing import replace_attribute
from grpo_trainer.engine_pod.hash_check import BLOCK, new_seed, tensor_hash
from grpo_trainer.generation.colocated import ColocatedGeneration
from grpo_trainer.generation.merged_weights import weight_shapes
from grpo_trainer.runtime.errors import classify_error
from grpo_trainer.telemetry.phases import device_bytes

from . import trial_runs
from .findings import Context, Finding, make_finding, skipped_finding
from .trial_plans import make_plan, middling_model

HASHED_DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.float8_e4m3fn
)  # fmt: skip
HASHED_SIZES = (1, 4095, 4097, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7)
"""Elements: around a tile of the kernel and a block of the hash."""


def compare_hashes(context: Context) -> list[Finding]:
    """The device's hash of every dtype and odd size is the CPU's, and a turned bit changes it.

    In an engine both sides hash with the same kernel: one that gave a constant would pass there.
    """
    problems = []
    for dtype in HASHED_DTYPES:
        for size in HASHED_SIZES:
            generator = torch.Generator().manual_seed(size)
            length = size * dtype.itemsize
            raw = torch.randint(0, 256, (length,), dtype=torch.uint8, generator=generator)
            values = raw.view(dtype)
            seed = new_seed()
            expected = tensor_hash(values, seed)
            on_device = values.to(context.device)
            if tensor_hash(on_device, seed) != expected:
                problems.append(f"{dtype}, {size} elements: it differs from the CPU's")
            on_device.view(torch.uint8)[-1] ^= 1
            if tensor_hash(on_device, seed) == expected:
                problems.append(f"{dtype}, {size} elements: a turned bit does not change it")
    count = len(HASHED_DTYPES) * len(HASHED_SIZES)
    return [make_finding("hash of weights", problems, f"{count} tensors as on the CPU")]


ENGINE = {
    "kind": "Colocated",
    "memoryShare": 0.2,
    "cacheBytes": 2**27,
    "maxModelLength": 128,
    "maxSequences": 8,
}
COMPLETION_LENGTH = 64


@dataclass(frozen=True, slots=True)
class EngineCell:
    """One run with an engine; what it doesn't set is as in every other."""

    dtype: ComputeDtype = "bfloat16"
    strategy: str = "Clone"
    stage: int = 0
    is_eager: bool = False
    """Whether it runs without torch.compile and CUDA graphs."""
    sleep: bool = False
    offload_base: bool = False
    training: dict[str, Any] = field(default_factory=dict)
    """Settings of spec.training."""
    damages: bool = False
    """Whether the engine's weights are damaged after the run."""


ENGINE_CELLS = {
    "bfloat16, eager": EngineCell(is_eager=True, damages=True),
    # vLLM's sampler then returns raw log-probabilities, by another code path.
    "bfloat16, eager, topP at another temperature": EngineCell(
        is_eager=True, training={"topP": 0.9, "temperature": 0.7}
    ),
    "bfloat16, eager, LoRA, sleep, base in host memory": EngineCell(
        is_eager=True, strategy="Adapter", sleep=True, offload_base=True
    ),
    "bfloat16, eager, LoRA, ZeRO-3": EngineCell(is_eager=True, strategy="Adapter", stage=3),
    "float32, eager": EngineCell("float32", is_eager=True, damages=True),
    "bfloat16, CUDA graphs": EngineCell(damages=True),
    "bfloat16, CUDA graphs, sleep": EngineCell(sleep=True, damages=True),
}
"""By the row's name. torch.compile and the capture of CUDA graphs took over a minute on an H100's
virtual machine, so most cells do without."""


def train_engine(context: Context, number: int) -> list[Finding]:
    """Train one of ENGINE_CELLS, and measure a step without an engine beside it."""
    if find_spec("vllm") is None:
        return [skipped_finding("engine", "vLLM is not installed")]
    plain = _run_cell(context, EngineCell(), None)
    name, cell = list(ENGINE_CELLS.items())[number]
    return [_train_cell(context, name, cell, ENGINE, plain.seconds[-1])]


def train_engine_of_ranks(context: Context, is_shared: int) -> list[Finding]:
    """One engine that all ranks share (tensor parallelism), or one for each rank; not both in one
    process, since vLLM makes its groups of ranks once."""
    if find_spec("vllm") is None:
        return [skipped_finding("engine on several GPUs", "vLLM is not installed")]
    plain = _run_cell(context, EngineCell(), None)
    name, engine = f"one for each of {context.world} ranks", ENGINE
    if is_shared:
        name, engine = f"one over {context.world} ranks", ENGINE | {"tensorParallel": context.world}
    return [_train_cell(context, f"bfloat16, {name}", EngineCell(), engine, plain.seconds[-1])]


def _run_cell(
    context: Context, cell: EngineCell, engine: dict[str, Any] | None
) -> trial_runs.FinishedRun:
    plan = make_plan(
        context,
        cell.strategy,
        cell.stage,
        model=middling_model(context),
        training={"maxCompletionLength": COMPLETION_LENGTH} | cell.training,
        generation={"engineArguments": {"enforceEager": True}} if cell.is_eager else {},
        execution={"dtype": cell.dtype, "engine": engine},
    )
    return trial_runs.run_trial(context, plan)


def _train_cell(
    context: Context, name: str, cell: EngineCell, engine: dict[str, Any], plain_seconds: float
) -> Finding:
    try:
        makes_room = {"sleep": cell.sleep, "offloadBase": cell.offload_base}
        run = _run_cell(context, cell, engine | makes_room)
        problems, numbers = _judge_run(run, cell)
    # whatever it is, it is what the row has to say, and the next cell is another trainer
    except Exception as error:
        result, message = classify_error(error)
        return make_finding(f"engine, {name}", [f"{result}: {message[:400]}"], "")
    numbers |= {"step": run.seconds[-1], "step_without": plain_seconds}
    share = numbers["proof"] / max(numbers["sync"], 1e-9)
    measured = f"{len(run.steps)} steps; proof is {share:.1%} of the sync"
    return make_finding(f"engine, {name}", problems, measured, dict(numbers))


def _judge_run(run: trial_runs.FinishedRun, cell: EngineCell) -> tuple[list[str], dict[str, float]]:
    """What is wrong with a run, and what was measured in it; seconds, bytes and nats."""
    engine = run.trainer.engine
    assert isinstance(engine, ColocatedGeneration)
    problems = trial_runs.nonfinite_problems(run.steps)
    if engine.failures:
        problems.append(f"{engine.failures} proofs failed")
    # With a canary not every step has one, but the first has.
    mismatch = max(run.mismatches, default=float("inf"))
    if not mismatch <= MISMATCH_LIMITS[cell.dtype]:
        problems.append(f"engine and trainer are {mismatch:.3g} nats apart")
    numbers = {"mismatch": mismatch, "sync": engine.sync_seconds, "proof": engine.proof_seconds}
    for phase in STEP_PHASES:
        numbers[f"seconds {phase}"] = run.metrics.get(f"{PHASE_SECONDS.key}/{phase}", 0.0)
    if cell.damages:
        problems += find_damage(engine)
    if cell.sleep:
        numbers |= measure_sleep(engine)
    return problems, numbers


def find_damage(engine: ColocatedGeneration) -> list[str]:
    """Damage the weights of a live engine in two ways; return those that no proof found."""
    problems = []
    engine.sync_weights()
    engine.call_worker(turn_bit)
    if not engine.changed_weights():
        problems.append("a turned bit in the live engine was not found")
    engine.sync_weights()
    name = next(iter(weight_shapes(engine.model)))
    # A tensor that is skipped is missed only where the policy has moved.
    with torch.no_grad():
        next(engine.model.parameters()).mul_(1.5)
    failures, load = engine.failures, engine.load_weight
    lost: list[str] = []

    def load_unless_lost(sent_name: str, tensor: torch.Tensor) -> None:
        if sent_name == name and not lost:
            lost.append(name)
        else:
            load(sent_name, tensor)

    with replace_attribute(engine, "load_weight", load_unless_lost):
        engine.sync_weights()
    if engine.failures != failures + 1:
        problems.append(f"a skipped tensor ({name}) in the live engine was not found")
    return problems


def turn_bit(worker: Any) -> None:
    """Turn the lowest bit of the last element of the live model's first weight."""
    weight = next(worker.model_runner.model.parameters()).data
    weight.view(-1)[-1:].view(torch.uint8)[0] ^= 1


def measure_sleep(engine: ColocatedGeneration) -> dict[str, float]:
    """Bytes of the device in use with the engine awake and asleep, and what weights and cache take
    by the plan."""
    engine.sync_weights()
    awake = device_bytes()
    engine.release_memory()
    asleep = device_bytes()
    elements = sum(torch.Size(shape).numel() for shape in weight_shapes(engine.model).values())
    planned = 2 * elements + engine.setup.engine.cache_bytes
    return {
        "device awake": float(awake),
        "device asleep": float(asleep),
        "given back": float(awake - asleep),
        "planned weights and cache": float(planned),
    }

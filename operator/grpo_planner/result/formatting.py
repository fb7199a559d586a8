"""How the planner's sentences and tables write things: counts with their noun, bytes in GiB, how a
model is sharded."""

from collections.abc import Iterable

from grpo_api.plan.plan import MAX_TEXT, MAX_TEXTS, ExecutionPlan
from grpo_api.spec.generation import EnginePlan
from grpo_api.text.messages import shorten
from grpo_api.text.units import GIB


def gib(count: float) -> str:
    """Bytes as `57.0 GiB`."""
    return f"{count / GIB:.1f} GiB"


def plan_texts(sentences: Iterable[str]) -> list[str]:
    """The first sentences, as many and as long as a plan may have: names in them are the user's."""
    return [shorten(sentence, MAX_TEXT) for sentence in sentences][:MAX_TEXTS]


def plural(count: int, noun: str) -> str:
    """`1 node`, `2 nodes`, `2 processes`."""
    if count == 1:
        return f"{count} {noun}"
    ending = "es" if noun.endswith("s") else "s"
    return f"{count} {noun}{ending}"


def sharding(zero_stage: int, *, offload: bool) -> str:
    """`DDP`, `ZeRO-2`, `ZeRO-3+offload`: how the trained model lies on the GPUs."""
    stage = f"ZeRO-{zero_stage}" if zero_stage else "DDP"
    return f"{stage}+offload" if offload else stage


def plan_name(plan: ExecutionPlan) -> str:
    """`full ZeRO-3+offload, Sharded on 8 x NVIDIA-L4, vLLM Colocated over 2 GPUs`: all that
    distinguishes two plans of one job."""
    sampler = f", {engine_plan_name(plan.engine)}" if plan.engine else ""
    return f"{brief_plan_name(plan)}{sampler}"


def brief_plan_name(plan: ExecutionPlan) -> str:
    """`full ZeRO-3+offload, Sharded on 8 x NVIDIA-L4`."""
    sharded = sharding(plan.zero_stage, offload=plan.offload != "None")
    method = "LoRA" if plan.method == "LoRA" else "full"
    return f"{method} {sharded}, {plan.strategy} on {gpus_name(plan)}"


def gpus_name(plan: ExecutionPlan) -> str:
    """`8 x NVIDIA-L4`, `2 x CPUs`."""
    if plan.accelerator == "CPU":
        return f"{plan.world_size} x CPUs"
    return f"{plan.gpus} x {plan.gpu_product or plan.gpu_resource}"


def distinct(first: float, second: float, digits: int = 1) -> tuple[str, str]:
    """Two numbers to be compared, with at least `digits` decimals, and enough of them to differ."""
    texts = (f"{first:.{digits}f}", f"{second:.{digits}f}")
    is_enough = texts[0] != texts[1] or first == second
    return texts if is_enough else distinct(first, second, digits + 1)


def distinct_gib(first: float, second: float) -> tuple[str, str]:
    """Two sizes in bytes to be compared, as `gib` writes them and with enough digits to differ."""
    texts = distinct(first / GIB, second / GIB)
    return f"{texts[0]} GiB", f"{texts[1]} GiB"


def needs_message(device: float, usable: float, phase: str, step: str) -> str:
    """What a plan needs of each GPU, in bytes, and how long a step takes, in words."""
    return f"needs {gib(device)} of {gib(usable)} per GPU at {phase}, {step}"


def engine_plan_name(engine: EnginePlan) -> str:
    """`vLLM Colocated over 2 GPUs, asleep while training`, or with their number `vLLM Servers, 2
    engines`."""
    return engine_name(
        engine.kind, engine.tensor_parallel, sleeps=engine.sleep,
        offloads_base=engine.offload_base, engines=engine.replicas,
    )  # fmt: skip


def engine_name(
    kind: str, gpus: int, *, sleeps: bool, offloads_base: bool = False, engines: int = 0
) -> str:
    """The name of an engine with these settings, as of engine_plan_name; with 0 `engines` their
    number is left out."""
    many = f", {plural(engines, 'engine')}" if engines else ""
    over = f" over {plural(gpus, 'GPU')}" if gpus > 1 else ""
    asleep = ", asleep while training" if sleeps else ""
    base = ", the base in host memory while it samples" if offloads_base else ""
    return f"vLLM {kind}{many}{over}{asleep}{base}"

"""The sentence that says which engine samples the completions of the chosen plan, and why."""

from ..memory.setup import Engine
from ..result.formatting import distinct, distinct_gib, engine_name, plural
from ..search.engines import settings_of_engines
from ..search.option import Option
from ..search.search import Search


def sampling_message(search: Search, chosen: Option) -> str:
    """Return which engine samples the chosen option's completions, and why, with the numbers of the
    alternatives that it was compared with."""
    engine, wanted = chosen.footprint.setup.engine, search.demand.spec.generation.engine
    sampler = _sampler_name(engine)
    if chosen.servers:
        sampler = f"{sampler} on {chosen.engine_gpus} x {chosen.servers.gpu_name}"
    if search.engines.why_none:
        return f"Transformers, since {search.engines.why_none}"
    if wanted != "Auto":
        return f"{sampler}, as asked for; {_ASSUMED}"
    # An engine for which the base must go is worth the reason why it must.
    others = [
        other
        for other in search.rivals(chosen)
        if _kind(other.footprint.setup.engine) != _kind(engine) or _is_kept_base(engine, other)
    ]
    if not others:
        # Transformers may always sample, and an engine on one GPU, unless a setting excludes it.
        pins = " and ".join(settings_of_engines(search.demand.spec))
        return f"{sampler}: no engine has a place on these GPUs with {pins}"
    comparisons = "; ".join(_comparison_message(chosen, other) for other in others)
    return f"{sampler}: {comparisons}; {_ASSUMED}"


_ASSUMED = "no GPU has confirmed an engine's memory (assumed)"


def _sampler_name(engine: Engine | None) -> str:
    if engine is None:
        return "Transformers"
    return engine_name(
        engine.kind, engine.tensor_parallel, sleeps=engine.sleeps,
        offloads_base=engine.offloads_base, engines=engine.replicas,
    )  # fmt: skip


def _is_kept_base(engine: Engine | None, other: Option) -> bool:
    """True if the other is the engine without its offloaded base."""
    rival = other.footprint.setup.engine
    if engine is None or rival is None or not engine.offloads_base:
        return False
    return rival.sleeps and not rival.offloads_base


def _comparison_message(chosen: Option, other: Option) -> str:
    """How another engine on the same split compares."""
    name = _sampler_name(other.footprint.setup.engine)
    if other.shortage == "HostMemory":
        need, have = distinct_gib(other.host, other.place.host_memory)
        return f"{name} needs {need} of host memory per node, of {have}"
    if other.shortage:
        phase = other.footprint.prediction.peak_phase
        need, have = distinct_gib(other.footprint.device, other.place.pool.usable_bytes)
        return f"{name} needs {need} of {have} per GPU at {phase}"
    more = ""
    if other.engine_gpus > chosen.engine_gpus:
        more = f" on {plural(other.engine_gpus, 'GPU')} more"
    seconds, _ = distinct(other.published_seconds, chosen.published_seconds)
    return f"{name}{more} would take {seconds} s"


def _kind(engine: Engine | None) -> str:
    return engine.kind if engine else "Transformers"

"""Which engine the chosen plan ends up with, and which ones it was compared with.

The search takes the engine that leaves most memory, so that the split of the batch is found once.
On that split the others are then compared by time: an engine that stays awake, Transformers, and
engines with GPUs of their own.
"""

from collections.abc import Iterator
from dataclasses import replace

from ..memory.setup import Engine
from ..result.formatting import engine_name, gib
from .option import NEAR, Option
from .search import Search


def choose_engine(search: Search, chosen: Option) -> Option:
    """The chosen option with the engine that is best for its split of the batch.

    An engine that needs no sleep spares the waking, and is taken where that leaves room. One that
    Auto may do without has to be faster by more than a tie. Engines with GPUs of their own have to
    earn those: by fewer GPU-seconds per step.
    """
    engine, best = chosen.footprint.setup.engine, chosen
    if engine is None:
        return chosen
    for other in _alike(search, engine):
        option = search.with_engine(chosen, other)
        if not (option.shortage or option.crowding) and option.seconds < best.seconds:
            best = option
    if search.engines.is_optional:
        plain = search.with_engine(chosen, None)
        best = plain if not plain.shortage and plain.seconds <= NEAR * best.seconds else best
    for other in _servers(search, chosen):
        option = search.with_engine(chosen, other)
        best = option if not option.shortage and option.gpu_seconds < best.gpu_seconds else best
    return best


def rivals(search: Search, chosen: Option) -> list[Option]:
    """The chosen option's method in its place with the other engines that the spec allows, fitting
    or not."""
    if search.engines.why_none:
        return []
    own = chosen.footprint.setup.engine
    tried = search.engines.engines_to_try(chosen.place, chosen.footprint.setup.precision)
    others = dict.fromkeys((*tried[:1], *_servers(search, chosen), *tried[-1:]))
    if own:
        others |= dict.fromkeys(_alike(search, own))
    found = (
        search.with_engine(chosen, other)
        for other in others
        if _kind(other) != _kind(own) or _awake(other, own)
    )
    return list(found)


def sampling_message(search: Search, chosen: Option) -> str:
    """What samples the chosen option's completions, and why: by what decided, with the numbers of
    what it beat."""
    engine, wanted = chosen.footprint.setup.engine, search.demand.spec.generation.engine
    if search.engines.why_none:
        return f"Transformers, since {search.engines.why_none}"
    if wanted != "Auto":
        return f"{_named(engine)}, as asked for; {_ASSUMED}"
    others = [
        other
        for other in rivals(search, chosen)
        if _kind(other.footprint.setup.engine) != _kind(engine)
    ]
    told = "; ".join(_against(chosen, other) for other in others)
    return f"{_named(engine)}: {told or 'nothing else was possible'}; {_ASSUMED}"


_ASSUMED = "no GPU has confirmed an engine's numbers (assumed)"


def _named(engine: Engine | None) -> str:
    return (
        engine_name(engine.kind, engine.tensor_parallel, sleeps=engine.sleeps)
        if engine
        else "Transformers"
    )


def _against(chosen: Option, other: Option) -> str:
    """How another engine on the same split compares."""
    name = _named(other.footprint.setup.engine)
    if other.shortage == "HostMemory":
        return (
            f"{name} needs {gib(other.host)} of host memory per node, of "
            f"{gib(other.place.host_memory)}"
        )
    if other.shortage:
        phase = other.footprint.prediction.peak_phase
        return (
            f"{name} needs {gib(other.footprint.device)} of "
            f"{gib(other.place.pool.usable_bytes)} per GPU at {phase}"
        )
    more = f" on {other.engine_gpus} GPUs more" if other.engine_gpus > chosen.engine_gpus else ""
    return f"{name}{more} would take {other.seconds:.1f} s"


def _alike(search: Search, engine: Engine) -> Iterator[Engine]:
    """The same colocated engine awake, where the spec leaves that open."""
    if engine.sleeps and search.demand.spec.generation.sleep is None:
        yield replace(engine, sleeps=False)


def _awake(one: Engine | None, other: Engine | None) -> bool:
    return bool(one and other and one.sleeps != other.sleeps)


def _kind(engine: Engine | None) -> str:
    return engine.kind if engine else "Transformers"


def _servers(search: Search, chosen: Option) -> Iterator[Engine]:
    """Engines with GPUs of their own, where Auto may choose them."""
    if search.engines.has_declared_servers and not search.engines.why_none:
        yield from search.engines.servers(chosen.place, chosen.footprint.setup.precision)

"""Extents: which methods may run in which places of the pools, before any time is computed.

A place is a number of GPUs on a number of nodes. A site is a place with all methods that may have
room there, and an extent is a method in one place.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, product
from math import inf
from typing import NamedTuple

from ..hardware.pools import Place, Pool
from ..memory.setup import PRECISIONS, Engine, Precision
from ..time.training import TrainingTime
from .batch import whole_node_gpus
from .engines import Engines
from .footprints import Family, Footprints, Update, Variants
from .methods import Method, methods
from .option import CROWDED, SHARES, Option, Score, place_risk

WHOLE_NODES = 16
"""GPUs past which a gang takes whole nodes only, as far as its batch can be split over them."""
SPACING = 1.25
"""Least ratio of two extents past WHOLE_NODES."""


@dataclass(eq=False)
class Extent:
    """A method in one place, with what a search has worked out of it; each exists once."""

    place: Place
    method: Method
    precision: Precision
    footprints: Footprints = field(repr=False)
    engines: Engines = field(repr=False)
    """Of the search."""
    training: dict[tuple[int, bool, bool], TrainingTime] = field(default_factory=dict, repr=False)
    """By micro-batch, checkpointing and whether the old policy scores."""
    options: dict[tuple[Variants, bool], list[Option]] = field(default_factory=dict, repr=False)
    """What fits with an engine, as far as it may be chosen; by whether risks are counted."""
    least_step: float | None = None
    fitting_training: dict[bool, list[tuple[float, float]]] = field(
        default_factory=dict, repr=False
    )
    """Times.least_step and fitting_training, once they have been asked for; the latter by whether
    the old policy scores."""
    family: Family = field(init=False, repr=False)
    """The variants of its method, by engine."""
    without_engine: Variants = field(init=False, repr=False)
    """Those without an engine, whether or not one is asked for."""

    def __post_init__(self) -> None:
        # Every extent needs them.
        self.family = self.footprints.family(self.place.world, self.method, self.precision)
        self.without_engine = self.family[None]

    @cached_property
    def candidates(self) -> tuple[Engine | None, ...]:
        """The engines of its place; None for Transformers."""
        may_offload_base = self.method.may_offload_base
        return self.engines.candidates(
            self.place, self.precision, may_offload_base=may_offload_base
        )

    @cached_property
    def engines_with_room(self) -> list[Engine | None]:
        """The engines among `candidates` that a GPU has room for; None for Transformers."""
        return self.engines.with_room(self.candidates, self.place, self.precision)

    @cached_property
    def variants(self) -> tuple[Variants, ...]:
        """The variants of this extent with each engine that may sample."""
        return tuple(map(self.variants_with, self.candidates))

    def variants_with(self, engine: Engine | None) -> Variants:
        """The variants of this extent with one engine."""
        return self.family[engine]

    @cached_property
    def may_train(self) -> bool:
        """True if training has room, whatever samples beside it."""
        return self.without_engine.may_train(self.place.pool.usable_bytes)

    @cached_property
    def fitting_updates(self) -> list[tuple[list[Update], float]]:
        """For each of SHARES the updates that may be the fastest which fill a GPU up to it, beside
        an engine that takes nothing, and the factor by which their time counts longer.

        A share in which no others fit than in less can't win, nor one past that in which those fit
        that the whole GPU has room for.
        """
        alone, usable = self.without_engine, self.place.pool.usable_bytes
        fitting: list[tuple[list[Update], float]] = []
        earlier: list[Update] = []
        in_whole = alone.fastest_updates(usable)
        for share, crowded in zip(SHARES, CROWDED, strict=True):
            updates = alone.fastest_updates(int(share * usable))
            if updates != earlier:
                fitting.append((updates, crowded))
                earlier = updates
            if updates == in_whole:
                break
        return fitting


@dataclass(eq=False)
class Site:
    """A place with methods that train the same; with each it is one extent, or two."""

    place: Place
    methods: tuple[Method, ...]
    stand_in: Extent = field(repr=False)
    """With one of its methods in the narrowest precision of any, and with weights that need no
    gathering where any has such: no other samples faster, and all compute as fast."""
    risk: float
    """The least factor by which a method's time counts longer."""
    least_products: float | None = None
    least_step: float | None = None
    """Times.least_products and least_step_at, once they have been asked for."""


class SiteMethod(NamedTuple):
    """A site with one of its methods."""

    site: Site
    method: Method


class EnginedExtent(NamedTuple):
    """An extent with one engine."""

    extent: Extent
    variants: Variants

    @property
    def missing_shares(self) -> float:
        """What the leanest variant lacks of a GPU and of a node's host memory, as shares of what
        they have."""
        place = self.extent.place
        device = self.variants.leanest.device / max(1, place.pool.usable_bytes)
        host = self.variants.host(place.per_node) / max(1, place.host_memory)
        return max(0.0, device - 1) + max(0.0, host - 1)


Candidate = Site | SiteMethod | Extent | EnginedExtent
"""What a search bounds, the whole before its parts."""


class Entry(NamedTuple):
    """A candidate in the queue of the search."""

    bound: Score
    serial: int
    """Decides among equal bounds, so that the order is the same every time."""
    candidate: Candidate


class MethodRoom(NamedTuple):
    """What a method needs of the GPUs of a pool."""

    method: Method
    precision: Precision | None
    """Its dtypes there; None where a pinned one is not to be had."""
    least_world: float
    """The least GPUs that may have room for it; infinite if none."""


class Extents:
    """The places of pools, and the methods that may have room there."""

    def __init__(self, footprints: Footprints, engines: Engines, pools: Iterable[Pool]) -> None:
        """Finds the places; `engines`: those of the search."""
        self._footprints, self._demand, self._engines = footprints, footprints.demand, engines
        self.methods = methods(self._demand.spec)
        self.places = {pool: list(self._places_in(pool)) for pool in pools}
        self._sites: dict[tuple[int, int], Site | None] = {}
        self._extents: dict[tuple[int, int], list[Extent]] = {}
        self._rooms: dict[tuple[int, int], MethodRoom] = {}

    @property
    def all_places(self) -> Iterator[Place]:
        """The places of all pools."""
        return chain.from_iterable(self.places.values())

    def sites(self, places: Iterable[Place], tier: int) -> Iterator[Site]:
        """Places with those of all methods of a tier that may have room on their GPUs, each with
        one at least."""
        of_tier = [method for method in self.methods if method.tier == tier]
        rooms: dict[Pool, list[MethodRoom]] = {}
        for place in places:
            key = (id(place), tier)
            if key not in self._sites:
                pool = place.pool
                if pool not in rooms:
                    rooms[pool] = [self._room_of(pool, method) for method in of_tier]
                self._sites[key] = self._site_of(place, rooms[pool])
            site = self._sites[key]
            if site:
                yield site

    def _site_of(self, place: Place, rooms: list[MethodRoom]) -> Site | None:
        world = place.world
        sufficient = [room for room in rooms if world >= room.least_world]
        if not sufficient:
            return None
        roomy = tuple(room.method for room in sufficient)
        precisions = {room.precision for room in sufficient}
        narrowest = next(precision for precision in PRECISIONS if precision in precisions)
        # Sampling depends on the method by whether weights have to be gathered, and by no more.
        fastest = [room.method for room in sufficient if room.method.zero != 3] or roomy
        stand_in = Extent(place, fastest[-1], narrowest, self._footprints, self._engines)
        risk = min(place_risk(place, method) for method in roomy)
        return Site(place, roomy, stand_in, risk)

    def trainable(self, places: Iterable[Place], of_methods: Iterable[Method]) -> Iterator[Extent]:
        """The extents of places by methods that can train there."""
        for place, method in product(places, of_methods):
            if self.has_room(place, method):
                yield from self.trainable_at(place, method)

    def trainable_at(self, place: Place, method: Method) -> Sequence[Extent]:
        """The extents of a place by a method, if it can train there."""
        precision = self._room_of(place.pool, method).precision
        if precision:
            # Whether it can does not depend on the nodes.
            alone = self._footprints.family(place.world, method, precision)[None]
            if alone.may_train(place.pool.usable_bytes):
                return self.at(place, method)
        return ()

    def lacks(self, place: Place, method: Method) -> float:
        """Least share of a GPU that training by a method lacks in a place; infinite where the GPUs
        lack its pinned dtype."""
        precision = self._room_of(place.pool, method).precision
        if precision is None:
            return inf
        alone = self._footprints.family(place.world, method, precision)[None]
        return max(0.0, alone.least_training_bytes / max(1, place.pool.usable_bytes) - 1)

    def in_pool(self, pool: Pool, method: Method) -> Iterator[Extent]:
        """A method in every place of a pool that something may sample in, smallest first."""
        for place in self.places[pool]:
            yield from self.at(place, method)

    def at(self, place: Place, method: Method) -> Sequence[Extent]:
        """A method in a place that something may sample in; none where the GPUs lack its pinned
        dtype."""
        key = (id(place), id(method))
        if key not in self._extents:
            precision = self._room_of(place.pool, method).precision
            # On one GPU ZeRO has no other rank to share with. It only costs, unless it offloads.
            has_use = place.world > 1 or not method.zero or method.offload
            extents: Iterable[Extent] = ()
            if precision and has_use:
                extents = self._with_memory(place, method, precision)
            self._extents[key] = list(extents)
        return self._extents[key]

    def _with_memory(self, place: Place, method: Method, precision: Precision) -> Iterator[Extent]:
        """A method on as many GPUs as a place has: on each number of nodes that lets an engine
        sample which no smaller number does; where none does, on the fewest nodes."""
        family = self._footprints.family(place.world, method, precision)
        narrowest: Place | None = None
        samplers: set[Engine | None] = set()
        for wider in self._widths(place):
            candidates = self._engines.candidates(
                wider, precision, may_offload_base=method.may_offload_base
            )
            if not candidates:
                continue
            narrowest = narrowest or wider
            # The same GPUs on more nodes have more host memory and slower links. So the first
            # number of nodes with enough memory for an engine is the only one that may be better.
            have_memory = family.with_memory(candidates, wider)
            if not samplers.issuperset(have_memory):
                yield Extent(wider, method, precision, self._footprints, self._engines)
            # Fewer GPUs per node may be split by an engine that more can't be, unless those are a
            # power of two, as an engine's are.
            is_power_of_two = wider.per_node & (wider.per_node - 1) == 0
            if is_power_of_two and len(have_memory) == len(candidates):
                return
            samplers.update(have_memory)
        if narrowest and not samplers:
            yield Extent(narrowest, method, precision, self._footprints, self._engines)

    def _widths(self, place: Place) -> Iterator[Place]:
        """A place, and as many GPUs on each larger number of nodes, as far as the job leaves it
        open and the pool has them."""
        yield place
        demand = self._demand
        if demand.spec.nodes:
            return
        for per_node in range(place.per_node - 1, 0, -1):
            if place.world % per_node == 0:
                nodes = place.world // per_node
                wider = place.pool.place(place.world, nodes, demand.pod_cpu, demand.most_memory)
                if wider:
                    yield wider

    def _places_in(self, pool: Pool) -> Iterator[Place]:
        """A place for every number of GPUs that splits the batch evenly and is within the job's
        limits."""
        demand, last = self._demand, 0.0
        most = min(pool.gpus, demand.most_gpus or pool.gpus)
        per_node = whole_node_gpus(demand.spec, pool.most_gpus_per_node)
        for world in self._footprints.worlds:
            if world > most:
                return
            # Each place is searched with all methods. Past WHOLE_NODES neighbouring numbers differ
            # by little, and a part of a node would keep its rest from other jobs.
            pinned = world in (demand.fewest_gpus, demand.most_gpus)
            if world > WHOLE_NODES and not pinned and (world % per_node or world < last * SPACING):
                continue
            place = pool.place(world, demand.spec.nodes, demand.pod_cpu, demand.most_memory)
            if place:
                last = world
                yield place

    def has_room(self, place: Place, method: Method) -> bool:
        """True if the policy and the passes of a method have room on the GPUs of a place."""
        return place.world >= self._room_of(place.pool, method).least_world

    def _room_of(self, pool: Pool, method: Method) -> MethodRoom:
        # One lower bound per method and precision can rule out a whole product.
        key = (id(pool), id(method))
        room = self._rooms.get(key)
        if room is None:
            precision = self._demand.precision(method, pool.hardware)
            least = inf
            if precision:
                least = self._footprints.least_world(
                    method, precision, pool.usable_bytes, engined=not self._engines.why_none
                )
            room = self._rooms[key] = MethodRoom(method, precision, least)
        return room

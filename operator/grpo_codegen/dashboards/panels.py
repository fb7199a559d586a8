"""What a dashboard is made of: rows of panels, variables and annotations, in few words and without
Grafana's JSON.

The modules beside this one say with it what to show; grafana.py lays it out and writes it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["timeseries", "stat", "gauge", "bargauge", "table"]
Look = Literal["line", "limit", "edge", "band"]
"""`limit`: red and dashed, a bound that others are held against. `band`: filled down to the query
that is `edge`."""
Color = Literal["green", "blue", "yellow", "orange", "red", "purple", "dark-green", "light-blue"]
Bounds = tuple[tuple[float, Color], ...]
"""From which value on a number has which colour, rising."""
NOTHING = "Nothing in this time"


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression; `legend` names its series, with labels as `{{label}}`."""

    expression: str
    legend: str
    look: Look = "line"


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One picture."""

    kind: Kind = "timeseries"
    title: str
    """What is seen, in words."""
    description: str
    """What it means, and what to do when it looks bad."""
    unit: str = "none"
    """Grafana's name of the unit."""
    queries: tuple[Query, ...]
    width: int = 8
    """Of 24."""
    height: int = 8
    bounds: Bounds = ()
    base: Color | None = None
    """Colour of a number below all bounds; None for green where there are any."""
    empty: str = NOTHING
    """What stands in the panel when there is no such series."""
    reach: float | None = None
    """The axis goes at least so far, that small values look small."""
    stacked: bool = False
    values_only: bool = False
    """A stat of several values that its title tells apart."""
    label: str = ""
    """A stat shows the values of this label, not numbers."""
    text_pixels: int = 0
    """Height of a stat's letters. 0: as high as its place allows, which several names share."""
    colors: Mapping[str, Color] = field(default_factory=dict)
    """By legend."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Headings of a table by label or `Value #A`, in their order; all others are left out."""
    to_job: bool = False
    """Whether a click on a job's value leads to its Training health."""

    @property
    def lowest_color(self) -> Color | None:
        """Colour of a number below all bounds; None where no number is good or bad."""
        return self.base or ("green" if self.bounds else None)


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a heading, laid out from left to right."""

    title: str
    panels: tuple[Panel, ...]
    is_collapsed: bool = False
    """Only its heading is shown, and nothing of it asked for, until a click opens it."""


@dataclass(frozen=True, slots=True)
class Annotation:
    """A mark across all panels wherever the expression has a value."""

    title: str
    expression: str
    text: str
    color: Color


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice at the top, by the values of a metric's label."""

    name: str
    title: str
    series: str
    label: str
    many: bool
    """Whether several or all values may be chosen; all are at first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """One page."""

    uid: str
    title: str
    description: str
    since: str
    """Start of the time shown at first, such as `now-3h`."""
    variables: tuple[Variable, ...]
    annotations: tuple[Annotation, ...] = ()
    rows: tuple[Row, ...]

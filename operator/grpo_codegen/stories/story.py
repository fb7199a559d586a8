"""What a story is, and the world that it changes: one in which all is well."""

from dataclasses import dataclass

from .cluster import OPERATOR, OTHER_RUNS, UTILISATION
from .run import JOB, RANK0
from .run_findings import with_findings
from .world import World

WELL: World = {**RANK0, **JOB, **OPERATOR, **OTHER_RUNS, **UTILISATION}


@dataclass(frozen=True, slots=True)
class Story:
    """What happens."""

    name: str
    """Few words, for the matrix."""
    summary: str
    """A sentence on what happens when."""
    minutes: int
    """How long it lasts. At its end all is well again, for long enough that nothing fires any
    more."""
    at: int
    """The minute at which all fires that is to fire, late in what happens."""
    changes: World
    """What differs from WELL."""
    drawn_minute: int = 0
    """The minute of which the dashboards are drawn, where `at` would show too little."""

    @property
    def world(self) -> World:
        """All series."""
        return with_findings({**WELL, **self.changes}, self.minutes)

    @property
    def drawn_at(self) -> int:
        """The minute of which the dashboards are drawn."""
        return self.drawn_minute or self.at

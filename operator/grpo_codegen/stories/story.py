"""What a story is, and the world that it changes: one in which all is well."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from grpo_api.spec.run_policy import FindingName
from grpo_api.status.status import Phase

from .cluster_series import OPERATOR, OTHER_RUNS, UTILISATION
from .job_series import JOB, RANK0
from .run_findings import with_findings
from .world import World

WELL: World = {**RANK0, **JOB, **OPERATOR, **OTHER_RUNS, **UTILISATION}


@dataclass(frozen=True, kw_only=True)
class Story:
    """What happens."""

    name: str
    """Few words, for the matrix."""
    summary: str
    """A sentence on what happens when."""
    minutes: int = 90
    """How long it lasts. At its end all is well again, for long enough that nothing fires any
    more."""
    at: int = 55
    """The minute at which all fires that is to fire, late in what happens."""
    changes: World
    """What differs from the base."""
    base: World = field(default_factory=lambda: WELL)
    steps: tuple[Mapping[str, Any], ...] = ()
    """The steps as TRL logs them, where the series do not have all that the rules read."""
    findings: tuple[FindingName, ...] = ()
    """What the trainer's rules find at `at`."""
    alerts: tuple[str, ...] = ()
    """Alerts that fire at `at`, beside GRPORunFinding, which fires with a finding; all others are
    silent throughout."""
    phase: Phase = Phase.RUNNING
    """The job's at `at`."""
    board: Literal["training-health", "fleet", "operator"] = "training-health"
    """The dashboard that somebody looks at who is concerned."""
    drawn_minute: int = 0
    """The minute of which the dashboards are drawn, where `at` would show too little."""

    @cached_property
    def world(self) -> World:
        """All series."""
        return with_findings({**self.base, **self.changes}, self.minutes, self.steps)

    @property
    def firing(self) -> set[str]:
        """All alerts that fire at `at`."""
        return {*self.alerts, *(["GRPORunFinding"] if self.findings else [])}

    @property
    def drawn_at(self) -> int:
        """The minute of which the dashboards are drawn."""
        return self.drawn_minute or self.at

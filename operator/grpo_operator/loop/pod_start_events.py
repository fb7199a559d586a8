"""Reads the warning that a Job or pod which fails to start has in its events.

A pod's status does not say that a container waits for a volume, a Secret or its sandbox. A Job's
status does not say that the API server refuses its pods. The kubelet and the Job controller write
events about these. They are requested only then. Without the right to list events the cause stays
unknown.
"""

import logging
from dataclasses import dataclass

from grpo_kube.client import Cluster, list_and_parse
from grpo_kube.objects.errors import ClusterError
from grpo_kube.objects.resources import EVENTS, ObjectKey, Selection
from grpo_kube.objects.times import Observed

from ..decide.decisions import Limits
from ..decide.observation import Observation
from ..decide.start_checks import asks_about, current_warning, start_event

log = logging.getLogger(__name__)

FRESH_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class _NewestWarning:
    uid: str
    at: Observed
    message: str


class PodStartEvents:
    """The newest warning about an attempt that does not start, remembered for a moment."""

    def __init__(self, cluster: Cluster, limits: Limits) -> None:
        """`limits` say how long an attempt may take to start before events are read."""
        self._cluster = cluster
        self._limits = limits
        self._newest: dict[ObjectKey, _NewestWarning] = {}

    async def newest_warning(self, observation: Observation) -> str:
        """`reason: message` of the warning about the Job or pod that keeps the attempt from
        starting.

        Empty while the attempt gets going, and where there is no warning.
        """
        key, now = observation.job.key, observation.at
        uid = asks_about(observation, self._limits)
        if not uid:
            self.forget(key)
            return ""
        # A gang that does not start is reconciled often, and each question is a LIST of events.
        warning = self._newest.get(key)
        if warning is None or warning.uid != uid or now - warning.at > FRESH_SECONDS:
            warning = self._newest[key] = _NewestWarning(
                uid, now, await self._fetch_warning(key, uid)
            )
        return warning.message

    def forget(self, key: ObjectKey) -> None:
        """Drop the remembered event of a GRPOJob that runs or is gone."""
        self._newest.pop(key, None)

    async def _fetch_warning(self, key: ObjectKey, uid: str) -> str:
        selection = Selection(EVENTS, key.namespace, fields=f"involvedObject.uid={uid}")
        try:
            events, _ = await list_and_parse(self._cluster, selection, start_event)
        except ClusterError as error:
            log.info("%s: events about %s can't be listed: %s", key, uid, error)
            return ""
        return current_warning(events)

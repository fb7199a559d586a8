"""Which weights an engine process has, and what it may answer: the rules alone, without vLLM and
HTTP.

An engine samples only under a version that the trainer has confirmed. A completion during which a
sync began is never handed out, since some of its tokens may be of the next version.
"""

import uuid

from .messages import EngineState, Phase


class RequestRefused(Exception):
    """The engine has other weights than a request is for, or none; the message says what it has
    instead."""


class ServedWeights:
    """State machine of the weights of one engine process."""

    def __init__(self, incarnation: str | None = None) -> None:
        """`incarnation` is random unless given."""
        self.incarnation = incarnation or uuid.uuid4().hex
        self.phase: Phase = "Waiting"
        self._version: int | None = None
        """What was received; served once it is confirmed."""
        self._changes = 0
        """Syncs that have begun."""

    @property
    def version(self) -> int | None:
        """The confirmed version, while it is served."""
        return self._version if self.phase == "Serving" else None

    def state(self) -> EngineState:
        """The state for the trainer, without the load, which the caller adds."""
        return EngineState(incarnation=self.incarnation, phase=self.phase, version=self.version)

    def begin_sync(self) -> None:
        """Begin a sync: the weights have no version until it ends.

        Raises:
            RequestRefused: another is under way.
        """
        if self.phase == "Receiving":
            raise RequestRefused("another sync of weights is under way")
        self.phase, self._version = "Receiving", None
        # Counted, since the version alone would not show a sync that failed.
        self._changes += 1

    def record_received(self, version: int) -> None:
        """Note that all tensors of the version have arrived."""
        self.phase, self._version = "Unproven", version

    def record_failure(self) -> None:
        """Note that the sync failed: the weights are a mixture of versions."""
        self.phase, self._version = "Waiting", None

    def require_received(self, version: int) -> None:
        """Require that this version was received: only then can it be hashed and confirmed.

        Raises:
            RequestRefused: another version was, or none.
        """
        if self.phase not in ("Unproven", "Serving") or self._version != version:
            raise RequestRefused(f"version {version} was not received: {self._state_message()}")

    def confirm(self, version: int) -> None:
        """Serve the version, since the trainer has compared its hashes.

        Raises:
            RequestRefused: it compared those of another version.
        """
        self.require_received(version)
        self.phase = "Serving"

    def admit(self, version: int, incarnation: str) -> int:
        """Admit a request to sample under a version; return the token for `require_no_sync_since`.

        Raises:
            RequestRefused: this process doesn't serve it.
        """
        # A process that restarted answers under the same address, with other weights.
        if incarnation != self.incarnation:
            raise RequestRefused(
                f"this is incarnation {self.incarnation}, not {incarnation}: "
                f"{self._state_message()}"
            )
        if self.version != version:
            raise RequestRefused(f"version {version} is not served: {self._state_message()}")
        return self._changes

    def require_no_sync_since(self, admitted: int) -> None:
        """Require that no sync has begun since the request was admitted.

        Raises:
            RequestRefused: a sync began meanwhile.
        """
        if self._changes != admitted:
            raise RequestRefused("a sync of weights began while the completion was sampled")

    def _state_message(self) -> str:
        has = "no weights" if self._version is None else f"version {self._version}"
        return f"the engine has {has} in phase {self.phase}"

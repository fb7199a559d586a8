"""The errors of requests to the API server, as one tree.

A caller catches the class that it can handle and nothing wider. The classes differ in the remedy:
the same request again, reading the object again, or a change by somebody else.

    OperatorError
    ├── ConfigurationError       the operator was started with settings that can't work
    ├── LeadershipLost           another operator may lead by now: this process must end
    └── ClusterError             the API server did not do what was asked
        ├── NotLeading           not even asked: only the operator that holds the Lease may write
        ├── Unavailable          no answer, 401, 429 or 5xx: the same request may work later
        ├── Stale                asked on old knowledge: read or list again, then repeat the request
        │   ├── Conflict         409 of an update: the object has changed since it was read
        │   └── Expired          410: the resource version or page of a watch or list is too old
        ├── NotFound             404: the object, or its kind, is not there
        ├── AlreadyExists        409 of a create: the name is taken
        └── Denied               400, 422 and the like: the same request won't ever work
            └── Forbidden        403 until somebody grants it, or the namespace is being deleted
"""


class OperatorError(Exception):
    """Every error of this package."""


class ConfigurationError(OperatorError):
    """The operator was started with settings that can't work."""


class LeadershipLost(OperatorError):
    """Another operator may lead: this process must end, and may start again as a follower."""


class ClusterError(OperatorError):
    """The API server did not do what was asked."""

    def __init__(self, message: str, code: int = 0) -> None:
        """Keeps the HTTP status, 0 when there was no answer."""
        super().__init__(message)
        self.code = code


class NotLeading(ClusterError):
    """Not even asked: only the operator that holds the Lease may write."""


class Unavailable(ClusterError):
    """No answer, 401, 429 or 5xx: the same request may work later."""

    def __init__(self, message: str, code: int = 0, retry_after: float | None = None) -> None:
        """Keeps the pause that the server asked for, in seconds."""
        super().__init__(message, code)
        self.retry_after = retry_after


class Stale(ClusterError):
    """The request stood on knowledge that is too old."""


class Conflict(Stale):
    """The object has changed since it was read."""


class Expired(Stale):
    """The resource version, or the page of a list, is too old to continue from."""


class NotFound(ClusterError):
    """The object, or its kind, is not there."""


class AlreadyExists(ClusterError):
    """The name is taken."""


class Denied(ClusterError):
    """An answer that repeating won't change."""


class Forbidden(Denied):
    """The operator may not do this, or not in this namespace."""

"""How a pod knows who may read what it says: by the hash of a token that nobody but the operator can make.

The hash is in the pod's template, which anybody sees who may read pods; the token is not in it.
"""

import hashlib
import hmac
from collections.abc import Iterable

HEADER = "X-GRPO-Token"
"""Carries the tokens of a request, with commas between them."""
MOST = 8
"""How many of them are looked at."""


def digest(token: str) -> str:
    """Return the sha256 of a token in hex: the only form of it that a pod's template carries."""
    return hashlib.sha256(token.encode(errors="surrogatepass")).hexdigest()


def is_shown(headers: Iterable[str], wanted: str) -> bool:
    """Whether the values of HEADER have the token with this digest; none has an empty one.

    All are compared, each in the same time whatever it is.
    """
    tokens = [token.strip() for header in headers for token in header.split(",")][:MOST]
    matches = [hmac.compare_digest(digest(token).encode(), wanted.encode()) for token in tokens]
    return any(matches)

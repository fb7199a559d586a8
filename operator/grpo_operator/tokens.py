"""The tokens that open what pods say: an HMAC of job and attempt, by a key that the operators alone read.

So nothing has to be kept per attempt, and who learns one attempt's token, such as the user's code in its pods, can make
no other.
"""

import hashlib
import hmac
from collections.abc import Sequence

from grpo_api import tokens

LEAST_KEY = 16
"""Bytes that a key must have."""


class Tokens:
    """Makes them. Without a key there are none, and pods don't ask for any."""

    def __init__(self, keys: Sequence[bytes] = ()) -> None:
        """The last of the keys is that of new attempts; those before it are of attempts that still run."""
        self.keys = keys

    def digest(self, uid: str, attempt: int) -> str:
        """Return the digest by which the pods of an attempt recognise their token; empty without a key."""
        return tokens.digest(_token(self.keys[-1], uid, attempt)) if self.keys else ""

    def headers(self, uid: str, attempt: int) -> dict[str, str]:
        """What a request to the attempt's pods must carry."""
        made = [_token(key, uid, attempt) for key in reversed(self.keys)][: tokens.MOST]
        return {tokens.HEADER: ",".join(made)} if made else {}


def _token(key: bytes, uid: str, attempt: int) -> str:
    return hmac.new(key, f"{uid}/{attempt}".encode(), hashlib.sha256).hexdigest()

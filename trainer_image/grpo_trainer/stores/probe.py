"""Whether a store keeps what its API promises: a write under a condition that doesn't hold is refused.

Some that speak S3 ignore conditions. On such a store two attempts that live at once could both commit.
"""

import uuid
from typing import TYPE_CHECKING

from ..errors import BadInput

if TYPE_CHECKING:
    from .client import Store


def require_conditions(store: "Store", folder: str) -> None:
    """Try both conditions that the head stands on, with an object of this moment in a folder.

    Raises:
        BadInput: the store takes If-None-Match twice, or an If-Match that doesn't match.
        StoreFailed: as Store.get.
    """
    key = f"{folder}/probe-{uuid.uuid4().hex}"
    try:
        store.put_if(key, b"first", None)
        if store.put_if(key, b"second", None):
            raise _useless(store, "If-None-Match: *", "twice for one object")
        found = store.get(key)
        stale = found[1] if found else None
        store.put_if(key, b"third", stale)
        if store.put_if(key, b"fourth", stale):
            raise _useless(store, "If-Match", "with the ETag of an earlier version")
    finally:
        store.delete([key])


def _useless(store: "Store", condition: str, how: str) -> BaseException:
    return BadInput(
        f"{store.url}: this store took a write with {condition} {how}, so it doesn't keep conditions and can't tell "
        "the newest attempt from an old one. Use a store with conditional writes (docs/object-stores.md), or a volume"
    )

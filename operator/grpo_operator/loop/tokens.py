"""Makes the tokens that authorize reading a pod's HTTP pages, and keeps their keys in a Secret.

A token is an HMAC of job and attempt, by a key that only the operators read. So nothing is stored
per attempt. The user's code in the pods learns its own attempt's token, but can make no other.

The first operator that leads creates the Secret, and all later ones read it. A chart would create
another key with every rendering that can't read the cluster.
"""

import base64
import hashlib
import hmac
import logging
import secrets
from collections.abc import Sequence

from grpo_api.text import contract
from grpo_kube.client import Cluster
from grpo_kube.objects.errors import AlreadyExists, ClusterError, Denied, NotFound
from grpo_kube.objects.json_reader import JsonObject, Unreadable
from grpo_kube.objects.resources import SECRETS, Object, ObjectKey
from grpo_kube.pacing import Backoff

from ..records.names import LABEL_MANAGED_BY, MANAGER

log = logging.getLogger(__name__)

FIRST = "1"
"""Name of the key that an operator makes."""
KEY_BYTES = 32


async def load(cluster: Cluster, secret: ObjectKey) -> list[bytes]:
    """The keys by their names' order; none where the Secret can't be had, which costs secrecy and
    no job."""
    backoff = Backoff()
    while True:
        try:
            return read(await _found_or_made(cluster, secret))
        # Jobs must run without the Secret too: only what their pods show of training data needs the
        # token.
        except (Denied, NotFound, Unreadable) as error:
            log.warning(
                "Secret %s: %s; pods of new attempts answer without a token, and show no samples",
                secret,
                error,
            )
            return []
        except ClusterError as error:
            log.info("Secret %s: %s; trying again", secret, error)
            await backoff.wait()


def read(item: Object) -> list[bytes]:
    """Return the keys of a Secret, by the order of their names.

    Raises:
        Unreadable: a key is not base64 or is too short, or the Secret has no keys.
    """
    found = []
    for name, text in sorted(JsonObject(item).string_map("data").items()):
        try:
            key = base64.b64decode(text, validate=True)
        except ValueError:  # what is no ASCII, too
            key = b""
        if len(key) < LEAST_KEY:
            raise Unreadable(f"data[{name}]: a key has {LEAST_KEY} bytes at least")
        found.append(key)
    if not found:
        raise Unreadable("data: there is no key")
    return found


async def _found_or_made(cluster: Cluster, secret: ObjectKey) -> Object:
    try:
        return await cluster.get(SECRETS, *secret)
    except NotFound:
        return await _made(cluster, secret)


async def _made(cluster: Cluster, secret: ObjectKey) -> Object:
    """A new Secret, or that of an operator which was first."""
    try:
        made = await cluster.create(SECRETS, secret.namespace, _body(secret))
    except AlreadyExists:
        return await cluster.get(SECRETS, *secret)
    log.info("Secret %s was made: its key opens what pods of jobs say", secret)
    return made


def _body(secret: ObjectKey) -> Object:
    key = base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode()
    metadata = {
        "name": secret.name,
        "namespace": secret.namespace,
        "labels": {LABEL_MANAGED_BY: MANAGER},
    }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata,
        "type": "Opaque",
        "data": {FIRST: key},
    }


LEAST_KEY = 16
"""Bytes that a key must have."""


class Tokens:
    """Makes them. Without a key there are none, and pods don't ask for any."""

    def __init__(self, keys: Sequence[bytes] = ()) -> None:
        """The last of the keys is that of new attempts; those before it are of attempts that still
        run."""
        self.keys = keys

    def digest(self, uid: str, attempt: int) -> str:
        """Return the digest by which the pods of an attempt recognise their token; empty without a
        key."""
        return contract.digest(_token(self.keys[-1], uid, attempt)) if self.keys else ""

    def headers(self, uid: str, attempt: int) -> dict[str, str]:
        """What a request to the attempt's pods must carry."""
        made = [_token(key, uid, attempt) for key in reversed(self.keys)][: contract.MOST]
        return {contract.HEADER: ",".join(made)} if made else {}


def _token(key: bytes, uid: str, attempt: int) -> str:
    return hmac.new(key, f"{uid}/{attempt}".encode(), hashlib.sha256).hexdigest()

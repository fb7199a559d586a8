"""`spec.checkpoint.store`: a place on an object store, and who may write there.

Checkpoints on a store need no volume that several nodes can mount, and outlive the cluster.
"""

from typing import Annotated

from pydantic import Field

from .base import Model, Rule
from .references import LocalObjectReference

StoreURL = Annotated[
    str,
    Field(
        min_length=6,
        max_length=512,
        pattern=r"^(s3|gs|az)://[a-z0-9][-._a-z0-9]*(/[a-zA-Z0-9_][-._=a-zA-Z0-9]*)*$",
    ),
]
"""A bucket and a folder in it. No part begins with a dot, so none leads upwards."""

Endpoint = Annotated[
    str,
    Field(
        max_length=512,
        pattern=r"^https?://(\[[0-9a-fA-F:.]+\]|[a-zA-Z0-9][-._a-zA-Z0-9]*)(:[0-9]{1,5})?(/[-._/a-zA-Z0-9]*)?$",
    ),
]


def _s3_settings_have_an_s3_url(store: "ObjectStoreSpec") -> bool:
    if store.url.startswith("s3://"):
        return True
    return not (store.endpoint or store.region)


def _azure_url_names_a_container(store: "ObjectStoreSpec") -> bool:
    # az://account/container has three slashes.
    return not store.url.startswith("az://") or store.url.count("/") >= 3


class ObjectStoreSpec(Model):
    """A folder on an object store. Every run has a folder of its own in it, `<job>-<uid>`."""

    RULES = (
        Rule(
            "self.url.startsWith('s3://') || (!has(self.endpoint) && !has(self.region))",
            "endpoint and region belong to s3:// stores; remove them",
            _s3_settings_have_an_s3_url,
        ),
        Rule(
            "!self.url.startsWith('az://') || self.url.matches('^az://[^/]+/[^/]+')",
            "an az:// URL names account and container: az://account/container/folder",
            _azure_url_names_a_container,
        ),
    )

    url: StoreURL
    """Bucket and folder: `s3://bucket/folder`, `gs://bucket/folder` or `az://account/container/folder`."""
    endpoint: Endpoint | None = None
    """URL of the service, for s3:// stores that are not Amazon's. Unset: Amazon's."""
    region: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[-a-zA-Z0-9]+$")] | None = None
    """Region of the bucket, for s3://. Unset: us-east-1."""
    credentials_secret_ref: LocalObjectReference | None = None
    """Secret whose keys are the client's settings, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY
    (docs/object-stores.md). Unset: the pods' own identity, by podTemplate.spec.serviceAccountName."""

"""The strings of the spec that name something: Kubernetes objects, labels, hub repositories, folders.

Patterns are read by two engines, Go's RE2 in the API server and Rust's in pydantic. Where they differ (\\s, \\w and \\d
are ASCII in one and Unicode in the other) the characters are written out.
"""

import re
from typing import Annotated, Literal

from pydantic import Field
from pydantic.alias_generators import to_snake

from .base import Rule

_DNS_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_LABEL_KEY = r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[a-zA-Z0-9]([-._a-zA-Z0-9]{0,61}[a-zA-Z0-9])?$"

Name = Annotated[str, Field(min_length=1, max_length=253, pattern=rf"^{_DNS_LABEL}(\.{_DNS_LABEL})*$")]
"""The name of a Kubernetes object."""

DNSLabel = Annotated[str, Field(min_length=1, max_length=63, pattern=rf"^{_DNS_LABEL}$")]
"""The name of a container or of a pod's volume."""

LabelKey = Annotated[str, Field(min_length=1, max_length=317, pattern=_LABEL_KEY)]
LabelValue = Annotated[str, Field(max_length=63, pattern=r"^([a-zA-Z0-9]([-._a-zA-Z0-9]*[a-zA-Z0-9])?)?$")]
Labels = Annotated[dict[LabelKey, LabelValue], Field(max_length=32)]
Annotations = Annotated[dict[LabelKey, Annotated[str, Field(max_length=4096)]], Field(max_length=32)]

Repository = Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^\x00-\x20\x7f]+$")]
"""A Hugging Face hub id such as `openai/gsm8k`, or an absolute path in the pods."""

Revision = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[-._/a-zA-Z0-9]+$")]
"""A commit, tag or branch on the hub."""

Image = Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[\x21-\x7e]+$")]
"""A container image by its name, with a tag or a digest."""

PullPolicy = Literal["Always", "IfNotPresent", "Never"]

Path = Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^/[^\x00-\x1f\x7f:]*$")]
"""An absolute path inside the pods."""

SubPath = Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^/\x00-\x1f\x7f][^\x00-\x1f\x7f]*$")]
"""A path relative to a volume; `stays_inside` keeps it there."""


_UPWARDS = r"(^|/)\.\.(/|$)"
"""A part `..` anywhere in a path."""


def stays_inside(path: str | None) -> bool:
    """Whether a path has no part that leads upwards, so that a relative one stays below its volume."""
    return path is None or not re.search(_UPWARDS, path)


def inside_rule(field: str, optional: bool = False) -> Rule:
    """That the path in a field, by its name in the CRD, stays inside its volume."""
    cel = f"!self.{field}.matches(r'{_UPWARDS}')"
    if optional:
        cel = f"!has(self.{field}) || {cel}"
    return Rule(
        cel,
        f"{field} must stay inside the volume: remove `..`",
        lambda owner: stays_inside(getattr(owner, to_snake(field))),
    )


SUB_PATH_RULE = inside_rule("subPath", optional=True)
"""For every model with a `subPath`."""

"""Records by which spec an attempt runs.

A user who changes how a job runs suspends it for that. An operator that did not look meanwhile sees
only that the spec is another than the one that the attempt's Job was made from.
"""

import hashlib
import json

from grpo_api.job import GRPOJobSpec
from grpo_api.spec.immutability import WHILE_STOPPED


def has_changed(version: str, spec: GRPOJobSpec) -> bool:
    """True if one of those fields differs from that version; False without one, which is a former
    operator's."""
    # Former operators put the generation and a point before the hash.
    digest = version.rpartition(".")[2]
    return bool(digest) and digest != spec_version(spec)


def spec_version(spec: GRPOJobSpec) -> str:
    """Return a hash of the fields that change only while no gang runs."""
    fields = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    fields_changed_stopped = {name: fields.get(name) for name in WHILE_STOPPED}
    # The queue's name may be that of a label, which changes at any time.
    fields_changed_stopped["placement"] = {**fields.get("placement", {}), "queueName": None}
    fields_changed_stopped["model.cache"] = fields.get("model", {}).get("cache")
    text = json.dumps(fields_changed_stopped, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]

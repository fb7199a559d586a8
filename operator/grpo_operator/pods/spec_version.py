"""Records by which spec an attempt runs.

A user who changes how a job runs suspends it for that. An operator that did not look meanwhile sees
only that the spec is another than the one that the attempt's Job was made from.
"""

import hashlib
import json

from grpo_api.job import GRPOJobSpec
from grpo_api.spec.immutability import WHILE_STOPPED

CHANGES_OF_A_SUSPENSION = 2
"""One change of the spec suspends the job, and another resumes it."""


def spec_version(generation: int, spec: GRPOJobSpec) -> str:
    """`3.` for generation 3, and a hash of the fields that change only while no gang runs."""
    return f"{generation}.{_digest(spec)}"


def has_changed(version: str, generation: int, spec: GRPOJobSpec) -> bool:
    """True if one of those fields has changed since that version; False without one, which is a
    former operator's."""
    # After fewer changes than a suspension takes, the hash is not compared: another version of the
    # operator may know other fields and defaults.
    made_from, _, digest = version.partition(".")
    too_recent = {str(generation - changes) for changes in range(CHANGES_OF_A_SUSPENSION)}
    if not digest or made_from in too_recent:
        return False
    return digest != _digest(spec)


def _digest(spec: GRPOJobSpec) -> str:
    fields = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    fields_changed_stopped = {name: fields.get(name) for name in WHILE_STOPPED}
    # The queue's name may be that of a label, which changes at any time.
    fields_changed_stopped["placement"] = {**fields.get("placement", {}), "queueName": None}
    fields_changed_stopped["model.cache"] = fields.get("model", {}).get("cache")
    text = json.dumps(fields_changed_stopped, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]

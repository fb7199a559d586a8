"""Changes one field of a spec by its path: what `--what-if` and the fixes do.

The changed spec is parsed again, so a suggested change is planned exactly as if the user had written it.
"""

from typing import Any

from grpo_api.job import GRPOJobSpec, SpecInvalid, parse_spec


def with_value(spec: GRPOJobSpec, path: str, value: Any) -> GRPOJobSpec:
    """The spec with the field at `path`, such as `spec.training.numGenerations`, set; None removes it.

    Raises:
        SpecInvalid: there is no such field, or the value is not allowed there.
    """
    document: dict[str, Any] = spec.model_dump(by_alias=True, exclude_unset=True)
    *parents, last = path.removeprefix("spec.").split(".")
    section = document
    for name in parents:
        section = section.setdefault(name, {})
        if not isinstance(section, dict):
            raise SpecInvalid([f"{path}: {name} is {section!r:.80}, which has no fields to set"])
    if value is None:
        section.pop(last, None)
    else:
        section[last] = value
    return parse_spec(document)

"""ResourceQuotas as the API server describes them, and which of them count a gang's pods."""

from dataclasses import dataclass

from ..untyped import Part
from .resources import Amounts, amounts


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaFacts:
    """A ResourceQuota: what it allows, what is used, and which pods it counts."""

    namespace: str
    name: str
    hard: Amounts
    used: Amounts
    scopes: tuple[tuple[str, str, tuple[str, ...]], ...] = ()
    """Scope, operator and values; a pod is counted that meets all."""


def quota_facts(item: object) -> QuotaFacts:
    """The facts of a ResourceQuota object.

    Raises:
        Unreadable: a field has a type that it can't have.
    """
    whole = Part(item)
    meta, spec, status = whole.part("metadata"), whole.part("spec"), whole.part("status")
    plain = tuple((name, "Exists", ()) for name in spec.words("scopes"))
    chosen = tuple(
        (one.text("scopeName"), one.text("operator"), tuple(one.words("values")))
        for one in spec.part("scopeSelector").parts("matchExpressions")
    )
    return QuotaFacts(
        namespace=meta.required("namespace"),
        name=meta.required("name"),
        hard=amounts(status.part("hard")),  # what is in force; spec.hard may be newer
        used=amounts(status.part("used")),
        scopes=plain + chosen,
    )


def counts(quota: QuotaFacts, priority_class: str) -> bool:
    """True if the quota counts a gang's pods, whose PriorityClass is this (empty: none)."""
    return all(_meets(name, operator, values, priority_class) for name, operator, values in quota.scopes)


def _meets(scope: str, operator: str, values: tuple[str, ...], priority_class: str) -> bool:
    """Our pods request cores, so they are no best effort, and have no deadline of their own."""
    # the fourth operator of the API is DoesNotExist
    if scope == "PriorityClass":
        there = bool(priority_class)
        answers = {"In": priority_class in values, "NotIn": priority_class not in values, "Exists": there}
        return answers.get(operator, not there)
    return scope in ("NotTerminating", "NotBestEffort")

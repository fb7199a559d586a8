"""The rule for changes of a spec, which the API server evaluates once an attempt was committed.

It knows three kinds of fields. Some may change at any time. Fields that say how and where pods run
may change only while no gang runs: while the job is suspended or has failed. What is trained never
changes, since that would be another run that continues from this run's checkpoints.

The API server evaluates the rule at status writes, too, and there are thousands of them. So there
is one rule instead of one per field. It ends at once when the status differs, because such a write
leaves the spec as it was. To compare two specs takes 6 ms.
"""

from collections.abc import Iterable, Mapping

from ..text.base import Model, Rule
from .model import ModelSpec
from .rewards import MAX_REWARDS, HTTPReward, RewardSpec

ALWAYS = (
    "suspend",
    "retry",
    "restarts",
    "preflight",
    "jobClassName",
    "tracking",
    "samples",
    "activeDeadlineSeconds",
    "ttlSecondsAfterFinished",
)
"""Fields of the spec that may change at any time."""

NEVER = ("managedBy",)
"""Fields of the spec that are fixed when the job is created: two controllers must never run the
same job."""

WHILE_STOPPED = (
    "image",
    "imagePullPolicy",
    "command",
    "env",
    "envFrom",
    "resources",
    "volumeMounts",
    "sharedMemory",
    "podTemplate",
    "placement",
    "generation",
    "guard",
    "export",
    "rewards",
)
"""Fields of the spec that may change while no gang runs. Of placement not the accelerator: CPUs and
GPUs compute differently. Of generation not what changes the completions (SAMPLED). Of rewards only
how a service is reached (HTTPReward.REACHED_BY) and how much of it may fail
(RewardSpec.JUDGED_BY). So may `model.cache`, which only says where files are kept."""

SAMPLED = ("stop", "kwargs")
"""Fields of generation that are part of what is trained."""

STARTED = "has(oldSelf.status) && has(oldSelf.status.attempt) && oldSelf.status.attempt > 0"
"""CEL: an attempt has been committed. The API server restores the status before it judges a change
of the spec, so `status: null` doesn't get round it; a new object has no oldSelf and is not judged.
"""

_WRITES_STATUS = "!has(self.status) || self.status != oldSelf.status"
"""CEL: the request is a write of the status, which can't change the spec. One of the spec can't
change the status."""

_STOPPED = (
    "oldSelf.spec.suspend || (has(oldSelf.status.conditions) && "
    "oldSelf.status.conditions.exists(c, c.type == 'Failed' && c.status == 'True'))"
)


def immutability(spec: type[Model]) -> tuple[Rule, ...]:
    """The rules, for the fields of that spec."""
    same = {
        name: _unchanged_rule(f"spec.{name}", optional)
        for name, optional in _optional(spec).items()
    }
    frozen = {
        name: cel for name, cel in same.items() if name not in (*ALWAYS, *NEVER, *WHILE_STOPPED)
    }
    frozen |= {
        "placement.accelerator": _unchanged_rule("spec.placement.accelerator"),
        "rewards": _same_meaning(),
    }
    frozen |= {
        f"generation.{name}": _unchanged_rule(f"spec.generation.{name}", optional=True)
        for name in SAMPLED
    }
    frozen |= {"model": _same_fields(ModelSpec, "spec.model", ("cache",))}
    stopped = {name: same[name] for name in WHILE_STOPPED} | {
        "model.cache": _unchanged_rule("spec.model.cache", optional=True)
    }
    recreate = "can't change: delete the job and create a new one"
    return (
        *(Rule(same[name], recreate, field_path=f".spec.{name}") for name in NEVER),
        Rule(
            f"!({STARTED}) || {_WRITES_STATUS} || self.spec == oldSelf.spec || "
            f"({_conjunction(frozen)} && ({_STOPPED} || ({_conjunction(stopped)})))",
            "what is trained can't change once the job has started, and how it runs only while it "
            "is suspended or has failed",
            field_path=".spec",
            message_cel=f"{_conjunction(frozen)} ? "
            "'can change only while the job is suspended or has failed:' + "
            f"{_changed_paths(stopped)} + '; set spec.suspend to true first' : "
            "'can\\'t change once the job has started, since it is what is trained:' + "
            f"{_changed_paths(frozen)} + "
            "'; delete the job and create a new one'",
        ),
    )


def _optional(model: type[Model]) -> dict[str, bool]:
    """The fields as users write them, and whether each may be absent."""
    optional = {}
    for name, field in model.model_fields.items():
        optional[field.alias or name] = field.default is None
    return optional


def _in_parentheses(cel: str) -> str:
    return f"({cel})"


def _unchanged_rule(path: str, optional: bool = False) -> str:
    """CEL: the field is as it was."""
    new, old = f"self.{path}", f"oldSelf.{path}"
    if optional:
        return f"has({new}) == has({old}) && (!has({new}) || {new} == {old})"
    return f"{new} == {old}"


def _same_fields(model: type[Model], path: str, left_out: Iterable[str]) -> str:
    """CEL: the fields below the path are as they were, but for some."""
    fields = {name: optional for name, optional in _optional(model).items() if name not in left_out}
    return " && ".join(
        _in_parentheses(_unchanged_rule(f"{path}.{name}", optional))
        for name, optional in fields.items()
    )


def _same_meaning() -> str:
    """CEL: the rewards score as they did. Lists have no index in CEL's macros, so the positions are
    spelled out."""
    reward_path, service_path = "spec.rewards[i]", "spec.rewards[i].http"
    kinds = _same_fields(RewardSpec, reward_path, ("http", *RewardSpec.JUDGED_BY))
    http = _same_fields(HTTPReward, service_path, HTTPReward.REACHED_BY)
    return (
        "self.spec.rewards == oldSelf.spec.rewards || (self.spec.rewards.size() == "
        "oldSelf.spec.rewards.size() && "
        f"{list(range(MAX_REWARDS))}.all(i, i >= self.spec.rewards.size() || ({kinds} && "
        f"has(self.{service_path}) == has(oldSelf.{service_path}) && "
        f"(!has(self.{service_path}) || ({http})))))"
    )


def _conjunction(parts: Mapping[str, str]) -> str:
    """CEL: they all hold."""
    return " && ".join(map(_in_parentheses, parts.values()))


def _changed_paths(parts: Mapping[str, str]) -> str:
    """CEL: the paths of those that are not as they were."""
    return " + ".join(f"(({same}) ? '' : ' spec.{path}')" for path, same in parts.items())

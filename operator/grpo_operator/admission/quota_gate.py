"""What keeps a gang's pods from being created although GPUs are free: quotas, and names that
nothing answers to.

A gang that is admitted without its pods being allowed holds GPUs for nothing. So what the
namespace's ResourceQuotas leave, and whether the PriorityClass and the ServiceAccount exist, is
checked before a place is given. What can't be seen is unknown and refuses no job; a gang whose pods
don't appear is released all the same.
"""

from grpo_api.job import GRPOJobSpec
from grpo_api.plan.plan import ExecutionPlan

from ..pods.roles import roles
from ..records.reasons import Reason
from ..records.records import GRPOJobRecord
from .inventory import Amounts, thousandths
from .node_fit import pod_amounts, pod_limits
from .snapshot import QuotaFacts, Snapshot, is_in_scope
from .spec_checks import Problem

PODS = ("pods", "count/pods")
JOBS = "count/jobs.batch"
REQUESTS, LIMITS = "requests.", "limits."
DEFAULT_ACCOUNT = "default"


def needs(spec: GRPOJobSpec, plan: ExecutionPlan, wanted: str) -> float:
    """Return the amount of a quota's resource that all roles of a gang take."""
    return sum(_needs(role.spec, role.plan, wanted) for role in roles(spec, plan))


def _needs(spec: GRPOJobSpec, plan: ExecutionPlan, wanted: str) -> float:
    pods = plan.nodes
    if wanted in PODS:
        return float(pods)
    if wanted == JOBS:
        return 1.0
    if wanted.startswith(LIMITS):
        amounts = pod_limits(spec, plan)
        resource = wanted.removeprefix(LIMITS)
    else:
        amounts = pod_amounts(spec, plan)
        resource = wanted.removeprefix(REQUESTS)
    return pods * amounts.get(resource, 0.0)


def missing_object(snapshot: Snapshot, job: GRPOJobRecord) -> Problem | None:
    """The PriorityClass or ServiceAccount that the job names and the cluster lacks."""
    spec = job.valid_spec
    priority_class = spec.placement.priority_class_name
    priorities = snapshot.priorities
    # The kind can't be listed, so nothing is known: an unknown object refuses no job.
    if priority_class and priorities and priority_class not in priorities:
        message = (
            f"spec.placement.priorityClassName: no PriorityClass {priority_class} exists; the "
            "pods wait until somebody creates it"
        )
        return Reason.PRIORITY_CLASS_NOT_FOUND, message
    namespace = job.key.namespace
    account = spec.pod_template.spec.service_account_name or DEFAULT_ACCOUNT
    accounts = snapshot.service_accounts.get(namespace)
    if accounts and account not in accounts:
        message = (
            f"spec.podTemplate.spec.serviceAccountName: namespace {namespace} has no "
            f"ServiceAccount {account}; the pods wait until somebody creates it"
        )
        return Reason.SERVICE_ACCOUNT_NOT_FOUND, message
    return None


class Allowance:
    """The rest of each ResourceQuota during one admission cycle."""

    def __init__(self, snapshot: Snapshot) -> None:
        """Start with what the snapshot's quotas leave."""
        self._snapshot = snapshot
        self._use: dict[tuple[str, str], Amounts] = {}
        """What gangs take that no quota counts yet, by namespace and name of the quota."""

    def problem(self, job: GRPOJobRecord, plan: ExecutionPlan) -> Problem | None:
        """Why the gang's pods would not be created."""
        return missing_object(self._snapshot, job) or self._exceeded_quota(job, plan)

    def take(self, job: GRPOJobRecord, plan: ExecutionPlan) -> None:
        """Counts a gang that has been admitted and whose pods no quota counts yet."""
        # quota.used does not show the gang's pods yet, and the jobs behind it must not be given the
        # same room.
        for quota in self._quotas(job):
            use = self._use.setdefault((quota.namespace, quota.name), {})
            for name in quota.hard:
                before = use.get(name, 0.0)
                use[name] = before + needs(job.valid_spec, plan, name)

    def _exceeded_quota(self, job: GRPOJobRecord, plan: ExecutionPlan) -> Problem | None:
        for quota in self._quotas(job):
            uncounted = self._use.get((quota.namespace, quota.name), {})
            for name, hard in sorted(quota.hard.items()):
                wanted = needs(job.valid_spec, plan, name)
                used = quota.used.get(name, 0.0) + uncounted.get(name, 0.0)
                if wanted and thousandths(used + wanted) > thousandths(hard):
                    allowance = f"allows {_quantity(hard)} {name}; {_quantity(used)} are used"
                    message = (
                        f"ResourceQuota {quota.name} of namespace {quota.namespace} {allowance}, "
                        f"and the gang needs {_quantity(wanted)}"
                    )
                    return Reason.WAITING_FOR_QUOTA, message
        return None

    def _quotas(self, job: GRPOJobRecord) -> list[QuotaFacts]:
        placement = job.valid_spec.placement
        priority_class = placement.priority_class_name or self._snapshot.default_priority
        quotas = self._snapshot.quotas.get(job.key.namespace, ())
        return [quota for quota in quotas if is_in_scope(quota, priority_class)]


def _quantity(amount: float) -> str:
    """A quantity as people write it: whole gibibytes where it is that large, else plain."""
    gibibytes = amount / 2**30
    return f"{gibibytes:g}Gi" if gibibytes >= 1 else f"{amount:g}"

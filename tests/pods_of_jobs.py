"""The pod of every Job that is made for a GRPOJob, by us and by our commands."""

from typing import Any

from grpo_cli.cluster.delivery import export_job
from grpo_cli.commands.prefetch import prefetch_job
from grpo_operator.pods.manifests import Attempt, engines_job, indexed_job
from grpo_operator.pods.pod_spec import PodDefaults


def pods_of_jobs(attempt: Attempt, defaults: PodDefaults) -> dict[str, dict[str, Any]]:
    """The pods' specs by what they are for; engines only where the attempt has some."""
    jobs = {
        "gang": indexed_job(attempt, defaults),
        "engines": engines_job(attempt, defaults),
        "prefetch": prefetch_job(attempt.key._asdict(), attempt.spec, defaults),
        "export": export_job(attempt, defaults),
    }
    return {name: job["spec"]["template"]["spec"] for name, job in jobs.items() if job}

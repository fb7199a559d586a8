"""The Python client: GRPOJobs of a cluster, or of this machine's processes, as objects.

from grpo.client import GRPOClient, LocalProcess

client = GRPOClient(LocalProcess(volumes={"data": "./data"}))
name = client.train(job)
client.wait_for_job_status(name)
"""

from grpo_cli.inputs.manifest import load_config_maps, load_jobs
from grpo_cli.show.errors import CliError as GRPOError

from .client import GRPOClient, JobFailed
from .job import Event, Job
from .kubernetes import Kubernetes
from .local_process import LocalProcess

__all__ = [
    "Event",
    "GRPOClient",
    "GRPOError",
    "Job",
    "JobFailed",
    "Kubernetes",
    "LocalProcess",
    "load_config_maps",
    "load_jobs",
]

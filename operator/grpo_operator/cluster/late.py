"""Pods that a watch has not brought yet.

After an outage the watch of Jobs may be back before that of pods, and then a Job has ended whose pods are not known. No
pod, no cause, and an end that counts would pass for a disruption. So the pods are asked for before that is judged.
"""

from ..names import attempt_selector
from ..observe import Observation
from .api import PODS, Cluster, Selection
from .cache import Caches


async def bring_pods(cluster: Cluster, caches: Caches, seen: Observation) -> bool:
    """Takes the current attempt's pods in, as they are now, if its Job has ended and none is known; whether it did.

    Raises:
        ClusterError: the API server did not say; nobody knows then what ended the Job.
    """
    job = seen.job
    if not job.active or seen.child is None or not seen.child.ended or seen.pods:
        return False
    own = attempt_selector(job.uid, job.status.attempt)
    async for items, _ in cluster.pages(Selection(PODS, job.key.namespace, own)):
        for item in items:
            caches.pods.put(item)
    return True

"""Pods that a watch has not brought yet.

After an outage the watch of Jobs may be back before that of pods, and then a Job has ended whose pods are not known. No
pod, no cause, and an end that counts would pass for a disruption. So the pods are asked for before that is judged.
"""

from ..names import attempt_selector
from ..observe import Observation
from .api import PODS, Cluster, Selection
from .cache import Caches


async def bring_pods(cluster: Cluster, caches: Caches, seen: Observation) -> bool:
    """List the current attempt's pods into the cache if its Job has ended and no pod is known.

    Return True if pods were listed.

    Raises:
        ClusterError: the API server did not answer, so the cause of the Job's end is not known.
    """
    job = seen.job
    if not job.active or seen.child is None or not seen.child.ended or seen.pods:
        return False
    # Labels are hints that anybody can set: of what is listed, observe counts only the pods of the attempt's own Job.
    own = attempt_selector(job.uid, job.status.attempt)
    async for items, _ in cluster.pages(Selection(PODS, job.key.namespace, own)):
        for item in items:
            caches.pods.put(item)
    return True

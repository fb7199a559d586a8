"""Names the leader in the object that the chart's policy reads."""

from grpo_api.text.contract import API_VERSION, LEADER_KIND
from grpo_kube.client import HttpCluster
from grpo_kube.leader_election import Election
from grpo_kube.objects.errors import NotFound
from grpo_kube.objects.json_reader import JsonObject
from grpo_kube.objects.resources import Object

from ..records.names import LEADERS


async def tell_fence(cluster: HttpCluster, election: Election) -> None:
    """Puts the leader's name where the chart's policy looks.

    One that led before and is late meets another resourceVersion, or is written over by the one
    that leads, which begins only then.

    Raises:
        ClusterError: it was not taken; somebody else may have written.
    """
    metadata: Object = {"name": election.lease.name, "namespace": election.lease.namespace}
    body: Object = {
        "apiVersion": API_VERSION,
        "kind": LEADER_KIND,
        "spec": {"holderIdentity": election.identity},
    }
    try:
        leader = await cluster.get(LEADERS, *election.lease)
    except NotFound:
        await cluster.create(LEADERS, election.lease.namespace, body | {"metadata": metadata})
        return
    version = JsonObject(leader).part("metadata").text("resourceVersion")
    body["metadata"] = metadata | {"resourceVersion": version}
    await cluster.replace(LEADERS, *election.lease, body)

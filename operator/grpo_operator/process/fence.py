"""Writes the leader into OperatorLeader, by which the chart's policy refuses former ones."""

from grpo_api.text.contract import API_VERSION, LEADER_KIND
from grpo_kube.client import Client
from grpo_kube.leader_election import Election
from grpo_kube.objects.errors import NotFound
from grpo_kube.objects.json_reader import JsonObject
from grpo_kube.objects.resources import Object

from ..records.names import LEADERS


async def record_leader(cluster: Client, election: Election) -> None:
    """Write this process's identity into the OperatorLeader object.

    A delayed write of a former leader fails on the resourceVersion, or the new leader overwrites
    it: a leader begins only after its own write.

    Raises:
        ClusterError: the API server refused the write, or another process wrote first.
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

"""`python -m harness.nodes.policy_enforcer FOLDER`: holds the nodes' pods to the cluster's
NetworkPolicies.

No policy engine can be built from the registries, and a policy that nobody enforces would be shown
by no test. So this process asks the API server twice a second, and has nftables filter what each
node forwards to its pods; the CNI plugin routes between pods of the same node, so that this is
everything.
"""

import sys
import time
from pathlib import Path

from ..client import ApiClient
from ..controlplane import ControlPlane
from ..programs.processes import ClusterError, Processes, run
from ..settings import load_settings
from .isolation import World, ruleset

ROLE = "network-policies"
SECONDS = 0.5


def start(processes: Processes, repository: Path) -> None:
    """Start it for the cluster of these processes."""
    processes.start(ROLE, [sys.executable, "-m", __name__, processes.directory], repository)


def _world(client: ApiClient) -> World:
    """What is to be enforced; pods are asked for only where there is a policy."""
    policies = client.get("/apis/networking.k8s.io/v1/networkpolicies?resourceVersion=0")["items"]
    if not policies:
        return World([], [], [])
    pods, namespaces = (
        client.get(f"/api/v1/{kind}?resourceVersion=0")["items"] for kind in ("pods", "namespaces")
    )
    return World(policies, pods, namespaces)


def _enforce(processes: Processes, nodes: int, rules: str) -> None:
    for index in range(nodes):
        for pid in processes.find(f"node-{index}")[:1]:  # all of them are in its network
            run("nsenter", "--target", pid, "--net", "nft", "--file", "-", stdin=rules)


def main() -> None:
    """Enforces until it is killed; an API server that is away, or a node that ends, is tried
    again."""
    directory = Path(sys.argv[1])
    settings, processes = load_settings(directory), Processes(directory)
    client = ControlPlane(processes, settings.control_plane).client()
    enforced = ruleset(World([], [], []))
    while True:
        try:
            rules = ruleset(_world(client))
            if rules != enforced:
                _enforce(processes, settings.nodes, rules)
                enforced = rules
        except (OSError, ClusterError) as error:
            print(error, flush=True)
        time.sleep(SECONDS)


if __name__ == "__main__":
    main()

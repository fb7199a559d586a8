"""What NetworkPolicies let through to pods, as a ruleset of nftables. Pure.

Only ingress, for nothing here restricts what pods may ask for. A pod that some policy selects takes
what one of them allows and nothing else; all others take everything (networking.k8s.io/v1,
NetworkPolicySpec).
"""

import ipaddress
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]
TABLE = "network-policies"
ENDED = ("Succeeded", "Failed")


@dataclass(frozen=True)
class World:
    """The policies, and the objects that their selectors look at."""

    policies: list[Object]
    pods: list[Object]
    namespaces: list[Object]

    @property
    def reachable(self) -> Iterator[Object]:
        """Pods with an address of their own."""
        for pod in self.pods:
            status = pod.get("status", {})
            if (
                status.get("podIP")
                and status.get("phase") not in ENDED
                and not pod["spec"].get("hostNetwork")
            ):
                yield pod


def ruleset(world: World) -> str:
    """Rules for `nft --file`, which replace the earlier rules in one transaction."""
    rules = [rule for pod in world.reachable for rule in _pod(world, pod)]
    chain = (
        "type filter hook forward priority filter; policy accept; ct state "
        "established,related accept"
    )
    body = "\n".join(f"    {rule}" for rule in rules)
    table = f"table inet {TABLE}"
    return (
        f"{table} {{}}\ndelete {table}\n{table} {{\n  chain forward {{\n    {chain}\n{body}\n  "
        f"}}\n}}\n"
    )


def _pod(world: World, pod: Object) -> Iterator[str]:
    mine = [one for one in world.policies if _isolates(one, pod)]
    if not mine:
        return
    family = _family(pod["status"]["podIP"])
    to = f"{family} daddr {pod['status']['podIP']}"
    for policy in mine:
        for rule in policy["spec"].get("ingress") or []:
            for source in _sources(world, policy["metadata"]["namespace"], rule, family):
                yield from (f"{to} {source}{port}accept" for port in _ports(rule, pod))
    yield f"{to} drop"


def _isolates(policy: Object, pod: Object) -> bool:
    spec = policy["spec"]
    same = policy["metadata"]["namespace"] == pod["metadata"]["namespace"]
    return (
        same
        and "Ingress" in spec.get("policyTypes", ["Ingress"])
        and matches(spec.get("podSelector"), pod)
    )


def _sources(world: World, namespace: str, rule: Object, family: str) -> Iterator[str]:
    """Who may come by this family of addresses, each as a part of a rule; empty: everybody."""
    if not rule.get("from"):
        yield ""
        return
    for peer in rule["from"]:
        if block := peer.get("ipBlock"):
            without = "".join(f"{family} saddr != {one} " for one in block.get("except", []))
            found = {block["cidr"]: without}
        else:
            found = dict.fromkeys(_addresses(world, namespace, peer), "")
        for address, without in found.items():
            if _family(address) == family:
                yield f"{family} saddr {address} {without}"


def _addresses(world: World, namespace: str, peer: Object) -> Iterator[str]:
    """The pods that a peer means: of its own namespace, where it says nothing else."""
    chosen = {namespace}
    if "namespaceSelector" in peer:
        chosen = {
            one["metadata"]["name"]
            for one in world.namespaces
            if matches(peer["namespaceSelector"], one)
        }
    for pod in world.reachable:
        if pod["metadata"]["namespace"] in chosen and matches(peer.get("podSelector"), pod):
            yield pod["status"]["podIP"]


def _ports(rule: Object, pod: Object) -> Iterator[str]:
    """What they may ask for, each as a part of a rule; empty: everything."""
    if not rule.get("ports"):
        yield ""
        return
    for one in rule["ports"]:
        protocol, port = one.get("protocol", "TCP").lower(), one.get("port")
        if isinstance(port, str):
            yield from (f"{protocol} dport {number} " for number in _named(pod, port, protocol))
        elif port is None:
            yield f"meta l4proto {protocol} "
        else:
            last = f"-{one['endPort']}" if "endPort" in one else ""
            yield f"{protocol} dport {port}{last} "


def _named(pod: Object, name: str, protocol: str) -> Iterable[int]:
    ports = (port for container in pod["spec"]["containers"] for port in container.get("ports", []))
    return (
        port["containerPort"]
        for port in ports
        if port.get("name") == name and port.get("protocol", "TCP").lower() == protocol
    )


def matches(selector: Mapping[str, Any] | None, item: Object) -> bool:
    """Whether a LabelSelector (meta/v1) selects an object; none, or an empty one, selects all."""
    labels = item["metadata"].get("labels") or {}
    wanted = (selector or {}).get("matchLabels") or {}
    return wanted.items() <= labels.items() and all(
        _expressed(one, labels) for one in (selector or {}).get("matchExpressions") or []
    )


def _expressed(one: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    key, values = one["key"], one.get("values", [])
    there = {
        "In": labels.get(key) in values,
        "NotIn": labels.get(key) not in values,
        "Exists": key in labels,
        "DoesNotExist": key not in labels,
    }
    return there[one["operator"]]


def _family(address: str) -> str:
    return "ip6" if ipaddress.ip_network(address, strict=False).version == 6 else "ip"

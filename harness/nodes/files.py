"""The configuration files of one node's daemons: containerd, pod network, kubelet, kube-proxy, and
its identity.

Written by the host side before the node's first process starts. Each setting that is not obvious
says what fails without it; all were found by experiment.
"""

import json
from pathlib import Path
from typing import Any

from ..controlplane import ControlPlane
from ..programs.build import Toolchain
from ..programs.prerequisites import cni_folder
from ..programs.processes import run
from ..settings import ClusterSettings
from . import cgroups
from .network import Addresses

PAUSE = "grpo.test/pause:1"
REGISTRIES = "registries"
"""Folder of a node with containerd's settings of each registry; read at every pull."""


def write_node_files(
    home: Path, index: int, settings: ClusterSettings, tools: Toolchain, plane: ControlPlane
) -> None:
    """Write all files of a node below its state folder `home`."""
    for part in ("kubelet", "containerd", "cni", "logs"):
        (home / part).mkdir(parents=True)
    addresses = Addresses(settings.slot)
    authority = plane.authority
    subject = f"/O=system:nodes/CN=system:node:{home.name}"
    authority.kubeconfig(home / "kubeconfig", plane.url, home.name, subject)
    authority.issue(
        f"{home.name}-serving", f"/CN={home.name}", f"IP:{addresses.node(index)},DNS:{home.name}"
    )
    (home / "containerd.toml").write_text(_containerd(home, tools.program("runc")))
    _write(home / "container.json", _container(tools.program("ctr"), settings.shown))
    _write(home / "cni" / "10-ptp.conflist", _pod_network(addresses.pod_subnet(index)))
    _write(home / "kubelet.json", _kubelet(home, index, settings, plane))
    _write(home / "proxy.json", _proxy(home, addresses))


def write_plain_registry(home: Path, address: str) -> None:
    """Let a node pull from the registry at host:port by plain HTTP."""
    folder = home / REGISTRIES / address
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hosts.toml").write_text(f'server = "http://{address}"\n')


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1))


def _containerd(home: Path, runc: Path) -> str:
    # restrict_oom_score_adj: some virtual machines forbid lowering oom_score_adj, and then no
    # sandbox starts
    return f"""version = 3
root = "{home}/containerd"
[grpc]
address = "{home}/containerd.sock"
[plugins.'io.containerd.internal.v1.opt']
path = "{home}/opt"
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = "{PAUSE}"
[plugins.'io.containerd.cri.v1.images'.registry]
config_path = "{home}/{REGISTRIES}"
[plugins.'io.containerd.cri.v1.runtime']
restrict_oom_score_adj = true
[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = ["{cni_folder()}"]
conf_dir = "{home}/cni"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
base_runtime_spec = "{home}/container.json"
options = {{ BinaryName = "{runc}" }}
"""


def _container(ctr: Path, shown: dict[str, str]) -> dict[str, Any]:
    """Return what every container starts from: containerd's default, with the host's folders that
    all may see."""
    spec: dict[str, Any] = json.loads(run(ctr, "oci", "spec"))
    for source, target in shown.items():
        mount = {
            "source": source,
            "destination": target,
            "type": "bind",
            "options": ["rbind", "ro"],
        }
        spec["mounts"].append(mount)
    return spec


def _pod_network(subnet: str) -> dict[str, Any]:
    # ptp, not bridge: with a bridge a Service whose endpoint is on the same node needs br_netfilter
    addresses = {
        "type": "host-local",
        "ranges": [[{"subnet": subnet}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    plugins = [
        {"type": "ptp", "ipam": addresses},
        {"type": "portmap", "capabilities": {"portMappings": True}},
    ]
    return {"cniVersion": "1.0.0", "name": "pods", "plugins": plugins}


def _kubelet(
    home: Path, index: int, settings: ClusterSettings, plane: ControlPlane
) -> dict[str, Any]:
    addresses = Addresses(settings.slot)
    authority = plane.authority
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(authority.crt("ca"))},
        },
        "authorization": {"mode": "Webhook"},
        "address": addresses.node(index),
        "tlsCertFile": str(authority.crt(f"{home.name}-serving")),
        "tlsPrivateKeyFile": str(authority.key(f"{home.name}-serving")),
        "containerRuntimeEndpoint": f"unix://{home}/containerd.sock",
        "volumePluginDir": str(home / "volume-plugins"),  # else made under /usr/libexec of the host
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cgroups.group(home.parents[1])}/{home.name}",
        "failCgroupV1": False,
        "enforceNodeAllocatable": [],
        "failSwapOn": False,
        "clusterDNS": [addresses.host],
        "clusterDomain": "cluster.local",
        "resolvConf": str(home.parents[1] / "resolv.conf"),
        # memory only, and no image collection: or a disk that is nearly full evicts the tests
        "evictionHard": {"memory.available": "100Mi"},
        "imageGCHighThresholdPercent": 100,
        "nodeStatusUpdateFrequency": "2s",
        "nodeLeaseDurationSeconds": lease_seconds(settings.control_plane.node_grace_seconds),
    }


def lease_seconds(grace_seconds: int) -> int:
    """Return the duration of a node's lease, renewed every quarter of it, for a node monitor's
    grace."""
    return max(4, grace_seconds * 4 // 5)


def _proxy(home: Path, addresses: Addresses) -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clientConnection": {"kubeconfig": str(home.parents[1] / "kube-proxy.kubeconfig")},
        "clusterCIDR": addresses.pods,
        "hostnameOverride": home.name,
        "conntrack": {"maxPerCore": 0, "min": 0},  # this sysctl belongs to the host's namespace
    }

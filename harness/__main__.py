"""The command line: `python -m harness tools|up|down|load|images|kubelet|apiserver|kubeconfig`; for
make."""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from . import stack
from .cluster import MAIN, Cluster, clusters_folder, is_kept
from .controlplane import ControlPlaneSettings
from .fixtures import training_settings
from .images import recipes as images
from .programs.build import user_commands
from .programs.processes import ClusterError
from .settings import ClusterSettings, GpuSettings
from .tools import RUNS, prepare

GPU = GpuSettings()
SHIPPED = ("operator", "trainer")
PLANE = ControlPlaneSettings()
NEXT_STEP = "# next: kubectl apply -f examples/quickstart.yaml    trains, exports and evaluates"


def main() -> int:
    """Run the command; errors go to stderr in one sentence and the exit code is 1."""
    arguments = _parser().parse_args()
    try:
        arguments.run(arguments)
    except ClusterError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; everything started was removed\n")
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m harness", description=__doc__)
    parser.add_argument(
        "--name", default=MAIN, help="several clusters may be up under different names"
    )
    commands = parser.add_subparsers(required=True)
    _add_up(commands.add_parser("up", help="start a cluster and print how to use it"))
    down = commands.add_parser("down", help="remove the cluster and every trace of it")
    down.add_argument("--all", action="store_true", help="remove every cluster of this user")
    down.set_defaults(run=_down)
    load = commands.add_parser("load", help="import an image archive on every node")
    load.add_argument("image", type=Path)
    load.set_defaults(run=lambda arguments: _cluster(arguments).load(arguments.image))
    build = commands.add_parser("images", help="build images and print their names and archives")
    names = f"of {', '.join(images.RECIPES)} (default: {' and '.join(SHIPPED)})"
    build.add_argument("image", nargs="*", default=SHIPPED, help=names)
    build.set_defaults(run=_images)
    tools = commands.add_parser(
        "tools", help="build what a run needs, so that nothing is built within it"
    )
    tools.add_argument("needed_by", nargs="?", choices=RUNS, default="test", help="default: test")
    tools.set_defaults(run=lambda arguments: prepare(arguments.needed_by))
    kubelet = commands.add_parser(
        "kubelet", help="kill a node's kubelet (its pods run on), or start it again"
    )
    kubelet.add_argument("node")
    kubelet.add_argument("action", choices=["stop", "start"])
    kubelet.set_defaults(
        run=lambda arguments: _cluster(arguments).kubelet(arguments.node, arguments.action)
    )
    apiserver = commands.add_parser(
        "apiserver", help="kill the API server, or start it again on the same data"
    )
    apiserver.add_argument("action", choices=["stop", "start"])
    apiserver.set_defaults(run=_apiserver)
    kubeconfig = commands.add_parser(
        "kubeconfig", help="print the path of the administrator's kubeconfig"
    )
    kubeconfig.set_defaults(run=lambda arguments: print(_cluster(arguments).kubeconfig))
    guard = commands.add_parser(
        "guard", help="what `up` starts: remove the cluster when its owner dies"
    )
    guard.add_argument("folder", type=Path)
    guard.set_defaults(run=_guard)
    return parser


def _add_up(up: argparse.ArgumentParser) -> None:
    up.add_argument("--nodes", type=int, default=2, help="real kubelets (default 2)")
    kinds = up.add_mutually_exclusive_group()
    kinds.add_argument("--api-only", action="store_true", help="no real node: needs no root")
    kinds.add_argument(
        "--operator", action="store_true", help="with the operator, so that jobs run on it"
    )
    up.add_argument(
        "--gpus-per-node",
        type=int,
        default=0,
        help="GPUs that every node claims to have (default 0)",
    )
    up.add_argument(
        "--gpu-product", default=GPU.product, help=f"nvidia.com/gpu.product (default {GPU.product})"
    )
    up.add_argument(
        "--gpu-memory-mib", type=int, default=GPU.memory_mib, help="nvidia.com/gpu.memory"
    )
    up.add_argument("--gpu-family", default=GPU.family, help="nvidia.com/gpu.family")
    up.add_argument(
        "--kwok-nodes", type=int, default=0, help="nodes whose pods only pretend to run (default 0)"
    )
    grace = f"silence after which a node counts as lost (default {PLANE.node_grace_seconds}s)"
    up.add_argument("--node-grace", type=_seconds, default=PLANE.node_grace_seconds, help=grace)
    up.add_argument(
        "--client-qps",
        type=int,
        default=PLANE.client_qps,
        help="requests/s of the controller manager",
    )
    up.add_argument(
        "--audit",
        action="store_true",
        help="log every API request to audit.log in the state folder",
    )
    up.set_defaults(run=_up)


def _seconds(text: str) -> int:
    return int(text.removesuffix("s"))


def _settings(arguments: argparse.Namespace) -> ClusterSettings:
    gpus = GpuSettings(
        arguments.gpus_per_node,
        arguments.gpu_product,
        arguments.gpu_memory_mib,
        arguments.gpu_family,
    )
    plane = ControlPlaneSettings(
        node_grace_seconds=arguments.node_grace,
        client_qps=arguments.client_qps,
        audit=arguments.audit,
    )
    nodes = 0 if arguments.api_only else arguments.nodes
    # the trainer's light image, which `make demo` loads, finds its packages on the nodes alone
    shown = training_settings(engines=False).shown if nodes else {}
    return ClusterSettings(
        nodes=nodes,
        kwok_nodes=arguments.kwok_nodes,
        shown=shown,
        storage_class=True,
        gpus=gpus,
        control_plane=plane,
    )


def _up(arguments: argparse.Namespace) -> None:
    began = time.monotonic()

    def report(text: str) -> None:
        print(f"# {time.monotonic() - began:5.1f} s  {text}", flush=True)

    folder = clusters_folder() / arguments.name
    running = folder.exists() and bool(Cluster.open(folder).processes.find())
    if running:
        print(
            f"# cluster {arguments.name!r} is up already; to start another one first: python -m "
            "harness down"
        )
        cluster = Cluster.open(folder)
    else:
        cluster = Cluster.create(arguments.name, _settings(arguments), report)
        cluster.keep()
    if arguments.operator:
        _install_operator(cluster, report)
    print(f"export PATH={user_commands()}:$PATH")
    print(f"export KUBECONFIG={cluster.kubeconfig}")
    if arguments.operator:
        print(NEXT_STEP)


def _install_operator(cluster: Cluster, report: Callable[[str], None]) -> None:
    """Install what `make demo` does, so that its images are built once."""
    report("building the images that are not in the cache, and loading them on the nodes")
    operator, trainer = images.operator_image(), images.light_trainer_image()
    for image in (operator, trainer):
        cluster.load_missing(image.name, image.archive)
    report("helm install grpo-operator")
    stack.install_operator(cluster, operator, trainer)


def _cluster(arguments: argparse.Namespace) -> Cluster:
    folder = clusters_folder() / arguments.name
    if not folder.exists():
        raise ClusterError(
            f"no cluster {arguments.name!r} is up: start one with `python -m harness up`"
        )
    return Cluster.open(folder)


def _images(arguments: argparse.Namespace) -> None:
    for name in arguments.image:
        if name not in images.RECIPES:
            raise ClusterError(f"no image {name!r}: have {', '.join(images.RECIPES)}")
        image = images.RECIPES[name]()
        print(f"{image.name}\t{image.archive}", flush=True)


def _apiserver(arguments: argparse.Namespace) -> None:
    cluster = _cluster(arguments)
    cluster.stop_apiserver() if arguments.action == "stop" else cluster.start_apiserver()


def _guard(arguments: argparse.Namespace) -> None:
    if not is_kept():
        Cluster.open(arguments.folder).down()


def _down(arguments: argparse.Namespace) -> None:
    folders = (
        sorted(clusters_folder().glob("[!.]*"))
        if arguments.all
        else [clusters_folder() / arguments.name]
    )
    for folder in folders:
        Cluster.open(folder).down()


if __name__ == "__main__":
    sys.exit(main())

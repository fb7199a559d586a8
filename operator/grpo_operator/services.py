"""The headless Services that all attempts of a namespace share: under one ranks find rank 0, under the other engines.

Each function returns one object as a dict.
"""

from .names import (
    COMPONENT_ENGINE,
    COMPONENT_RENDEZVOUS,
    ENGINE_SERVICE,
    LABEL_COMPONENT,
    LABEL_INDEX,
    LABEL_MANAGED_BY,
    MANAGER,
    RENDEZVOUS_SERVICE,
)
from .pod_volumes import Manifest


def wanted_service(namespace: str, name: str) -> Manifest:
    """The Service of this name as attempts need it: that of the engines, else that of the rendezvous."""
    return engine_service(namespace) if name == ENGINE_SERVICE else rendezvous_service(namespace)


def rendezvous_service(namespace: str) -> Manifest:
    """The headless Service under which rank 0 of every gang of the namespace has its name, ready or not.

    It selects only pods with index 0: every further endpoint costs kube-controller-manager an update per pod.
    """
    return _service(namespace, RENDEZVOUS_SERVICE, {LABEL_MANAGED_BY: MANAGER, LABEL_INDEX: "0"})


def engine_service(namespace: str) -> Manifest:
    """The headless Service under which every engine pod of the namespace has its name, ready or not."""
    return _service(namespace, ENGINE_SERVICE, {LABEL_MANAGED_BY: MANAGER, LABEL_COMPONENT: COMPONENT_ENGINE})


def _service(namespace: str, name: str, selector: dict[str, str]) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {LABEL_MANAGED_BY: MANAGER, LABEL_COMPONENT: COMPONENT_RENDEZVOUS},
        },
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector},
    }

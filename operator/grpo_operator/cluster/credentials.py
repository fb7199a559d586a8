"""How the operator reaches the API server: from the pod's service account, or from a kubeconfig.

The loaders are the kubernetes package's, which also renew tokens that run out.
"""

import os
from pathlib import Path

from kubernetes.aio.client import Configuration
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

from ..errors import ConfigurationError

_BEARER = "BearerToken"


async def load(kubeconfig: str | None = None) -> Configuration:
    """The connection's settings: the given kubeconfig, else the service account, else the user's kubeconfig.

    Raises:
        ConfigurationError: none of them is there, or one can't be read.
    """
    configuration = Configuration()
    path = kubeconfig or os.environ.get("KUBECONFIG")
    try:
        # Every pod has this variable. A kubeconfig that is named goes before it, for an operator that is run by hand.
        if path or "KUBERNETES_SERVICE_HOST" not in os.environ:
            await load_kube_config(config_file=path, client_configuration=configuration)
        else:
            load_incluster_config(client_configuration=configuration)
    except (ConfigException, OSError) as error:
        where = path or str(Path("~/.kube/config"))
        raise ConfigurationError(
            f"no way to the API server: no service account and no usable {where}: {error}"
        ) from error
    return configuration


async def authorization(configuration: Configuration) -> dict[str, str]:
    """The Authorization header, with a token that the loader renews; empty for client certificates."""
    value = await configuration.get_api_key_with_prefix(_BEARER)
    return {"Authorization": value} if value else {}

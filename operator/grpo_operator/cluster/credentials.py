"""How the operator reaches the API server: from the pod's service account, or from a kubeconfig.

Exists so that kopf and our own client log in the same way, by the kubernetes package's loaders. Called by __main__.
"""

import os
from pathlib import Path

import kopf
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


async def for_kopf(configuration: Configuration) -> kopf.ConnectionInfo:
    """The same connection as kopf wants it."""
    header = (await authorization(configuration)).get("Authorization", "")
    scheme, _, token = header.partition(" ")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert or None,
        insecure=not configuration.verify_ssl,
        certificate_path=configuration.cert_file or None,
        private_key_path=configuration.key_file or None,
        token=token.strip() or None,
        scheme=scheme.capitalize() or None,
    )

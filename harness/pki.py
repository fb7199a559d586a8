"""The cluster's own certificate authority and the kubeconfigs that identify its components.

Kubernetes' authorizers (Node, RBAC) only mean something with real identities, so each component
gets its own certificate. Made with openssl to need no Python package.
"""

import base64
import json
from collections.abc import Sequence
from pathlib import Path

from .programs.processes import flags, run

DAYS = 365
CURVE = ("ec", "-pkeyopt", "ec_paramgen_curve:P-256")


class Authority:
    """A certificate authority in a folder; making one makes the CA's own key and certificate when
    absent."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        if not self.crt("ca").exists():
            directory.mkdir(parents=True, mode=0o700, exist_ok=True)
            # the distribution's own openssl.cnf would add CA:true to every certificate
            self._config.write_text("[req]\ndistinguished_name=dn\n[dn]\n")
            self._make(
                "ca", "/CN=grpo-test-ca", ["basicConstraints=critical,CA:true"], signed=False
            )

    @property
    def _config(self) -> Path:
        return self.directory / "openssl.cnf"

    def crt(self, name: str) -> Path:
        """Return the path of a certificate."""
        return self.directory / f"{name}.crt"

    def key(self, name: str) -> Path:
        """Return the path of a private key."""
        return self.directory / f"{name}.key"

    def issue(self, name: str, subject: str, names: str = "") -> None:
        """Make `name`.key and `name`.crt, valid as server (for the subjectAltName `names`) and as
        client."""
        extensions = ["extendedKeyUsage=serverAuth,clientAuth"]
        if names:
            extensions.append(f"subjectAltName={names}")
        self._make(name, subject, extensions, signed=True)

    def make_alone(self, name: str, subject: str, names: str) -> None:
        """Make `name`.key and `name`.crt that vouch for themselves, as authority and as server for
        the names.

        The key is RSA's in its oldest spelling (PKCS 1): the library by which many a manager
        rotates its certificates reads no other.
        """
        extensions = ["basicConstraints=critical,CA:true", f"subjectAltName={names}"]
        self._make(name, subject, extensions, signed=False, key=["rsa:2048"])
        self.key(name).write_text(run("openssl", "pkey", "-traditional", "-in", self.key(name)))

    def _make(
        self,
        name: str,
        subject: str,
        extensions: list[str],
        signed: bool,
        key: Sequence[str] = CURVE,
    ) -> None:
        options = {
            "-config": self._config,
            "-days": DAYS,
            "-subj": subject,
            "-keyout": self.key(name),
            "-out": self.crt(name),
        }
        if signed:
            options |= {"-CA": self.crt("ca"), "-CAkey": self.key("ca")}
        command = ["openssl", "req", "-x509", "-nodes", "-newkey", *key, *flags(options)]
        for extension in extensions:
            command += ["-addext", extension]
        run(*command)

    def kubeconfig(self, path: Path, url: str, name: str, subject: str) -> Path:
        """Write a self-contained kubeconfig (certificates inside, so it may be copied) and return
        its path."""
        self.issue(name, subject)
        cluster = {"server": url, "certificate-authority-data": _base64(self.crt("ca"))}
        user = {
            "client-certificate-data": _base64(self.crt(name)),
            "client-key-data": _base64(self.key(name)),
        }
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "grpo-test",
            "contexts": [{"name": "grpo-test", "context": {"cluster": "grpo-test", "user": name}}],
            "clusters": [{"name": "grpo-test", "cluster": cluster}],
            "users": [{"name": name, "user": user}],
        }
        path.touch(mode=0o600)
        path.write_text(json.dumps(config, indent=1))
        return path


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()

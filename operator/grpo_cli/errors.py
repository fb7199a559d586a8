"""What ends a command with exit code 2 and one sentence on stderr.

    CliError
    ├── ManifestError     a file that holds no GRPOJob, or is no YAML
    ├── InventoryError    an inventory or a config.json that can't be read, or none where one is needed
    ├── ValueRefused      a --what-if that names no field, or a picture that can't be drawn here
    ├── KubectlError      kubectl is missing, or ended with an error
    └── NotYet            the cluster has not what the command shows: no plan, no pod

Raised by the commands; __main__ turns them into messages.
"""


class CliError(Exception):
    """Every error that a user can cause."""


class ManifestError(CliError):
    """A file that holds no GRPOJob, or is no YAML; the message says where."""


class KubectlError(CliError):
    """kubectl is missing, or ended with an error; the message is its own."""


class NotYet(CliError):
    """The cluster has not what the command shows."""


class InventoryError(CliError):
    """An inventory or a config.json that can't be read, or none where one is needed."""


class ValueRefused(CliError):
    """A --what-if that names no field, or a picture that can't be drawn here."""

"""What ends a command with exit code 2 and one sentence on stderr.

    CliError
    ├── ManifestError     a file that holds no GRPOJob, or is no YAML
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

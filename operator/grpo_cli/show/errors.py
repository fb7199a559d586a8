"""What ends a command with exit code 2 and a sentence on stderr.

CliError
├── ManifestError     a file that is no YAML, or holds no GRPOJob that can be read
├── InventoryError    an inventory or a config.json that can't be read, or none where one is needed
├── OptionError       an option whose value means nothing, or asks for what can't be done here
├── KubectlError      kubectl is missing, ended with an error, or printed what is no answer
└── NotYet            what the command shows is not there: no plan, no pod
"""

WRONG = 2
"""Exit code when the arguments, the file or the cluster are not what a command needs."""


class CliError(Exception):
    """Every error that a user can cause; its arguments are sentences, one per problem."""

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong, each a line of its own."""
        return self.args

    def __str__(self) -> str:
        """All problems in one line."""
        return "; ".join(self.problems)


class ManifestError(CliError):
    """A file that is no YAML, or holds no GRPOJob that can be read; the message says where."""


class KubectlError(CliError):
    """kubectl is missing, ended with an error, or printed what is no answer; the message quotes
    it."""


class NotYet(CliError):
    """What the command shows is not there; the message says what is."""


class InventoryError(CliError):
    """An inventory or a config.json that can't be read, or none where one is needed."""


class OptionError(CliError):
    """An option whose value means nothing, or asks for what can't be done here."""

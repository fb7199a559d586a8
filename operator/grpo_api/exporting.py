"""`spec.export`: where the trained model is put when the run ends.

A run whose model goes nowhere must say so: nobody trains for days to throw it away.
"""

from typing import Annotated, Literal

from pydantic import Field

from .base import Model, Rule
from .references import SecretKeySelector

_HUB_PART = "[a-zA-Z0-9_]([-._a-zA-Z0-9]{0,94}[a-zA-Z0-9_])?"
HubRepository = Annotated[str, Field(min_length=3, max_length=193, pattern=f"^{_HUB_PART}/{_HUB_PART}$")]
"""A repository of the hub that can be written: with its namespace."""


def _hub_takes_the_name(hub: "HubExportSpec") -> bool:
    name = hub.repository
    return "--" not in name and ".." not in name and not name.endswith((".git", ".ipynb"))


class HubExportSpec(Model):
    """A model repository of the Hugging Face hub."""

    RULES = (
        Rule(
            "!self.repository.contains('--') && !self.repository.contains('..') && "
            "!self.repository.endsWith('.git') && !self.repository.endsWith('.ipynb')",
            "the hub takes no repository with `--` or `..` in its name, or with .git or .ipynb at its end",
            _hub_takes_the_name,
        ),
    )

    repository: HubRepository
    """Namespace and name, such as `team/model`; created if it is missing. Files of the same name are replaced, and a
    former model's weights removed, in one commit to its main branch."""
    private: bool = True
    """Whether only the namespace's members may see it; then a public repository is refused. It is set where the
    repository is created. Unset: true."""
    token_secret_ref: SecretKeySelector
    """Hub token with the right to write to the repository, and to create it if it is missing."""


class ExportSpec(Model):
    """What becomes of the trained model, or of the adapter where only that is trained."""

    RULES = (
        Rule(
            "(self.to == 'Hub') == has(self.hub)",
            "export.to Hub needs export.hub, and export.hub belongs to export.to Hub: set both or none",
            lambda export: (export.to == "Hub") == (export.hub is not None),
        ),
    )

    to: Literal["Volume", "ObjectStore", "Hub", "None"]
    """Volume, ObjectStore: a folder `export` beside the run's checkpoints, which are there. Hub: a repository, and that
    folder, too, where there are lasting checkpoints. None: the model ends with its pods."""
    hub: HubExportSpec | None = None
    """For Hub: which repository. Unset: none."""
    signing_key_secret_ref: SecretKeySelector | None = None
    """Private key, in PEM and without a password, that signs what the model was made of: Ed25519, or ECDSA on P-256 or
    P-384 (docs/verify.md). Unset: provenance.json is not signed."""

    @property
    def keeps(self) -> bool:
        """Whether the model outlives the pods."""
        return self.to != "None"

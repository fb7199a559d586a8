"""`volumeMounts`: where volumes appear in a container, and which folders of the trainer's are taken."""

import re
from pathlib import PurePosixPath
from typing import ClassVar

from ..base import Model, Rule
from ..contract import RESERVED_MOUNTS
from ..names import SUB_PATH_RULE, DNSLabel, Path, SubPath, stays_inside

_SLASH = r"/(\.?/)*"
"""One slash, however it is spelt: `//` and `/./` lead to the same folder."""


def _spelt(path: PurePosixPath) -> str:
    """A regular expression for all spellings of an absolute path, without what may follow it; the root is empty."""
    return "".join(_SLASH + re.escape(part) for part in path.parts[1:])


def _shadowing(reserved: tuple[str, ...]) -> str:
    """A regular expression for the paths in, on and above the reserved folders.

    An expression and not a function, because CEL can neither normalise a path nor compare lists within its cost.
    """
    folders = [PurePosixPath(path) for path in reserved]
    above = sorted({parent for folder in folders for parent in folder.parents})
    inside = "|".join(map(_spelt, folders))
    return f"^(({inside})(/.*)?|({'|'.join(map(_spelt, above))})({_SLASH}\\.?)?)$"


SHADOWING = _shadowing(RESERVED_MOUNTS)


class VolumeMount(Model):
    """A volume of podTemplate.spec.volumes in a container."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        SUB_PATH_RULE,
        Rule(
            r"!self.mountPath.matches(r'(^|/)\.\.(/|$)')",
            "mountPath must not contain `..`: write the folder that is meant",
            lambda mount: stays_inside(mount.mount_path),
        ),
    )

    name: DNSLabel
    """Name of the volume."""
    mount_path: Path
    """Folder in the container."""
    sub_path: SubPath | None = None
    """Folder inside the volume. Unset: the volume's root."""
    read_only: bool | None = None
    """Mount read-only. Unset: false."""


class TrainerMount(VolumeMount):
    """A volume of podTemplate.spec.volumes in the training container."""

    RULES = (
        *VolumeMount.RULES,
        Rule(
            f"!self.mountPath.matches(r'{SHADOWING}')",
            f"mountPath must lie outside of {', '.join(RESERVED_MOUNTS)}, and not above them: "
            "the operator and the kernel mount there themselves",
            lambda mount: not re.search(SHADOWING, mount.mount_path),
        ),
    )

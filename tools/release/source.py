"""What a release is made of: its version, its commit, and what is still missing before it may be
published.

The version stands in pyproject.toml. Where else a file must have it (Helm reads no other file), it
is compared.
"""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import yaml

from harness.programs.cache import REPOSITORY
from harness.programs.processes import ClusterError, run

CHART = Path("charts/grpo-operator")
OPERATE = Path("docs/how-to/operate")
LOCAL = "localhost"
"""Registry of images that come from no registry: nodes that have imported them find them under
it."""


@dataclass(frozen=True)
class Release:
    """What the parts of a release have in common.

    epoch: seconds since 1970 of the commit, the latest time in any archive. registry: where the
    images will be, without their names. downloads: address of the folder that will hold the other
    files.
    """

    version: str
    commit: str
    epoch: int
    registry: str
    downloads: str


def current(registry: str, downloads: str, root: Path = REPOSITORY) -> Release:
    """The release of a checkout.

    Raises:
        ClusterError: two files name different versions, or there is no commit.
    """
    require_one_version(root)
    commit, epoch = run("git", "-C", root, "log", "-1", "--format=%H %ct").split()
    return Release(
        stated_versions(root)["pyproject.toml"],
        commit,
        int(epoch),
        registry.rstrip("/"),
        downloads.rstrip("/"),
    )


def stated_versions(root: Path) -> dict[str, str]:
    """The version by the place that names it; pyproject.toml's comes first."""
    chart = yaml.safe_load((root / CHART / "Chart.yaml").read_text())
    found = {
        "pyproject.toml": tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    }
    found |= {f"{CHART}/Chart.yaml, {key}": str(chart[key]) for key in ("version", "appVersion")}
    named = r"(?:/grpo-(?:operator|trainer):|grpo-operator==|grpo-operator --version )(\S+)"
    for page in ("README.md", f"{OPERATE}/images.md", f"{OPERATE}/install.md"):
        tags = re.findall(named, (root / page).read_text())
        found |= {f"{page}, place {number}": tag for number, tag in enumerate(tags, 1)}
    return {place: str(version) for place, version in found.items()}


def require_one_version(root: Path) -> None:
    """Hold all places to one version.

    Raises:
        ClusterError: the places that have another one than pyproject.toml.
    """
    versions = stated_versions(root)
    wanted = versions["pyproject.toml"]
    others = [f"{place}: {version}" for place, version in versions.items() if version != wanted]
    if others:
        raise ClusterError(
            f"pyproject.toml has version {wanted}; write it also into {'; '.join(others)}"
        )


def lacking(release: Release, root: Path = REPOSITORY) -> list[str]:
    """What a publisher has still to do, in sentences; empty for what may be published."""
    missing = []
    if not newest_heading((root / "CHANGELOG.md").read_text()).startswith(release.version):
        missing.append(f"CHANGELOG.md: its newest heading is not {release.version}")
    if run("git", "-C", root, "status", "--porcelain"):
        missing.append("the checkout has changes that are in no commit")
    if f"v{release.version}" not in run("git", "-C", root, "tag", "--points-at", "HEAD").split():
        missing.append(f"the commit has no tag v{release.version}")
    if release.registry == LOCAL:
        missing.append(
            "REGISTRY is not set: chart and manifest look for images that nodes have imported"
        )
    return missing


def newest_heading(changelog: str) -> str:
    """Text of the first heading of the second level, without brackets."""
    found = re.search(r"^## \[?([^\]\n]+)", changelog, re.MULTILINE)
    return found[1].strip() if found else ""

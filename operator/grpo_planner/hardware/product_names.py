"""Short names of GPU products, in inventories and in specs.

Users write `8xH100`, while a node's label, and so a plan, names one product, such as
`NVIDIA-H100-80GB-HBM3`. So short names are expanded. For a misspelled name the nearest ones are
suggested.
"""

import re
from difflib import get_close_matches
from functools import cache

from .products import lookup_product, table

USUAL = {
    "T4": "Tesla-T4",
    "P100": "Tesla-P100",
    "V100": "Tesla-V100-SXM2-16GB",
    "V100-32GB": "Tesla-V100-SXM2-32GB",
    "A100": "NVIDIA-A100-SXM4-80GB",
    "A100-40GB": "NVIDIA-A100-SXM4-40GB",
    "A100-80GB": "NVIDIA-A100-SXM4-80GB",
    "A100-PCIe": "NVIDIA-A100-80GB-PCIe",
    "A800": "NVIDIA-A800-SXM4-80GB",
    "A800-80GB": "NVIDIA-A800-SXM4-80GB",
    "A800-PCIe": "NVIDIA-A800-80GB-PCIe",
    "H100": "NVIDIA-H100-80GB-HBM3",
    "H100-80GB": "NVIDIA-H100-80GB-HBM3",
    "H100-SXM": "NVIDIA-H100-80GB-HBM3",
    "H200-SXM": "NVIDIA-H200",
    "GH200": "NVIDIA-GH200-480GB",
    "A6000": "NVIDIA-RTX-A6000",
    "A5000": "NVIDIA-RTX-A5000",
    "RTX-6000": "NVIDIA-RTX-6000-Ada-Generation",
    "RTX-6000-Ada": "NVIDIA-RTX-6000-Ada-Generation",
    "RTX-PRO-6000": "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition",
    "RTX3090": "NVIDIA-GeForce-RTX-3090",
    "RTX4090": "NVIDIA-GeForce-RTX-4090",
    "RTX5090": "NVIDIA-GeForce-RTX-5090",
}
"""What a name without form or memory means: the one that is rented most, the larger where both
are."""

_MIG = re.compile(
    r"(?:nvidia\.com/)?(?P<card>.*?)-?(?:mig-)?(?P<profile>\d+g\.\d+gb)", re.IGNORECASE
)
"""A MIG instance by its profile, with or without its card: `1g.10gb`, `A100-1g.5gb`."""
_MIG_CARDS = {
    profile: label
    for label, profiles in {
        "NVIDIA-A30": ("1g.6gb", "2g.12gb", "4g.24gb"),
        "NVIDIA-A100-SXM4-40GB": ("1g.5gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb"),
        "NVIDIA-H100-80GB-HBM3": ("1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"),
        "NVIDIA-H200": ("1g.18gb", "1g.35gb", "2g.35gb", "3g.71gb", "4g.71gb", "7g.141gb"),
    }.items()
    for profile in profiles
}
"""The card that a profile without one means (NVIDIA MIG user guide); A100s with 80 GB have the same
profiles as H100s."""

_MAKERS = re.compile("^(NVIDIA-|AMD-|Tesla-|GeForce-|Instinct-)+", re.IGNORECASE)
_LIKENESS = 0.5


@cache
def short_names() -> dict[str, str]:
    """Labels by their short name: every label without its maker, and the usual names."""
    without_maker = {_MAKERS.sub("", label): label for label in table()}
    return without_maker | USUAL


def label_of(name: str) -> str | None:
    """The label that a name means: itself where a known product begins it; None where no product is
    called so.

    Capitals, and whether its words are parted by hyphens, underscores or spaces, make no difference
    to a short name.
    """
    if lookup_product(name).is_known:
        return name
    instance = _MIG.fullmatch(name)
    if instance is None:
        return _by_key().get(_key(name))
    card = _mig_card(instance["card"], instance["profile"].lower())
    return f"{card}-MIG-{instance['profile'].lower()}" if card else None


def _mig_card(name: str, profile: str) -> str | None:
    """The label of the card that a MIG instance is of; by its profile where no card is named."""
    usual = _MIG_CARDS.get(profile)
    if not name:
        return usual
    label = _by_key().get(_key(name))
    is_smaller_a100 = _key(name) == "A100" and usual == USUAL["A100-40GB"]
    return usual if is_smaller_a100 else label


@cache
def is_of_product(label: str, wanted: str) -> bool:
    """True if a spec that asks for a product takes GPUs with this label.

    The label begins with what is asked for, or is what a short name means. A short name without
    form or memory means all of them: `H100` takes `NVIDIA-H100-PCIe`, too. A product's whole name
    takes no other product: `NVIDIA-L4` is no `NVIDIA-L40S`.
    """
    if label.startswith(wanted) and wanted not in table():
        return True
    card, short = _key(label), _key(wanted)
    usual = _key(label_of(wanted) or wanted)
    return f"{card}-".startswith((f"{short}-", f"{usual}-"))


def unknown_product(name: str) -> str:
    """The sentence on a name that no product has, with those that are like it."""
    names_by_key = {_key(short_name): short_name for short_name in short_names()}
    close_keys = get_close_matches(_key(name), names_by_key, n=3, cutoff=_LIKENESS)
    suggestion = ""
    if close_keys:
        similar = " or ".join(names_by_key[key] for key in close_keys)
        suggestion = f"did you mean {similar}? "
    return (
        f"{name} is no GPU product that the planner knows; {suggestion}`grpo gpus` lists them, and "
        "an inventory file can say gpuMemoryMiB of others"
    )


@cache
def _by_key() -> dict[str, str]:
    return {_key(short): label for short, label in short_names().items()}


def _key(name: str) -> str:
    hyphenated = re.sub("[-_ ]+", "-", name.strip())
    without_maker = _MAKERS.sub("", hyphenated).upper()
    # Some write `80G` for 80GB.
    return re.sub(r"(?<=\d)G$", "GB", without_maker)

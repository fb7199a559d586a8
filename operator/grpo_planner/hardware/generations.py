"""GPU generations: which cards the trainer's image can compute on, and has been shown to.

A build of torch has kernels for some compute capabilities; on any other card the first one ends with "no kernel image
is available". The image's torch is pinned, so a plan can be refused before anything is started.
"""

Capability = tuple[int, int]
"""CUDA compute capability: major and minor version."""

IMAGE: tuple[Capability, ...] = ((7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0))
"""What the image's torch is compiled for; a test holds it to the pinned torch's own list."""

BFLOAT16: Capability = (8, 0)
"""From where on tensor cores multiply bfloat16. Before it all would run in float32, which nobody has shown to work."""

OWN_IMAGE = "set spec.placement.gpuProduct to other GPUs, or spec.image to an image of yours whose torch has them"
"""What helps where the image can't compute."""


def obstacle(product: str, resource: str, capability: Capability | None) -> str:
    """Why the image isn't known to compute on a GPU; empty where it is, and where the card's capability isn't known."""
    if resource.startswith("amd.com/") or product.startswith("AMD"):
        return f"{product or resource} is an AMD GPU, and the trainer's image has torch for CUDA alone"
    if capability is None or (_has_kernels(capability) and capability >= BFLOAT16):
        return ""
    if _has_kernels(capability):
        return (
            f"{product or resource} has compute capability {written(capability)} and so no bfloat16, and the trainer "
            "has not been shown to run in float32 on GPUs"
        )
    built = ", ".join(map(written, IMAGE))
    return (
        f"{product or resource} has compute capability {written(capability)}, and the torch of the trainer's image is "
        f"built for {built}"
    )


def written(capability: Capability) -> str:
    """`8.6`."""
    return f"{capability[0]}.{capability[1]}"


def _has_kernels(capability: Capability) -> bool:
    """Code runs on its own major version from its own minor version on (CUDA programming guide, compute capability)."""
    minors = [minor for major, minor in IMAGE if major == capability[0]]
    return any(minor <= capability[1] for minor in minors)

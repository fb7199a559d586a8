"""What the pods of a job have where it says nothing of it: their image, their user, their pull secrets.

One set of flags tells it to the operator and to the commands that make pods themselves, so that what these show and
start is what the operator would.
"""

import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from dataclasses import dataclass

USER = 1000
MAX_USER = 2**31 - 1
"""The largest id that the API server takes."""
NO_USER = "none"
_NAME = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
USER_HELP = f"user and group of the pods, or {NO_USER}: the platform or the image gives one"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodDefaults:
    """What the operator is installed with for the pods of all jobs."""

    image: str = ""
    """Image of jobs without spec.image; empty: they are rejected."""
    user: int | None = USER
    """Id of the pods' user and group, and of their volumes' group; None: no id is asked for, and the platform gives
    one, as OpenShift does, or the image."""
    pull_secrets: tuple[str, ...] = ()
    """Names of pull secrets, in each job's namespace, beside those that the job names."""


def add_arguments(parser: ArgumentParser, image: str) -> None:
    """Adds the flags; `image` is the default one."""
    parser.add_argument("--trainer-image", default=image, help="image of jobs without spec.image")
    parser.add_argument("--pod-user", type=pod_user, default=USER, metavar="ID", help=f"{USER_HELP}; default: {USER}")
    parser.add_argument(
        "--pod-pull-secret",
        action="append",
        type=pull_secret,
        default=[],
        metavar="NAME",
        help="pull secret of all training pods, in each job's namespace (may be repeated)",
    )


def given(options: Namespace) -> PodDefaults:
    """What the flags say."""
    secrets = tuple(dict.fromkeys(options.pod_pull_secret))
    return PodDefaults(image=options.trainer_image, user=options.pod_user, pull_secrets=secrets)


def pod_user(text: str) -> int | None:
    """A user's id, or none, from a flag."""
    if text == NO_USER:
        return None
    if not text.isdecimal() or not 0 < int(text) <= MAX_USER:
        raise ArgumentTypeError(f"{text!r} is neither {NO_USER} nor a user's id from 1 to {MAX_USER}; root is refused")
    return int(text)


def pull_secret(text: str) -> str:
    """The name of a Secret, from a flag."""
    if not re.fullmatch(_NAME, text):
        raise ArgumentTypeError(f"{text!r} is no name of a Secret: lower-case letters, digits, - and ., at most 253")
    return text

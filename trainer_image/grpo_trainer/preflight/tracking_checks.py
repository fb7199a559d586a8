"""Checks the trackers of spec.tracking: their package, their token and whether they answer.

A run goes on without its tracker. So what can't be asked now is no problem, and rank 0 checks
nothing. But a package or a Secret that is missing is a mistake, which costs nothing to find here.
"""

import os
import urllib.error
import urllib.request

from grpo_api.spec.tracking import Tracker, TrackerName, WandbTracking, token_of
from grpo_api.text.contract import tracking_token_env

from ..runtime.errors import BadInput
from ..tracking.packages import has_package
from .findings import NotChecked, Preflight

ANSWER_SECONDS = 5.0
WANDB_URL = "https://api.wandb.ai"
HUB_URL = "https://huggingface.co"


def check_tracking(preflight: Preflight) -> None:
    """Check each tracker of the job."""
    tracking = preflight.plan.tracking
    if tracking is None or not preflight.scope.is_whole:
        return
    for name, tracker in tracking.trackers:
        path = f"spec.tracking.{name}"
        with preflight.findings.check(path):
            _require_package(preflight, name)
        with preflight.findings.check(f"{path}.tokenSecretRef"):
            _require_token(preflight, name, tracker)
        with preflight.findings.check(path):
            _require_answer(tracker_url(tracker))


def tracker_url(tracker: Tracker) -> str:
    """Address that the tracker's rows are sent to; empty for files."""
    if isinstance(tracker, WandbTracking):
        return tracker.url or WANDB_URL
    if getattr(tracker, "space", None):
        return HUB_URL
    return getattr(tracker, "url", None) or ""


def _require_package(preflight: Preflight, name: TrackerName) -> None:
    """Raises BadInput if the image lacks it; a laptop's packages say nothing of the image."""
    if preflight.scope.is_in_cluster and not has_package(name):
        raise BadInput(
            f"the image has no package for {name}; build it with TRACKERS={name} "
            f"(docs/how-to/train/tracking.md) and set spec.image, or remove tracking.{name}"
        )


def _require_token(preflight: Preflight, name: TrackerName, tracker: Tracker) -> None:
    secret = token_of(tracker)
    if secret is None:
        return
    has_token = bool(os.environ.get(tracking_token_env(name)))
    preflight.require_input("the Secret of tokenSecretRef", is_there=has_token)
    if not has_token:
        raise BadInput(
            f"Secret {secret.name!r} with key {secret.key!r} is not there: create it, or "
            f"{name} gets no row"
        )


def _require_answer(url: str) -> None:
    """Ask for the address; any answer of HTTP will do. Without one the check is not made: the
    tracker may be away for now, and no run waits for it."""
    if not url:
        return
    try:
        urllib.request.urlopen(url, timeout=ANSWER_SECONDS).close()
    except urllib.error.HTTPError as error:
        error.close()
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise NotChecked(
            f"{url} does not answer ({reason}): a run goes on without it, and counts its lost rows"
        ) from error

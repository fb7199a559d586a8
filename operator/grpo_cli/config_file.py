"""Reads a model's config.json: from its folder or, when allowed, from the hub.

The planner itself reads nothing: what a plan depends on is handed to it. Nothing is read that the user didn't name: the
operator has no files, and a plan that depends on what lies about on a laptop would not be the operator's.
"""

import json
import os
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 10
"""Longest wait for the hub."""
LARGEST = 1_000_000
"""Bytes; a config.json is a few kilobytes."""
HUB = "https://huggingface.co"
"""Where HF_ENDPOINT is unset."""


class ConfigUnreadable(OSError):
    """A config.json that was asked for and can't be had; the message says why."""


def read_config(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or in the config.json of a folder.

    Raises:
        ConfigUnreadable: the file is missing, or holds no JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        return _object(file.read_bytes(), str(file))
    except OSError as error:
        raise ConfigUnreadable(f"{file}: {error.strerror or error}") from error


def fetch_config(model: str, revision: str | None = None, token: str | None = None) -> dict[str, Any]:
    """The config.json of a hub id, over HTTP. Only for callers whose user allowed it.

    Raises:
        ConfigUnreadable: the hub refuses, doesn't answer in time, or sends something else.
    """
    import urllib.error
    import urllib.request  # takes as long to import as a plan to make, and few plans need it

    url = f"{os.environ.get('HF_ENDPOINT', HUB)}/{model}/resolve/{revision or 'main'}/config.json"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
            return _object(answer.read(LARGEST), url)
    except urllib.error.HTTPError as error:
        raise ConfigUnreadable(f"{url}: HTTP {error.code}; for a gated model set HF_TOKEN") from error
    except OSError as error:
        raise ConfigUnreadable(f"{url}: {error}") from error


def _object(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ConfigUnreadable: the data is something else.
    """
    try:
        found = json.loads(data)
    except ValueError as error:
        raise ConfigUnreadable(f"{where} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigUnreadable(f"{where} is not a JSON object")
    return found

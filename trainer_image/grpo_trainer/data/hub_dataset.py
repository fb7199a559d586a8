"""Datasets of the hub as rows: one commit, fetched and converted once per cache by one process, and read by all.

`datasets` alone asks the hub on every rank and in every attempt, and where that fails it may take another version that
it finds in its cache. Here the converted rows lie in a folder named after the commit, which is whole or not there.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path

import datasets
from huggingface_hub import is_offline_mode

from grpo_api.spec.dataset import DatasetSpec
from grpo_api.text.contract import DATASET_TOKEN_ENV

from ..errors import BadInput
from ..files import sync_folder
from ..gang import led
from ..hub.patience import passing
from ..hub.repositories import Hub, Repository, asked

_REFUSED = (FileNotFoundError, ConnectionError, datasets.exceptions.DatasetGenerationError, ValueError)


def read_hub(dataset: DatasetSpec, hub: Hub) -> datasets.Dataset:
    """The rows of a hub dataset, or of a folder that stands in for one. A collective.

    Raises:
        BadInput: there is no such dataset, configuration or split, or no right to it; or it can't be read.
        Transient: the hub can't be asked now, or there is no room.
    """
    name, token = dataset.name or "", os.environ.get(DATASET_TOKEN_ENV)
    repository = Repository("dataset", name, dataset.revision, "dataset", token)
    if Path(name).is_absolute():
        return _loaded(dataset, dataset.revision)
    commit = hub.commit(repository)
    if is_offline_mode():
        folder = _folder(dataset, repository, commit)
        return datasets.load_from_disk(str(folder)) if folder.is_dir() else _loaded(dataset, dataset.revision)
    return datasets.load_from_disk(str(led.by_node(lambda: _converted(dataset, repository, commit, hub))))


def _folder(dataset: DatasetSpec, repository: Repository, commit: str) -> Path:
    """Where the rows of that commit are, once they are there."""
    choice = json.dumps([dataset.config, dataset.split])
    name = hashlib.sha256(choice.encode()).hexdigest()[:16]
    commits = Path(datasets.config.HF_DATASETS_CACHE) / "commits" / repository.storage.name
    return commits / (commit or "none") / name


def _converted(dataset: DatasetSpec, repository: Repository, commit: str, hub: Hub) -> Path:
    """The folder with the rows of that commit, as `save_to_disk` writes them."""
    folder = _folder(dataset, repository, commit)

    def convert() -> Path:
        if not folder.is_dir():
            _convert(dataset, commit, folder)
        return folder

    return folder if folder.is_dir() else asked(repository, convert, hub, folder.parent)


def _convert(dataset: DatasetSpec, commit: str, folder: Path) -> None:
    """Fetch and convert under another name, so that the folder appears whole."""
    work = folder.with_name(f".{folder.name}")
    shutil.rmtree(work, ignore_errors=True)  # of a process that was killed: the lease allows one at a time
    work.mkdir(parents=True)
    try:
        _loaded(dataset, commit, work / "cache").save_to_disk(work / "rows")
        (work / "rows").rename(folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _loaded(dataset: DatasetSpec, revision: str | None, cache: Path | None = None) -> datasets.Dataset:
    try:
        return datasets.load_dataset(
            dataset.name,
            dataset.config,
            split=dataset.split,
            revision=revision,
            token=os.environ.get(DATASET_TOKEN_ENV),
            cache_dir=None if cache is None else str(cache),
        )
    except _REFUSED as error:
        if passing(error) and not is_offline_mode():
            raise
        which = f"{dataset.name!r} (config {dataset.config or 'default'}, split {dataset.split})"
        raise BadInput(
            f"dataset {which} can't be loaded: {error}; check name, config, split and tokenSecretRef"
        ) from error

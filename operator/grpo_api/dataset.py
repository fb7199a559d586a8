"""`spec.dataset`: where prompts and answers come from, and how a row becomes a prompt.

Exists to keep the parts of the spec readable one by one. Imported by job.py and plan.py.
"""

from typing import Annotated, Literal

from pydantic import Field

from .base import ATOMIC_LIST, Model, rules
from .model import ConfigMapFiles, SecretKey, VolumeClaim

Column = Annotated[str, Field(min_length=1, max_length=128)]


class DatasetFiles(Model):
    """Files on a volume or in a ConfigMap, mounted read-only at /data."""

    model_config = {
        "json_schema_extra": rules(
            ("has(self.volume) != has(self.configMap)", "set exactly one of volume and configMap"),
        )
    }

    volume: VolumeClaim | None = None
    """Volume with the files. Unset: `configMap` must be set."""
    config_map: ConfigMapFiles | None = None
    """ConfigMap with the files (1 MiB at most). Unset: `volume` must be set."""
    paths: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^/].*$")]],
        Field(min_length=1, max_length=256, json_schema_extra=ATOMIC_LIST),
    ]
    """Files relative to the volume or ConfigMap, read in this order; `*` matches within a folder."""
    format: Literal["Auto", "JSONL", "Parquet", "CSV"] = "Auto"
    """Format of the files. Auto: by their suffix (.jsonl, .json, .parquet, .csv)."""


class DatasetSpec(Model):
    """The training prompts: a hub dataset, or files."""

    model_config = {
        "json_schema_extra": rules(
            ("has(self.name) != has(self.files)", "set exactly one of name (a hub dataset) and files"),
            ("has(self.name) || !has(self.config)", "config belongs to a hub dataset; remove it or set name"),
        )
    }

    name: Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^\s\x00]+$")] | None = None
    """Hub id such as `openai/gsm8k`. Unset: `files` must be set."""
    config: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """Configuration of the hub dataset, such as `main`. Unset: its default."""
    split: Annotated[str, Field(min_length=1, max_length=128)] = "train"
    """Split of the hub dataset. Unset: `train`."""
    revision: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """Commit, tag or branch of the hub dataset. Unset: the default branch."""
    token_secret: SecretKey | None = None
    """Hub token for gated datasets. Unset: anonymous."""
    files: DatasetFiles | None = None
    """Files instead of a hub dataset. Unset: `name` must be set."""
    prompt_column: Column = "prompt"
    """Column with the prompt: text, or a list of chat messages ({role, content}). Unset: `prompt`."""
    system_prompt: Annotated[str, Field(max_length=16384)] | None = None
    """Put in front of every prompt as the system message (text prompts become chats). Unset: none."""
    on_long_prompt: Literal["Drop", "Fail"] = "Drop"
    """What happens to prompts longer than `training.maxPromptLength` tokens: dropped and counted, or the run fails."""
    shuffle: bool = True
    """Shuffle rows with `training.seed`. Unset: true."""

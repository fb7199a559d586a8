"""`spec.dataset`: where prompts and answers come from, and how a row becomes a prompt."""

from typing import Annotated, Literal

from pydantic import Field

from ..text.base import Model, Rule, exactly_one
from ..text.names import (
    ConfigMapFiles,
    Repository,
    Revision,
    SecretKeySelector,
    SubPath,
    VolumeClaim,
)

Column = Annotated[str, Field(min_length=1, max_length=128)]


class DatasetFiles(Model):
    """Files on a volume or in a ConfigMap, mounted read-only at /data."""

    RULES = (
        exactly_one("volume", "configMap"),
        Rule(
            "self.paths.all(path, !path.split('/').exists(part, part == '..'))",
            "paths must stay inside the volume: remove `..`",
        ),
    )

    volume: VolumeClaim | None = None
    """Volume with the files. Unset: `configMap` must be set."""
    config_map: ConfigMapFiles | None = None
    """ConfigMap with the files (1 MiB at most). Unset: `volume` must be set."""
    paths: Annotated[list[SubPath], Field(min_length=1, max_length=256)]
    """Files relative to the volume or ConfigMap, read in this order; `*` matches within a
    folder."""
    format: Literal["Auto", "JSONL", "Parquet", "CSV"] = "Auto"
    """Format of the files, text in UTF-8. JSONL: one object per line; CSV: with a header, every
    value a text. Auto: by their suffix (.jsonl or .json, .parquet, .csv)."""


class DatasetSpec(Model):
    """The training prompts: a hub dataset, or files."""

    RULES = (
        exactly_one("name", "files", message="set exactly one of name (a hub dataset) and files"),
        Rule(
            "has(self.name) || !has(self.config) && !has(self.revision) && "
            "!has(self.tokenSecretRef)",
            "config, revision and tokenSecretRef belong to a hub dataset; remove them or set name",
        ),
    )

    name: Repository | None = None
    """Hub id such as `openai/gsm8k`. Unset: `files` must be set."""
    config: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """Configuration of the hub dataset, such as `main`. Unset: its default."""
    split: Annotated[str, Field(min_length=1, max_length=128)] = "train"
    """Split of the hub dataset. Unset: `train`."""
    revision: Revision | None = None
    """Commit, tag or branch of the hub dataset. Unset: the default branch."""
    token_secret_ref: SecretKeySelector | None = None
    """Hub token for gated datasets. Unset: anonymous."""
    files: DatasetFiles | None = None
    """Files instead of a hub dataset. Unset: `name` must be set."""
    columns: Annotated[dict[Column, Column], Field(max_length=64)] = Field(default_factory=dict)
    """Other names for columns, as `new name: name in the dataset`; everything else, promptColumn
    too, goes by the new names. Unset: the dataset's names."""
    prompt_column: Column = "prompt"
    """Column with the prompt: text, or a list of chat messages ({role, content}). Unset:
    `prompt`."""
    system_prompt: Annotated[str, Field(max_length=16384)] | None = None
    """Put in front of every prompt as the system message (text prompts become chats). Unset:
    none."""
    on_long_prompt: Literal["Drop", "Fail"] = "Drop"
    """What happens to prompts longer than `training.maxPromptLength` tokens, chat template
    included: dropped and counted, or the run fails and names the first. Unset: Drop."""
    on_duplicate_prompt: Literal["Keep", "Drop", "Fail"] = "Keep"
    """What happens to prompts that occurred before: kept or dropped, counted in both cases, or the
    run fails and names the first. Unset: Keep."""
    shuffle: bool = True
    """Shuffle rows with `training.seed`. Unset: true."""

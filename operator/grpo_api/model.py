"""`spec.model`: which model is trained, where its weights come from, and its shape for planning memory."""

from typing import Annotated

from pydantic import Field

from .base import Model
from .names import Repository, Revision
from .quantity import ParameterCount
from .references import SecretKeySelector, VolumeClaim


class Architecture(Model):
    """The shape of a decoder-only transformer, for planning memory when the model's config.json can't be read."""

    layers: Annotated[int, Field(ge=1, le=1024)]
    """Number of transformer layers (`num_hidden_layers`)."""
    hidden_size: Annotated[int, Field(ge=1, le=1048576)]
    """Width of the residual stream (`hidden_size`)."""
    intermediate_size: Annotated[int, Field(ge=1, le=4194304)]
    """Width of the feed-forward layer (`intermediate_size`)."""
    attention_heads: Annotated[int, Field(ge=1, le=4096)]
    """Number of query heads (`num_attention_heads`)."""
    key_value_heads: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Number of key and value heads (`num_key_value_heads`). Unset: as many as query heads."""
    head_dim: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Width of one head. Unset: `hiddenSize / attentionHeads`."""
    vocab_size: Annotated[int, Field(ge=1, le=16777216)]
    """Number of tokens (`vocab_size`)."""
    tie_word_embeddings: bool = False
    """Whether input and output embeddings share one matrix. Unset: false."""


class ModelSpec(Model):
    """The model that is trained; its first weights are also the reference."""

    name: Repository
    """A Hugging Face hub id such as `Qwen/Qwen2.5-0.5B-Instruct`, or the absolute path of a folder in the pods, such as
    one of `volume` (mounted at /models)."""
    revision: Revision | None = None
    """Commit, tag or branch on the hub. Unset: the hub's default branch. Ignored for a folder."""
    parameters: ParameterCount | None = None
    """Number of parameters, such as `1.24B`; with it the job is planned without reading the model. Unset: taken from
    the built-in catalogue by name, or from `architecture`; a model known by neither is rejected."""
    architecture: Architecture | None = None
    """Exact shape for the memory model. Unset: the catalogue's, or the nearest dense shape of `parameters`."""
    token_secret_ref: SecretKeySelector | None = None
    """Hub token for gated models. Unset: anonymous."""
    volume: VolumeClaim | None = None
    """Volume with the model, mounted read-only at /models in every pod. Unset: no volume."""
    cache: VolumeClaim | None = None
    """Volume in which pods, attempts and jobs share what they fetch of the hub, each once: this model, reward
    models and the dataset; mounted read-write at /hub-cache. Unset: every pod fetches for itself, in each attempt."""
    trust_remote_code: bool = False
    """Run code that the model's repository ships. Unset: false."""

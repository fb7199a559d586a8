"""Finds a model's files: a folder, or what is fetched of a repository of the hub.

It also finds the tokenizer among them, and the model's shape by its configuration.

Every rank provably means the same files. Nothing here needs torch, so that a preflight looks at the
same files in the same way.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from pydantic import ValidationError

from grpo_api.spec.model import Architecture
from grpo_api.spec.model_config import position_count

from ..gang import ranks
from ..hub.repositories import CONFIG_FILES, Fetch, Hub, Repository, listed_files
from ..runtime.durable_files import name_unreadable
from ..runtime.errors import BadInput, DiskFailed, is_volume_away
from .checkpoint_files import (
    ADAPTER,
    INDEX,
    WHOLE,
    indexed_files,
    no_weights_message,
    open_weights,
    shards,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODEL_FILES = [*CONFIG_FILES, WHOLE, ADAPTER]
"""What is fetched of a hub repository: CONFIG_FILES and the weights; and the shards of an index.
No pickles, and none of the copies in other formats that lie beside (`consolidated.safetensors`,
`onnx/`)."""

CONFIG = "config.json"
_LAYER = re.compile(r"(?:model\.|transformer\.|gpt_neox\.)?(?:layers|h)\.([0-9]{1,4})\.")
"""Names of the tensors of a decoder's layers."""
_FURTHER = re.compile("nextn|mtp")

Dtype = Literal["bfloat16", "float32"]


@dataclass(frozen=True, slots=True)
class Source:
    """The files that a model was loaded from."""

    name: str
    """Hub id or folder, as the plan names it."""
    folder: Path
    """Where the files lie on this node."""
    revision: str
    """Commit on the hub; empty for a folder."""
    dtype: Dtype
    """Dtype that the weights were cast to."""


def locate_model(repository: Repository, dtype: Dtype, hub: Hub) -> Source:
    """The folder of a model, with every weight file checked to be there and whole. A collective.

    Raises:
        BadInput: not found, or a file is missing, truncated or damaged.
        Transient: the hub can't be asked now, or there is no room.
    """
    if any(ranks.gather(repository.folder is not None)):
        folder = Path(repository.name)
        commit = ranks.run_on_all(lambda: _check_folder(repository))
    else:
        folder, commit = hub.snapshot(repository, _download)
    return ranks.run_on_all(lambda: _check_weights(Source(repository.name, folder, commit, dtype)))


def locate_config(repository: Repository, dtype: Dtype, hub: Hub) -> Source:
    """The folder of a model as `locate_model` finds it, but of a repository of the hub only the
    small files are fetched; its weights are looked up in its list of files.

    Raises:
        BadInput: not found, or the weights are not there.
        Transient: the hub can't be asked now, or there is no room.
    """
    if repository.folder is not None:
        return _check_weights(
            Source(repository.name, repository.folder, _check_folder(repository), dtype)
        )
    folder, commit = hub.snapshot(repository, lambda fetch: fetch(CONFIG_FILES))
    source = Source(repository.name, folder, commit, dtype)
    names = listed_files(repository, commit)
    if names is not None and not {WHOLE, ADAPTER} & names:
        needed = set(shards(folder))
        missing = sorted(needed - names)
        _require_layers(source, indexed_files(folder))
        if not needed:
            raise BadInput(f"{repository.description} {no_weights_message(names)}")
        if missing:
            raise BadInput(
                f"{repository.description} lacks {missing[0]}, which its {INDEX} lists; push the "
                "whole model again"
            )
    return source


@name_unreadable()
def _check_folder(repository: Repository) -> str:
    """A folder has no commit; it has to be there."""
    if not Path(repository.name).is_dir():
        where = f"spec.{repository.path}"
        raise BadInput(
            f"{where}.name: folder {repository.name} does not exist in the pod; mount it with "
            f"{where}.volume"
        )
    return ""


def _download(fetch: Fetch) -> Path:
    """The repository's snapshot with the one set of weights that `open_weights` reads."""
    folder = fetch(MODEL_FILES)
    if not (folder / WHOLE).exists() and (listed := shards(folder)):
        fetch([escape(shard) for shard in listed])
    return folder


def _check_weights(source: Source) -> Source:
    _require_layers(source, open_weights(source.folder).paths)
    return source


def _require_layers(source: Source, tensors: Iterable[str]) -> None:
    """Make sure that the weights have the layers that config.json says: transformers drops the
    rest without an error.

    Raises:
        BadInput: they have more or fewer.
    """
    try:
        config = json.loads((source.folder / CONFIG).read_text(encoding="utf-8"))
        configured = int(config.get("num_hidden_layers") or config["n_layer"])
    # Other damage is reported when the whole file is read.
    except (
        OSError,
        ValueError,
        ArithmeticError,
        RecursionError,
        LookupError,
        TypeError,
        AttributeError,
    ):
        return
    numbers = [int(match[1]) for match in map(_LAYER.match, tensors) if match]
    stored = max(numbers, default=-1) + 1
    # Layers that predict further tokens follow the others, and are not counted with them.
    has_more = any(_FURTHER.search(name) for name in config)
    if not stored or stored == configured or (stored > configured and has_more):
        return
    raise BadInput(
        f"{CONFIG} of model {source.name} has num_hidden_layers {configured}, and its weights have "
        f"{stored} layers; copy both from one model"
    )


def load_tokenizer(
    source: Source, remote_code: bool, chat_template: str | None = None
) -> "PreTrainedTokenizerBase":
    """The tokenizer beside a model, with a chat template in the place of its own where one is
    given; a missing pad token becomes the end-of-sequence token.

    Raises:
        BadInput: the folder has none.
    """
    # A process that only looks for files has no use for transformers.
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source.folder,
            padding_side="left",
            truncation_side="left",
            trust_remote_code=remote_code,
        )
    # The tokenizers library raises anything at a damaged file.
    except Exception as error:
        if is_volume_away(error):
            raise DiskFailed(f"model {source.name}: {error}") from error
        raise BadInput(
            f"model {source.name} has no usable tokenizer: {type(error).__name__}: {error}; save "
            "it again beside the model"
        ) from error
    _require_files(tokenizer, source)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return cast("PreTrainedTokenizerBase", tokenizer)


def _require_files(tokenizer: Any, source: Source) -> None:
    """Make sure that the tokenizer was read from a file. Without one, transformers makes an
    empty one of some model types, by which every prompt has no token.

    Raises:
        BadInput: the folder has none of the tokenizer's files.
    """
    names = sorted(set(tokenizer.vocab_files_names.values()))
    if names and not any((source.folder / name).is_file() for name in names):
        raise BadInput(
            f"model {source.name} has no tokenizer, none of {', '.join(names)}; save it beside the "
            "model with tokenizer.save_pretrained"
        )


def vocabulary_of(config: Any) -> int | None:
    """Tokens that the model has; None where its own code has another name for that."""
    size: int | None = getattr(config.get_text_config(), "vocab_size", None)
    return size


def require_pad_token(tokenizer: "PreTrainedTokenizerBase", config: Any, name: str) -> None:
    """Make sure that batches are padded with a token that the model of that name has.

    Raises:
        BadInput: the tokenizer has none, or it was added to the tokenizer alone.
    """
    token = tokenizer.pad_token_id
    if token is None:
        raise BadInput(
            f"the tokenizer of model {name} has neither pad_token nor eos_token, and batches are "
            "padded with one of them; name it in tokenizer_config.json"
        )
    vocabulary = vocabulary_of(config)
    if vocabulary is not None and token >= vocabulary:
        raise BadInput(
            f"the tokenizer of model {name} pads with {tokenizer.pad_token!r}, token {token}, and "
            f"the model has {vocabulary} tokens; set pad_token in tokenizer_config.json to one of "
            "them"
        )


def require_decoder(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Make sure that a tokenizer decodes token by token, as stop strings need it.

    Raises:
        BadInput: the tokenizers library can't read it.
    """
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        kind = type(tokenizer).__name__
        raise BadInput(
            f"spec.generation.stop: {kind} has no tokenizer.json, which decodes token by token; "
            "convert it with transformers, or remove stop"
        )


def architecture_of_config(config: Any) -> Architecture | None:
    """The shape that spec.model.architecture would say; None for what that has no words for.

    transformers has filled in what the file left out.
    """
    if getattr(config, "text_config", None) is not None or not _has_equal_layers(config):
        return None
    try:
        experts = int(
            _declared_setting(config, "num_local_experts")
            or _declared_setting(config, "num_experts")
            or 0
        )
        heads = config.num_attention_heads
        intermediate_size = (
            _declared_setting(config, "moe_intermediate_size") or config.intermediate_size
        )
        key_value_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        experts_per_token = config.num_experts_per_tok if experts else 0
        return Architecture(
            model_type=config.model_type,
            layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            intermediate_size=intermediate_size,
            attention_heads=heads,
            key_value_heads=key_value_heads,
            head_dim=head_dim,
            vocab_size=config.vocab_size,
            tie_word_embeddings=bool(config.tie_word_embeddings),
            attention_bias=bool(_declared_setting(config, "attention_bias")),
            mlp_bias=bool(_declared_setting(config, "mlp_bias")),
            max_position_embeddings=position_count(config.to_dict()),
            experts=experts,
            experts_per_token=experts_per_token,
            **_window(config),
        )
    except (ArithmeticError, AttributeError, TypeError, ValidationError):
        return None


def _has_equal_layers(config: Any) -> bool:
    """Whether all layers have the same feed-forward part."""
    return (
        not getattr(config, "mlp_only_layers", None)
        and getattr(config, "decoder_sparse_step", 1) == 1
    )


def _declared_setting(config: Any, name: str) -> Any:
    """A setting that the model's type has; a file may carry others' along. None where it has it
    not."""
    return getattr(config, name, None) if hasattr(type(config), name) else None


def _window(config: Any) -> dict[str, int]:
    """The window of local attention and how many layers have none; empty when all layers attend to
    everything."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    full = list(kinds).count("full_attention") if kinds else 0
    if not window or full == config.num_hidden_layers:
        return {}
    return {"sliding_window": window, "full_attention_layers": full}

"""Checks the models of a job by their small files: configuration, tokenizer, and whether the
weights are there."""

import ast
import importlib.util
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from grpo_api.spec.model_config import untrainable_message
from grpo_api.spec.rewards import ModelReward

from ..data.prompts import TEMPLATE, render_limit, require_template
from ..hub.repositories import Repository
from ..runtime.durable_files import name_unreadable
from ..runtime.errors import BadInput
from ..weights.model_files import (
    CONFIG,
    Dtype,
    Source,
    architecture_of_config,
    load_tokenizer,
    locate_config,
    require_pad_token,
)
from .findings import NotChecked, Preflight

_NEEDS_TORCH = re.compile(r"not found in your environment:[^.]*\btorch\b|No module named 'torch\b")
"""What transformers and Python say of code that imports a missing torch."""


def check_policy(preflight: Preflight) -> Any:
    """Check the trained model; return its tokenizer, None where it has none or was not checked."""
    model, findings = preflight.plan.model, preflight.findings
    path = "spec.model.name"
    source = None
    with findings.check(TEMPLATE), render_limit(preflight.scope.render_seconds):
        if model.chat_template is not None:
            require_template(model.chat_template)
    with findings.check(path):
        repository = Repository("model", model.name, model.revision, "model")
        located = _locate(repository, preflight.plan.execution.dtype, preflight)
        message = untrainable_message(_read_config(located))
        if message:
            raise BadInput(message)
        source = located
    if source is None or not preflight.scope.is_whole:
        return None
    config = None
    with findings.check(path):
        config = _load_config(source, remote_code=model.trust_remote_code)
        _require_causal(config, remote_code=model.trust_remote_code)
        findings.architecture = architecture_of_config(config)
    # The tokenizer is found by the configuration.
    if config is None:
        return None
    with findings.check(path), _skip_code_with_torch():
        tokenizer = load_tokenizer(source, model.trust_remote_code, model.chat_template)
        require_pad_token(tokenizer, config, source.name)
        return tokenizer
    return None


def check_reward_model(reward: ModelReward, path: str, preflight: Preflight) -> Any:
    """Check a reward model at a path below spec; its tokenizer, as in `check_policy`."""
    tokenizer = None
    with preflight.findings.check(f"spec.{path}.name"):
        repository = Repository("model", reward.name, reward.revision, path)
        source = _locate(repository, reward.dtype, preflight)
        _read_config(source)
        if preflight.scope.is_whole:
            config = _load_config(source, remote_code=False)
            if config.num_labels != 1:
                raise BadInput(
                    f"reward model {source.name} has {config.num_labels} labels; name a reward "
                    "model, which has one"
                )
            tokenizer = load_tokenizer(source, remote_code=False)
            require_pad_token(tokenizer, config, source.name)
    return tokenizer


def _locate(repository: Repository, dtype: Dtype, preflight: Preflight) -> Source:
    folder = repository.folder
    if folder is None:
        preflight.findings.require_hub()
        preflight.require_token("model.tokenSecretRef", preflight.plan.model.token_secret_ref)
    else:
        preflight.require_input(f"folder {folder}", is_there=folder.is_dir())
    return locate_config(repository, dtype, preflight.hub)


@name_unreadable()
def _read_config(source: Source) -> dict[str, Any]:
    """The model's config.json, which must be a JSON object."""
    path = source.folder / CONFIG
    if not path.is_file():
        names = ", ".join(sorted(file.name for file in source.folder.iterdir())[:8])
        raise BadInput(
            f"model {source.name} has no {CONFIG}, but {names}; save it with save_pretrained"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise BadInput(
            f"{CONFIG} of model {source.name} is no JSON: {error}; copy the model again"
        ) from error
    if not isinstance(config, dict):
        raise BadInput(f"{CONFIG} of model {source.name} is no JSON object; copy the model again")
    return config


def _load_config(source: Source, *, remote_code: bool) -> Any:
    """The configuration as transformers reads it."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    with _skip_code_with_torch():
        try:
            return AutoConfig.from_pretrained(source.folder, trust_remote_code=remote_code)
        except (OSError, ValueError, KeyError, ImportError, StrictDataclassError) as error:
            raise BadInput(
                f"{CONFIG} of model {source.name} can't be used: {error}; name a model that "
                "transformers knows, or set spec.model.trustRemoteCode"
            ) from error
        # What transformers does not check fails where it is first used.
        except (ArithmeticError, AttributeError, TypeError) as error:
            raise BadInput(
                f"{CONFIG} of model {source.name} can't be used: {_wrong_setting(source)}"
                f"{type(error).__name__}: {error}; correct it"
            ) from error


def _wrong_setting(source: Source) -> str:
    """The setting without which transformers takes the configuration, for the beginning of a
    message; empty if no setting is wrong."""
    from transformers import AutoConfig

    config = _read_config(source)
    for name, value in config.items():
        others = {key: other for key, other in config.items() if key != name}
        with suppress(Exception):
            AutoConfig.for_model(**others)
            return f"{name} is {value!r:.80}: "
    return ""


@contextmanager
def _skip_code_with_torch() -> Iterator[None]:
    """Surrounds a model's own code, which may import the torch that a preflight hides.

    Raises:
        NotChecked: it does.
    """
    try:
        yield
    except BadInput as error:
        if not _NEEDS_TORCH.search(str(error)):
            raise
        raise NotChecked("the model's own code needs torch, which no preflight loads") from error


def _require_causal(config: Any, *, remote_code: bool) -> None:
    """Make sure that the trainer can load the model, as it can't most of those that see images."""
    own_classes = getattr(config, "auto_map", None) or {}
    has_own_class = remote_code and "AutoModelForCausalLM" in own_classes
    if has_own_class or config.model_type in _causal_types():
        return
    classes = ", ".join(config.architectures or ["a model"])
    raise BadInput(
        f"config.json is that of {classes}, model_type {config.model_type}, which "
        "AutoModelForCausalLM does not load: set spec.model.name to a causal language model "
        "(…ForCausalLM)"
    )


def _causal_types() -> frozenset[str]:
    """The types that this image's AutoModelForCausalLM loads.

    The module that lists them imports torch, for which a preflight has neither time nor memory:
    it is read and not run.
    """
    package = importlib.util.find_spec("transformers")
    assert package is not None
    assert package.submodule_search_locations is not None
    folder = Path(package.submodule_search_locations[0])
    module = ast.parse((folder / "models/auto/modeling_auto.py").read_text(encoding="utf-8"))
    for statement in module.body:
        match statement:
            case ast.Assign(
                targets=[ast.Name(id="MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")],
                value=ast.Call(args=[pairs]),
            ):
                return frozenset(dict(ast.literal_eval(pairs)))
    raise LookupError("transformers has no MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")

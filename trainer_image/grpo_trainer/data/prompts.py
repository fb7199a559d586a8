"""From a cell of the prompt column to a prompt, and how many tokens it has: all rules for chat
messages."""

from collections.abc import Callable, Iterator
from typing import Any

import jinja2

from ..runtime.errors import BadInput

Message = dict[str, str]
Prompt = str | list[Message]
ROLES = ("system", "user", "assistant", "tool")
_BATCH = 512


def build_prompt(value: Any, system_prompt: str | None, place: str) -> Prompt:
    """The prompt of a cell: text stays text without a system prompt and becomes a chat with one.

    Raises:
        BadInput: the cell has neither text nor chat messages; names its place.
    """
    if isinstance(value, str):
        if not value.strip():
            raise BadInput(f"{place}: the prompt is empty")
        if system_prompt is None:
            return value
        messages = [{"role": "user", "content": value}]
    elif isinstance(value, list) and value:
        messages = [
            _message(message, f"{place}, message {number}")
            for number, message in enumerate(value, 1)
        ]
    else:
        raise BadInput(
            f"{place}: {value!r:.80} is neither text nor a list of {{role, content}} messages"
        )
    return messages if system_prompt is None else _with_system(messages, system_prompt, place)


def _message(message: Any, place: str) -> Message:
    if not isinstance(message, dict):
        raise BadInput(f"{place}: {message!r:.80} is not a message; write {{role, content}}")
    # a table fills keys that other rows have with None
    given = {key: value for key, value in message.items() if value is not None}
    if given.keys() != {"role", "content"}:
        raise BadInput(
            f"{place} has the keys {sorted(given)}; both role and content are needed, and nothing "
            "else"
        )
    if given["role"] not in ROLES:
        raise BadInput(f"{place}: role {given['role']!r:.40} is none of {', '.join(ROLES)}")
    if not isinstance(given["content"], str):
        raise BadInput(
            f"{place}: content {given['content']!r:.80} is not text; only text prompts are "
            "supported"
        )
    return {"role": given["role"], "content": given["content"]}


def _with_system(messages: list[Message], system_prompt: str, place: str) -> list[Message]:
    if messages[0]["role"] == "system":
        raise BadInput(
            f"{place} has a system message already; remove dataset.systemPrompt or that message"
        )
    return [{"role": "system", "content": system_prompt}, *messages]


def token_counts(
    prompts: dict[int, Prompt], tokenizer: Any, place: Callable[[int], str]
) -> dict[int, int]:
    """Tokens of each prompt, by its key, as TRL will encode it: chat template and generation prompt
    included.

    Raises:
        BadInput: the tokenizer has no chat template, or its template rejects a prompt; names the
            prompt's place.
    """
    if tokenizer.chat_template is None and any(
        isinstance(prompt, list) for prompt in prompts.values()
    ):
        problem = "the prompts are chats but the model's tokenizer has no chat template"
        raise BadInput(
            f"dataset: {problem}; remove dataset.systemPrompt, use text prompts, or take a chat "
            "model"
        )
    counts: dict[int, int] = {}
    for keys in _batches(list(prompts)):
        encoded = _encode({key: prompts[key] for key in keys}, tokenizer, place)
        counts |= {key: len(tokens) for key, tokens in zip(keys, encoded, strict=True)}
    return counts


def _batches(keys: list[int]) -> Iterator[list[int]]:
    for start in range(0, len(keys), _BATCH):
        yield keys[start : start + _BATCH]


def _encode(
    prompts: dict[int, Prompt], tokenizer: Any, place: Callable[[int], str]
) -> list[list[int]]:
    batch = list(prompts.values())
    if isinstance(batch[0], str):
        return list(tokenizer(text=batch)["input_ids"])
    try:
        return list(_encode_chats(batch, tokenizer))
    except jinja2.TemplateError as error:
        if len(batch) > 1:
            return [_encode({key: prompt}, tokenizer, place)[0] for key, prompt in prompts.items()]
        (key,) = prompts
        raise BadInput(
            f"{place(key)}: the model's chat template rejects this prompt: {error}"
        ) from error


def _encode_chats(batch: list[Prompt], tokenizer: Any) -> Any:
    encoded = tokenizer.apply_chat_template(
        batch, add_generation_prompt=True, tokenize=True, return_dict=True
    )
    return encoded["input_ids"]

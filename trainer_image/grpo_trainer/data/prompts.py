"""From a cell of the prompt column to a prompt, and how many tokens it has: all rules for chat
messages and chat templates.

What is said of a template names the line. A template is a program of the user's, so any exception
may come out of it, and it may take as long as it likes.
"""

import signal
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..runtime.errors import BadInput

Message = dict[str, str]
Prompt = str | list[Message]
ROLES = ("system", "user", "assistant", "tool")
_BATCH = 512
TEMPLATE = "spec.model.chatTemplate"
_FILE = "<template>"
"""Name of a template's frames in a traceback (jinja2/environment.py)."""


def build_prompt(value: Any, system_prompt: str | None, place: str) -> Prompt:
    """The prompt of a cell: text stays text without a system prompt and becomes a chat with one.

    Raises:
        BadInput: the cell has neither text nor chat messages; names its place.
    """
    if isinstance(value, str):
        if not value.strip():
            raise BadInput(f"{place}: the prompt is empty; write one, or remove the row")
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
    if system_prompt is None:
        return messages
    if messages[0]["role"] == "system":
        raise BadInput(
            f"{place} has a system message already; remove dataset.systemPrompt or that message"
        )
    return [{"role": "system", "content": system_prompt}, *messages]


def _message(message: Any, place: str) -> Message:
    if not isinstance(message, dict):
        raise BadInput(f"{place}: {message!r:.80} is not a message; write {{role, content}}")
    # a table fills keys that other rows have with None
    fields = {key: value for key, value in message.items() if value is not None}
    if fields.keys() != {"role", "content"}:
        raise BadInput(
            f"{place} has the keys {sorted(fields)}; both role and content are needed, and nothing "
            "else"
        )
    if fields["role"] not in ROLES:
        raise BadInput(f"{place}: role {fields['role']!r:.40} must be one of {', '.join(ROLES)}")
    if not isinstance(fields["content"], str):
        raise BadInput(
            f"{place}: content {fields['content']!r:.80} is not text; only text prompts are "
            "supported"
        )
    return {"role": fields["role"], "content": fields["content"]}


class PromptEncoder:
    """Encodes prompts as TRL does: chats by the tokenizer's chat template with the generation
    prompt, text as it is."""

    def __init__(
        self,
        tokenizer: Any,
        template_kwargs: Mapping[str, Any] | None = None,
        vocabulary: int | None = None,
    ) -> None:
        """`template_kwargs` are spec.model.chatTemplateKwargs. `vocabulary`: tokens that the model
        has; None leaves that unchecked."""
        self.tokenizer = tokenizer
        self.template_kwargs = template_kwargs or {}
        self.vocabulary = vocabulary

    def render(self, prompt: Prompt) -> str:
        """The text that the model reads."""
        if isinstance(prompt, str):
            return prompt
        text: str = self._apply_template(prompt, tokenize=False)
        return text

    def encode(self, prompts: list[Prompt], **options: Any) -> Any:
        """What the tokenizer returns for prompts of one kind; `options` are its own."""
        if isinstance(prompts[0], str):
            return self.tokenizer(text=prompts, **options)
        return self._apply_template(prompts, tokenize=True, return_dict=True, **options)

    def token_counts(
        self, prompts: dict[int, Prompt], place: Callable[[int], str]
    ) -> dict[int, int]:
        """Tokens of each prompt, by its key.

        Raises:
            BadInput: the tokenizer has no chat template, its template rejects a prompt, or it makes
                a token of one that the model does not have; names the prompt's place.
        """
        has_chats = any(isinstance(prompt, list) for prompt in prompts.values())
        if has_chats and self.tokenizer.chat_template is None:
            raise BadInput(
                "dataset: the prompts are chats but the model's tokenizer has no chat template; "
                "set model.chatTemplate, take a chat model, or use text prompts without "
                "dataset.systemPrompt"
            )
        counts: dict[int, int] = {}
        all_keys = list(prompts)
        for start in range(0, len(all_keys), _BATCH):
            keys = all_keys[start : start + _BATCH]
            encoded = self._ids({key: prompts[key] for key in keys}, place)
            for key, tokens in zip(keys, encoded, strict=True):
                self._require_known(tokens, place(key))
                counts[key] = len(tokens)
        return counts

    def _require_known(self, tokens: list[int], place: str) -> None:
        """On a GPU, such a token would end the process without a word about it."""
        largest = max(tokens, default=0)
        if self.vocabulary is not None and largest >= self.vocabulary:
            text = self.tokenizer.convert_ids_to_tokens(largest)
            raise BadInput(
                f"{place}: the tokenizer makes token {largest}, {text!r}, of it, and the model has "
                f"{self.vocabulary} tokens; take the model's own tokenizer, or resize its "
                "embeddings"
            )

    def _ids(self, prompts: dict[int, Prompt], place: Callable[[int], str]) -> list[list[int]]:
        batch = list(prompts.values())
        if isinstance(batch[0], str):
            return list(self.encode(batch)["input_ids"])
        try:
            return list(self.encode(batch)["input_ids"])
        except (BadInput, MemoryError):
            raise
        # A template raises what it likes: it adds texts to numbers, or looks for a missing key.
        except Exception as error:
            if len(batch) > 1:
                return [self._ids({key: prompt}, place)[0] for key, prompt in prompts.items()]
            (key,) = prompts
            raise BadInput(
                f"{place(key)}: the model's chat template rejects this prompt: "
                f"{_template_problem(error)}"
            ) from error

    def _apply_template(self, prompts: Any, **options: Any) -> Any:
        return self.tokenizer.apply_chat_template(
            prompts, add_generation_prompt=True, **options, **self.template_kwargs
        )


class _Generation(Extension):
    """transformers' block `{% generation %}`, which marks the assistant's tokens."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        """The block's own statements."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def require_template(text: str) -> None:
    """Compile a template as transformers does (utils/chat_template_utils.py), without transformers.

    Raises:
        BadInput: it can't be compiled; with line and cause.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    try:
        environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        problem = str(error.message).rstrip(".")
        raise BadInput(f"{TEMPLATE}: line {error.lineno}: {problem}; correct it") from error
    # Nested too deeply, for Jinja or for Python's own compiler.
    except (RecursionError, SyntaxError, MemoryError, ValueError, OverflowError) as error:
        raise BadInput(f"{TEMPLATE}: it can't be compiled: {error}; make it simpler") from error


def _template_problem(error: BaseException) -> str:
    """Why a template failed on a prompt, with the line of it where there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == _FILE]
    place = f"line {lines[-1]}: " if lines else ""
    return f"{place}{error or type(error).__name__}"


@contextmanager
def render_limit(seconds: float) -> Iterator[None]:
    """Bound the time for rendering in the block; in a main thread alone, which has the signals.

    Raises:
        BadInput: it is over.
    """

    def end(*_: Any) -> None:
        raise BadInput(
            f"{TEMPLATE}: the template was not done with the first prompts after {seconds:g} s; "
            "does a loop of it end?"
        )

    previous = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)

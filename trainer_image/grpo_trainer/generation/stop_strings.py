"""`spec.generation.stop`: completions end at a text, alike in every engine, and keep it.

vLLM decodes a completion token by token, after its prompt, and ends it with the token that makes a
stop string whole (0.30, v1/engine/detokenizer.py). The same is done here while Transformers
samples. Its own stop_strings can't be used, since they match across the end of the prompt. TRL 1.16
does not pass generate the tokenizer that they need. It would also take the padding after a stop
string for sampled tokens.

TRL counts a completion as truncated unless its last token is an end-of-sequence token, and
`mask_truncated_completions` leaves those out of the loss. A completion that ended at a stop string
came to its end; StoppedCompletion shows this to TRL.
"""

from collections.abc import Sequence
from typing import Any, SupportsIndex, overload

import torch
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase, StoppingCriteria

_LOST_PLACE = "Invalid prefix encountered"
"""How tokenizers begins its error where bytes of several tokens make no text (vLLM issue 17448)."""


class StopStringMatcher:
    """Decodes one completion token by token and finds the first stop string in it."""

    def __init__(
        self, stop: Sequence[str], tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]
    ) -> None:
        """`prompt`: the tokens before the first one, which decide how that is decoded."""
        self._stop = stop
        self._backend = tokenizer.backend_tokenizer
        # Special tokens are text here, so that one such as <|im_end|> can be a stop string.
        self._stream = DecodeStream(ids=list(prompt), skip_special_tokens=False)
        self._text = ""
        self._longest = max(map(len, stop))

    def is_complete(self, token: int) -> bool:
        """Take the next token; True once a stop string is whole."""
        added = self._decode_token(token)
        # One that began earlier than this would have been found with an earlier token.
        start = max(0, len(self._text) - self._longest + 1)
        self._text = self._text[start:] + added
        return any(text in self._text for text in self._stop)

    def _decode_token(self, token: int) -> str:
        try:
            return self._stream.step(self._backend, token) or ""
        except Exception as error:
            if not str(error).startswith(_LOST_PLACE):
                raise
            self._stream = DecodeStream(skip_special_tokens=False)
            return self._stream.step(self._backend, token) or ""


class StopStrings(StoppingCriteria):  # type: ignore[misc]  # transformers is not followed by the type checker
    """Ends the completions of one call of transformers' generate; made for that call."""

    def __init__(
        self,
        stop: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        end_tokens: Sequence[int],
        prompts: Sequence[Sequence[int]],
    ) -> None:
        """`end_tokens` end a completion before any stop string; `prompts` are without padding."""
        self._matchers = [StopStringMatcher(stop, tokenizer, prompt) for prompt in prompts]
        self._end_tokens = frozenset(end_tokens)
        self._length = 0
        self.lengths: list[int | None] = [None] * len(prompts)
        """Tokens of each completion that has come to its end; the rest of its row is padding."""

    def __call__(self, input_ids: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
        """Which completions, of shape (completions,), end with the newest token of `input_ids`, of
        shape (completions, tokens)."""
        self._length += 1
        is_stopped = []
        for row, token in enumerate(input_ids[:, -1].tolist()):
            is_stopped.append(self.lengths[row] is None and self._ends(row, token))
        return torch.tensor(is_stopped, device=input_ids.device)

    def _ends(self, row: int, token: int) -> bool:
        if token in self._end_tokens:
            self.lengths[row] = self._length
            return False
        is_stopped = self._matchers[row].is_complete(token)
        if is_stopped:
            self.lengths[row] = self._length
        return is_stopped

    def remove_padding(self, completions: Sequence[list[int]]) -> list[list[int]]:
        """The completions without the padding of their rows."""
        return [ids[:length] for ids, length in zip(completions, self.lengths, strict=True)]


class StoppedCompletion(list[int]):
    """The tokens of a completion that a stop string ended.

    Its last element, read as `ids[-1]` by TRL alone, is the end-of-sequence token that TRL looks
    for there. Iteration, slices and conversions give the real tokens.
    """

    def __init__(self, tokens: Sequence[int], end_token: int) -> None:
        super().__init__(tokens)
        self._end_token = end_token

    @overload
    def __getitem__(self, key: SupportsIndex) -> int: ...
    @overload
    def __getitem__(self, key: slice) -> list[int]: ...
    def __getitem__(self, key: Any) -> Any:
        return self._end_token if key == -1 else super().__getitem__(key)


TOKENS_OF_A_CHARACTER = 4
"""Most tokens of one character: a byte each."""
CONTEXT = 32
"""Tokens before a text that decide how its first one is decoded."""


def mark_stopped(
    completions: Sequence[list[int]],
    stop: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    end_token: int,
) -> list[list[int]]:
    """The completions, those that ended at a stop string as StoppedCompletion."""
    most = TOKENS_OF_A_CHARACTER * max(map(len, stop))
    marked: list[list[int]] = []
    for tokens in completions:
        end = max(0, len(tokens) - most)
        matcher = StopStringMatcher(stop, tokenizer, tokens[max(0, end - CONTEXT) : end])
        # Not any(): a stop string in the middle would have ended the completion there.
        is_complete = [matcher.is_complete(token) for token in tokens[end:]]
        is_stopped = bool(is_complete) and is_complete[-1]
        marked.append(StoppedCompletion(tokens, end_token) if is_stopped else tokens)
    return marked

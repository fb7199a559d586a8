"""What rank 0 and an engine say to each other, as types that bound it: names, versions, prompts,
completions.

Both sides run the same image; the bounds are for whatever else reaches the port.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from grpo_api.plan.plan import JobIdentity
from grpo_api.text.base import Model
from grpo_api.text.quantity import MAX_COUNT

ATTEMPT_HEADER = "X-GRPO-Attempt"
"""Which attempt a request comes from; an engine answers its own alone."""
MAX_BODY = 64 * 2**20
"""Bytes of one request or answer."""
TOKEN_BYTES = 36
"""Most bytes of a token with its log-probability in an answer: 10 digits, 24 characters of a float,
two commas."""
MAX_MESSAGE = 4096
"""Characters of a reason."""
MAX_TENSORS = 200_000
MAX_TOKENS = 4_194_304
"""Tokens of one prompt or completion."""


class RequestInvalid(Exception):
    """The engine doesn't take a request, and no other engine would; the message says why."""


Version = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Name = Annotated[str, Field(min_length=1, max_length=512)]
Shape = Annotated[list[Annotated[int, Field(ge=0, le=MAX_COUNT)]], Field(max_length=8)]
Token = Annotated[int, Field(ge=0, le=2**31 - 1)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
Phase = Literal["Waiting", "Receiving", "Unproven", "Serving"]
"""Waiting: no weights yet. Receiving: a sync is under way. Unproven: it came to its end. Serving:
the trainer has confirmed that the weights are its own."""


class EngineState(Model):
    """GET /state: what an engine says of itself."""

    incarnation: Annotated[str, Field(min_length=1, max_length=64)]
    """New with every process."""
    phase: Phase
    """Where its weights stand."""
    version: Version | None = None
    """The version that it was confirmed to have, while it serves."""
    waiting: Annotated[int, Field(ge=0)] = 0
    """Completions that wait for their turn."""
    cache_used: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the cache for keys and values in use."""
    tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens that it has sampled so far."""


class Learn(Model):
    """POST /learn: find out where each tensor goes."""

    shapes: Annotated[dict[Name, Shape], Field(min_length=1, max_length=MAX_TENSORS)]
    """Shape of each of the trainer's tensors by name."""
    dtype: Literal["bfloat16", "float32"]
    """Type in which they will be sent."""
    config: Annotated[str, Field(max_length=32)] = ""
    """Fingerprint of rank 0's config.json and tokenizer; empty where it is not compared."""


class Sync(Model):
    """POST /sync: come to the meeting and receive."""

    version: Version
    """Number of the weights."""
    meeting: dict[str, Any]
    """Fields of a transfer.Meeting."""
    names: Annotated[list[Name], Field(min_length=1, max_length=MAX_TENSORS)]
    """Tensors in the order in which they are sent."""


class Prove(Model):
    """POST /prove: hash what lies in the engine."""

    version: Version
    """The version that was received."""
    seed: Seed
    """Of the hash."""


class Confirm(Model):
    """POST /confirm: the hashes are the trainer's."""

    version: Version
    """The version that may be served from now on."""


class End(Model):
    """POST /end: the trainer has given this engine up; only a new process gets another chance."""

    reason: Annotated[str, Field(max_length=MAX_MESSAGE)]
    """Why."""
    incarnation: Annotated[str, Field(min_length=1, max_length=64)]
    """The process that has to end: two may answer at one address."""


class Generate(Model):
    """POST /generate: complete one prompt."""

    version: Version
    """The version that must sample it."""
    incarnation: Annotated[str, Field(min_length=1, max_length=64)]
    """Of the process that was proven to have it."""
    prompt: Annotated[list[Token], Field(min_length=1, max_length=MAX_TOKENS)]
    """Token ids."""
    seeds: Annotated[list[Seed], Field(min_length=1, max_length=65536)]
    """One for each completion."""
    sampling: Annotated[dict[str, Any], Field(max_length=32)]
    """vLLM's SamplingParams of one completion by name, the seed left out."""
    after_sampler: bool = False
    """Take log-probabilities after the sampler, whatever those of other requests are."""


class Completion(Model):
    """One sampled completion."""

    # Rank 0 ends the run on a log-probability that is no number, and says so (EngineMismatch).
    model_config = ConfigDict(allow_inf_nan=True, ser_json_inf_nan="constants")

    tokens: Annotated[list[Token], Field(max_length=MAX_TOKENS)]
    """Its token ids."""
    logprobs: Annotated[list[float], Field(max_length=MAX_TOKENS)]
    """Log-probability of each, in nats."""


class GeneratedCompletions(Model):
    """The answer: completions with what sampled them."""

    version: Version
    """The version that was proven while every token was sampled."""
    incarnation: str
    """The process."""
    completions: list[Completion]
    """One for each seed."""


def attempt_of(job: JobIdentity) -> str:
    """The attempt as the header names it."""
    return f"{job.uid}/{job.attempt}"

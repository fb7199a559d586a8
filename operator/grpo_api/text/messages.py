"""Sentences for people, made of errors and of what other programs say.

Conditions, events and a trainer's reports show them. What Python prints of an error names classes
and objects, and a service's answer may hold a token: neither belongs into a status.
"""

import json
import re
from collections.abc import Iterator

MAX_MESSAGE = 300
"""Characters of the longest message of a condition; the details are in other fields and in logs."""
_FAILURES = (
    ("name resolution failed", r"gaierror|DNSError|dns error|[Nn]ame or service not known"),
    ("name resolution failed", r"[Nn]ame resolution|nodename nor servname"),
    ("connection refused", r"ConnectionRefused|[Cc]onnection refused"),
    ("no route to it", r"No route to host|[Nn]etwork is unreachable"),
    ("its TLS certificate is not trusted", r"CERTIFICATE_VERIFY_FAILED|invalid peer certificate"),
    ("no answer in time", r"[Tt]imed ?-?out|Timeout"),
    ("the connection was cut", r"[Cc]onnection (was )?(reset|closed)|ConnectionReset|Disconnected"),
    ("the connection was cut", r"RemoteProtocolError|PayloadError|BrokenPipe|IncompleteRead"),
)
"""What is wrong with a connection, by what libraries call it: Python's, aiohttp, httpx, Rust's."""
_PREFIX = re.compile(r"^(?:[A-Z]+ \S+://\S+: |[\w.]+(?:Error|Exception): |\[Errno -?\d+\] )+")
LONGEST_ERROR = 2000
"""Characters of an error in which a prefix is looked for, which takes the cube of their number."""
_SECRETS = re.compile(
    r"\b(hf_)[A-Za-z0-9]{8,}|\b(sk-|ghp_|AKIA|Bearer )[A-Za-z0-9._~+/-]{8,}=*|(://)[^\s/@]+(?=@)"
)
"""Tokens, and the user of a URL."""
_QUERY = re.compile(r"\?[^\s\"']+")
_SIGNATURE = re.compile("sig|token|key|credential|policy", re.IGNORECASE)
"""Parts of the names in the query of a signed URL, which needs no token."""
_SECRET_FIELDS = re.compile(
    r'("(?:\w*(?:key|token|secret|password)|value)": )"[^"]*"', re.IGNORECASE
)
"""Of an object as JSON; variables may hold secrets."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]{6,}")


def connection_problem(error: BaseException, peer: str) -> str:
    """Why a request to `peer` failed, such as `connection refused by 10.0.0.7:8080`."""
    text = "; ".join(f"{type(cause).__name__}: {cause}" for cause in error_chain(error))
    phrases = (phrase for phrase, pattern in _FAILURES if re.search(pattern, text))
    problem = next(phrases, "")
    if not problem:
        own_words = _PREFIX.sub("", str(error)[:LONGEST_ERROR])
        problem = own_words or type(error).__name__
    if problem == "connection refused":
        return f"connection refused by {peer}"
    return shorten(f"{peer}: {plain_text(problem)}", MAX_MESSAGE // 2)


def error_chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those that led to it, also where it was raised `from None`."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def plain_text(text: str) -> str:
    """The text on one line, without secrets, addresses of objects and Go's word for nothing."""
    line = " ".join(text.split()).replace("<nil>", "null")
    return _ADDRESS.sub("", hide_secrets(line))


def hide_secrets(text: str) -> str:
    """The text with an ellipsis for what may be a secret."""
    return _QUERY.sub(_unsigned_query, _SECRETS.sub(r"\1\2\3…", text))


def _unsigned_query(query: re.Match[str]) -> str:
    # One expression for all of it would take cubic time, and a text may be anything.
    names = [field.partition("=")[0] for field in query[0].split("&") if "=" in field]
    return "?…" if any(map(_SIGNATURE.search, names)) else query[0]


def value_text(value: object, most: int = 80) -> str:
    """A value as JSON has it, without secrets, in at most `most` characters."""
    text = json.dumps(value, ensure_ascii=False, default=str, skipkeys=True)
    text = hide_secrets(_SECRET_FIELDS.sub(r'\1"…"', text))
    return f"{text[:most]}…" if len(text) > most else text


def printable_text(text: str, keep: str = "\n\t") -> str:
    """The text with a replacement for what could steer a terminal, but for `keep`."""
    letters = []
    for letter in text:
        is_safe = letter.isprintable() or letter in keep
        letters.append(letter if is_safe else "\N{REPLACEMENT CHARACTER}")
    return "".join(letters)


def shorten(text: str, most: int) -> str:
    """The text in at most `most` characters; its last sentence, which says what to do, stays."""
    if len(text) <= most:
        return text
    start, _, last_sentence = text.rpartition(". ")
    if start and len(last_sentence) <= most // 2:
        return f"{text[: most - len(last_sentence) - 2]}… {last_sentence}"
    return f"{text[: most - 1]}…"

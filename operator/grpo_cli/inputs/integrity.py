"""Checks an exported model against its provenance: every file, none besides, and the signature.

The folder may come from anywhere and hold anything: what is in it is compared and never followed,
run or believed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from pydantic import ValidationError

from grpo_api.provenance.provenance import (
    ENVELOPE_FILE,
    MOST_BYTES,
    ORIGINAL,
    OWN_FILES,
    STATEMENT_FILE,
    ConversionStatement,
    Described,
    Envelope,
    Statement,
    read_statement,
)
from grpo_api.report.artifacts import ReportBytes, files_of, is_regular_file, sha256_digests

from ..show.errors import KubectlError, OptionError


class NotGenuine(Exception):
    """The documents themselves don't hold; the message says why."""


@dataclass(frozen=True, slots=True)
class Documents:
    """What lies beside the model."""

    statement: Statement | ConversionStatement
    """What the model was made of: by training, or of an export."""
    envelope: Envelope | None
    """The same, signed; None if it is unsigned."""


def read_documents(folder: Path) -> Documents:
    """The Statement, and the envelope around its very bytes if there is one.

    Raises:
        NotGenuine: there is no Statement, or one of them can't be read, or they don't say the same.
    """
    text = _content(folder / STATEMENT_FILE)
    if text is None:
        raise NotGenuine(f"{STATEMENT_FILE} is missing: nothing says what the model should be")
    signed = _content(folder / ENVELOPE_FILE)
    try:
        envelope = Envelope.model_validate_json(signed) if signed is not None else None
        same = envelope is None or envelope.content == text
    except ValueError as error:
        raise NotGenuine(
            f"{ENVELOPE_FILE} is no envelope with a signature: {_first_problem(error)}"
        ) from error
    if not same:
        raise NotGenuine(f"{STATEMENT_FILE} is not what was signed in {ENVELOPE_FILE}")
    try:
        return Documents(read_statement(text), envelope)
    except ValueError as error:
        raise NotGenuine(
            f"{STATEMENT_FILE} is no provenance of a model: {_first_problem(error)}"
        ) from error


def read_original(
    folder: Path, conversion: ConversionStatement
) -> tuple[Statement, Envelope | None]:
    """The documents of the export that a conversion was made of; all files of the folder have been
    compared.

    Raises:
        NotGenuine: they can't be read, or are about other files than those that went in.
    """
    documents = read_documents(folder / ORIGINAL)
    if isinstance(documents.statement, ConversionStatement):
        raise NotGenuine(f"{ORIGINAL}/{STATEMENT_FILE} is a conversion's, not an export's")
    original_sums, consumed = documents.statement.sums, conversion.predicate.consumed_digests
    others = sorted(name for name, digest in consumed.items() if original_sums.get(name) != digest)
    if others:
        raise NotGenuine(
            f"{ORIGINAL}/{STATEMENT_FILE} is about other files than were converted: "
            f"{', '.join(others)}"
        )
    return documents.statement, documents.envelope


def unsigned_message(envelope: Envelope | None, key: Path) -> str:
    """Return a sentence on an unsigned conversion: whether the key has signed the original's
    envelope.

    Raises:
        OptionError: the key can't be used, or cryptography isn't installed.
    """
    try:
        signer = require_signature(envelope, key)
    except NotGenuine as error:
        return f"the conversion is not signed, and neither is its original by this key: {error}"
    return (
        f"the conversion is not signed, its original is signed by the given key, {signer}: for "
        "files that are, leave out --merge and --dtype of grpo export"
    )


def require_made_of(folder: Path, weights_hash: str) -> None:
    """Make sure that a converted model was made of the weights with that hash, as far as it says of
    what.

    Raises:
        KubectlError: it was made of others.
    """
    if not (folder / STATEMENT_FILE).exists():
        return  # by a trainer that wrote none
    try:
        statement = read_documents(folder).statement
    except NotGenuine as error:
        raise KubectlError(f"what the conversion was made of can't be read: {error}") from error
    used = (
        statement.predicate.weights_hash
        if isinstance(statement, ConversionStatement)
        else "those of no conversion"
    )
    if used != weights_hash:
        raise KubectlError(
            f"weights {used} were converted, the job reported {weights_hash}: somebody changed them"
        )


def _content(path: Path) -> bytes | None:
    """What one of the documents holds; None where it is missing."""
    if not is_regular_file(path):
        if path.is_symlink() or path.exists():
            raise NotGenuine(f"{path.name} is a link or no file")
        return None
    if path.stat().st_size > MOST_BYTES:
        raise NotGenuine(
            f"{path.name} has {path.stat().st_size} bytes, more than a provenance takes"
        )
    return path.read_bytes()


def _first_problem(error: ValueError) -> str:
    if isinstance(error, ValidationError):
        problem = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, problem['loc'])) or 'the file'}: {problem['msg']}"
    return str(error)


def require_signature(envelope: Envelope | None, key: Path) -> str:
    """The id of the key that signed the envelope.

    Raises:
        NotGenuine: it is unsigned, or not signed by this key.
        OptionError: the key can't be used, or cryptography isn't installed.
    """
    try:
        from grpo_api.provenance import (
            signing,
        )  # alone in needing cryptography, which a laptop may lack
    except ImportError as error:
        raise OptionError(
            "--key needs the package cryptography: pip install 'grpo-operator[verify]'"
        ) from error
    try:
        public = signing.public_key(key)
    except signing.KeyUnusable as error:
        raise OptionError(f"--key: {error}") from error
    if envelope is None:
        raise NotGenuine(f"{ENVELOPE_FILE} is missing: the model is not signed")
    if not signing.is_signed_by(envelope, public):
        names = [signature.keyid or "without a name" for signature in envelope.signatures]
        others = ", ".join(names)
        problem = (
            f"is not signed by this key, {signing.key_id(public)}, or was changed since; it "
            f"names {others}"
        )
        raise NotGenuine(f"{ENVELOPE_FILE} {problem}")
    return signing.key_id(public)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a folder has against what it should have."""

    files: int
    """Files that should be there."""
    size: int
    """Bytes of those that are."""
    problems: list[str]
    """What differs, a sentence per file."""


def compare_files(
    folder: Path,
    statement: Described,
    ignored: Sequence[str] = (),
    report_bytes: ReportBytes = lambda _: None,
) -> Comparison:
    """Compares every file; `report_bytes` is called, from any thread, with the bytes of each piece.

    `ignored` are patterns (`*` matches slashes, too) of files that may be there although nothing
    says so.

    Raises:
        OSError: a file or a folder can't be read.
    """
    expected = statement.sums
    paths = {name: path for name, path in files_of(folder).items() if name not in OWN_FILES}
    unknown = paths.keys() - expected.keys()
    unknown -= {name for name in unknown for pattern in ignored if fnmatchcase(name, pattern)}
    there = {name: path for name, path in paths.items() if name in expected}
    odd = [name for name, path in there.items() if not is_regular_file(path)]
    whole = {name: path for name, path in there.items() if name not in odd}
    hashes = sha256_digests(whole, report_bytes)
    problems = [f"{name} is missing" for name in expected.keys() - paths.keys()]
    problems += [f"{name} was added: the provenance doesn't name it" for name in unknown]
    problems += [f"{name} is a link or no file" for name in odd]
    changed = [name for name, actual in hashes.items() if actual != expected[name]]
    problems += [
        f"{name} was changed: its sha256 is {hashes[name]}, not {expected[name]}"
        for name in changed
    ]
    size = sum(path.stat().st_size for path in whole.values())
    return Comparison(len(expected), size, sorted(problems))

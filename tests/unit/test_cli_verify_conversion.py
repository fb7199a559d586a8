"""A converted model under `grpo verify`: what it is and what it was made of; it never passes for
what was signed."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_api.provenance.provenance import (
    CONVERSION_TYPE,
    ORIGINAL,
    OWN_FILES,
    PREDICATE_TYPE,
    STATEMENT_FILE,
    STATEMENT_TYPE,
)
from grpo_api.provenance.signing import PrivateKey
from grpo_api.report.artifacts import files_of, sha256_digests, weights_hash
from grpo_cli.inputs.integrity import require_made_of
from grpo_cli.show.errors import KubectlError
from tests.exported_model import KEYS, public, verify, write
from tests.generated import cases

KEY = KEYS["Ed25519"]
WEIGHTS = "model.safetensors"
CONVERTED = {"config.json": b"{}", WEIGHTS: bytes(range(64))}


def conversion(place: Path, key: PrivateKey | None = KEY) -> Path:
    """A model in bfloat16, and in ORIGINAL what was said of the export that it was made of."""
    export, folder = write(place / "export", key=key), place / "model"
    (folder / ORIGINAL).mkdir(parents=True)
    for name in OWN_FILES:
        if (export / name).exists():
            (folder / ORIGINAL / name).write_bytes((export / name).read_bytes())
    for name, content in CONVERTED.items():
        (folder / name).write_bytes(content)
    used = {name: path for name, path in files_of(export).items() if name not in OWN_FILES}
    described(folder, sha256_digests(used))
    return folder


def described(folder: Path, used: dict[str, str]) -> None:
    """Writes the document of a conversion that took these files."""
    (folder / STATEMENT_FILE).unlink(missing_ok=True)
    hashes = sha256_digests(files_of(folder)).items()
    definition = {
        "buildType": CONVERSION_TYPE,
        "externalParameters": {"merge": True, "dtype": "bfloat16"},
        "resolvedDependencies": [
            {"name": f"export/{name}", "digest": {"sha256": one}} for name, one in used.items()
        ],
    }
    details = {"builder": {"id": "x", "version": {}}}
    details["metadata"] = {
        "invocationId": "1-2/2",
        "startedOn": "2026-01-31",
        "finishedOn": "2026-01-31",
    }
    document = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": one}} for name, one in hashes],
        "predicateType": PREDICATE_TYPE,
        "predicate": {"buildDefinition": definition, "runDetails": details},
    }
    (folder / STATEMENT_FILE).write_text(json.dumps(document))


def said_to_be_used(folder: Path) -> dict[str, str]:
    """Name → sha256 of what the document names."""
    found = json.loads((folder / STATEMENT_FILE).read_text())["predicate"]["buildDefinition"][
        "resolvedDependencies"
    ]
    return {one["name"].removeprefix("export/"): one["digest"]["sha256"] for one in found}


@pytest.fixture
def public_key(tmp_path: Path) -> Path:
    return public(tmp_path / "public.pem", KEY)


def test_it_is_told_what_it_is_and_what_it_was_made_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(conversion(tmp_path)) == 0
    told = capsys.readouterr().out
    assert "merged into its base, to bfloat16, from weights sha256:" in told
    assert "by nobody: a person who changes a file can change its hash, too" in told
    assert "team/demo, uid 1-2" in told


def test_only_its_original_has_the_signature(
    tmp_path: Path, public_key: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(conversion(tmp_path / "signed"), "--key", public_key) == 1
    told = capsys.readouterr().err
    assert "its original is signed by the given key" in told
    assert "grpo: these files are a conversion of it" in told
    assert verify(conversion(tmp_path / "unsigned", key=None), "--key", public_key) == 1
    assert verify(conversion(tmp_path / "other", key=KEYS["P-256"]), "--key", public_key) == 1
    assert (
        capsys.readouterr().err.count("is not signed, and neither is its original by this key") == 2
    )


def _other_weights(folder: Path) -> str:
    described(folder, {**said_to_be_used(folder), WEIGHTS: "ab" * 32})
    return f"original/{STATEMENT_FILE} is about other files than were converted: {WEIGHTS}"


def _another_file(folder: Path) -> str:
    described(folder, {**said_to_be_used(folder), "never-exported": "ab" * 32})
    return f"original/{STATEMENT_FILE} is about other files than were converted: never-exported"


def _no_original(folder: Path) -> str:
    used = said_to_be_used(folder)
    for path in (folder / ORIGINAL).iterdir():
        path.unlink()
    described(folder, used)
    return f"{STATEMENT_FILE} is missing"


def _signed_of_another(folder: Path) -> str:
    used = said_to_be_used(folder)
    (folder / ORIGINAL / STATEMENT_FILE).write_text("{}")
    described(folder, used)
    return f"{STATEMENT_FILE} is not what was signed"


def _of_a_conversion(folder: Path) -> str:
    used = said_to_be_used(folder)
    for path in (folder / ORIGINAL).iterdir():
        path.unlink()
    (folder / ORIGINAL / STATEMENT_FILE).write_bytes((folder / STATEMENT_FILE).read_bytes())
    described(folder, used)
    return f"original/{STATEMENT_FILE} is a conversion's, not an export's"


@pytest.mark.parametrize(
    "forge",
    [_other_weights, _another_file, _no_original, _signed_of_another, _of_a_conversion],
    ids=lambda one: one.__name__,
)
def test_a_chain_that_does_not_hold_is_refused(
    forge: Callable[[Path], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = conversion(tmp_path)
    expected = forge(folder)
    assert verify(folder) == 1
    assert expected in capsys.readouterr().err


PLACES = [*CONVERTED, *(f"{ORIGINAL}/{name}" for name in OWN_FILES)]


@settings(max_examples=cases(60))
@given(st.sampled_from(PLACES), st.integers(0, 10**6), st.integers(0, 7), st.booleans())
def test_whatever_is_done_to_a_file_is_found(name: str, at: int, bit: int, remove: bool) -> None:
    with tempfile.TemporaryDirectory() as place:
        path = conversion(Path(place)) / name
        content = bytearray(path.read_bytes())
        content[at % len(content)] ^= 1 << bit
        path.unlink() if remove else path.write_bytes(content)
        assert verify(Path(place) / "model") == 1


def test_a_conversion_of_weights_that_the_job_did_not_report_is_refused(tmp_path: Path) -> None:
    folder = conversion(tmp_path)
    weights = sha256_digests({WEIGHTS: tmp_path / "export" / WEIGHTS})
    require_made_of(folder, weights_hash(weights))
    with pytest.raises(
        KubectlError,
        match=r"weights sha256:\w+ were converted, the job reported sha256:0: somebody",
    ):
        require_made_of(folder, "sha256:0")
    with pytest.raises(KubectlError, match="weights those of no conversion were converted"):
        require_made_of(tmp_path / "export", "sha256:0")
    (folder / STATEMENT_FILE).unlink()
    require_made_of(folder, "sha256:0")  # a trainer that wrote none
    (folder / STATEMENT_FILE).write_text("{}")
    with pytest.raises(KubectlError, match="what the conversion was made of can't be read"):
        require_made_of(folder, "sha256:0")

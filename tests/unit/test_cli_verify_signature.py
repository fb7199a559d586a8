"""The signature of an exported model's provenance: no change passes, and others' tools read it as
we read theirs."""

import base64
import json
import sys
import tempfile
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from hypothesis import given, settings
from hypothesis import strategies as st
from securesystemslib.dsse import Envelope as OtherEnvelope
from securesystemslib.signer import CryptoSigner, SSlibKey  # type: ignore[attr-defined]  # it says of no name so

from grpo_api.provenance import signing
from grpo_api.provenance.provenance import ENVELOPE_FILE, PAYLOAD_TYPE, STATEMENT_FILE
from tests.exported_model import KEYS, describe, private, public, verify, write
from tests.generated import cases

KEY = KEYS["Ed25519"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "model", key=KEY)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return public(tmp_path / "public.pem", KEY)


def test_files_that_are_described_anew_no_longer_have_the_signature(
    model: Path, key: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "config.json").write_text("[]")
    envelope = (model / ENVELOPE_FILE).read_text()
    for one in (ENVELOPE_FILE, STATEMENT_FILE):
        (model / one).unlink()
    describe(model)
    assert (verify(model), verify(model, "--key", key)) == (0, 1)
    (model / ENVELOPE_FILE).write_text(envelope)
    assert (verify(model), verify(model, "--key", key)) == (1, 1)
    assert f"{STATEMENT_FILE} is not what was signed in {ENVELOPE_FILE}" in capsys.readouterr().err
    (model / ENVELOPE_FILE).unlink()
    (model / STATEMENT_FILE).unlink()
    describe(model, KEYS["P-256"])
    assert (verify(model), verify(model, "--key", key)) == (0, 1)
    assert f"{ENVELOPE_FILE} is not signed by this key" in capsys.readouterr().err


def _meaning(text: bytes) -> tuple[bytes, str, bytes] | None:
    """What an envelope says, with the key's name left out, which is a hint that nothing vouches
    for."""
    try:
        found = json.loads(text)
        (signature,) = found["signatures"]
        return (
            base64.b64decode(found["payload"]),
            found["payloadType"],
            base64.b64decode(signature["sig"]),
        )
    except (ValueError, KeyError, TypeError):
        return None


@given(st.integers(0, 99999), st.integers(1, 255))
@settings(max_examples=cases(150))
def test_no_byte_of_an_envelope_can_change_what_was_signed(at: int, flip: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = write(Path(place) / "model", {"config.json": b"{}"}, KEY)
        given_key = public(Path(place) / "public.pem", KEY)
        path = folder / ENVELOPE_FILE
        before = path.read_bytes()
        # the payload is most of the file: the other half of the cases is of what follows it
        position = at % len(before) if at % 2 else before.index(b'"payloadType"') + at % 300
        changed = bytearray(before)
        changed[position % len(before)] ^= flip
        path.write_bytes(changed)
        assert verify(folder, "--key", given_key) == (
            0 if _meaning(bytes(changed)) == _meaning(before) else 1
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"payloadType": "application/json"},
        {"signatures": []},
        {
            "signatures": [
                {
                    "keyid": signing.key_id(KEY.public_key()),
                    "sig": base64.b64encode(b"0" * 64).decode(),
                }
            ]
        },
        {"signatures": [{"sig": "%"}]},
        {"payload": "%"},
        {"payload": None},
    ],
)
def test_a_changed_field_of_the_envelope_is_found(
    model: Path, key: Path, changes: dict[str, object]
) -> None:
    path = model / ENVELOPE_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert verify(model, "--key", key) == 1


def other_key(path: Path, kind: str) -> Path:
    """A file that `--key` must refuse."""
    made: dict[str, rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey] = {
        "RSA": rsa.generate_private_key(65537, 2048),
        "P-521": ec.generate_private_key(ec.SECP521R1()),
    }
    if kind in made:
        encoding, form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        path.write_bytes(made[kind].public_key().public_bytes(encoding, form))
    elif kind == "private":
        private(path, KEY)
    elif kind == "text":
        path.write_text("-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n")
    return path


@pytest.mark.parametrize("kind", ["RSA", "P-521", "private", "text", "missing"])
def test_a_key_that_is_none_is_another_code(
    model: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(model, "--key", other_key(tmp_path / "other.pem", kind)) == 2
    told = capsys.readouterr().err
    assert told.startswith("grpo: --key: ")
    assert "BEGIN PRIVATE" not in told


def test_a_laptop_without_cryptography_checks_files_and_says_what_keys_need(
    model: Path, key: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "grpo_api.provenance.signing")
    monkeypatch.delattr("grpo_api.provenance.signing")
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    assert verify(model) == 0
    assert (
        f"{ENVELOPE_FILE} was not checked: give the public key with --key"
        in capsys.readouterr().out
    )
    assert verify(model, "--key", key) == 2
    assert "pip install 'grpo-operator[verify]'" in capsys.readouterr().err


@pytest.mark.parametrize("kind", KEYS)
def test_another_implementation_reads_our_signature_and_we_read_its(
    tmp_path: Path, kind: str
) -> None:
    """securesystemslib, which in-toto and TUF stand on."""
    folder, signer = write(tmp_path / "model", key=KEYS[kind]), KEYS[kind]
    path = folder / ENVELOPE_FILE
    theirs = SSlibKey.from_crypto(signer.public_key(), keyid=signing.key_id(signer.public_key()))
    found = OtherEnvelope.from_dict(json.loads(path.read_text()))
    assert found.verify([theirs], 1)
    assert found.payload == (folder / STATEMENT_FILE).read_bytes()

    made = OtherEnvelope(found.payload, PAYLOAD_TYPE, {})
    made.sign(CryptoSigner(signer, theirs))
    path.write_text(json.dumps(made.to_dict()))
    assert verify(folder, "--key", public(tmp_path / "public.pem", signer)) == 0

"""Signs what an export was made of, and checks such a signature: Ed25519, or ECDSA on the curves
P-256 and P-384.

Keys are PEM files as openssl writes them, and nothing else is needed: no service, no network, no
certificates. The one module that needs `cryptography`, and imported only by who signs or checks.
"""

import base64
import hashlib
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from .provenance import PAYLOAD_TYPE, Envelope, Signature, signed_bytes

PrivateKey = ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey
PublicKey = ed25519.Ed25519PublicKey | ec.EllipticCurvePublicKey
KINDS = "Ed25519, or ECDSA on P-256 or P-384"
_HASHES: dict[str, hashes.HashAlgorithm] = {
    "secp256r1": hashes.SHA256(),
    "secp384r1": hashes.SHA384(),
}
"""The digest that belongs to each curve (FIPS 186-5; the names are SEC 2's)."""


class KeyUnusable(ValueError):
    """A key that can't be used; the message says why, and never what was read."""


def private_key(path: Path) -> PrivateKey:
    """The private key of a PEM file.

    Raises:
        KeyUnusable: it can't be read, has a password, is no private key, or one of another kind.
    """
    content = _content(path)
    try:
        key = serialization.load_pem_private_key(content, password=None)
    except TypeError:
        # `from None`: what the library says of a key stays out of every log
        raise KeyUnusable(
            f"the private key in {path} has a password, which nobody could type in"
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        raise KeyUnusable(
            f"{path} holds no private key in PEM (-----BEGIN PRIVATE KEY-----)"
        ) from None
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return key
    if isinstance(key, ec.EllipticCurvePrivateKey) and key.curve.name in _HASHES:
        return key
    raise KeyUnusable(f"the private key in {path} is of another kind than {KINDS}")


def public_key(path: Path) -> PublicKey:
    """The public key of a PEM file.

    Raises:
        KeyUnusable: it can't be read, is no public key, or one of another kind.
    """
    content = _content(path)
    try:
        key = serialization.load_pem_public_key(content)
    except (ValueError, UnsupportedAlgorithm):
        raise KeyUnusable(
            f"{path} holds no public key in PEM (-----BEGIN PUBLIC KEY-----)"
        ) from None
    if isinstance(key, ed25519.Ed25519PublicKey):
        return key
    if isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name in _HASHES:
        return key
    raise KeyUnusable(f"the public key in {path} is of another kind than {KINDS}")


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise KeyUnusable(f"the key {path} can't be read: {error.strerror}") from None


def key_id(key: PublicKey) -> str:
    """A name for a key: sha256 of its SubjectPublicKeyInfo in DER, in hex, which openssl and
    sha256sum give as well."""
    der = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(der).hexdigest()


def sign(payload: bytes, key: PrivateKey) -> Envelope:
    """The payload in an envelope, with one signature."""
    data = signed_bytes(payload)
    if isinstance(key, ed25519.Ed25519PrivateKey):
        signature_bytes = key.sign(data)
    else:
        signature_bytes = key.sign(data, ec.ECDSA(_HASHES[key.curve.name]))
    signature = Signature(
        keyid=key_id(key.public_key()), sig=base64.b64encode(signature_bytes).decode()
    )
    return Envelope(
        payload=base64.b64encode(payload).decode(),
        payload_type=PAYLOAD_TYPE,
        signatures=[signature],
    )


def is_signed_by(envelope: Envelope, key: PublicKey) -> bool:
    """Return True if any signature of the envelope is this key's over its payload. Key ids are
    hints only."""
    try:
        data = signed_bytes(envelope.content, envelope.payload_type)
        signatures = [
            base64.b64decode(signature.sig, validate=True) for signature in envelope.signatures
        ]
    except ValueError:
        return False
    return any(_is_valid_signature(signature, data, key) for signature in signatures)


def _is_valid_signature(signature: bytes, data: bytes, key: PublicKey) -> bool:
    try:
        if isinstance(key, ed25519.Ed25519PublicKey):
            key.verify(signature, data)
        else:
            key.verify(signature, data, ec.ECDSA(_HASHES[key.curve.name]))
    except InvalidSignature:
        return False
    return True

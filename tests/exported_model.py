"""An exported model as small as can be, with its provenance, signed or not: what `grpo verify` is
tried on."""

from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from grpo_api.provenance.provenance import (
    BUILD_TYPE,
    BUILDER,
    ENVELOPE_FILE,
    PREDICATE_TYPE,
    STATEMENT_FILE,
    STATEMENT_TYPE,
    AttemptRecord,
    BuildDefinition,
    Builder,
    BuildMetadata,
    Dependency,
    End,
    EnvironmentRecord,
    ExternalParameters,
    FileDigest,
    InternalParameters,
    Provenance,
    ReferenceRecord,
    RunDetails,
    RunRecord,
    Statement,
    Subject,
    WeightsProof,
)
from grpo_api.provenance.signing import PrivateKey, sign
from grpo_api.report.artifacts import files_of, sha256_digests
from grpo_cli.__main__ import main

KEYS: dict[str, PrivateKey] = {
    "Ed25519": ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32))),
    "P-256": ec.derive_private_key(12345, ec.SECP256R1()),
    "P-384": ec.derive_private_key(12345, ec.SECP384R1()),
}
"""A key of every kind; the same in every run, as nothing depends on their being secret."""
FILES = {
    "config.json": b"{}",
    "model.safetensors": bytes(range(256)) * 9,
    "tokenizer/merges.txt": b"",
    "a b.txt": b"a",
}


def provenance() -> Provenance:
    """Of a run of two attempts whose reference moved."""
    rows = Dependency(name="rows", digest={"sha256": "ab" * 32})
    environment = EnvironmentRecord(platform="Linux", command=["python"], variables=["HF_TOKEN"])
    return Provenance(
        build_definition=BuildDefinition(
            build_type=BUILD_TYPE,
            external_parameters=ExternalParameters(
                spec={"model": {"name": "demo/policy"}}, omitted=["placement"]
            ),
            internal_parameters=InternalParameters(
                job={"namespace": "team", "name": "demo", "uid": "1-2", "attempt": 2},
                execution={
                    "method": "Full",
                    "accelerator": "CPU",
                    "nodes": 1,
                    "dtype": "float32",
                    "zeroStage": 0,
                },
                pod_plan={},
            ),
            resolved_dependencies=[rows],
        ),
        run_details=RunDetails(
            builder=Builder(id=BUILDER, version={"torch": "2.13.0"}),
            metadata=BuildMetadata(
                invocation_id="1-2/2", started_on="2026-01-31T12:00:00Z", finished_on="2026-02-01T"
            ),
            grpo_run=RunRecord(
                steps=7,
                attempts=[
                    AttemptRecord(attempt=1, ends=[End(result="Error", step=4, ranks=2)]),
                    AttemptRecord(attempt=2, resumed_from_step=4),
                ],
                reference=ReferenceRecord(
                    strategy="Clone", sync_every_steps=3, mixup=0.6, syncs=2, last_sync_step=6
                ),
                proofs=[WeightsProof(what="policy", parameters=30, fingerprint="cd" * 16)],
                environment=environment,
            ),
        ),
    )


def write(
    folder: Path, files: dict[str, bytes] | None = None, key: PrivateKey | None = None
) -> Path:
    """The model in a folder, described, and signed if there is a key; returns the folder."""
    for name, content in (FILES if files is None else files).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    describe(folder, key)
    return folder


def describe(folder: Path, key: PrivateKey | None = None) -> None:
    """Writes the documents about what is in the folder now."""
    hashes = sha256_digests(files_of(folder)).items()
    subjects = [Subject(name=name, digest=FileDigest(sha256=one)) for name, one in hashes]
    text = (
        Statement(
            type=STATEMENT_TYPE,
            subject=subjects,
            predicate_type=PREDICATE_TYPE,
            predicate=provenance(),
        )
        .model_dump_json(exclude_none=True)
        .encode()
    )
    (folder / STATEMENT_FILE).write_bytes(text)
    if key:
        (folder / ENVELOPE_FILE).write_text(sign(text, key).model_dump_json() + "\n")


def public(path: Path, key: PrivateKey) -> Path:
    """Writes the public key of a key in PEM; returns the file."""
    encoding, form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    path.write_bytes(key.public_key().public_bytes(encoding, form))
    return path


def private(path: Path, key: PrivateKey) -> Path:
    """Writes the key itself in PEM; returns the file."""
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    path.write_bytes(key.private_bytes(encoding, form, serialization.NoEncryption()))
    return path


def verify(*arguments: object) -> int:
    """The exit code of `grpo verify`."""
    return main(["verify", *map(str, arguments)])

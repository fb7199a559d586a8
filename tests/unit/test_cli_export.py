"""`grpo export` without a cluster: who has a model, what the pod may do, and files over connections
that break."""

import hashlib
import signal
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo_api.job_object import GRPOJob
from grpo_api.report.artifacts import Export, FileEntry, Listing, weights_hash
from grpo_cli.cluster.delivery import Delivery, export_job
from grpo_cli.cluster.delivery_pod import build_attempt
from grpo_cli.cluster.download import (
    PAUSES,
    download_files,
    missing_files,
    require_folder,
    require_room,
    require_safe,
)
from grpo_cli.commands.export import exported_model, is_conversion_requested, require_reported
from grpo_cli.show.errors import CliError, KubectlError, NotYet, OptionError
from grpo_operator.records.names import LABEL_JOB, LABEL_UID
from tests.generated import cases
from tests.stepped_clock import SteppedClock
from tests.unit.operator_world import PLAN, PODS, UID, active_status, at, make_job

EXPORT = {"to": "Volume", "path": "pvc://team/run/export", "format": "Model", "bytes": 9}
EXPORT |= {"weightsHash": weights_hash({})}
KEPT = {"step": 40, "time": at(0), "bytes": 9, "where": "pvc://team/run/attempt-1/checkpoint-40"}


def job(phase: str = "Succeeded", **status: Any) -> GRPOJob:
    known = make_job(status=active_status(phase=phase, **status))
    return GRPOJob(spec=known.valid_spec, status=known.status)


@pytest.mark.parametrize(
    ("to", "path"), [("Volume", "pvc://team/run/export"), ("ObjectStore", "s3://team/run/export")]
)
def test_a_model_of_one_s_own_place_can_be_had(to: str, path: str) -> None:
    assert exported_model("run", job(export=EXPORT | {"to": to, "path": path})).path == path


@pytest.mark.parametrize(
    ("status", "says"),
    [
        ({"phase": "Succeeded"}, "run kept no model"),
        (
            {"phase": "Failed", "checkpoint": KEPT},
            "its newest checkpoint, step 40 at pvc://team/run/attempt-1/checkpoint-40",
        ),
        ({"phase": "Failed"}, "what it has is training state and no model"),
        (
            {"phase": "Running", "progress": {"summary": "7/20"}},
            "run is Running at step 7/20; the model is",
        ),
        ({"phase": "Queued"}, "run is Queued; the model is exported after the last step"),
        (
            {"phase": "Succeeded", "export": EXPORT | {"to": "Hub", "path": "hf://a/b"}},
            "at hf://a/b: fetch it there",
        ),
    ],
)
def test_a_job_without_a_model_says_what_there_is(status: dict[str, Any], says: str) -> None:
    with pytest.raises(NotYet) as caught:
        exported_model("run", job(**status))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "merge", "dtype", "answer"),
    [
        ("Model", False, None, False),
        ("Model", False, "float32", True),
        ("Adapter", False, None, False),
        ("Adapter", True, None, True),
        ("Adapter", True, "bfloat16", True),
        ("Model", True, None, "there is no adapter to merge"),
        ("Adapter", False, "float32", "run has exported an adapter; add --merge"),
    ],
)
def test_what_is_asked_for_fits_what_was_exported(
    kind: str, merge: bool, dtype: str | None, answer: Any
) -> None:
    options, told = (
        Namespace(name="run", merge=merge, dtype=dtype),
        Export.model_validate(EXPORT | {"format": kind}),
    )
    if isinstance(answer, bool):
        assert is_conversion_requested(options, told) is answer
        return
    with pytest.raises(OptionError, match=answer):
        is_conversion_requested(options, told)


def manifest(spec: dict[str, Any], **wanted: Any) -> dict[str, Any]:
    known = make_job(spec)
    metadata = {"name": "run", "namespace": "team-a", "uid": UID, "labels": {"team": "rl"}}
    return export_job(build_attempt(metadata, known.valid_spec, PLAN, 1, None), PODS, **wanted)


SPEC: dict[str, Any] = {
    "checkpoint": {"volume": {"claimName": "team", "subPath": "kept"}},
    "model": {"tokenSecretRef": {"name": "hub", "key": "token"}, "volume": {"claimName": "models"}},
    "env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
    "envFrom": [{"secretRef": {"name": "all"}}],
    "placement": {
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "nodeSelector": {"pool": "a"},
    },
}


@pytest.mark.parametrize("merge", [False, True])
def test_the_pod_reads_the_claim_and_has_no_right_beside(merge: bool) -> None:
    made = manifest(SPEC, merge=merge, dtype="float32" if merge else None)
    template = made["spec"]["template"]
    pod = template["spec"]
    (container,) = pod["containers"]
    volumes = {one["name"]: one for one in pod["volumes"]}
    assert volumes["checkpoints"]["persistentVolumeClaim"] == {"claimName": "team"}
    assert ("model" in volumes) is merge
    mounts = {one["name"]: one for one in container["volumeMounts"]}
    assert mounts.keys() == volumes.keys()
    read_only = {
        "name": "checkpoints",
        "mountPath": "/checkpoints",
        "subPath": "kept",
        "readOnly": True,
    }
    assert mounts["checkpoints"] == read_only
    assert [name for name, mount in mounts.items() if not mount.get("readOnly")] == ["scratch"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    secrets = [one["name"] for one in container["env"] if "valueFrom" in one]
    assert secrets == (["HF_TOKEN"] if merge else [])
    assert ("envFrom" in container) is merge
    assert {"name": "HTTPS_PROXY", "value": "http://proxy:3128"} in container["env"]
    assert "nvidia.com/gpu" not in str(container["resources"])
    assert (pod["nodeSelector"], pod["tolerations"][0]["key"]) == ({"pool": "a"}, "gpu")
    assert container["command"][3:] == (
        ["serve", "--merge", "--dtype", "float32"] if merge else ["serve"]
    )


def test_a_history_is_read_as_an_export_is_without_its_conversion() -> None:
    export, history = (manifest(SPEC, history=wanted) for wanted in (False, True))
    (container,) = history["spec"]["template"]["spec"]["containers"]
    assert container["command"][3:] == ["serve", "--history"]
    (container["command"],) = (
        one["command"] for one in export["spec"]["template"]["spec"]["containers"]
    )
    assert history == export


@pytest.mark.parametrize("merge", [False, True])
def test_the_pod_reads_the_store_with_the_job_s_own_credentials_and_no_other(merge: bool) -> None:
    store = {"url": "s3://bucket/runs", "credentialsSecretRef": {"name": "keys"}}
    identity = {"spec": {"serviceAccountName": "trainer"}}
    made = manifest({**SPEC, "checkpoint": {"store": store}, "podTemplate": identity}, merge=merge)
    pod = made["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    keys = {"prefix": "GRPO_CHECKPOINT_STORE_", "secretRef": {"name": "keys"}}
    assert container["envFrom"] == ([keys, *SPEC["envFrom"]] if merge else [keys])
    assert "checkpoints" not in {one["name"] for one in pod["volumes"]}
    assert pod["serviceAccountName"] == "trainer"


def test_a_thread_of_a_notebook_can_read_a_history() -> None:
    with ThreadPoolExecutor() as threads:
        delivery = Delivery(Namespace(), {}).deleted_afterwards()
        assert threads.submit(delivery.__enter__).result()


def test_a_download_under_nohup_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Delivery(Namespace(), {}).deleted_afterwards():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_nothing_takes_the_pod_for_one_of_the_job_s_own_and_nothing_of_it_stays() -> None:
    made = manifest({**SPEC, "podTemplate": {"metadata": {"labels": {"cost": "me"}}}})
    labels = made["spec"]["template"]["metadata"]["labels"]
    assert not {LABEL_JOB, LABEL_UID, "app.kubernetes.io/managed-by"} & labels.keys()
    assert (labels["team"], labels["cost"]) == ("rl", "me")
    assert LABEL_JOB not in made["metadata"]["labels"]
    assert made["metadata"]["ownerReferences"][0]["uid"] == UID
    assert "controller" not in made["metadata"]["ownerReferences"][0]
    assert made["spec"].keys() >= {"ttlSecondsAfterFinished", "activeDeadlineSeconds"}
    assert made["spec"]["backoffLimit"] == 0


class Volume:
    """A folder behind a connection that is cut after each of so many bytes, and may spoil what it
    carries once."""

    def __init__(self, files: dict[str, bytes], cuts: list[int], spoils: int | None = None) -> None:
        self.files, self.cuts, self.spoils = files, list(cuts), spoils
        self.sent = 0

    @property
    def listing(self) -> Listing:
        entries = {
            name: FileEntry(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
            for name, content in self.files.items()
        }
        return Listing(files=entries)

    def read(self, name: str, offset: int) -> Iterator[bytes]:
        content = self.files[name][offset:]
        cut = self.cuts.pop(0) if self.cuts else len(content)
        for byte in content[:cut]:
            self.sent += 1
            yield bytes([byte ^ (self.sent == self.spoils)])
        if cut < len(content):
            raise KubectlError("error: unexpected EOF")


NAMES = st.text(st.characters(exclude_characters="/\\"), min_size=1, max_size=30).filter(
    lambda name: name.isprintable() and name not in (".", "..")
)
PATHS = st.lists(NAMES, min_size=1, max_size=2)
FILES = st.dictionaries(PATHS.map("/".join), st.binary(max_size=40), max_size=4)


def possible(files: dict[str, bytes]) -> bool:
    """Whether a folder can have all these: none is the folder of another."""
    return not any(one != other and other.startswith(f"{one}/") for one in files for other in files)


@settings(max_examples=cases(150))
@given(
    FILES.filter(possible), st.lists(st.integers(0, 30), max_size=6), st.none() | st.integers(1, 60)
)
@example({"model.safetensors": b"abc", "-rf": b"", "a b/ü": b"x"}, [1, 0, 0, 1], None)
def test_whatever_cuts_the_connection_every_byte_arrives_once(
    files: dict[str, bytes], cuts: list[int], spoils: int | None
) -> None:
    volume = Volume(files, cuts, spoils)
    with TemporaryDirectory() as place:
        folder, counted = Path(place, "to"), list[int]()
        require_safe(volume.listing)
        wanted = missing_files(folder, volume.listing)
        require_room(folder, wanted)
        download_files(folder, wanted, volume.read, counted.append, SteppedClock())
        found = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }
        assert found == files
        assert sum(counted) == sum(map(len, files.values()))
        assert missing_files(folder, volume.listing) == {}
    sizes = sum(map(len, files.values()))
    again = max(map(len, files.values()), default=0) if spoils and spoils <= sizes else 0
    assert sizes <= volume.sent <= sizes + again, "only a spoiled file is sent again"


def test_the_next_command_goes_on_where_this_one_was_cut(tmp_path: Path) -> None:
    clock = SteppedClock()
    volume = Volume({"a": b"12345", "b": b"67890"}, [5, 2, *[0] * len(PAUSES)])
    wanted = missing_files(tmp_path, volume.listing)
    with pytest.raises(
        KubectlError, match="b: nothing came for a minute: error: unexpected EOF; the same"
    ):
        download_files(tmp_path, wanted, volume.read, lambda _: None, clock)
    assert clock.now() == sum(PAUSES)
    assert (tmp_path / "a").read_bytes() == b"12345"
    assert not (tmp_path / "b").exists()
    wanted = missing_files(tmp_path, volume.listing)
    assert list(wanted) == ["b"]
    require_room(tmp_path, wanted)
    download_files(tmp_path, wanted, volume.read, lambda _: None)
    assert volume.sent == 10


def test_a_part_of_another_version_is_not_continued(tmp_path: Path) -> None:
    before, after = Volume({"a": b"12345"}, [3, *[0] * len(PAUSES)]), Volume({"a": b"abcde"}, [])
    with pytest.raises(KubectlError):
        download_files(
            tmp_path,
            missing_files(tmp_path, before.listing),
            before.read,
            lambda _: None,
            SteppedClock(),
        )
    download_files(tmp_path, missing_files(tmp_path, after.listing), after.read, lambda _: None)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"abcde")]


def test_a_file_that_stays_wrong_is_not_taken(tmp_path: Path) -> None:
    volume = Volume({"a": b"12345"}, [])
    listing = volume.listing
    volume.files["a"] = b"1234x"
    with pytest.raises(KubectlError, match="a came twice with another sha256"):
        download_files(tmp_path, listing.files, volume.read, lambda _: None)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    "name", ["another.safetensors", "model.safetensors", ".hidden", "below/it"]
)
def test_a_folder_with_something_else_is_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"mine")
    with pytest.raises(
        OptionError, match=f"has files that are not of this export: {name}; name a new folder"
    ):
        missing_files(tmp_path, Volume({"model.safetensors": b"12345"}, []).listing)
    with pytest.raises(OptionError, match="is no folder"):
        require_folder(tmp_path / name)
    with pytest.raises(OptionError, match="--to"):
        require_room(tmp_path / name / "below", {})


def test_what_does_not_fit_is_refused_before_it_comes(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"8192 TiB are to come, its disk has .* free"):
        require_room(tmp_path, {"a": FileEntry(bytes=2**53 - 1, sha256="0" * 64)})


def test_a_disk_that_fills_up_keeps_what_has_arrived(tmp_path: Path) -> None:
    volume = Volume({"a": b"12345"}, [])

    def full(name: str, offset: int) -> Iterator[bytes]:
        yield from list(volume.read(name, offset))[:3]
        raise OSError(28, "No space left on device")

    with pytest.raises(OptionError, match="No space left on device; what has arrived stays"):
        download_files(tmp_path, volume.listing.files, full, lambda _: None)
    volume.sent = 0
    download_files(tmp_path, missing_files(tmp_path, volume.listing), volume.read, lambda _: None)
    assert volume.sent == 2


@given(st.text(st.sampled_from("a./\\\n\0é")) | st.just(f".{'0' * 32}.part"))
@example("../a")
@example("/etc/passwd")
def test_no_name_leads_out_of_the_folder(name: str) -> None:
    listing = Listing(files={name: FileEntry(bytes=0, sha256="0" * 64)})
    folder = Path("/to/folder")
    try:
        require_safe(listing)
    except CliError:
        return
    assert (folder / name).resolve().is_relative_to(folder)
    assert (folder / name).resolve() != folder


def test_weights_that_the_job_did_not_report_are_refused() -> None:
    told = Export.model_validate(EXPORT)
    require_reported(Listing(files={"config.json": FileEntry(bytes=1, sha256="1" * 64)}), told)
    with pytest.raises(KubectlError, match="somebody changed it"):
        require_reported(
            Listing(files={"a.safetensors": FileEntry(bytes=1, sha256="1" * 64)}), told
        )

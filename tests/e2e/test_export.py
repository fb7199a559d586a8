"""An adapter is brought home: interrupted, over a connection that is cut, merged, signed; and
nothing stays behind.

One job, made once for the file. kubectl is the real one behind a script, which cuts the connection
where a test says.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grpo_api.report.artifacts import parse_sums, weights_hash
from grpo_api.status.status import GRPOJobStatus
from harness.jobs import POLL_SECONDS, TIMEOUT, Jobs, Object
from harness.programs.build import component
from harness.programs.cache import REPOSITORY
from harness.programs.patience import Patience
from harness.programs.processes import until

pytestmark = pytest.mark.slow

NAME, SECRET = "exported", "model-signing"
WEIGHTS = "adapter_model.safetensors"
CUT_AFTER = 10_000
SCRIPT = f"""
import os, signal, subprocess, sys
from pathlib import Path
real, mode, marker = {{real!r}}, {{mode!r}}, Path({{marker!r}})
sending = "send" in sys.argv and sys.argv[-2] == "{WEIGHTS}"
cuts = len(marker.read_text()) if marker.exists() else 0
if mode == "whole" or not sending or cuts == 2:
    os.execv(real[0], real + sys.argv[1:])
marker.write_text("x" * (cuts + 1))
if mode == "silent":
    signal.pause()
child = subprocess.Popen(real + sys.argv[1:], stdout=subprocess.PIPE)
sys.stdout.buffer.write(child.stdout.read({CUT_AFTER}))
sys.stdout.buffer.flush()
if cuts == 1:
    at = sys.argv.index("exec")
    subprocess.run([*real, *sys.argv[1:at], "delete", "pod", sys.argv[at + 1]], stdout=subprocess.DEVNULL, check=True)
os.kill(child.pid, signal.SIGKILL)
child.wait()
sys.exit(1)
"""  # noqa: E501
"""kubectl that is killed after so many bytes of the weights, the second time together with the pod;
or that sends nothing of them for ever."""


@pytest.fixture(scope="module")
def public_key(jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the key by which the job signs; both are made as docs/how-to/models/verify.md says."""
    folder = tmp_path_factory.mktemp("key")
    subprocess.run(
        shlex.split("openssl genpkey -algorithm ed25519 -out signing.key"), cwd=folder, check=True
    )
    subprocess.run(
        shlex.split("openssl pkey -in signing.key -pubout -out signing.pub"), cwd=folder, check=True
    )
    jobs.kubectl("create", "secret", "generic", SECRET, f"--from-file=key.pem={folder}/signing.key")
    return folder / "signing.pub"


@pytest.fixture(scope="module")
def done(jobs: Jobs, public_key: Path) -> Object:
    """A job that has trained and exported its adapter."""
    export = {"to": "Volume", "signingKeySecretRef": {"name": SECRET, "key": "key.pem"}}
    alone = {"accelerator": "CPU", "nodes": 1}
    jobs.create(NAME, {"maxSteps": 2}, placement=alone, adapter={"use": "Always"}, export=export)
    return jobs.wait_succeeded(NAME)


def environment(jobs: Jobs, folder: Path, mode: str) -> dict[str, str]:
    """A user's, with kubectl behind the script."""
    script = folder / "kubectl.py"
    real = list(map(str, component("kubectl")))
    script.write_text(SCRIPT.format(real=real, mode=mode, marker=str(folder / mode)))
    paths = os.pathsep.join([str(REPOSITORY / "operator"), os.environ.get("PYTHONPATH", "")])
    own = {"KUBECTL": shlex.join([sys.executable, str(script)]), "PYTHONPATH": paths}
    return jobs.access.environment | own


def command(jobs: Jobs, folder: Path, *more: str) -> list[str]:
    """`grpo export` into the folder."""
    return [
        sys.executable,
        "-m",
        "grpo_cli",
        "export",
        NAME,
        "-n",
        jobs.namespace,
        "--to",
        str(folder),
        *more,
    ]


def exported(jobs: Jobs, place: Path, mode: str, *more: str) -> str:
    """What the command prints when it is done."""
    line = command(jobs, place / "model", *more)
    done = subprocess.run(
        line, env=environment(jobs, place, mode), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def verified(folder: Path, key: Path | None = None) -> tuple[int, str]:
    """Exit code and words of `grpo verify`."""
    line = [
        sys.executable,
        "-m",
        "grpo_cli",
        "verify",
        str(folder),
        *(["--key", str(key)] if key else []),
    ]
    paths = {"PYTHONPATH": str(REPOSITORY / "operator")}
    done = subprocess.run(line, env=os.environ | paths, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def nothing_left(jobs: Jobs) -> None:
    """Waits until neither Job nor pod of an export is there."""
    jobs.kubectl(
        "wait", "--for=delete", "jobs,pods", "--selector=grpo.dev/component=export", "--timeout=60s"
    )
    left = jobs.kubectl("get", "jobs,pods", "--selector=grpo.dev/component=export", "--output=name")
    assert left == ""


def test_the_status_says_where_the_model_is(jobs: Jobs, done: Object) -> None:
    status = GRPOJobStatus.model_validate(done["status"])
    run = f"{NAME}-{done['metadata']['uid']}"
    assert status.export is not None
    assert status.export.path == f"pvc://first-job/checkpoints/{run}/export"
    on_volume = jobs.checkpoints / run / "export"
    assert status.export.bytes == sum(
        path.stat().st_size for path in on_volume.rglob("*") if path.is_file()
    )
    assert status.export.weights_hash == weights_hash(
        parse_sums((on_volume / "SHA256SUMS").read_text())
    )
    path = status.export.path
    # events are sent after the status is written
    until("the event", lambda: any(path in one for one in messages(jobs, "Succeeded")))


def messages(jobs: Jobs, reason: str) -> list[str]:
    """What events of this reason say of the job."""
    text = jobs.kubectl(
        "get", "events", f"--field-selector=involvedObject.name={NAME}", "-o", "json"
    )
    return [one["message"] for one in json.loads(text)["items"] if one["reason"] == reason]


def test_ctrl_c_leaves_nothing_in_the_cluster(jobs: Jobs, done: Object, tmp_path: Path) -> None:
    # a test run that was started in the background has SIGINT ignored, and its children inherit
    # that
    heard = "import signal, runpy; signal.signal(signal.SIGINT, signal.default_int_handler)"
    _, _, module, *arguments = command(jobs, tmp_path / "model")
    line = [
        sys.executable,
        "-c",
        f"{heard}; runpy.run_module({module!r}, run_name='__main__')",
        *arguments,
    ]
    running = subprocess.Popen(
        line, env=environment(jobs, tmp_path, "silent"), stderr=subprocess.PIPE, text=True
    )
    patience = Patience(TIMEOUT)
    while not (tmp_path / "silent").exists():
        assert running.poll() is None, running.communicate()[1]
        assert not patience.is_over
        time.sleep(POLL_SECONDS)
    running.send_signal(signal.SIGINT)
    assert running.wait() == 130, running.communicate()[1]
    assert not (tmp_path / "model" / WEIGHTS).exists()
    nothing_left(jobs)


def test_a_model_comes_whole_over_a_connection_that_is_cut(
    jobs: Jobs, done: Object, tmp_path: Path
) -> None:
    said = exported(jobs, tmp_path, "cut")
    assert (tmp_path / "cut").read_text() == "xx", "cut twice, once with the pod"
    told, folder = GRPOJobStatus.model_validate(done["status"]).export, tmp_path / "model"
    assert told is not None
    assert f"{told.weights_hash}, as the job reported it" in said.replace("\n", " ")
    subprocess.run(
        ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=folder, check=True
    )
    source = jobs.checkpoints / f"{NAME}-{done['metadata']['uid']}" / "export"
    here, there = (
        {path.name: path.read_bytes() for path in one.iterdir()} for one in (folder, source)
    )
    assert here == there
    nothing_left(jobs)
    again = exported(jobs, tmp_path, "whole")
    assert again == said, "what is there is checked and not fetched again"


def test_what_a_pod_signed_with_a_key_from_a_secret_is_verified_and_a_changed_byte_is_not(
    jobs: Jobs, done: Object, public_key: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(jobs.checkpoints / f"{NAME}-{done['metadata']['uid']}" / "export", folder)
    code, said = verified(folder, public_key)
    assert code == 0, said
    assert "by the given key" in said
    spoiled = bytearray((folder / WEIGHTS).read_bytes())
    spoiled[-1] ^= 1
    (folder / WEIGHTS).write_bytes(spoiled)
    code, said = verified(folder, public_key)
    assert code == 1
    assert f"{WEIGHTS} was changed" in said


def test_an_adapter_is_merged_in_the_cluster_and_says_so(
    jobs: Jobs, done: Object, public_key: Path, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    said, folder = (
        exported(jobs, tmp_path, "whole", "--merge", "--dtype", "bfloat16"),
        tmp_path / "model",
    )
    assert "converted from the job's" in said
    subprocess.run(
        ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=folder, check=True
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert (model.dtype, model.num_parameters() > 70_000) == (torch.bfloat16, True)
    told = GRPOJobStatus.model_validate(done["status"]).export
    assert told is not None
    code, said = verified(folder)
    assert code == 0, said
    assert f"merged into its base, to bfloat16, from weights {told.weights_hash}" in said
    code, said = verified(folder, public_key)
    assert code == 1, said
    assert "its original is signed by the given key" in said
    nothing_left(jobs)

"""The pure parts of the cluster harness: caching, settings, addresses, and what it borrows from the
host."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness import __main__ as commands
from harness import controlplane, stack
from harness.controlplane import ControlPlaneSettings
from harness.images import recipes
from harness.images.recipes import Image, pip_config
from harness.images.wheels import slim_metadata
from harness.nodes import cgroups
from harness.nodes.network import SLOTS, Addresses
from harness.programs import prerequisites, processes
from harness.programs.build import go_version
from harness.programs.cache import NO_BUILDS, cached, content_key
from harness.programs.processes import MARK, ClusterError, Processes, until
from harness.settings import ClusterSettings, GpuSettings, load_settings


@pytest.fixture(autouse=True)
def _builds(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests make results of their own."""
    monkeypatch.delenv(NO_BUILDS, raising=False)


def test_a_key_changes_with_names_and_bytes_but_not_with_generated_files(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one")
    first = content_key(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.pyc").write_text("generated")
    assert content_key(tmp_path) == first
    (tmp_path / "a.py").write_text("two")
    changed = content_key(tmp_path)
    assert changed != first
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert content_key(tmp_path) not in {first, changed}


def test_parts_of_a_key_cannot_run_together() -> None:
    assert content_key("ab", "c") != content_key("a", "bc")


def test_an_interrupted_build_leaves_nothing_on_the_disk(tmp_path: Path) -> None:
    def interrupted(part: Path) -> None:
        part.mkdir()
        (part / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached(tmp_path / "tool", interrupted)
    assert [path.name for path in tmp_path.iterdir()] == [".tool.lock"]


def test_a_build_that_was_killed_is_started_again(tmp_path: Path) -> None:
    target = tmp_path / "tool"
    killed = tmp_path / ".tool.part"
    killed.mkdir()
    (killed / "half").touch()
    assert cached(target, lambda part: part.mkdir()) == target
    assert list(target.iterdir()) == []


def test_a_finished_build_is_not_repeated(tmp_path: Path) -> None:
    target = tmp_path / "tool"
    cached(target, lambda part: part.touch())
    cached(target, lambda _: pytest.fail("built twice"))


def test_a_missing_result_is_an_error_where_builds_are_forbidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NO_BUILDS, "1")
    target = tmp_path / "kwok-0123456789ab"
    with pytest.raises(ClusterError, match=r"^kwok is not built: run `make tools`$"):
        cached(target, lambda part: part.mkdir())
    target.mkdir()
    assert cached(target, lambda _: pytest.fail("built twice")) == target


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_only_the_newest_results_of_a_name_are_kept(tmp_path: Path, kept: int) -> None:
    names = [f"image-{content_key(text)}.tar" for text in "abcd"]
    for age, name in enumerate(names[:3]):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (age, age))
    (tmp_path / "image-other-0123456789ab.tar").touch()
    newest = names[4 - kept :]

    def results() -> set[str]:
        return {path.name for path in tmp_path.glob("image-*")}

    def make(part: Path) -> None:
        # The old ones have made room before the new one takes it.
        assert results() == {*newest[:-1], "image-other-0123456789ab.tar"}
        part.touch()

    cached(tmp_path / names[3], make, kept=kept)
    assert results() == {*newest, "image-other-0123456789ab.tar"}


def test_settings_survive_the_state_folder(tmp_path: Path) -> None:
    settings = ClusterSettings(
        nodes=2,
        slot=3,
        shown={"/host": "/pod"},
        gpus=GpuSettings(8),
        control_plane=ControlPlaneSettings("10.99.3.1", 6443, audit=True),
    )
    settings.save(tmp_path)
    assert load_settings(tmp_path) == settings


def test_a_folder_whose_start_was_interrupted_at_once_can_be_opened(tmp_path: Path) -> None:
    assert load_settings(tmp_path) == ClusterSettings()


def test_no_labels_and_no_capacity_without_gpus() -> None:
    assert GpuSettings().labels == {}
    assert GpuSettings().capacity == {}
    assert GpuSettings(2).labels["nvidia.com/gpu.count"] == "2"


def test_clusters_on_one_machine_share_no_address() -> None:
    every = [Addresses(slot) for slot in range(SLOTS)]
    assert len({addresses.host for addresses in every}) == SLOTS
    assert len({addresses.pod_subnet(0) for addresses in every}) == SLOTS
    assert len({addresses.link for addresses in every}) == SLOTS


@pytest.mark.parametrize(("file", "weight"), [("cpu.shares", "8192"), ("cpu.weight", "800")])
def test_a_cluster_s_pods_go_before_what_else_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, weight: str
) -> None:
    monkeypatch.setattr(cgroups, "roots", lambda: [tmp_path])
    (tmp_path / "grpo-test").mkdir()
    (tmp_path / "grpo-test" / file).write_text("default")
    cgroups.make("grpo-test/node-0")
    assert (tmp_path / "grpo-test" / file).read_text() == weight
    assert not (tmp_path / "grpo-test" / "node-0" / file).exists()


def test_version_2_groups_delegate_only_what_a_kubelet_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain files stand in for a version 2 hierarchy, which not every machine has."""
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids rdma\n")
    (tmp_path / "cgroup.subtree_control").write_text("pids\n")
    monkeypatch.setattr(cgroups, "roots", lambda: [tmp_path])
    cgroups.make("grpo-test")
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu +memory"
    assert (tmp_path / "grpo-test").is_dir()


def test_version_1_cpusets_start_with_their_parents_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain files stand in for a version 1 cpuset hierarchy, which makes such files in every new
    folder."""
    child = tmp_path / "grpo-test"
    child.mkdir()
    (tmp_path / "tasks").touch()
    for name, value in (("cpuset.cpus", "0-1\n"), ("cpuset.mems", "0\n")):
        (tmp_path / name).write_text(value)
        (child / name).write_text("\n")
    monkeypatch.setattr(cgroups, "roots", lambda: [tmp_path])
    cgroups.make("grpo-test")
    assert (child / "cpuset.cpus").read_text() == "0-1\n"
    assert (child / "cpuset.mems").read_text() == "0\n"


def test_whether_groups_can_be_made_is_tried_without_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "roots", lambda: [tmp_path])
    cgroups.require()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(cgroups, "roots", lambda: [tmp_path / "absent"])
    with pytest.raises(
        ClusterError, match="real nodes need cgroups, and this machine refuses them"
    ):
        cgroups.require()


def test_real_nodes_are_refused_to_users_without_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match="real nodes need root"):
        prerequisites.require(nodes=True)


def test_everything_that_is_missing_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prerequisites, "_present", lambda _: False)
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(prerequisites, "APT", Path("/nonexistent"))
    with pytest.raises(ClusterError) as refused:
        prerequisites.require(nodes=False, images=True)
    assert (
        str(refused.value).splitlines()[1]
        == "  apt-get install -y binutils buildah gcc mmdebstrap openssl"
    )


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("go version go1.26.8 linux/amd64", (1, 26)),
        ("go version go1.19.8 linux/amd64", (1, 19)),
        ("devel", (0, 0)),
    ],
)
def test_an_old_go_is_told_from_a_new_one(text: str, version: tuple[int, int]) -> None:
    assert go_version(text) == version


def test_a_container_borrows_only_the_settings_that_choose_the_index() -> None:
    listed = "global.index-url='https://index.test/simple'\n:env:.find-links='/host/wheels'\nglobal.cert='/host/ca'\n"
    lines = pip_config(listed).splitlines()
    assert "index-url = https://index.test/simple" in lines
    assert not [line for line in lines if "/host/" in line]


def test_a_repacked_wheel_needs_no_cuda() -> None:
    text = (
        "Metadata-Version: 2.4\nName: torch\nVersion: 2.15.0\nRequires-Dist: filelock\n"
        'Requires-Dist: nvidia-nccl-cu13==2.30.7; platform_system == "Linux"\n'
        "Requires-Dist: cuda-toolkit[cublas]==13.2.2\nRequires-Dist: triton~=3.9.0\n\nVersion: "
        "2.15.0 of the text\n"
    )
    slim = slim_metadata(text, "2.15.0")
    assert slim.splitlines()[2:4] == ["Version: 2.15.0+nocuda", "Requires-Dist: filelock"]
    assert "Requires-Dist: nvidia" not in slim
    assert "Version: 2.15.0 of the text" in slim


@pytest.mark.realtime
def test_waiting_ends_with_the_last_reason() -> None:
    def refuses() -> bool:
        raise ConnectionError("refused by the peer")

    with pytest.raises(ClusterError, match="the peer to answer: refused by the peer"):
        until("the peer to answer", refuses, seconds=0.1)


@pytest.mark.realtime
def test_a_port_is_given_once_although_nobody_listens_on_it_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Each process has ports of its own: the same test may run in another checkout.
    first = 30001 + 4 * (os.getpid() % 500)
    monkeypatch.setattr(controlplane, "PORTS", (first, first + 3))
    given = {controlplane.free_port() for _ in range(3)}
    assert given == set(range(first, first + 3))
    with pytest.raises(ClusterError, match="no free TCP port"):
        controlplane.free_port()
    other_process = (
        f"from harness import controlplane; controlplane.PORTS = {(first, first + 3)}; "
        "controlplane.free_port()"
    )
    child = subprocess.run(
        [sys.executable, "-c", other_process], capture_output=True, text=True, check=False
    )
    assert "no free TCP port" in child.stderr


@pytest.mark.parametrize(
    ("arguments", "has_operator"),
    [(["up", "--operator"], True), (["up"], False), (["up", "--api-only"], False)],
)
def test_a_cluster_with_the_operator_names_the_command_that_runs_a_job_on_it(
    arguments: list[str],
    has_operator: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings: list[ClusterSettings] = []
    loaded: list[str] = []
    installed: list[object] = []

    class FakeCluster:
        kubeconfig = tmp_path / "kubeconfig"

        @classmethod
        def create(cls, _: str, chosen: ClusterSettings, __: object) -> "FakeCluster":
            settings.append(chosen)
            return cls()

        def keep(self) -> None:
            pass

        def load_missing(self, name: str, _: Path) -> None:
            loaded.append(name)

    def install(_: object, *images: Image) -> None:
        assert loaded == [image.name for image in images]
        installed.append(images)

    for name in ("operator_image", "light_trainer_image"):
        image = Image(f"localhost/{name}:1", tmp_path)
        monkeypatch.setattr(recipes, name, lambda image=image: image)
    monkeypatch.setattr(stack, "install_operator", install)
    monkeypatch.setattr(commands, "Cluster", FakeCluster)
    monkeypatch.setattr(commands, "clusters_folder", lambda: tmp_path / "clusters")
    monkeypatch.setattr(commands, "user_commands", lambda: tmp_path)
    packages = ClusterSettings(2, shown={"site": "packages"})
    monkeypatch.setattr(commands, "training_settings", lambda **_: packages)
    monkeypatch.setattr(sys, "argv", ["harness", *arguments])
    assert commands.main() == 0
    shown = capsys.readouterr().out
    assert ("kubectl apply -f examples/quickstart.yaml" in shown) == has_operator
    assert len(installed) == has_operator
    assert settings[0].shown == ({} if "--api-only" in arguments else packages.shown)
    lines = [line for line in shown.splitlines() if not line.startswith("export ")]
    assert all(line.startswith("#") for line in lines), "a shell evaluates what is printed"


def test_a_process_that_is_loading_its_program_is_found_once_it_has_an_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the last one that a killed owner started: the guard removed the folder and left it."""
    loading, kernel_thread = tmp_path / "41", tmp_path / "2"
    for process, memory in ((loading, "260 1 1 20 0 40 0"), (kernel_thread, "0 0 0 0 0 0 0")):
        process.mkdir()
        (process / "statm").write_text(memory)
        (process / "cmdline").write_bytes(b"")
        (process / "environ").write_bytes(b"")

    def load(_: float) -> None:
        (loading / "environ").write_bytes(f"{MARK}=/clusters/a".encode())
        (loading / "cmdline").write_bytes(b"kube-apiserver\0")

    monkeypatch.setattr("time.sleep", load)
    monkeypatch.setattr(processes, "PROC", tmp_path)
    assert Processes(Path("/clusters/a")).find() == [41]

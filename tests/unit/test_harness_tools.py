"""What is built for a run, when it is refused, and which edits build an image anew."""

import re
import shutil
from pathlib import Path

import pytest

from harness import tools
from harness.images import recipes
from harness.nodes import cgroups
from harness.programs import prerequisites
from harness.programs.cache import NO_BUILDS, REPOSITORY, cached
from harness.programs.processes import ClusterError
from harness.tools import Tools, prepare


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine that can run everything; its cache folder."""
    monkeypatch.delenv(NO_BUILDS, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(prerequisites, "require", lambda **_: None)
    monkeypatch.setattr(cgroups, "require", lambda: None)
    monkeypatch.setattr(tools, "user_commands", lambda: None)
    return tmp_path


def test_only_what_is_missing_is_built(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    def make(name: str) -> Path:
        def write(part: Path) -> None:
            built.append(name)
            part.touch()

        return cached(machine / name, write)

    (machine / "there").touch()
    run = Tools((), (lambda: make("there"), lambda: make("absent")), disk=0, memory=0)
    monkeypatch.setitem(tools.RUNS, "some", run)
    prepare("some")
    prepare("some")
    assert built == ["absent"]


def test_a_full_disk_is_noticed_before_anything_is_built(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Tools(
        (),
        (lambda: cached(machine / "absent", lambda _: pytest.fail("built")),),
        disk=10**9,
        memory=0,
    )
    monkeypatch.setitem(tools.RUNS, "some", run)
    with pytest.raises(
        ClusterError, match=r"^1000000000 GB of disk are needed and [\d.]+ are there for "
    ):
        prepare("some")


def test_too_little_memory_is_noticed(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prerequisites, "MEMORY", machine / "meminfo")
    (machine / "meminfo").write_text("MemTotal:       99999999 kB\nMemAvailable:    2000000 kB\n")
    with pytest.raises(ClusterError, match=r"^6 GB of memory are needed and 2\.0 are available$"):
        prerequisites.require_room(0, 6)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small repository with a file in each folder that a Dockerfile may copy."""
    monkeypatch.setattr(recipes, "base_tar", lambda: Path("base.tar"))
    for file in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / file, tmp_path)
    for package in (*REPOSITORY.glob("operator/grpo_*"), *REPOSITORY.glob("trainer_image/grpo_*")):
        copy = tmp_path / package.relative_to(REPOSITORY)
        copy.mkdir(parents=True)
        (copy / "__init__.py").touch()
    shutil.copytree(REPOSITORY / "trainer_image/trackers", tmp_path / "trainer_image/trackers")
    for recipe in recipes.SHIPPED.values():
        shutil.copy(REPOSITORY / recipe.dockerfile, tmp_path / recipe.dockerfile)
    return tmp_path


OPERATOR, TRAINER = "grpo-operator", "grpo-trainer"


@pytest.mark.parametrize(
    ("edited", "rebuilt"),
    [
        ("README.md", set()),
        ("LICENSE", set()),
        ("operator/grpo_codegen/__init__.py", set()),
        ("operator/grpo_operator/__init__.py", {OPERATOR}),
        ("operator/Dockerfile", {OPERATOR}),
        ("trainer_image/grpo_trainer/__init__.py", {TRAINER}),
        ("trainer_image/grpo_acceptance/__init__.py", {TRAINER}),
        ("trainer_image/trackers/wandb.txt", {TRAINER}),
        ("operator/grpo_api/__init__.py", {OPERATOR, TRAINER}),
        ("constraints.txt", {OPERATOR, TRAINER}),
    ],
)
def test_an_edit_builds_the_images_anew_that_have_the_file(
    repository: Path, edited: str, rebuilt: set[str]
) -> None:
    before = keys(repository)
    with (repository / edited).open("a") as file:
        file.write("# edited\n")
    after = keys(repository)
    assert {name for name in before if after[name] != before[name]} == rebuilt


@pytest.mark.parametrize(
    ("old", "new", "rebuilt"),
    [
        ("line-length = 100", "line-length = 90", set()),
        ('"hypothesis",', '"hypothesis>=6",', set()),
        ('"PyYAML>=6"', '"PyYAML>=7"', {OPERATOR, TRAINER}),
    ],
)
def test_only_settings_of_the_package_reach_an_image(
    repository: Path, old: str, new: str, rebuilt: set[str]
) -> None:
    before = keys(repository)
    project = repository / "pyproject.toml"
    assert old in project.read_text()
    project.write_text(project.read_text().replace(old, new))
    after = keys(repository)
    assert {name for name in before if after[name] != before[name]} == rebuilt


def keys(repository: Path) -> dict[str, str]:
    return {name: recipes.image_key(recipe, repository) for name, recipe in recipes.SHIPPED.items()}


@pytest.mark.parametrize("recipe", recipes.SHIPPED.values(), ids=lambda recipe: recipe.name)
def test_a_recipe_has_all_that_its_dockerfile_copies(recipe: recipes.Recipe) -> None:
    text = (REPOSITORY / recipe.dockerfile).read_text()
    copied = {
        source
        for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE)
        for source in line.split()[:-1]
    }
    assert copied - {"pyproject.toml", "LICENSE"} == set(recipe.sources) - {recipe.dockerfile}

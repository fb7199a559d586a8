"""The repository keeps its own rules: layers, sizes, docstrings, examples that parse, links that
lead somewhere.

The rules of docs/internals/architecture.md are checked, not remembered.
"""

import ast
import keyword
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from grpo_api.job import parse_spec
from grpo_api.text.contract import KIND
from grpo_cli.show.kubectl_yaml import load_documents
from tests.prose import read_page
from tests.reading import functions, syntax_tree

ROOT = Path(__file__).parents[2]
SOURCES = ("operator", "trainer_image", "harness", "tools", "tests", "examples", "benchmarks")
TEXTS = (*SOURCES, "docs", "charts", "crds", ".ci")
SUFFIXES = {".py", ".md", ".yaml", ".yml", ".toml", ".txt", ".json", ".tpl", ".sh", ".go", ""}
MAX_LINES, MAX_FUNCTION_LINES = 500, 80
MAX_FILES = 14
"""Files of one folder of a product package, with its `__init__.py`."""
REFERENCE = re.compile(
    r"(?<![\w./-])(?:[a-z_]\w*(?:\.(?!com\b|io\b|dev\b|so\b)\w+)+|[A-Z][a-z0-9]+[A-Z]\w*)\b"
    r"|`[A-Za-z_]\w*`"
)
"""A dotted, CamelCase or backquoted name."""
OTHERS_NAMES = re.findall(
    r"\S+",
    """
    AMD_Instinct_MI300X_OAM AutoModel CachingHostAllocator CommonMark CublasHandlePool
    ExportTraceServiceRequest LaTeX MarkPodsNotReady MoE NetworkPolicySpec
    OpenMetrics OpenRLHF ParamWrapper PromQL Qwn RepeatSampler ResourceDescriptor ResourceFlavor
    SmolLM3 SortStable SpanKind StatusCode SyncRefModelCallback VmRSS
    _generate_and_score_completions _partition_param baseline consolidated.safetensors cub.cu
    cumem.py deepspeed.zero.Init default_optim eager_attention_forward grouped_mm
    grouped_mm_experts_forward grpo_trainer.VLLMGeneration grpo_trainer.create_model_from_path
    grpo_trainer.prepare_deepspeed grpo_trainer.py k8s.v1.cni.cncf logits_process.py malloc.h
    metav1.Condition metav1.Time ndots preempted register_NAME resource.Quantities stage3.py
    stage_1_and_2.py tearDown temp_grad_buffer_for_gpu_offload torch.quantile
    tuners_utils.check_target_module_exists vocab_parallel_embedding.py vpc.amazonaws zero.Init
    FailedMount ImagePullBackOff OptimizerNames PyYAML StorageClasses
    """,
)
"""Names of other projects in our docstrings."""


def files(folders: tuple[str, ...], *suffixes: str) -> Iterator[Path]:
    """Files of the repository's own below the folders and at its root."""
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*"))]
    found += [path for path in sorted(ROOT.iterdir()) if not path.name.startswith(".")]
    for path in found:
        if (
            path.is_file()
            and path.suffix in suffixes
            and not re.search(r"__pycache__|egg-info", str(path))
        ):
            yield path


def relative(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


@cache
def parsed() -> dict[str, ast.Module]:
    """Return every module of the repository by its path."""
    return {str(path.relative_to(ROOT)): syntax_tree(path) for path in files(SOURCES, ".py")}


def run(code: str, folder: Path = ROOT) -> str:
    """What a fresh interpreter prints when started in the folder."""
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.realtime
def test_the_operator_folder_does_not_shadow_the_standard_library() -> None:
    assert not (ROOT / "operator/__init__.py").exists()
    assert [path.name for path in (ROOT / "operator").glob("*.py")] == []
    for folder in (ROOT, ROOT / "tests"):
        assert "site-packages" not in run("import operator; print(operator.__file__)", folder)
        assert run("import operator; print(operator.itemgetter(0)('ok'))", folder) == "o"


CLUSTER = ("kopf", "kubernetes", "aiohttp")


@pytest.mark.realtime
@pytest.mark.parametrize(
    ("packages", "absent"),
    [
        (
            ("grpo_kube.objects", "grpo_api", "grpo_planner", "grpo_cli"),
            (*CLUSTER, "torch", "transformers"),
        ),
        (
            ("grpo_kube", "grpo_operator"),
            ("torch", "transformers", "trl", "deepspeed", "peft", "datasets"),
        ),
    ],
)
def test_packages_load_without_what_they_must_not_need(
    packages: tuple[str, ...], absent: tuple[str, ...]
) -> None:
    code = f"""
import importlib, pkgutil, sys
for name in {packages!r}:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
print(sorted(set({absent!r}) & set(sys.modules)))
"""
    assert run(code) == "[]"


def test_every_module_says_what_it_is_for() -> None:
    assert [path for path, module in parsed().items() if not ast.get_docstring(module)] == []


def test_a_program_starts_after_all_that_it_needs_is_defined() -> None:
    late = [
        f"{path}:{following.lineno}"
        for path, module in parsed().items()
        for statement, following in pairwise(module.body)
        if isinstance(statement, ast.If)
        and ast.unparse(statement.test).startswith("__name__ ==")
        and not isinstance(following, ast.Import | ast.ImportFrom)
    ]
    assert late == []


def test_docstrings_of_product_modules_have_short_sentences() -> None:
    long = {
        path: sentences
        for path, module in parsed().items()
        if path.startswith(("operator/", "trainer_image/"))
        # without trees and indented formulas
        and (text := re.sub(r"(?m)^(?: {4}|[│├└]).*$", "", ast.get_docstring(module) or ""))
        and (sentences := read_page(text).long_sentences)
    }
    assert long == {}


@cache
def docstrings(module: ast.Module) -> list[ast.Constant]:
    """Return the docstrings of a module and of all that is in it, attributes too."""
    values = [node.value for node in ast.walk(module) if isinstance(node, ast.Expr)]
    return [node for node in values if isinstance(node, ast.Constant)]


def names_in_code(path: str, module: ast.Module) -> Iterator[str]:
    """Yield the names of a module, its definitions, fields and arguments, but not of variables."""
    parts = Path(path).with_suffix("").parts
    yield from (*parts, *(".".join(parts[1:end]) for end in range(2, len(parts) + 1)))
    yield from (f"{'.'.join(parts[1:])}.{getattr(node, 'name', '')}" for node in module.body)
    ignored = set(docstrings(module))
    values: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        if node not in ignored and not (isinstance(node, ast.Name) and node.id.islower()):
            values.update(value for value in vars(node).values() if isinstance(value, str))
    for value in values:
        if re.fullmatch(r"[\w.-]+", value):
            yield from (value, *re.split("[.-]", value))


def test_names_in_docstrings_exist() -> None:
    folders = ("operator/", "trainer_image/", "harness/")
    product = {path: module for path, module in parsed().items() if path.startswith(folders)}
    names = {*keyword.kwlist, *(path.name for path in files(TEXTS, *SUFFIXES))}
    for path, text in texts().items():
        if path.startswith(("docs/", "charts/", "crds/")):
            names.update(re.findall(r"\b[A-Za-z][a-z0-9]+[A-Z]\w*", text))
    unknown = {}
    for path, module in product.items():
        names.update(names_in_code(path, module))
    for path, module in product.items():
        for node in docstrings(module):
            for name in (found.strip("`") for found in REFERENCE.findall(str(node.value))):
                parts = {name} if name.startswith("grpo_") else set(name.split("."))
                if not {name, name.removesuffix("s")} & names and not parts <= names:
                    unknown[name] = f"{path}:{node.lineno}"
    assert {name: unknown[name] for name in unknown if name not in OTHERS_NAMES} == {}
    assert unknown.keys() >= set(OTHERS_NAMES)


def test_files_are_short() -> None:
    long = [
        path
        for path in files(SOURCES, ".py", ".go")
        if len(path.read_text().splitlines()) > MAX_LINES
    ]
    assert relative(long) == []


@pytest.mark.parametrize(
    "package",
    [
        "operator/grpo_kube",
        "operator/grpo_api",
        "operator/grpo_planner",
        "operator/grpo_operator",
        "operator/grpo_cli",
        "trainer_image/grpo_trainer",
        "trainer_image/grpo_acceptance",
    ],
)
def test_rooms_are_small_and_each_file_of_a_package_has_a_name_of_its_own(package: str) -> None:
    modules = sorted((ROOT / package).rglob("*.py"))
    rooms = Counter(str(path.parent.relative_to(ROOT)) for path in modules)
    assert {room: count for room, count in rooms.items() if count > MAX_FILES} == {}
    names = Counter(
        path.name for path in modules if path.name not in ("__init__.py", "__main__.py")
    )
    assert {name: count for name, count in names.items() if count > 1} == {}


def test_functions_are_short() -> None:
    sizes = {
        f"{path}:{node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for path, module in parsed().items()
        for node in functions(module)
    }
    assert {name: size for name, size in sizes.items() if size > MAX_FUNCTION_LINES} == {}


@cache
def texts() -> dict[str, str]:
    """Return every text of the repository by its path, but for this file's own."""
    own = Path(__file__)
    found = {path for path in files(TEXTS, *SUFFIXES) if path != own}
    return {str(path.relative_to(ROOT)): path.read_text(errors="replace") for path in found}


@pytest.mark.parametrize(
    "forbidden",
    [
        r"/(work|root|home)/\w",
        r"\b(docker\.io|ghcr\.io|quay\.io|nvcr\.io|gcr\.io)\b",
        r"\b(TO" r"DO|FIX" r"ME|X" r"XX)\b",
        r"pytest\.mark\.(skip|xfail|flaky)",
        r"\bpytest\.(skip|xfail)\(",
    ],
)
def test_no_file_names_a_machine_or_leaves_work_undone(forbidden: str) -> None:
    assert sorted(path for path, text in texts().items() if re.search(forbidden, text)) == []


def documents() -> list[tuple[str, str]]:
    """Every YAML text with a GRPOJob that we show: the examples, and the blocks of README and
    docs."""
    found = [
        (str(path.relative_to(ROOT)), path.read_text())
        for path in sorted(ROOT.glob("examples/*.yaml"))
    ]
    for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]:
        blocks = re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)
        found += [
            (f"{page.name}-{n}", block)
            for n, block in enumerate(blocks)
            if re.search(f"^kind: {KIND}", block, re.MULTILINE)
        ]
    return found


@pytest.mark.parametrize(("place", "text"), documents(), ids=[place for place, _ in documents()])
def test_every_job_that_we_show_is_valid(place: str, text: str) -> None:
    jobs = [document for document in load_documents(text) if document["kind"] == KIND]
    assert jobs, f"{place} shows no {KIND}"
    for job in jobs:
        parse_spec(job["spec"])


def test_readme_and_examples_are_among_them() -> None:
    places = {place.partition("-")[0] for place, _ in documents()}
    assert {"README.md", "examples/01"} <= places


def test_links_between_documents_lead_somewhere() -> None:
    dead = [
        f"{page.relative_to(ROOT)} -> {target}"
        for page in files(TEXTS, ".md")
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert dead == []

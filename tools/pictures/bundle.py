"""The page that draws: Grafana's components by `npm ci`, bundled with our own few files by esbuild,
each made once."""

import shutil
from pathlib import Path

from harness.programs.cache import cache_root, cached, content_key
from harness.programs.nodejs import node, npm_ci
from harness.programs.processes import run
from harness.programs.progress import progress

FOLDER = Path(__file__).parent
PAGE = FOLDER / "page"
LOCK = tuple(FOLDER / name for name in ("package.json", "package-lock.json", ".npmrc"))


def page() -> Path:
    """Path of the page, made on first use (a minute; 270 MB stay in the cache, so that a change
    takes two seconds)."""
    key = content_key(*LOCK, PAGE)
    return cached(cache_root() / f"pictures-page-{key}", _bundle) / "index.html"


def _packages() -> Path:
    return (
        cached(cache_root() / f"pictures-packages-{content_key(*LOCK)}", _install) / "node_modules"
    )


def _install(folder: Path) -> None:
    folder.mkdir(parents=True)
    for file in LOCK:
        shutil.copy(file, folder)
    with progress("Grafana's components"):
        npm_ci(folder)


def _bundle(folder: Path) -> None:
    packages = _packages()
    shutil.copytree(PAGE, folder)
    (folder / "node_modules").symlink_to(packages)
    options = [
        "--bundle",
        "--minify",
        "--jsx=transform",
        "--loader:.svg=text",
        '--define:process.env.NODE_ENV="production"',
        "--log-level=error",
        f"--outfile={folder / 'page.js'}",
    ]
    run(node(), packages / "esbuild" / "bin" / "esbuild", folder / "main.jsx", *options)
    (folder / "node_modules").unlink()

"""Writes every generated file: the CRD and the chart's copy, alert rules, the dashboards, the
generated pages, and the data of the trainer's acceptance run.

So what follows from grpo_api and grpo_planner can't drift from them. `make codegen` writes.
`--check`, part of `make lint`, writes nothing and fails when a file is stale.
"""

import argparse
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from . import (
    acceptance,
    alert_page,
    alerts,
    chart_page,
    crd,
    planner_pages,
    readme,
    recording_rules,
    reference_pages,
    step_time_page,
    trl_fields,
    trl_page,
)
from .dashboards import DASHBOARDS, grafana, page

ROOT = Path(__file__).parents[2]

OUTPUTS: dict[str, Callable[[], str]] = {
    "README.md": readme.readme,
    "docs/reference/api.md": readme.api_page,
    "operator/grpo_api/spec/trl_fields.json": trl_fields.render,
    "crds/grpojob.yaml": crd.render,
    "charts/grpo-operator/files/grpojob.yaml": crd.render,
    "crds/grpojobclass.yaml": crd.render_class,
    "charts/grpo-operator/files/grpojobclass.yaml": crd.render_class,
    "crds/operatorleader.yaml": crd.render_leader,
    "charts/grpo-operator/files/operatorleader.yaml": crd.render_leader,
    "charts/grpo-operator/files/alerts.yaml": alerts.render,
    "charts/grpo-operator/files/recording.yaml": recording_rules.render,
    "charts/grpo-operator/README.md": chart_page.render,
    "docs/reference/alerts.md": alert_page.render,
    **{
        f"charts/grpo-operator/files/dashboards/{name}.json": partial(grafana.render, dashboard)
        for name, dashboard in DASHBOARDS.items()
    },
    "docs/reference/dashboards.md": partial(page.render, DASHBOARDS),
    "docs/reference/metrics.md": reference_pages.metrics,
    "docs/reference/traces.md": reference_pages.traces,
    "docs/reference/findings.md": reference_pages.findings,
    "docs/how-to/train/from-trl.md": trl_page.render,
    "docs/internals/step-times.md": step_time_page.render,
    "docs/internals/planner-table.md": planner_pages.table,
    "docs/reference/gpu-products.md": planner_pages.products,
    "docs/reference/plan-schema.json": planner_pages.schema,
    "trainer_image/grpo_acceptance/pins.json": acceptance.pins,
    "trainer_image/grpo_acceptance/predictions.json": acceptance.predictions,
}
"""Every generated file by its path in the repository, with the function that renders it."""


def stale_files(root: Path) -> list[str]:
    """The generated files that differ from what their sources say, by path."""
    return [path for path, render in OUTPUTS.items() if _read(root / path) != _text(render)]


def write_files(root: Path) -> list[str]:
    """Write the files that differ and return their paths."""
    changed = stale_files(root)
    for path in changed:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(_text(OUTPUTS[path]))
    return changed


@cache
def _text(render: Callable[[], str]) -> str:
    """What a function renders, once: the CRD is two files, and what is compared is written, too."""
    return render()


def _read(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


def main(arguments: list[str] | None = None) -> int:
    """Write or check the generated files; 1 if a check found a stale one."""
    parser = argparse.ArgumentParser(
        prog="python -m grpo_codegen", description="Write the generated files."
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a file is stale"
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="repository to write to")
    options = parser.parse_args(arguments)
    if not options.check:
        for path in write_files(options.root):
            print(f"wrote {path}")
        return 0
    stale = stale_files(options.root)
    for path in stale:
        print(f"{path} is stale: run `make codegen`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())

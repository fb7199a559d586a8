"""`grpo reward test`: scores a file of completions with a job's rewards.

Each reward runs in the process in which it runs in training. So a reward is fixed before a GPU
waits for it.
"""

import json
import os
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.text import Text

from grpo_api.report.history import Row
from grpo_api.text.contract import PLAN_ENV, REWARD_MOUNT_ENV
from grpo_api.text.messages import value_text
from grpo_operator.pods.manifests import plan_json

from ...inputs import local_preflight
from ...inputs.manifest import Job, add_filename, load_specs
from ...inputs.run_history import load_rows, sampled_completions
from ...show.documents import add_output, print_document
from ...show.errors import ENDED_BADLY, NotYet, OptionError
from ...show.terminal import console, show_table

SHOWN_LETTERS = 40
"""Of a completion."""
QUIET_SECONDS = 5.0
"""Until then nothing is said of what the rewards wait for."""


def register(parser: ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("action", choices=("test",))
    parser.add_argument(
        "completions",
        type=Path,
        help="JSON lines: completion, prompt, and the dataset's columns that the rewards read; "
        "such as the samples.jsonl of a run",
    )
    add_filename(parser, required=True)
    parser.add_argument(
        "--files", type=Path, metavar="FOLDER", help="what the functions' ConfigMaps hold"
    )
    add_output(parser)


def run(options: Namespace) -> int:
    """Prints one line per completion and the means; 0, or 1 where a reward failed."""
    local_preflight.require_trainer()
    jobs = load_specs(options.filename)
    if len(jobs) != 1:
        raise OptionError(f"-f {options.filename}: {len(jobs)} GRPOJobs; name a file with one")
    if options.files is not None and not options.files.is_dir():
        raise OptionError(f"--files {options.files} is no folder")
    for position, reward in enumerate(jobs[0].spec.rewards):
        if options.files is None and reward.python and reward.python.config_map:
            raise OptionError(
                f"spec.rewards[{position}].python.configMap is not read here; name the folder with "
                "its files by --files"
            )
    lines = load_rows(options.completions)
    rows = [row for row in (*lines, *sampled_completions(lines)) if "completion" in row]
    if not rows:
        raise OptionError(f"{options.completions}: no row has `completion`")
    result = _score_rows(jobs[0], rows, options.files)
    if options.output != "table":
        print_document(options.output, result)
    elif "error" not in result:
        _show(rows, result["rewards"])
    if "error" in result:
        print(f"grpo: {result['error']}", file=sys.stderr)
        return ENDED_BADLY
    return 0


def _score_rows(job: Job, rows: list[Row], files: Path | None) -> dict[str, Any]:
    """What the trainer's process says of the rows; where it leaves no answer, what it printed is on
    stderr."""
    with tempfile.TemporaryDirectory(prefix="grpo-") as name:
        folder = Path(name)
        plan_file, rows_file, result_file = (
            folder / file for file in ("plan.json", "rows.json", "result.json")
        )
        namespace = job.metadata.get("namespace")
        plan = local_preflight.local_plan(job.metadata["name"], namespace, job.spec)
        plan_file.write_text(plan_json(plan), encoding="utf-8")
        rows_file.write_text(json.dumps(rows), encoding="utf-8")
        for position in range(len(job.spec.rewards)):
            if files is not None:
                (folder / str(position)).symlink_to(files.resolve(), target_is_directory=True)
        command = [sys.executable, "-m", "grpo_trainer.rewards.trial"]
        command += [str(rows_file), str(result_file)]
        environment = os.environ | {PLAN_ENV: str(plan_file), REWARD_MOUNT_ENV: str(folder)}
        exit_code, printed = _run_trial(command, environment, job)
        if not result_file.exists():
            sys.stderr.write(printed.decode(errors="replace"))
            raise NotYet(f"scoring ended with exit code {exit_code} and no result")
        result: dict[str, Any] = json.loads(result_file.read_text(encoding="utf-8"))
        return result


def _run_trial(command: list[str], environment: dict[str, str], job: Job) -> tuple[int, bytes]:
    """Exit code and output of the trainer's process; what it may wait for is printed after
    QUIET_SECONDS."""
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            printed, _ = process.communicate(timeout=QUIET_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"grpo: {_waiting_message(job)}", file=sys.stderr, flush=True)
            printed, _ = process.communicate()
        finally:
            process.kill()  # after Ctrl-C
        return process.returncode, printed


def _waiting_message(job: Job) -> str:
    """Which services the rewards may wait for, and for how long."""
    waits = [
        f"spec.rewards[{position}].http for {urlsplit(reward.http.url).hostname}, at most "
        f"{reward.http.batch_timeout_seconds} s (batchTimeoutSeconds)"
        for position, reward in enumerate(job.spec.rewards)
        if reward.http
    ]
    services = f"; it may wait: {'; '.join(waits)}" if waits else ""
    return f"the rewards still run after {QUIET_SECONDS:.0f} s{services}"


def _show(rows: list[Row], rewards: dict[str, Any]) -> None:
    totals = [
        sum(
            reward["weight"] * reward["scores"][index]
            for reward in rewards.values()
            if reward["scores"][index] is not None
        )
        for index in range(len(rows))
    ]
    headings = ("completion", *rewards, "sum")
    lines: list[tuple[str, ...]] = []
    for index, row in enumerate(rows):
        scores = [_number(reward["scores"][index]) for reward in rewards.values()]
        text = value_text(row["completion"], SHOWN_LETTERS)
        lines.append((text, *scores, _number(totals[index])))
    means = [_number(_mean(reward["scores"])) for reward in rewards.values()]
    lines.append(("mean", *means, _number(_mean(totals))))
    out = console()
    show_table(out, headings, lines, tuple, right=headings[1:])
    for name, reward in rewards.items():
        if reward["problem"]:
            out.print(Text(f"{name}: {reward['problem']}"))


def _mean(scores: list[float | None]) -> float | None:
    numeric_scores = [score for score in scores if score is not None]
    return sum(numeric_scores) / len(numeric_scores) if numeric_scores else None


def _number(score: float | None) -> str:
    return "–" if score is None else f"{score:.4g}"

"""`grpo samples`: shows what the policy wrote, with rewards and advantages."""

import math
from argparse import ArgumentParser, Namespace

from rich.console import Console

from grpo_api.findings.step_row import as_number
from grpo_api.report.history import SAMPLES_FILE, STEP, Row

from ...cluster.delivery_pod import add_pod_arguments
from ...inputs.run_history import (
    SOURCE_HELP,
    dictionaries_of,
    load_history,
    sampled_completions,
    step_of,
)
from ...show.documents import add_output, print_document
from ...show.errors import NotYet, OptionError
from ...show.terminal import console, terminal_text


def register(parser: ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("run_name", metavar="RUN", help=SOURCE_HELP)
    parser.add_argument("--step", type=int, help="sampled step, or the last one before it")
    ends = parser.add_mutually_exclusive_group()
    ends.add_argument("--best", type=int, metavar="N", help="the N best completions")
    ends.add_argument("--worst", type=int, metavar="N", help="the N worst completions")
    parser.add_argument(
        "--reward", metavar="NAME", help="reward function to sort by. Unset: the advantage"
    )
    add_output(parser, "text")
    add_pod_arguments(parser)


def run(options: Namespace) -> int:
    """Prints completions: the best or worst of all sampled steps, or those of one step."""
    sorts = options.best is not None or options.worst is not None
    if options.reward and not sorts:
        raise OptionError("--reward: add --best or --worst, which it sorts by")
    for option in ("best", "worst"):
        count = getattr(options, option)
        if count is not None and count < 1:
            raise OptionError(f"--{option} is {count}; it takes 1 or more")
    lines = load_history(options, options.run_name, SAMPLES_FILE)
    if next(sampled_completions(lines), None) is None:
        raise NotYet(f"{options.run_name} has no samples")
    if options.step is not None or not sorts:
        lines = [_sampled_step(lines, options.step, options.run_name)]
    completions = list(sampled_completions(lines))
    if sorts:
        completions = _select_completions(options, completions)
    if options.output != "text":
        print_document(options.output, completions)
        return 0
    out = console()
    for completion in completions:
        _print_completion(out, completion)
    return 0


def _sampled_step(lines: list[Row], step: int | None, run_name: str) -> Row:
    """The newest sample, of this step or before it."""
    earlier = [line for line in lines if step is None or step_of(line) <= step]
    if not earlier:
        sampled = ", ".join(str(step_of(line)) for line in lines[:10])
        raise NotYet(f"{run_name} has no samples up to step {step}; sampled steps: {sampled}")
    return earlier[-1]


def _select_completions(options: Namespace, completions: list[Row]) -> list[Row]:
    """The best ones first, or the worst ones first. One that a reward function gave no score, which
    is NaN, is neither."""
    pairs = [(_score(completion, options.reward), completion) for completion in completions]
    scored_pairs = [(score, completion) for score, completion in pairs if score is not None]
    if options.reward and not scored_pairs:
        names = sorted({name for completion in completions for name in _rewards(completion)})
        raise OptionError(f"--reward {options.reward}: there are {', '.join(names) or 'none'}")
    is_best = options.best is not None
    ranked_pairs = [pair for pair in scored_pairs if not math.isnan(pair[0])]
    ranked_pairs.sort(key=lambda pair: pair[0], reverse=is_best)
    count = options.best if is_best else options.worst
    return [completion for _, completion in ranked_pairs[:count]]


def _score(completion: Row, reward: str | None) -> float | None:
    if reward is None:
        return as_number(completion.get("advantage"))
    return as_number(_rewards(completion).get(reward))


def _rewards(completion: Row) -> Row:
    rewards = completion.get("rewards")
    return rewards if isinstance(rewards, dict) else {}


def _print_completion(out: Console, completion: Row) -> None:
    rewards = {name: as_number(value) for name, value in _rewards(completion).items()}
    numbers = [f"{name} {value:g}" for name, value in rewards.items() if value is not None]
    advantage = as_number(completion.get("advantage"))
    if advantage is not None:
        numbers.append(f"advantage {advantage:+.3g}")
    cut = ", truncated" if completion.get("truncated") else ""
    head = f"step {completion[STEP]}: {', '.join(numbers)} ({completion.get('tokens')} tokens{cut})"
    out.print(terminal_text(head, "bold"))
    prompt = completion.get("prompt")
    # Of a chat the last message.
    messages = dictionaries_of(prompt)
    text = str(messages[-1].get("content") if messages else prompt)
    out.print(terminal_text(text, "dim"), soft_wrap=True)
    out.print(terminal_text(str(completion.get("completion"))), soft_wrap=True)
    out.print()

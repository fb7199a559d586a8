"""Prints plans: the chosen one, every family with its reason, and differences between two plans.

The layout is kept apart from the command, which decides what is planned. A terminal too narrow for
a table gets the same facts in lines below each other.
"""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from grpo_api.job import GRPOJobSpec
from grpo_api.plan.learned import Learned
from grpo_api.plan.plan import ExecutionPlan
from grpo_api.spec.checkpoint import CheckpointSpec
from grpo_api.text.contract import EXPORT_FOLDER
from grpo_api.text.units import GIB
from grpo_operator.records.names import checkpoint_volume, run_folder
from grpo_planner.explain.explain import decision_message, refusal_message, sampling_reason
from grpo_planner.memory.disk import staged_bytes
from grpo_planner.result.formatting import distinct_gib, gib, gpus_name, sharding
from grpo_planner.result.result import Candidate, PlanResult
from grpo_planner.search.engine_plan import engine_numbers, short_sampler_name
from grpo_planner.time.step_time import headline_message

from .terminal import show_table

SHOWN = 12
"""Candidates that are printed without --all."""
CHOSEN = "CHOSEN"
HEADINGS = ("method", "sharding", "reference", "sampled by", "GPUs", "nodes", "batch x accum",
"saving", "GiB", "of",
            "phase", "s/step", "verdict")  # fmt: skip

SHAPE_SOURCES = {
    "Spec": "spec.model.architecture", "FormerAttempt": "the preflight or a former attempt",
    "ConfigFile": "config.json",
    "Catalogue": "the catalogue", "Size": "spec.model.parameters", None: "an unknown source",
}  # fmt: skip
"""How a plan's shapeSource is named to a reader."""


def show_plan(out: Console, name: str, result: PlanResult, everything: bool = False) -> None:
    """Prints the verdict, the candidates, the memory of the chosen plan, and what to do."""
    _headline(out, name, result)
    if decided := decision_message(result):
        _line(out, "why", decided, "bold")
    if result.chosen and (sampler := sampling_reason(result.chosen)):
        _line(out, "completions", f"by {sampler}", "bold")
    if result.chosen and result.chosen.step_runs:
        _line(out, "measured", f"by runs {', '.join(result.chosen.step_runs)}", "bold")
    shown = [candidate for candidate in result.candidates if candidate.memory]
    if shown:
        rows = shown if everything else shown[:SHOWN]
        show_table(out, HEADINGS, rows, _cells, _stacked_cells, right=["s/step"], style=_style)
        if hidden := len(shown) - len(rows):
            out.print(f"[dim]… {hidden} more with --all[/dim]")
    if result.chosen:
        _phases(out, result.chosen)
        for text in result.chosen.warnings:
            _line(out, "warning", text, "yellow")
    for text in result.changes:
        _line(out, "changes", text, "bold yellow")
    for fix in result.fixes:
        _line(out, "fix", fix.message, "cyan")


def _line(out: Console, label: str, text: str, style: str) -> None:
    """A sentence behind a label."""
    out.print(Text.assemble((label, style), f"  {text}"))


def _headline(out: Console, name: str, result: PlanResult) -> None:
    """What is planned and how long a step takes, in two lines of a usual terminal; a longer text is
    below it."""
    plan = result.chosen
    verdict = ("planned", "green") if plan else (str(result.reason), "red")
    if plan is None:
        out.print(Text.assemble((name, "bold"), "  ", verdict))
        out.print(Text(refusal_message(result)))
        return
    out.print(Text.assemble((name, "bold"), "  ", verdict, f"  {headline_message(plan)}"))
    if not result.fits_now:
        _line(out, "waits", f"{gpus_name(plan)} are taken now", "yellow")
    if plan.memory is None:
        _line(out, "why", plan.reason, "bold")


def show_learned(out: Console, learned: Learned | None) -> None:
    """Prints what the job has learned of its memory by running out of it, and of engines that
    failed, on which the plan counts."""
    if learned is None:
        return
    lines: list[str] = []
    for key, phase_memory in learned.memory.items():
        predicted, needed = distinct_gib(phase_memory.predicted_bytes, phase_memory.needed_bytes)
        lines.append(f"{key}: {predicted} predicted, {needed} needed or more")
    lines += [
        f"attempt {shortfall.attempt} ran out at {shortfall.where}: {shortfall.tried}, needed "
        f"{gib(shortfall.needed_bytes)} or more"
        for shortfall in learned.shortfalls
    ]
    lines += [
        f"attempt {failed.attempt} ended with {failed.reason}, which {failed.rung} answers: "
        f"{failed.message}"
        for failed in learned.engine_failures
    ]
    for line in lines:
        _line(out, "learned", line, "magenta")


def settings(plan: ExecutionPlan) -> list[str]:
    """The columns that say how a candidate runs."""
    sharded = sharding(plan.zero_stage, offload=plan.offload != "None")
    saving: list[str] = []
    if plan.gradient_checkpointing:
        saving.append("checkpointing")
    if plan.generation_sub_batch:
        saving.append(f"sub-batch {plan.generation_sub_batch}")
    if not plan.gather_for_generation:
        saving.append("no gather")
    if plan.optimizer == "AdamW8bit":
        saving.append("8-bit")
    return [
        plan.method, sharded, plan.strategy, short_sampler_name(plan),
        f"{plan.gpus} x {plan.gpu_product or plan.gpu_resource}",
        str(plan.nodes), (f"{plan.micro_batch} x "
                         f"{plan.gradient_accumulation}"), ", ".join(saving) or "-",
    ]  # fmt: skip


def _style(candidate: Candidate) -> str:
    return "" if candidate.rejected else "bold green"


def _cells(candidate: Candidate) -> list[str]:
    """A candidate's cells under HEADINGS. What doesn't fit takes no time, since it never runs."""
    memory = candidate.memory
    assert memory is not None, "a GPU plan has a prediction"
    seconds = candidate.estimated_step_seconds
    step = "-" if seconds is None else f"{seconds:.1f}"
    verdict = candidate.rejected.message if candidate.rejected else CHOSEN
    return [
        *settings(candidate),
        f"{memory.device_bytes / GIB:.1f}",
        f"{memory.usable_bytes / GIB:.1f}",
        memory.peak_phase,
        step,
        verdict,
    ]


def _stacked_cells(candidate: Candidate) -> tuple[Text, ...]:
    """A candidate in lines, for a narrow terminal: how and where it runs, its numbers, the
    verdict."""
    cells = dict(zip(HEADINGS, _cells(candidate), strict=True))
    how = "{method} {sharding}, {reference} on {GPUs}, nodes {nodes}, sampled by {sampled by}"
    numbers = "{GiB} of {of} GiB at {phase}, batch x accum {batch x accum}"
    numbers += "" if cells["s/step"] == "-" else ", {s/step} s/step"
    numbers += "" if cells["saving"] == "-" else ", {saving}"
    head = Text(how.format_map(cells), _style(candidate) or "bold")
    return head, Text(numbers.format_map(cells)), Text(cells["verdict"], _style(candidate))


def _phases(out: Console, plan: ExecutionPlan) -> None:
    """The chosen plan's memory by phase and its host memory, and its engine's."""
    if plan.engine:
        out.print(Text(f"engine: {engine_numbers(plan.engine)}"))
    if plan.memory is None:
        out.print(f"host memory per pod {gib(plan.host_memory_bytes)}; {_disk(plan)}; no GPUs")
        return
    peaks = plan.memory.phases.model_dump().items()
    phases = [f"{name} {count / GIB:.1f}" for name, count in peaks if count]
    out.print(
        f"GiB allocated on one GPU, by phase: {'  '.join(phases)}; with the margin it needs "
        f"{gib(plan.memory.device_bytes)}"
    )
    shape = f"shape: {plan.architecture.lower()}, from {SHAPE_SOURCES[plan.shape_source]}"
    host_memory = f"host memory per pod {gib(plan.host_memory_bytes)}"
    checkpoint = f"checkpoint {gib(plan.memory.checkpoint_bytes)}"
    out.print(f"{shape}; {host_memory}; {_disk(plan)}; {checkpoint}")


def _disk(plan: ExecutionPlan) -> str:
    """What a pod requests of its node's disk."""
    if not plan.ephemeral_storage_bytes:
        return "no ephemeral storage requested"
    return f"ephemeral storage per pod {gib(plan.ephemeral_storage_bytes)}"


def show_lengths(
    out: Console, spec: GRPOJobSpec, plan: ExecutionPlan, learned: Learned | None
) -> None:
    """Prints the lengths that the plan's times count, and what sets them where they are assumed."""
    mean = plan.expected_completion_length
    if mean is None:
        return
    prompts = learned.prompts if learned else None
    prompt = f"{spec.training.max_prompt_length} tokens, the limit"
    if prompts:
        prompt = f"{prompts.mean} tokens"
    is_given = spec.training.expected_completion_length is not None
    way = "" if is_given else " (spec.training.expectedCompletionLength)"
    out.print(f"times count prompts of {prompt}, and completions of {mean} in the mean{way}")


def show_staged(out: Console, spec: GRPOJobSpec) -> None:
    """Prints what a pod has on its node's disk of checkpoints and exports that go elsewhere, if
    there is any."""
    if staged := staged_bytes(spec):
        what = (
            "its way: the export"
            if spec.checkpoint.store is None
            else "their way: checkpoints and the export"
        )
        out.print(f"on a pod's own disk, on {what}, up to {gib(staged)}")


def show_export(out: Console, name: str, spec: GRPOJobSpec, plan: ExecutionPlan) -> None:
    """Prints where the trained model will be, and how big."""
    stays_adapter = plan.method == "LoRA" and not spec.adapter.merge_on_export
    kind = "adapter" if stays_adapter else "model"
    size = f"{plan.export_bytes / GIB:.2f} GiB"
    where = (
        f", {size}, will be {' and '.join(_places(name, spec))}"
        if spec.is_model_kept
        else " is not kept"
    )
    out.print(Text(f"the trained {kind}{where}"))


def _places(name: str, spec: GRPOJobSpec) -> list[str]:
    """Where a model that is kept will be, in the order in which it comes there."""
    places: list[str] = []
    if spec.checkpoint.is_lasting:
        places.append(_place(name, spec.checkpoint))
    hub = spec.export.hub if spec.export else None
    if hub:
        visibility = "private" if hub.private else "public"
        places.append(f"on the hub, {visibility} repository {hub.repository}")
    return places


def _place(name: str, checkpoint: CheckpointSpec) -> str:
    """Where the model of a job is beside its checkpoints, before the job has a uid."""
    folder = f"{run_folder(name, '<uid>')}/{EXPORT_FOLDER}"
    if checkpoint.store:
        return f"at {checkpoint.store.url}/{folder}"
    claim = checkpoint_volume(name, checkpoint)
    assert claim is not None, "a model is kept only where checkpoints are"
    return (
        f"on claim {claim.claim_name}, folder "
        f"{claim.sub_path + '/' if claim.sub_path else ''}{folder}"
    )


def show_difference(
    out: Console, change: str, before: PlanResult, after: PlanResult, left_out: Sequence[str] = ()
) -> None:
    """Prints what a change does to the chosen plan and to its memory; `left_out`: fields that went
    with it."""
    out.print(Text.assemble("\n", (f"what if {change}", "bold"), f"  {after.message}"))
    if left_out:
        out.print(f"  without {', '.join(left_out)}, which another engine knows")
    if not (before.chosen and after.chosen and before.chosen.memory and after.chosen.memory):
        return
    headings = ("", "now", "then", "difference")
    rows = list(_comparison_rows(before.chosen, after.chosen))
    show_table(out, headings, rows, tuple, right=headings[1:])
    for was, now in zip(settings(before.chosen), settings(after.chosen), strict=True):
        if was != now:
            out.print(Text(f"  {was} becomes {now}"))


def _comparison_rows(
    before: ExecutionPlan, after: ExecutionPlan
) -> Iterator[tuple[str, str, str, str]]:
    """What is compared, then its value before and after, and the difference."""
    old, new = before.memory, after.memory
    assert old is not None, "both are GPU plans"
    assert new is not None, "both are GPU plans"
    phases = zip(old.phases.model_dump().items(), new.phases.model_dump().values(), strict=True)
    rows = [(name, was, now) for (name, was), now in phases if was or now]
    rows.append(("needed per GPU", old.device_bytes, new.device_bytes))
    for name, was, now in rows:
        by = (now - was) / GIB
        yield name, f"{was / GIB:.2f} GiB", f"{now / GIB:.2f} GiB", f"{by:+.2f} GiB"
    was_seconds = before.estimated_step_seconds or 0
    now_seconds = after.estimated_step_seconds or 0
    by_seconds = now_seconds - was_seconds
    yield "step", f"{was_seconds:.1f} s", f"{now_seconds:.1f} s", f"{by_seconds:+.1f} s"

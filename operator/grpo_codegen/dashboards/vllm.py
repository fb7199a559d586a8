"""Panels on what vLLM says of itself: load, cache and speed of each engine of a job."""

from dataclasses import replace

from grpo_api.report import metrics as vllm
from grpo_api.report.metrics import Metric

from .panels import Panel, Query
from .promql import JOB, WINDOW, quantiles, select

_LEGEND = "engine {{engine}}"


def _of_engine(metric: Metric) -> str:
    return f"max by (engine) ({select(metric, JOB)})"


def _rate(metric: Metric) -> str:
    return f"sum by (engine) (rate({select(metric, JOB)}{WINDOW}))"


_PANELS = (
    Panel(
        title="Requests in engines",
        description=(
            "Prompts that an engine samples at once. One that falls to 0 long before the others "
            "has had too little to do."
        ),
        unit="short",
        queries=(Query(_of_engine(vllm.RUNNING), _LEGEND),),
    ),
    Panel(
        title="Requests that wait",
        description="Prompts that an engine has no room for yet. More engines would take them.",
        unit="short",
        queries=(Query(_of_engine(vllm.WAITING), _LEGEND),),
    ),
    Panel(
        title="KV cache usage",
        description="Share of the blocks for keys and values in use. At 1 requests are preempted.",
        unit="percentunit",
        queries=(Query(_of_engine(vllm.CACHE_USAGE), _LEGEND),),
        bounds=((0.95, "orange"),),
        reach=1,
    ),
    Panel(
        title="Preemptions per second",
        description=(
            "Requests that lost their place in the KV cache and began again. Fewer sequences at a "
            "time, or a larger cache, would end them."
        ),
        unit="short",
        queries=(Query(_rate(vllm.PREEMPTIONS), _LEGEND),),
        bounds=((0.1, "orange"),),
        reach=0.2,
    ),
    Panel(
        title="Sampled tokens per second",
        description="Of each engine; a slow one holds up the step.",
        unit="short",
        queries=(Query(_rate(vllm.GENERATION_TOKENS), _LEGEND),),
    ),
    Panel(
        title="Prompt tokens per second",
        description="Of each engine, those that the prefix cache knew among them.",
        unit="short",
        queries=(Query(_rate(vllm.PROMPT_TOKENS), _LEGEND),),
    ),
    Panel(
        title="Prefix cache hits",
        description=(
            "Share of prompt tokens whose keys and values were known. The completions of a group "
            "share their prompt."
        ),
        unit="percentunit",
        queries=(
            Query(f"{_rate(vllm.PREFIX_HITS)} / ({_rate(vllm.PREFIX_QUERIES)} > 0)", _LEGEND),
        ),
        reach=1,
    ),
    Panel(
        title="Time to the first token",
        description="Of all engines' requests. It grows with the queue and the prompts' length.",
        unit="s",
        queries=quantiles(vllm.TIME_TO_FIRST_TOKEN, JOB),
    ),
    Panel(
        title="Duration of requests",
        description="Of all engines' requests. The slowest one ends the generation.",
        unit="s",
        queries=quantiles(vllm.REQUEST_SECONDS, JOB),
    ),
    Panel(
        title="Sleep of colocated engines",
        description="1 for the state that an engine is in; awake only while it samples.",
        queries=(
            Query(
                f"max by (engine, sleep_state) ({select(vllm.SLEEP_STATE, JOB)})",
                "{{sleep_state}} {{engine}}",
            ),
        ),
        stacked=True,
    ),
)
PANELS = tuple(replace(panel, empty="No data of a vLLM engine") for panel in _PANELS)

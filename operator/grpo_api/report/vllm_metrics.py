"""Metrics of vLLM itself that pods with an engine export: 60 of the 300 series that it has.

The names, kinds and labels are those of vLLM 0.30 (vllm/v1/metrics/loggers.py). They are declared
here so that the exporter, the dashboards and docs/reference/metrics.md agree.
"""

from .metrics import Kind, Metric

_LABELS = ("engine", "model_name")


def _vllm(name: str, kind: Kind, unit: str, text: str, *labels: str) -> Metric:
    return Metric(f"vllm:{name}", kind, unit, text, (*_LABELS, *labels))


RUNNING = _vllm("num_requests_running", "gauge", "1", "Requests in the engine's batch.")
WAITING = _vllm("num_requests_waiting", "gauge", "1", "Requests that wait for a place in it.")
CACHE_USAGE = _vllm("kv_cache_usage_perc", "gauge", "1", "Share of the KV cache in use.")
SLEEP_STATE = _vllm(
    "engine_sleep_state",
    "gauge",
    "1",
    "1 for the state that the engine is in: awake, weights_offloaded or discard_all.",
    "sleep_state",
)
PREEMPTIONS = _vllm(
    "num_preemptions_total",
    "counter",
    "1",
    "Requests that lost their place in the KV cache and began again.",
)
PROMPT_TOKENS = _vllm("prompt_tokens_total", "counter", "tokens", "Prompt tokens computed.")
GENERATION_TOKENS = _vllm("generation_tokens_total", "counter", "tokens", "Tokens sampled.")
PREFIX_QUERIES = _vllm(
    "prefix_cache_queries_total", "counter", "tokens", "Tokens looked up in the prefix cache."
)
PREFIX_HITS = _vllm(
    "prefix_cache_hits_total", "counter", "tokens", "Tokens found in the prefix cache."
)
TIME_TO_FIRST_TOKEN = _vllm(
    "time_to_first_token_seconds", "histogram", "seconds", "Time to a request's first token."
)
REQUEST_SECONDS = _vllm(
    "e2e_request_latency_seconds", "histogram", "seconds", "Duration of a request."
)
VLLM = (
    RUNNING,
    WAITING,
    CACHE_USAGE,
    SLEEP_STATE,
    PREEMPTIONS,
    PROMPT_TOKENS,
    GENERATION_TOKENS,
    PREFIX_QUERIES,
    PREFIX_HITS,
    TIME_TO_FIRST_TOKEN,
    REQUEST_SECONDS,
)
"""What is exported of vLLM."""

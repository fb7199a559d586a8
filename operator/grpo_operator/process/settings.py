"""Reads the operator's command line, as the chart sets it, and configures logging.

No other module reads arguments or the environment. Logs are one JSON object per line on stderr, or
plain text for people. They are configured here because kopf configures logging only when its own
command runs it.
"""

import argparse
import json
import logging
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from urllib.parse import unquote, urlsplit

from grpo_api.text.contract import PROGRESS_PORT
from grpo_api.text.log_lines import JsonFormatter, TextFormatter
from grpo_kube.leader_election import Election, Terms
from grpo_kube.objects.resources import ObjectKey

from ..admission.inventory import IMAGE_ARCHITECTURES
from ..decide.decisions import Limits
from ..pods import pod_spec
from ..pods.pod_spec import ARCHITECTURE_LABEL, PodDefaults
from ..pods.pod_volumes import Manifest

ENDPOINT_ENV, HEADERS_ENV = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_HEADERS"
"""What OpenTelemetry's own exporters read; headers may be secrets, so they have no flag."""
IDENTITY_ENV = "POD_NAME"
"""Name of the operator's own pod, by the downward API."""
MAX_PRICE = 1e6
"""The dearest GPU hour, as in the planner's inventory file."""
EVERY, MAX_EVERY = 10, 1_000_000
"""Every which step of an attempt has a span, by default and at most."""
_HEADER_NAME = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
"""A token of RFC 9110, section 5.6.2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracing:
    """Where spans go, and how many."""

    endpoint: str
    """URL of an OTLP/HTTP receiver, without /v1/traces."""
    headers: Mapping[str, str] = field(default_factory=dict)
    every: int = EVERY
    """Every which step has a span."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings; times in seconds."""

    namespaces: tuple[str, ...] = ()
    """Namespaces to watch; none: the whole cluster."""
    pods: PodDefaults = field(default_factory=PodDefaults)
    watchers: Sequence[Manifest] | None = None
    """Who may reach training pods, as networking.k8s.io/v1 peers; None: no NetworkPolicy."""
    metrics_address: str = ""
    """Where the pages are served; empty: on every address of the pod, IPv4 and IPv6."""
    metrics_port: int = 8081
    log_format: str = "auto"
    log_level: str = "info"
    kubeconfig: str | None = None
    resync: float = 300.0
    """Time between two full LISTs of each watched kind."""
    progress_interval: float = 5.0
    """Time between two pulls of a running job's progress."""
    status_interval: float = 5.0
    """Shortest time between two status writes that don't change the job's phase."""
    workers: int = 4
    """Jobs that are worked on at a time. More only make requests wait for each other: in a burst
    the API server is the bottleneck, and the Job controller needs its share of it."""
    gpu_hour_prices: Mapping[str, float] = field(default_factory=dict)
    """Price of one GPU for an hour by product; a label of the node goes before it."""
    tracing: Tracing | None = None
    """None: no traces."""
    election: Election | None = None
    """None: there is no other operator, and this one leads at once."""
    fenced: bool = False
    """True if the chart's policy is installed: the leader is recorded before any write."""
    measured_runs: ObjectKey | None = None
    """ConfigMap of the runs that were measured on the cluster; None: none are kept."""
    limits: Limits = field(default_factory=Limits)


def parse(
    arguments: Sequence[str] | None = None, environment: Mapping[str, str] = os.environ
) -> Settings:
    """The settings of a command line and the environment; exits with a message on a wrong one."""
    parser = _parser(Settings(), environment)
    flags = parser.parse_args(arguments)
    try:
        tracing = _tracing(
            flags.tracing_endpoint, environment.get(HEADERS_ENV, ""), flags.trace_every_nth_step
        )
        election = _election(
            flags.leader_elect, environment.get(IDENTITY_ENV, ""), flags.lease_seconds
        )
    except ValueError as error:
        parser.error(str(error))
    return Settings(
        namespaces=tuple(dict.fromkeys(flags.namespace)),
        pods=replace(
            pod_spec.defaults_from_flags(flags),
            preflight=flags.preflight,
            architectures=tuple(dict.fromkeys(flags.trainer_image_architecture)),
        ),
        watchers=flags.network_policy_from,
        metrics_address=flags.metrics_address,
        metrics_port=flags.metrics_port,
        log_format=flags.log_format,
        log_level=flags.log_level,
        kubeconfig=flags.kubeconfig,
        resync=flags.resync_seconds,
        progress_interval=flags.progress_seconds,
        workers=max(1, flags.workers),
        gpu_hour_prices=dict(flags.gpu_hour_price),
        tracing=tracing,
        election=election,
        fenced=flags.fence,
        measured_runs=flags.measured_runs,
        limits=Limits(scheduling_timeout_seconds=flags.scheduling_timeout_seconds),
    )


def _parser(default: Settings, environment: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="grpo_operator", description="Runs the GRPOJobs of a cluster."
    )
    parser.add_argument(
        "--namespace", action="append", default=[], help="watch only this one (may be repeated)"
    )
    pod_spec.add_arguments(parser, default.pods.image)
    parser.add_argument(
        "--network-policy-from",
        type=_peers,
        metavar="PEERS",
        help="make a NetworkPolicy for the pods of jobs, which lets these in at port "
        f"{PROGRESS_PORT}: a JSON list of "
        "NetworkPolicyPeers, this operator's among them; default: make none",
    )
    parser.add_argument(
        "--preflight",
        action="store_true",
        help="check jobs on GPUs whose spec.preflight is Auto before they are admitted",
    )
    parser.add_argument(
        "--metrics-address", default=default.metrics_address, help="default: every address"
    )
    parser.add_argument(
        "--metrics-port",
        type=int,
        default=default.metrics_port,
        help="/healthz, /readyz and /metrics",
    )
    parser.add_argument(
        "--log-format",
        choices=("auto", "json", "text"),
        default=default.log_format,
        help="auto: text on a terminal, else JSON",
    )
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default=default.log_level
    )
    parser.add_argument(
        "--kubeconfig", help="default: the pod's service account, else the user's kubeconfig"
    )
    _add_intervals(parser, default)
    parser.add_argument(
        "--workers", type=int, default=default.workers, help="jobs that are worked on at a time"
    )
    _add_hardware(parser)
    parser.add_argument(
        "--measured-runs",
        type=_object,
        metavar="NAMESPACE/CONFIGMAP",
        help="keep the step times of finished jobs here, for the plans of others; default: nowhere",
    )
    _add_tracing(parser, environment)
    _add_leader_election(parser)
    return parser


def _add_intervals(parser: argparse.ArgumentParser, default: Settings) -> None:
    """Add how often the cluster is listed, and how long a gang may take to be bound."""
    parser.add_argument(
        "--resync-seconds", type=_duration, default=default.resync, help="between two full LISTs"
    )
    parser.add_argument(
        "--progress-seconds",
        type=_duration,
        default=default.progress_interval,
        help="between pulls",
    )
    parser.add_argument(
        "--scheduling-timeout-seconds",
        type=_duration,
        default=default.limits.scheduling_timeout_seconds,
        help="a gang that isn't bound whole by then is released",
    )


def _add_hardware(parser: argparse.ArgumentParser) -> None:
    """Add what the cluster's hardware costs and runs."""
    parser.add_argument(
        "--gpu-hour-price",
        action="append",
        type=_price,
        default=[],
        metavar="PRODUCT=PRICE",
        help=(
            "price of one GPU of a product for an hour, such as NVIDIA-H100-80GB-HBM3=2.49 (may "
            "be repeated)"
        ),
    )
    parser.add_argument(
        "--trainer-image-architecture",
        action="append",
        default=[],
        metavar="ARCHITECTURE",
        help=(
            f"value of label {ARCHITECTURE_LABEL} that the trainer's image is built for (may be "
            f"repeated); default: {', '.join(IMAGE_ARCHITECTURES)}"
        ),
    )


def _add_tracing(parser: argparse.ArgumentParser, environment: Mapping[str, str]) -> None:
    """Add the options of traces."""
    parser.add_argument(
        "--tracing-endpoint",
        default=environment.get(ENDPOINT_ENV, ""),
        metavar="URL",
        help=(
            "OTLP/HTTP receiver of a trace per attempt, such as http://collector:4318; default: "
            f"${ENDPOINT_ENV}"
        ),
    )
    parser.add_argument(
        "--trace-every-nth-step",
        type=_count,
        default=EVERY,
        metavar="N",
        help="steps with a span of their own",
    )


def _add_leader_election(parser: argparse.ArgumentParser) -> None:
    """Add the options of several operators, of which one leads."""
    parser.add_argument(
        "--leader-elect",
        type=_object,
        metavar="NAMESPACE/LEASE",
        help=f"lead by this Lease, as ${IDENTITY_ENV}; default: there is no other operator",
    )
    parser.add_argument(
        "--fence",
        action="store_true",
        help="name the leader in the OperatorLeader of the Lease's name, for the policy",
    )
    parser.add_argument(
        "--lease-seconds",
        type=_duration,
        default=Terms().duration,
        help="others wait so long for a leader's renewal",
    )


def _election(lease: ObjectKey | None, identity: str, seconds: float) -> Election | None:
    """None without a Lease; ValueError if there is no name to stand by."""
    if lease is None:
        return None
    if not identity:
        raise ValueError(
            f"--leader-elect: ${IDENTITY_ENV} is empty; set it to the pod's name, by the downward "
            "API"
        )
    return Election(lease=lease, identity=identity, terms=Terms(seconds))


def _tracing(endpoint: str, headers: str, every: int) -> Tracing | None:
    """None without an endpoint; ValueError if the endpoint or the headers can't be used."""
    if not endpoint:
        return None
    if not _is_receiver(endpoint):
        raise ValueError(
            f"--tracing-endpoint or {ENDPOINT_ENV}: {endpoint!r} is no URL such as "
            "http://collector:4318"
        )
    return Tracing(endpoint=endpoint, headers=_headers(headers), every=every)


def _is_receiver(endpoint: str) -> bool:
    try:
        url = urlsplit(endpoint)
        is_http_address = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        return False
    if url.query or url.fragment:
        return False
    return is_http_address and endpoint.isprintable()


def _headers(text: str) -> dict[str, str]:
    """The headers of `name=value,name=value` with percent-encoded values; else ValueError."""
    # The text is not repeated in a message, for it may be a secret.
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    headers = {name.strip(): unquote(value.strip()) for name, _, value in pairs}
    names_are_tokens = all(re.fullmatch(_HEADER_NAME, name) for name in headers)
    values_are_printable = all(value.isprintable() for value in headers.values())
    all_have_values = all(separator for _, separator, _ in pairs)
    if not names_are_tokens or not values_are_printable or not all_have_values:
        raise ValueError(
            f"{HEADERS_ENV} is not name=value,name=value; percent-encode what is special in a value"
        )
    return headers


def _count(text: str) -> int:
    value = int(text)
    if not 0 < value <= MAX_EVERY:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 to {MAX_EVERY}")
    return value


def _duration(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a time above 0 seconds")
    return value


def _peers(text: str) -> list[Manifest]:
    try:
        peers = json.loads(text)
    except ValueError:
        peers = None
    if not isinstance(peers, list) or not all(isinstance(peer, dict) for peer in peers):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON list of NetworkPolicyPeers")
    return peers


def _object(text: str) -> ObjectKey:
    namespace, _, name = text.partition("/")
    if not (namespace and name) or "/" in name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAMESPACE/NAME")
    return ObjectKey(namespace, name)


def _price(text: str) -> tuple[str, float]:
    product, _, price = text.rpartition("=")
    try:
        value = float(price)
    except ValueError:
        value = math.nan
    if not product or not 0.0 <= value <= MAX_PRICE:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not PRODUCT=PRICE with a price from 0 to {MAX_PRICE:.0f}"
        )
    return product, value


def job_fields(record: logging.LogRecord) -> dict[str, str]:
    """Whose line it is: a message about a job begins with the key of the job."""
    key = record.args[0] if isinstance(record.args, tuple) and record.args else None
    if not isinstance(key, ObjectKey) or not record.msg.startswith("%s: "):
        return {}
    return {"namespace": key.namespace, "grpojob": key.name}


def configure(log_format: str, level: str) -> None:
    """Sets up the root logger; kopf only speaks up when something is wrong."""
    handler = logging.StreamHandler()
    is_json = log_format == "json" or (log_format == "auto" and not sys.stderr.isatty())
    handler.setFormatter((JsonFormatter if is_json else TextFormatter)(fields_of=job_fields))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    if level != "debug":
        logging.getLogger("kopf").setLevel(logging.WARNING)
        logging.getLogger("aiohttp.access").setLevel(logging.WARNING)

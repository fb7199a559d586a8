"""`python -m tests.integration.chaos.hasty_operator`: the operator with its own settings, but
pauses of seconds.

A storm of minutes would otherwise meet mostly jobs that wait for their next attempt. One that loses
its Lease ends with a code of its own, by which the storm tells that from every other end.
"""

import asyncio
import sys
from dataclasses import replace

from grpo_kube.objects.errors import LeadershipLost
from grpo_operator.__main__ import run
from grpo_operator.decide.decisions import Limits
from grpo_operator.process import settings

LIMITS = Limits(
    scheduling_timeout_seconds=15.0,
    release_pause_seconds=1.0,
    longest_release_pause_seconds=5.0,
    pods_missing_seconds=2.0,
    start_warning_seconds=5.0,
    restart_pause_seconds=0.5,
    longest_restart_pause_seconds=4.0,
    healthy_run_seconds=20.0,
    survivor_grace_seconds=5.0,
    rank0_silence_seconds=10.0,
)
LEASE_LOST = 3
"""Exit code after another may lead."""

if __name__ == "__main__":
    chosen = settings.parse()
    settings.configure(chosen.log_format, chosen.log_level)
    try:
        asyncio.run(run(replace(chosen, limits=LIMITS)))
    except LeadershipLost:
        sys.exit(LEASE_LOST)

"""Ranks that meet and do nothing else, each on a host of its own: what the worker does until it
loads.

`meet` starts them; run as a module this is one of them.
"""

import json
import os
import sys
import time
from ctypes import CDLL, get_errno
from pathlib import Path
from typing import Any

from grpo_api.plan.plan import TrainingPlan
from grpo_api.report.report import Outcome
from grpo_trainer.gang import rendezvous
from grpo_trainer.gang.interfaces import GLOO_INTERFACE
from grpo_trainer.gang.placement import Placement
from grpo_trainer.process import watchdog
from grpo_trainer.process.recorder import Recorder
from grpo_trainer.runtime.errors import TrainingError, classify_error
from harness.programs.patience import wait_for_exit

from .launch import launch
from .wires import Wires

CLONE_NEWNET = 0x40000000
"""linux/sched.h; os.setns comes with Python 3.12."""


def meet(
    wires: Wires, hosts: int, plan: TrainingPlan, folder: Path, **settings: Any
) -> list[dict[str, Any]]:
    """What each rank says: `bandwidth` and `interface`, or `result` and `message`.

    `settings`: `pair_seconds`, `patience`, `unchecked` (no try of pairs), and `environment` of all
    ranks.
    """
    folder.mkdir()
    (folder / "plan.json").write_text(plan.model_dump_json())
    environment = settings.pop("environment", {})
    ranks = []
    for host in range(hosts):
        command = [
            str(folder),
            str(host),
            str(hosts),
            str(wires.holder(host)),
            json.dumps(settings),
        ]
        pod_environment = environment | {"POD_NAME": f"demo-1-{host}"}
        ranks.append(
            launch("tests.support.ranks.meeting", command, pod_environment, folder / f"log-{host}")
        )
    for rank in ranks:
        wait_for_exit(rank, 300)
    return [json.loads((folder / f"said-{host}").read_text()) for host in range(hosts)]


def main() -> None:
    """One rank."""
    folder, settings = Path(sys.argv[1]), json.loads(sys.argv[5])
    host, hosts, holder = (int(argument) for argument in sys.argv[2:5])
    with Path(f"/proc/{holder}/ns/net").open() as namespace:
        if CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(get_errno(), "setns")
    plan = TrainingPlan.model_validate_json((folder / "plan.json").read_text())
    place = Placement(host, 0, 1, hosts)

    def say(**words: Any) -> None:
        (folder / f"said-{host}").write_text(json.dumps(words))
        os._exit(0)

    def ended(outcome: Outcome, _stacks: str) -> None:
        say(result=outcome.result.value, message=outcome.message)

    if settings.get("unchecked"):
        rendezvous.check_network = lambda *_: None
    recorder = Recorder(plan.job.attempt, place, time.time())
    watchdog.Watchdog(
        plan.guard, plan.execution, plan.grace_period_seconds, recorder, ended
    ).start()
    try:
        network = rendezvous.join_gang(
            plan.rendezvous,
            plan.guard,
            plan.execution,
            place,
            on_connecting=lambda: recorder.enter_stage("Connecting"),
        )
        rendezvous.leave_gang()
    except (TrainingError, RuntimeError) as error:
        result, message = classify_error(error)
        say(result=result.value, message=message)
    assert network is not None, "there are several ranks"
    say(bandwidth=network.bytes_per_second, interface=os.environ.get(GLOO_INTERFACE))


if __name__ == "__main__":
    main()

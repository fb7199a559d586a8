"""Chaos: faults of all kinds, drawn by a seed, against a real control plane, with an observer of
its own.

`world` is the cluster and what lives in it, `operator_process` two operators as processes that can
be killed and stopped, `trainer` what ends training, `faults` what goes wrong, `ledger` what was
done. `observer` watches the API server directly and fills `history`, on which the invariants are
judged. `run` is the whole story, `python -m tests.integration.chaos` its command.
"""

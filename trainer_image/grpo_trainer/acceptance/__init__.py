"""The acceptance run: does the trainer work on this machine's GPUs? `python -m grpo_trainer.acceptance`.

One call of a few minutes, for the owner of a cluster and for whoever changes versions: no network, no data, models
made on the spot. `__main__` asks for it, `runner` starts every check of `catalogue` in a process of its own under one
budget of time, `progress` shows them, `report` writes what they found. Until the versions are told nothing heavy is
imported, so that a machine with another stack still says what it has.

    checks     fused_head  steps  memory  states  strategies  ends  links
    use        attempts (a run in this process)  plans  tiny (the model)
    all say    findings

Nothing here is imported by a training run.
"""

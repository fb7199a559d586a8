"""Checks whether the trainer works on this machine's GPUs: `python -m grpo_trainer.acceptance`.

One call takes a few minutes and needs neither network nor data: it makes its own models. It is meant for the owner of
a cluster and for people who change versions. `__main__` starts it. `runner` runs every check of `catalogue` in a
process of its own under one time budget. `progress` shows the checks, `report` writes their findings. Nothing heavy is
imported before the versions are reported, so that a machine with another stack still reports its versions.

    checks     fused_head  steps  memory  states  strategies  ends  links
    use        attempts (a run in this process)  plans  tiny (the model)
    all say    findings

Nothing here is imported by a training run.
"""

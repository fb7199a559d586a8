"""Checks whether the trainer works on this machine's GPUs: `python -m grpo_acceptance`.

One call takes a few minutes and needs neither network nor data: it makes its own models. It is
meant for the owner of a cluster and for people who change versions. `__main__` starts it. `runner`
runs every check of `findings` in a process of its own under one time budget. `report` shows the
checks and writes their findings. Nothing heavy is imported before the versions are reported, so
that a machine with another stack still reports its versions.

    checks     machine_checks  step_checks  memory_checks
               training_checks  engine_checks  exit_checks
    use        trial_runs (a run in this process)  trial_plans  tiny_model
    all give   findings

Nothing here is imported by a training run.
"""

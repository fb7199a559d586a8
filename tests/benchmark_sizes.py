"""The smallest size of each benchmark: enough to see that it still runs, too little to measure
anything."""

SMALLEST: dict[str, tuple[str, ...]] = {
    "burst": ("--singles", "1", "--bursts", "1", "--jobs", "2", "--fails", "--preflight"),
    "calibrated_steps": ("--steps", "2"),
    "checkpoint_hash": ("--gib", "0.01", "--rounds", "1"),
    "checkpoint_store": ("--hidden", "64", "--layers", "2", "--rounds", "1"),
    "cli_start": ("--runs", "1"),
    "engine_overhead": ("--processes", "1", "--steps", "2"),
    "finding_runs": ("--steps", "2", "--healthy", "1", "--each", "0", "--processes", "1"),
    "many_jobs": ("--live", "2", "--ended", "2"),
    "memory_ranks": ("--quick",),
    "memory_truth": ("--quick",),
    "plan_speed": ("--runs", "1", "--nodes", "10"),
    "restart": ("--rounds", "1"),
    "strategy_demo": ("--strategies", "None", "--steps", "4"),
    "strategy_matrix": ("--parallelisms", "DDP"),
    "trainer_overhead": ("--processes", "1", "--steps", "2"),
    "waiting": ("--jobs", "4", "--seconds", "1", "--impossible", "2", "--nodes", "12"),
    "watch": ("--jobs", "2"),
    "zero3_load": ("--layers", "1"),
}
"""Options by name."""
IN_THE_GATE = ("checkpoint_hash", "cli_start", "plan_speed")
"""Those of a few seconds."""
WITH_LIMITS = ("calibrated_steps", "engine_overhead", "trainer_overhead", "zero3_load")
"""These exit with 1 above a limit, which so few steps can't keep."""

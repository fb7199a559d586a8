"""Exit codes of a training process: a pod that leaves no Outcome still says its Result by one."""

from .report import Result

EXIT_CODES = {
    Result.SUCCEEDED: 0,
    Result.ERROR: 1,
    Result.OUT_OF_MEMORY: 40,
    Result.HANG: 41,
    Result.DIVERGED_KL: 42,
    Result.BAD_INPUT: 43,
    Result.WEIGHTS_DIFFER: 44,
    Result.REWARD_ERROR: 45,
    Result.RENDEZVOUS_TIMEOUT: 46,
    Result.DIVERGED: 47,
    Result.WEIGHT_SYNC_TIMEOUT: 48,
    Result.ENGINE_WEIGHTS_DIFFER: 49,
    Result.ENGINE_MISMATCH: 50,
    Result.ENGINE_LOST: 51,
    Result.ENGINE_FAILED: 52,
    Result.OUT_OF_DISK: 53,
    Result.STOPPED_ON_FINDING: 54,
    Result.PREEMPTED: 143,
}
"""Exit code of a training process per result; 143 is 128 + SIGTERM. Codes outside are the kernel's
or the shell's."""

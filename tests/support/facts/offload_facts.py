"""What DeepSpeed takes for an optimizer whose state is in host memory: torch's own, with nothing to
compile.

DeepSpeed's CPU Adam is built by a C++ compiler when it is first used, which the trainer's image
doesn't have.
"""

from pathlib import Path
from typing import Any

from deepspeed.ops.op_builder.builder import OpBuilder

from ..ranks import demo_model, runs


def offloaded(folder: Path, zero: int) -> dict[str, Any]:
    """The optimizer of a run with `offload: CPU`, its steps, and the extensions that DeepSpeed
    compiled for it."""
    compiled: list[str] = []
    compile_now = OpBuilder.jit_load

    def noted(builder: OpBuilder, verbose: bool = True) -> Any:
        compiled.append(builder.name)
        return compile_now(builder, verbose)

    OpBuilder.jit_load = noted
    model = demo_model.save_policy(folder / "model")
    strategy = "Sharded" if zero == 3 else "Clone"
    logs = runs.Logs()
    trainer = runs.build(
        runs.plan(model, strategy, zero, execution={"offload": "CPU"}),
        logs,
        output_dir=str(folder),
        save_strategy="no",
    )
    trainer.train()
    optimizer = trainer.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return {"optimizer": type(optimizer).__module__, "steps": max(logs.rows), "compiled": compiled}

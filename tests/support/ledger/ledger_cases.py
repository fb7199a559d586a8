"""Cases on which the memory model is held to live ranks: what is run, and what the planner says of
it.

Apart from the test, because the benchmark memory_ranks prints the same cases as a table. Small
models do, for bytes are counted: sequences are short, so that what ZeRO keeps weighs most;
activations have tests/trainer/test_memory_truth.py.
"""

from dataclasses import dataclass
from typing import Any

from transformers import Qwen2Config

from grpo_acceptance.tiny_model import tiny_tokenizer
from grpo_planner.memory.host import offloaded_state
from grpo_planner.memory.phases import Prediction, predict
from grpo_planner.memory.setup import Precision, Setup, Strategy, ZeroStage
from grpo_planner.memory.states import gathering_buffers, live_parameters
from grpo_planner.model.shapes import Shape

from .config_shapes import from_config
from .live_ledger import Peaks

PROMPT, COMPLETION = 5, 2
"""Tokens of a sequence."""
OVER = 0.02
"""What the planner may say too much, of what is live."""
UNDER = 1 << 16
"""Bytes that it may say too little: activations of so few tokens, whose kernels on a CPU aren't
CUDA's."""
HELD = ("generate", "reference", "forward", "backward", "step")
"""Phases whose prediction is held to what is live. That of loading is an upper bound: it counts all
that stays, as a job whose GPUs suffice to load must also run."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration of a gang."""

    world: int = 2
    zero: ZeroStage
    offload: bool = False
    accumulation: int = 1
    micro_batch: int = 1
    gather: bool = True
    precision: Precision = "bfloat16"
    reference: Strategy = "None"
    checkpointing: bool = True
    lora_rank: int = 0
    words: int = 0
    """Of a large vocabulary; 0: as many as the tokenizer has."""
    tied: bool = False

    @property
    def name(self) -> str:
        """For tables and test ids, such as `2 x ZeRO-3+offload, 2 micro-batches, no gather`."""
        sharding = f"ZeRO-{self.zero}" if self.zero else "DDP"
        words = [
            (
                f"{self.world} x "
                f"{'LoRA ' if self.lora_rank else ''}{sharding}{'+offload' if self.offload else ''}"
            )
        ]
        words += [f"{self.accumulation} micro-batches"] if self.accumulation > 1 else []
        words += [f"{self.micro_batch} sequences each"] if self.micro_batch > 1 else []
        words += ["no gather"] if not self.gather else []
        words += [self.precision] if self.precision != "bfloat16" else []
        words += [self.reference] if self.reference != "None" else []
        words += ["no checkpointing"] if not self.checkpointing else []
        words += [f"{self.words} words"] if self.words else []
        words += ["tied"] if self.tied else []
        return ", ".join(words)

    @property
    def setup(self) -> Setup:
        """The same for the planner."""
        return Setup(
            precision=self.precision, prompt=PROMPT, completion=COMPLETION,
            micro_batch=self.micro_batch,
            accumulation=self.accumulation, generation_batch=self.micro_batch * self.accumulation,
            world=self.world,
            zero=self.zero, offload=self.offload, gather=self.gather, reference=self.reference,
            checkpointing=self.checkpointing, lora_rank=self.lora_rank,
        )  # fmt: skip

    @property
    def config(self) -> Qwen2Config:
        """The small model, with the case's vocabulary."""
        config = model_config()
        config.vocab_size = self.words or config.vocab_size
        config.tie_word_embeddings = self.tied
        return config

    @property
    def shape(self) -> Shape:
        """The same for the planner."""
        return from_config(self.config.to_dict())

    def predicted(self, shape: Shape | None = None) -> Prediction:
        """The planner's peaks on the device, of the small model or of another."""
        return predict(shape or self.shape, self.setup)

    def host(self, shape: Shape | None = None) -> int:
        """What is offloaded, before pinned buffers are rounded."""
        return offloaded_state(shape or self.shape, self.setup, rounded=False)

    def resident(self, shape: Shape | None = None) -> int:
        """The most that a rank has in memory once it has loaded, where device and host are the
        same."""
        return self.predicted(shape).peak + self.host(shape)

    def bound(self, phase: str) -> float:
        """Bytes of a phase's prediction that are an upper bound, beside OVER; 0 where all of it is
        exact.

        ZeRO-3 may keep what it has gathered until MAX_LIVE_PARAMETERS are. It does once it knows
        the order of the modules, which TRL makes it forget at each generation: the first
        micro-batch after one, generation without gather, and passes with and without an adapter in
        turn hold a module at a time. The policy beside a Sharded reference's pass holds none of
        them. What it gathers ahead is at most the bucket and the largest parameter.
        """
        if self.zero != 3 or phase == "step" or (phase == "generate" and self.gather):
            return 0
        known = self.accumulation > 1 and self.gather and not self.lora_rank
        beside_reference = phase == "reference" and self.reference == "Sharded"
        engines = (0 if known else 1) + (1 if beside_reference else 0)
        gathered = engines * live_parameters(self.shape, self.setup)
        return gathering_buffers(self.shape, self.setup) + gathered


def model_config() -> Qwen2Config:
    """9 million parameters: most tensors are partitioned, and the vocabulary weighs little."""
    return Qwen2Config(
        vocab_size=len(tiny_tokenizer()), hidden_size=512, intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip


def large_config() -> Qwen2Config:
    """252 million parameters, beside whose bytes those of an interpreter and its libraries are
    few."""
    return Qwen2Config(
        vocab_size=len(tiny_tokenizer()), hidden_size=1024, intermediate_size=4096,
        num_hidden_layers=16,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip


TIED: dict[str, Any] = {"words": 16_000, "tied": True}
"""A vocabulary that is half of the model, whose matrix is embedding and head at once."""
CASES = [
    Case(zero=2, reference="Clone"),
    Case(zero=2, offload=True, accumulation=2),
    Case(zero=3, accumulation=2, reference="Sharded", **TIED),
    Case(zero=3, offload=True, gather=False),
    Case(zero=2, precision="float32"),
    Case(world=4, zero=2, accumulation=2),
]
"""Those of `make test-all`."""
MORE = [
    Case(zero=0, **TIED),
    Case(zero=2, **TIED),
    Case(zero=2, accumulation=2, **TIED),
    Case(zero=2, offload=True, accumulation=2, **TIED),
    Case(zero=3, offload=True, accumulation=2, **TIED),
    Case(world=4, zero=2, **TIED),
    Case(zero=3, accumulation=2, reference="Sharded", words=16_000),
    Case(zero=3, accumulation=2, reference="Sharded"),
    Case(zero=0),
    Case(zero=0, accumulation=2, lora_rank=8),
    Case(zero=2, accumulation=4),
    Case(zero=3, precision="float32"),
    Case(zero=2, offload=True),
    Case(zero=2, offload=True, accumulation=2, precision="float32"),
    Case(zero=2, micro_batch=4, checkpointing=False),
    Case(zero=3),
    Case(zero=3, gather=False),
    Case(zero=3, gather=False, accumulation=2),
    Case(zero=3, accumulation=4),
    Case(zero=3, reference="Sharded"),
    Case(zero=3, offload=True, accumulation=2),
    Case(zero=3, accumulation=2, lora_rank=8, reference="Adapter"),
    Case(zero=3, offload=True, precision="float32"),
    Case(world=4, zero=2, reference="Clone"),
    Case(world=4, zero=2, offload=True),
    Case(world=4, zero=2, offload=True, accumulation=2),
    Case(world=4, zero=3),
    Case(world=4, zero=3, accumulation=2),
    Case(world=4, zero=3, gather=False, reference="Sharded"),
    Case(world=4, zero=3, offload=True, accumulation=2),
    Case(world=4, zero=3, accumulation=2, micro_batch=4),
    Case(world=4, zero=3, accumulation=2, precision="float32"),
]
"""What `make soak` and the table in docs/internals/memory-model.md have besides."""
RESIDENT = Case(zero=3, offload=True, accumulation=2)
"""Whose resident memory is measured with large_config(). Nothing is gathered at once but a module
at a time, and the model to generate: gloo's own buffers, which the ledger leaves out as the
network's, stay small beside the model."""


def live(peaks: list[Peaks], phase: str, memory: str) -> int:
    """Bytes of the rank that had most live in a phase; 0 for a phase that nobody has been in."""
    return max(sum(ledger.get(phase, {}).get(memory, {}).values()) for ledger in peaks)

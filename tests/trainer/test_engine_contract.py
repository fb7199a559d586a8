"""What reference_trainer.py and checkpoints/writing.py assume of private names; fails when a new
TRL changes it.

Private names may change in any release, transformers' `_run_epoch` with them. Both are pinned, so
this fails at the moment of an upgrade, not in production. One test per name of the list in
reference_trainer.py, or per group of them.
"""

import inspect
import re
from importlib.metadata import version
from pathlib import Path

import trl
from deepspeed.runtime.engine import DeepSpeedEngine
from transformers import Trainer
from trl import GRPOTrainer
from trl.models import utils
from trl.trainer import grpo_trainer
from trl.trainer.utils import RepeatSampler

import grpo_trainer as package
from grpo_trainer.training import finite_loss, reference_trainer

SOURCE = inspect.getsource(GRPOTrainer)
PRIVATE = {
    "_get_per_token_logps_and_entropies",
    "_compute_loss",
    "_get_grad_norm",
    "_save_checkpoint",
    "_metrics",
    "_generate_single_turn",
    "_calculate_rewards",
    "_get_train_sampler",
    "_run_epoch",
    "_step",
    "_buffered_inputs",
    "_logs",
    "_last_world_entropy",
    "_entropy_window_stats",
}


def calls(name: str, source: str = SOURCE) -> list[str]:
    """Lines that call a name."""
    return [
        line.strip() for line in source.splitlines() if re.search(rf"(?<!def )\b{name}\(", line)
    ]


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_trl_is_the_pinned_version() -> None:
    root = Path(__file__).resolve().parents[2]
    assert f'"trl=={version("trl")}"' in (root / "pyproject.toml").read_text()
    assert trl.__version__ == "1.16.0"


def test_the_reference_is_the_only_model_loaded_for_a_policy_that_is_an_instance() -> None:
    assert len(calls("create_model_from_path")) == 2
    constructor = inspect.getsource(GRPOTrainer.__init__)
    first, second = (
        constructor.index(line) for line in calls("create_model_from_path", constructor)
    )
    assert "isinstance(model, str)" in constructor[:first]
    assert "self.ref_model = create_model_from_path(" in constructor[second - 20 :]
    assert constructor.index("super().__init__(") < second < constructor.index("add_fused_lm_head(")


def test_deepspeed_wraps_the_reference_and_reward_models_through_one_function() -> None:
    assert len(calls("prepare_deepspeed")) == 2
    assert "self.ref_model = prepare_deepspeed(self.ref_model, self.accelerator)" in SOURCE
    assert parameters(grpo_trainer.prepare_deepspeed) == ["model", "accelerator"]


def test_every_log_probability_comes_from_one_method() -> None:
    assert (
        len(calls("self._get_per_token_logps_and_entropies")) == 4
    )  # old, reference, adapter's reference, policy
    names = parameters(GRPOTrainer._get_per_token_logps_and_entropies)
    assert names[:5] == ["self", "model", "input_ids", "attention_mask", "logits_to_keep"]


def test_the_loss_reads_the_reference_from_its_inputs_and_logs_the_kl_over_all_ranks() -> None:
    source = inspect.getsource(GRPOTrainer._compute_loss)
    assert parameters(GRPOTrainer._compute_loss) == ["self", "model", "inputs"]
    assert 'inputs["ref_per_token_logps"]' in source
    assert 'self._metrics[mode]["kl"].append(global_masked_mean(per_token_kl))' in source
    assert (
        'self.accelerator.reduce(torch.stack([local_sum, local_count]), reduction="sum")' in source
    )
    assert calls("self._compute_loss") == ["return self._compute_loss(model, inputs)"]


def test_a_loss_changes_three_attributes_besides_its_metrics() -> None:
    """Those of the adaptive entropy bonus, which a loss that is computed again takes back."""
    source = inspect.getsource(GRPOTrainer._compute_loss)
    changed = set(re.findall(r"self\.(\w+) = ", source))
    assert changed == set(finite_loss.ENTROPY_CONTROL)


def test_metrics_are_lists_by_mode() -> None:
    assert 'self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}' in SOURCE


def test_the_gradients_norm_is_known_before_the_optimizer_steps() -> None:
    assert parameters(GRPOTrainer._get_grad_norm) == ["self", "model", "grad_norm"]
    loop = inspect.getsource(GRPOTrainer._run_epoch)
    assert loop.index("self._get_grad_norm(model, grad_norm=grad_norm)") < loop.index(
        "self.optimizer.step()"
    )


def test_checkpoints_are_saved_by_one_method() -> None:
    assert parameters(GRPOTrainer._save_checkpoint) == ["self", "model", "trial"]
    assert "super()._save_checkpoint(model, trial)" in inspect.getsource(
        GRPOTrainer._save_checkpoint
    )


def test_what_a_checkpoint_writes_stands_between_collectives_where_it_is_looked_for() -> None:
    saving = inspect.getsource(Trainer._save_checkpoint)
    names = ("save_model", "_save_optimizer_and_scheduler", "_save_rng_state", "state.save_to_json")
    order = [f"self.{name}(" for name in names]
    assert sorted(order, key=saving.index) == order
    assert saving.count("dist.barrier()") == 1, "only for load_best_model_at_end"
    assert SOURCE.index("self.create_model_card(") < SOURCE.index("super()._save_checkpoint(")
    model = inspect.getsource(Trainer.save_model)
    assert model.count("self._save(output_dir, state_dict=state_dict)") == 3
    assert "gather" not in inspect.getsource(Trainer._save_scaler) + inspect.getsource(
        Trainer._save_rng_state
    )
    assert "self.model_wrapped.save_checkpoint(output_dir)" in inspect.getsource(
        Trainer._save_optimizer_and_scheduler
    )


def test_deepspeed_writes_through_three_methods_and_its_last_file_before_a_barrier() -> None:
    source = inspect.getsource(DeepSpeedEngine.save_checkpoint)
    assert parameters(DeepSpeedEngine.save_checkpoint)[1:5] == [
        "save_dir",
        "tag",
        "client_state",
        "save_latest",
    ]
    assert 'tag = f"global_step{self.global_steps}"' in source
    last = source[source.index("if save_latest and") :]
    assert last.index("open(os.path.join(save_dir, 'latest'), 'w')") < last.index("dist.barrier()")
    written = inspect.getsource(DeepSpeedEngine._save_checkpoint) + inspect.getsource(
        DeepSpeedEngine._save_zero_checkpoint
    )
    assert written.count("self.checkpoint_engine.save(") == 2
    assert "self._copy_recovery_script(" in written


def test_generation_takes_rows_of_token_ids_and_returns_completions_and_no_logprobs() -> None:
    assert parameters(GRPOTrainer._generate_single_turn)[:2] == ["self", "prompt_ids"]
    source = inspect.getsource(GRPOTrainer._generate_single_turn)
    assert source.rstrip().endswith("return completion_ids, logprobs")
    assert "logprobs = None  # not used in this case" in source


def test_an_engine_is_asked_for_weights_once_a_step_and_then_for_one_completion_per_prompt() -> (
    None
):
    constructor = inspect.getsource(GRPOTrainer.__init__)
    assert constructor.index("self.eos_token_ids = eos_token_ids") < constructor.index(
        "VLLMGeneration("
    )
    assert "model=self.model," in constructor[constructor.index("VLLMGeneration(") :]
    source = inspect.getsource(GRPOTrainer._generate_single_turn)
    assert source.index("self.vllm_generation.sync_weights()") < source.index(
        "self.vllm_generation.generate("
    )
    for name in (
        "prompts=prompt_ids",
        "images=images",
        "num_generations=num_generations",
        "profiler=",
    ):
        assert name in source
    assert "_, completion_ids, logprobs, _ = self.vllm_generation.generate(" in source
    assert "logprobs = [[lp[0] for lp in seq] for seq in logprobs]" in source


def test_rewards_come_from_one_method_for_the_completions_of_all_ranks() -> None:
    names = ["self", "inputs", "prompts", "completions", "completion_ids_list"]
    assert parameters(GRPOTrainer._calculate_rewards) == names
    assert "rewards_per_func = gather(rewards_per_func)" in inspect.getsource(
        GRPOTrainer._calculate_rewards
    )


def test_the_order_of_the_prompts_is_one_permutation_per_pass_from_one_generator() -> None:
    source = inspect.getsource(RepeatSampler)
    assert source.count("self.generator") == 3
    assert "self.generator.manual_seed(seed)" in inspect.getsource(RepeatSampler.__init__)
    assert "torch.randperm(self.num_samples, generator=self.generator)" in inspect.getsource(
        RepeatSampler.__iter__
    )
    assert "sampler_fn=self._get_train_sampler" in inspect.getsource(
        GRPOTrainer.get_train_dataloader
    )
    assert "return RepeatSampler(" in inspect.getsource(GRPOTrainer._get_train_sampler)


def test_a_pass_is_one_method_called_by_keywords() -> None:
    loop, a_pass = (
        inspect.getsource(Trainer._inner_training_loop),
        inspect.getsource(Trainer._run_epoch),
    )
    assert loop.count("self._run_epoch(") == 1
    for name in ("epoch", "steps_in_epoch", "epochs_trained", "steps_trained_in_current_epoch"):
        assert f"                {name}={name}," in loop
    assert "for epoch in range(epochs_trained, num_train_epochs):" in loop
    assert (
        "max_steps" not in a_pass.partition("if step < 0:")[0]
    )  # it would take a step more than all
    assert a_pass.index("skip_first_batches(") < a_pass.index(
        "epoch_iterator = iter(train_dataloader)"
    )


def test_a_generation_is_kept_in_memory_and_counted_in_micro_batches() -> None:
    source = inspect.getsource(GRPOTrainer._prepare_inputs)
    assert "generate_every = self.args.steps_per_generation * self.num_iterations" in source
    assert "if self._step % generate_every == 0 or self._buffered_inputs is None:" in source
    assert "inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]" in source
    assert SOURCE.count("self._step += 1") == SOURCE.count("self._step = 0") == 1
    assert len(re.findall(r"self\._buffered_inputs = ", SOURCE)) == 2  # none, and a generation


def test_engine_and_the_finite_loss_are_the_only_files_with_trls_private_names() -> None:
    folder = Path(inspect.getfile(package)).parent
    files = [*folder.rglob("*.py")]
    used = {
        path: [name for name in PRIVATE if re.search(rf"\b{name}\b", path.read_text())]
        for path in files
    }
    own = [Path(inspect.getfile(module)) for module in (reference_trainer, finite_loss)]
    assert {path for path, names in used.items() if names} == set(own)
    assert {name for path in own for name in used[path]} == PRIVATE
    imported = [path.name for path in files if "from trl.trainer" in path.read_text()]
    assert imported == ["reference_trainer.py"]
    assert vars(reference_trainer)["grpo_trainer"] is grpo_trainer


def test_whether_a_completion_is_truncated_is_read_of_its_last_token_alone() -> None:
    """StoppedCompletion answers this question, and nothing else asks for the last token."""
    assert SOURCE.count("ids[-1] not in eos_and_pad for ids in completion_ids") == 2
    assert SOURCE.count("ids[-1]") == 2
    assert SOURCE.count("[*self.eos_token_ids, self._tokenizer.pad_token_id]") == 2


def test_generate_gets_no_criterion_of_trl() -> None:
    """ReferenceGRPOTrainer passes its own."""
    assert "stopping_criteria" not in SOURCE
    assert len(re.findall(r"unwrapped_model\.generate\(", SOURCE)) == 1
    unwrapping = inspect.getsource(utils)
    assert unwrapping.count("unwrapped_model = accelerator.unwrap_model(model)") == 1
    assert unwrapping.count("yield accelerator.unwrap_model(model)") == 2, "under ZeRO-3"

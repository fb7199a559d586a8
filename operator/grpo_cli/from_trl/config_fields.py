"""Puts GRPOConfig's fields where the spec has them, by the decisions of trl_places.yaml.

A job must train what the script trains. So TRL's defaults are written where a job has others, and a
field that has no place becomes a note. A few fields have the same meaning in other units: batches,
warm-up, precision and the engine.
"""

import math
from collections.abc import Callable
from typing import Any

from grpo_api.spec.generation import TENSOR_PARALLEL
from grpo_api.spec.tracking import TABLE_TRACKERS
from grpo_api.spec.trl_places import FIELDS, FORMER, PLACES, Place

from .trl_run import SpecBuilder, TrlRun, TrlSetting

OPTIMIZERS = {
    "adamw_torch": "AdamW",
    "adamw_torch_fused": "AdamW",
    "adamw_8bit": "AdamW8bit",
    "adamw_bnb_8bit": "AdamW8bit",
}
"""transformers' names of the optimizers that a job has."""
SWITCHES = {True: "Enabled", False: "Disabled"}
FOREIGN = {
    "accelerate_config": "the plan decides how ranks work together; use spec.placement",
    "dataset_prompt_column": "set dataset.promptColumn",
    "num_processes": "give the number by --processes",
    "system_prompt": "set dataset.systemPrompt",
    "vllm_sampling_params": "set training.temperature, topP, topK and minP, and generation.stop",
    "wandb_project": "set tracking.wandb.project",
}
"""Fields of open-r1's recipes, of Unsloth's GRPOConfig, and of `accelerate launch` in TRL's recipes
that a job has."""
SWITCHED_BY = {
    "hub_model_id": "push_to_hub",
    "hub_private_repo": "push_to_hub",
    "project": "report_to",
    "run_name": "report_to",
    "trackio_space_id": "report_to",
    "vllm_mode": "use_vllm",
}
"""Fields that only count where another one is set."""
PLAIN = ("training.", "generation.", "checkpoint.", "model.", "dataset.shuffle")
"""Beginnings of the paths whose fields take TRL's value, unless the spec has words of its own."""
BATCHING = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "generation_batch_size",
    "steps_per_generation",
    "num_generations",
)
READ_ELSEWHERE = ("model_init_kwargs", "reward_weights")
"""Read with the model or the rewards."""


class ConfigFields:
    """Translates the fields of one run's GRPOConfig."""

    def __init__(self, run: TrlRun, builder: SpecBuilder, processes: int | None) -> None:
        self.run = run
        self.builder = builder
        launched = run.config.get("num_processes", TrlSetting(None, 0)).value
        if isinstance(launched, int) and launched > 0 and processes in (None, launched):
            processes = launched
            del run.config["num_processes"]
        self.processes = processes
        self._special: dict[str, Callable[[str, TrlSetting], None]] = {
            "activation_checkpointing": self._put_switch,
            "bf16": self._put_precision,
            "ds3_gather_for_generation": self._put_switch,
            "generation_kwargs": self._put_sampling,
            "gradient_checkpointing": self._put_switch,
            "learning_rate": self._put_rate,
            "log_completions": self._put_samples,
            "max_steps": self._put_steps,
            "optim": self._put_optimizer,
            "push_to_hub": self._put_hub,
            "ref_model_mixup_alpha": self._put_sync,
            "ref_model_sync_steps": self._put_sync,
            "report_to": lambda name, setting: put_trackers(self.run, self.builder, name, setting),
            "scale_rewards": self._put_scale,
            "sync_ref_model": self._put_sync,
            "top_k": self._put_top_k,
            "use_cpu": self._put_accelerator,
            "use_vllm": self._put_engine,
            "vllm_importance_sampling_correction": self._put_correction,
            "vllm_importance_sampling_mode": self._put_correction_mode,
            "vllm_tensor_parallel_size": self._put_tensor_parallel,
            "warmup_steps": self._put_warmup,
            **dict.fromkeys(SWITCHED_BY, self._read_with),
        }
        """Fields whose value the spec has in other words."""

    def translate(self) -> None:
        """Put every field of the run into the spec, or note it."""
        self._read_switches()
        self._put_defaults()
        self._put_batches()
        for name, setting in self.run.config.items():
            if name in FORMER:
                self._put_former(name, setting)
            elif name not in FIELDS:
                if setting.value is not None:
                    self._note(name, setting, FOREIGN.get(name, "TRL 1.16 has no such field"))
            elif name in self._special:
                self._special[name](name, setting)
            elif name not in (*BATCHING, *READ_ELSEWHERE):
                self._put_by_place(name, setting)

    def _read_switches(self) -> None:
        """Read 1 and 0 as TRL does, as true and false; a text is no switch."""
        for name, setting in list(self.run.config.items()):
            is_switch = name in FIELDS and FIELDS[name].type.startswith("bool")
            if not is_switch or setting.value is None or isinstance(setting.value, bool):
                continue
            if setting.value in (0, 1):
                self.run.config[name] = TrlSetting(bool(setting.value), setting.line)
            else:
                self._note(name, self.run.config.pop(name), "not allowed: write true or false")

    def _put_defaults(self) -> None:
        """TRL's defaults where a job's own differ."""
        self.builder.set_field("training.beta", FIELDS["beta"].default)
        if not self._has_steps():
            self.builder.set_field("training.numTrainEpochs", FIELDS["num_train_epochs"].default)
        # TRL drops no prompt, however long; a job would, so it is set to stop at one.
        self.builder.set_field("dataset.onLongPrompt", "Fail")
        longest = self.run.value("vllm_max_model_length")
        completion = self.run.value("max_completion_length")
        if isinstance(longest, int) and isinstance(completion, int) and longest > completion:
            self.builder.set_field("training.maxPromptLength", longest - completion)

    def _put_by_place(self, name: str, setting: TrlSetting) -> None:
        place = PLACES[name]
        if setting.value == FIELDS[name].default and place.kind == "Refused":
            return
        if place.kind == "Refused":
            self._note(name, setting, refusal_message(place))
        elif name.startswith("vllm_") and not self.run.value("use_vllm") and "clip" not in name:
            self._note(name, setting, "it has no effect without use_vllm")
        elif setting.value is None and FIELDS[name].default is None:
            return
        elif setting.value is not None and place.path.startswith(PLAIN):
            self.builder.set_field(place.path, setting.value, name, setting)
        else:
            self._note(name, setting, f"set spec.{place.path}")

    def _note(self, name: str, setting: TrlSetting, advice: str) -> None:
        self.run.note(setting.line, name, setting.value, advice)

    def _read_with(self, name: str, setting: TrlSetting) -> None:
        """Read with another field; without that one it has no effect."""
        switch = SWITCHED_BY[name]
        if self.run.value(switch) in (None, False, "none", []) and setting.value is not None:
            self._note(name, setting, f"it has no effect without {switch}")

    def _put_samples(self, name: str, setting: TrlSetting) -> None:
        """TRL prints completions, too; a job never has any in its log."""
        trackers = self.run.value("report_to") or []
        if setting.value and any(tracker in TABLE_TRACKERS for tracker in _as_list(trackers)):
            self.builder.set_field("tracking.samples", setting.value, name, setting)
        elif setting.value:
            self._note(name, setting, "samples are kept beside the checkpoints, for grpo samples")

    def _put_batches(self) -> None:
        """Prompts of a step; TRL counts completions of one process and one micro-batch."""
        numbers = [self.run.value(name) for name in (BATCHING[0], BATCHING[1], "num_generations")]
        if not all(isinstance(number, int) and number > 0 for number in numbers):
            self._note_batches("a step has no whole number of completions; set promptsPerStep")
            return
        device_batch, accumulation, group = numbers
        completions = device_batch * accumulation * (self.processes or 1)
        prompts = max(1, math.ceil(completions / group))
        whole = prompts * group == completions
        group_setting = self.run.config.get("num_generations")
        self.builder.set_field("training.numGenerations", group, "num_generations", group_setting)
        batch_setting = self.run.config.get(BATCHING[0]) or self.run.config.get(BATCHING[1])
        self.builder.set_field("training.promptsPerStep", prompts, BATCHING[0], batch_setting)
        if self.processes is None:
            advice = (
                f"one process was assumed, so that a step has {completions} completions; "
                "give --processes N for a script that runs on N GPUs"
            )
            self.run.note(0, "training.promptsPerStep", str(prompts), advice)
        if not whole:
            advice = (
                f"a step of {completions} completions has no whole groups of {group}; a job's has "
                f"{prompts * group}"
            )
            self._note_batches(advice)
        device_setting = self.run.config.get(BATCHING[0])
        if whole and (device_setting or self._depends_on_micro_batch()):
            path = "training.perDeviceTrainBatchSize"
            self.builder.set_field(path, device_batch, BATCHING[0], device_setting)
        self._put_generation_batch(device_batch, prompts * group)

    def _depends_on_micro_batch(self) -> bool:
        """True if another split of a step trains something else."""
        has_bonus = self.run.value("entropy_coef") != 0 or self.run.value("use_adaptive_entropy")
        quantile = self.run.value("top_entropy_quantile")
        return bool(self.run.value("loss_type") == "bnpo" or has_bonus or quantile != 1)

    def _note_batches(self, advice: str) -> None:
        for name in BATCHING:
            if name in self.run.config:
                self._note(name, self.run.config[name], advice)

    def _put_generation_batch(self, device_batch: int, step: int) -> None:
        """What is generated at a time, where it is not one step's worth."""
        for name in ("generation_batch_size", "steps_per_generation"):
            setting = self.run.config.get(name)
            if setting is None or setting.value is None:
                continue
            size = setting.value
            if name == "steps_per_generation" and isinstance(size, int):
                size *= device_batch * (self.processes or 1)
            if not isinstance(size, int) or size < step or size % step:
                advice = f"a job generates whole steps of {step} completions; one was taken"
                self._note(name, setting, advice)
            elif size != step:
                self.builder.set_field("training.generationBatchSize", size, name, setting)

    def _has_steps(self) -> bool:
        steps = self.run.value("max_steps")
        return isinstance(steps, int) and steps > 0

    def _put_steps(self, name: str, setting: TrlSetting) -> None:
        if self._has_steps():
            self.builder.set_field("training.maxSteps", setting.value, name, setting)
        elif not isinstance(setting.value, int):
            self._note(name, setting, "set training.maxSteps")

    def _put_rate(self, name: str, setting: TrlSetting) -> None:
        """An adapter's rate is a field of its own, without which the plan warns."""
        path = "training.learningRate" if self.run.lora is None else "adapter.learningRate"
        self.builder.set_field(path, setting.value, name, setting)

    def _put_former(self, name: str, setting: TrlSetting) -> None:
        """A field of an earlier TRL, in which steps of warm-up counted before their share."""
        is_replaced = name == "warmup_ratio" and self.run.value("warmup_steps")
        if is_replaced:
            self._note(name, setting, "warmup_steps was taken")
        elif setting.value is not None:
            self.builder.set_field(FORMER[name].path, setting.value, name, setting)

    def _put_warmup(self, name: str, setting: TrlSetting) -> None:
        """transformers takes a number below 1 as a share of the steps, and rounds it up."""
        steps = setting.value
        if not isinstance(steps, int | float) or isinstance(steps, bool):
            self._note(name, setting, "set training.warmupRatio")
        elif steps == 0 and "warmup_ratio" in self.run.config:
            return
        elif steps < 1:
            self.builder.set_field("training.warmupRatio", steps, name, setting)
        elif self._has_steps():
            ratio = _share(int(steps), self.run.value("max_steps"))
            self.builder.set_field("training.warmupRatio", ratio, name, setting)
        else:
            advice = "set training.warmupRatio to this share of all steps, or training.maxSteps"
            self._note(name, setting, advice)

    def _put_precision(self, name: str, setting: TrlSetting) -> None:
        """TRL's bf16 is autocast over float32 weights, which is a job's dtype Auto."""
        if setting.value is False and self.builder.get("training.dtype") == "bfloat16":
            self._note(name, setting, "a job's bfloat16 weights compute under autocast")
        elif setting.value is False:
            self.builder.set_field("training.dtype", "float32", name, setting)
            if not self.run.value("use_cpu"):
                advice = "float32 weights; on GPUs that have bfloat16 they compute under autocast"
                self._note(name, setting, advice)
        elif setting.value and self.run.value("use_cpu"):
            self._note(name, setting, "on CPUs a job computes in float32")

    def _put_switch(self, name: str, setting: TrlSetting) -> None:
        if setting.value in (True, False):
            self.builder.set_field(PLACES[name].path, SWITCHES[setting.value], name, setting)
        elif setting.value is not None:
            self._note(name, setting, f"set spec.{PLACES[name].path}")

    def _put_optimizer(self, name: str, setting: TrlSetting) -> None:
        optimizer = OPTIMIZERS.get(setting.value) if isinstance(setting.value, str) else None
        if optimizer is None:
            self._note(name, setting, f"a job has {' and '.join(sorted(set(OPTIMIZERS.values())))}")
            return
        self.builder.set_field("training.optimizer", optimizer, name, setting)
        if setting.value == "adamw_torch":
            self._note(name, setting, "taken as AdamW by fused kernels, equal up to rounding")

    def _put_scale(self, name: str, setting: TrlSetting) -> None:
        value = setting.value
        if isinstance(value, bool):  # a bool is an int: 1 would pass for True
            value = "group" if value else "none"
        self.builder.set_field("training.scaleRewards", value, name, setting)

    def _put_top_k(self, name: str, setting: TrlSetting) -> None:
        is_off = setting.value is None or setting.value == -1
        self.builder.set_field("training.topK", 0 if is_off else setting.value, name, setting)

    def _put_accelerator(self, name: str, setting: TrlSetting) -> None:
        if setting.value is not True:
            return
        self.builder.set_field("placement.accelerator", "CPU", name, setting)
        if "bf16" not in self.run.config and not self.run.value("fp16"):
            advice = (
                "TRL computes under bfloat16 autocast unless bf16=False; a job on CPUs in float32"
            )
            self._note(name, setting, advice)

    def _put_engine(self, name: str, setting: TrlSetting) -> None:
        if setting.value is not True:
            self.builder.set_field("generation.engine", "Transformers", name, setting)
            return
        kinds = {"colocate": "Colocated", "server": "Servers"}
        mode = self.run.config.get(
            "vllm_mode", TrlSetting(FIELDS["vllm_mode"].default, setting.line)
        )
        kind = kinds.get(mode.value) if isinstance(mode.value, str) else None
        if kind is None:
            self._note("vllm_mode", mode, "set spec.generation.engine")
            return
        self.builder.set_field("generation.engine", kind, name, setting)

    def _put_sampling(self, name: str, setting: TrlSetting) -> None:
        """Further arguments of sampling, which belong to the engine that the script has."""
        if not isinstance(setting.value, dict):
            if setting.value is not None:
                self._note(name, setting, "set spec.generation.kwargs")
            return
        arguments = dict(setting.value)
        is_engine = bool(self.run.value("use_vllm"))
        stop = arguments.pop("stop" if is_engine else "stop_strings", None)
        if stop is not None:
            stops = [stop] if isinstance(stop, str) else stop
            self.builder.set_field("generation.stop", stops, name, setting)
        if arguments:
            self.builder.set_field("generation.kwargs", arguments, name, setting)
            if is_engine:
                self.builder.set_field("generation.fallback", "Never")
            else:
                self.builder.set_field("generation.engine", "Transformers")

    def _put_tensor_parallel(self, name: str, setting: TrlSetting) -> None:
        if not self.run.value("use_vllm"):
            self._note(name, setting, "it is an engine's, and use_vllm is not set")
        elif self.run.value("vllm_mode") == "server":
            self.builder.set_field(
                "generation.servers.gpusPerReplica", setting.value, name, setting
            )
        elif setting.value in TENSOR_PARALLEL:
            self.builder.set_field("generation.tensorParallel", setting.value, name, setting)
        else:
            self._note(name, setting, f"generation.tensorParallel is one of {TENSOR_PARALLEL}")

    def _put_correction(self, name: str, setting: TrlSetting) -> None:
        if setting.value is False:
            self.builder.set_field("training.importanceSampling.mode", "none", name, setting)

    def _put_correction_mode(self, name: str, setting: TrlSetting) -> None:
        level, _, mode = str(setting.value).partition("_")
        self.builder.set_field("training.importanceSampling.level", level, name, setting)
        if self.run.value("vllm_importance_sampling_correction") is not False:
            self.builder.set_field("training.importanceSampling.mode", mode, name, setting)

    def _put_sync(self, name: str, setting: TrlSetting) -> None:
        if not self.run.value("sync_ref_model") or not self.run.value("beta"):
            if setting.value != FIELDS[name].default:
                advice = "it needs sync_ref_model: with a beta above 0 set reference.sync"
                self._note(name, setting, advice)
        elif name == "sync_ref_model":
            if self.builder.get("reference.sync") is None:
                self.builder.set_field("reference.sync", {})
        else:
            self.builder.set_field(PLACES[name].path, setting.value, name, setting)

    def _put_hub(self, name: str, setting: TrlSetting) -> None:
        repository = self.run.config.get("hub_model_id")
        if setting.value is not True:
            return
        if repository is None or "/" not in str(repository.value):
            self._note(name, setting, "set export.hub.repository, with its namespace")
            return
        private = self.run.config.get("hub_private_repo")
        self.builder.set_field("export.to", "Hub")
        self.builder.set_field(
            "export.hub.repository", repository.value, "hub_model_id", repository
        )
        self.builder.set_field("export.hub.private", bool(private and private.value))
        self.builder.set_field("export.hub.tokenSecretRef", {"name": "hub-token", "key": "token"})
        advice = "put a token that may write into the Secret hub-token, key token"
        self._note("hub_model_id", repository, advice)


def refusal_message(place: Place) -> str:
    """Why a job has no such field, and what to use instead; empty if it has one."""
    if place.kind != "Refused":
        return ""
    return f"{place.reason}; use spec.{place.path}" if place.path else place.reason


def _share(steps: int, of: int) -> float:
    """The share of `of` steps that transformers rounds up to `steps`."""
    if steps >= of:
        return 1.0
    share = steps / of
    while math.ceil(of * share) > steps:
        share = math.nextafter(share, 0.0)
    return share


TRACKERS = ("wandb", "mlflow", "trackio", "tensorboard")
SECRET_KEY = "token"


def put_trackers(run: TrlRun, builder: SpecBuilder, name: str, setting: TrlSetting) -> None:
    """Set `tracking` by report_to, project, run_name and trackio_space_id."""
    for tracker in _as_list(setting.value):
        if tracker in (None, "none"):
            continue
        if tracker not in TRACKERS:
            run.note(setting.line, name, tracker, f"a job has {', '.join(TRACKERS)}: set tracking")
        elif tracker == "mlflow":
            run.note(setting.line, name, tracker, "set tracking.mlflow.url, the tracking server")
        elif tracker == "trackio" and "/" not in str(run.value("trackio_space_id")):
            # Trackio takes a Space without an owner as one of the account that is logged in, and a
            # pod's account is not the user's.
            advice = "set tracking.trackio, with a Space (OWNER/NAME) or a server"
            run.note(setting.line, name, tracker, advice)
        else:
            _put_tracker(run, builder, tracker, name, setting)
    run_name = run.config.get("run_name")
    if run_name is not None and run_name.value is not None:
        builder.set_field("tracking.runName", run_name.value, "run_name", run_name)


def _put_tracker(
    run: TrlRun, builder: SpecBuilder, tracker: str, name: str, setting: TrlSetting
) -> None:
    settings: dict[str, Any] = {}
    if tracker != "tensorboard":
        settings["project"] = run.value("project")
        settings["tokenSecretRef"] = {"name": tracker, "key": SECRET_KEY}
        advice = f"put its API key into the Secret {tracker}, key {SECRET_KEY}"
        run.note(setting.line, name, tracker, advice)
    if tracker == "trackio":
        settings["space"] = run.value("trackio_space_id")
    builder.set_field(f"tracking.{tracker}", settings, name, setting)


def _as_list(trackers: Any) -> list[Any]:
    return trackers if isinstance(trackers, list) else [trackers]

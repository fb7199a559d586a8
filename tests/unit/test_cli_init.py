"""`grpo init`: the job that it makes of a script says what the script says, and names what it can't
take with its line."""

import re
from pathlib import Path
from typing import Any

import pytest

from grpo_cli.__main__ import main
from tests.unit.trl_scripts import CHAT, MODEL, init, notes, script, spec_of


def test_a_job_to_begin_with_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = str(tmp_path / "job.yaml")
    assert main(["init", "-o", output, "--name", "mine"]) == 0
    assert main(["plan", "-f", output, "--gpus", "1xA100"]) == 0
    assert capsys.readouterr().out.startswith("mine  planned")
    assert main(["init"]) == 0
    assert "name: first-grpo" in capsys.readouterr().out


@pytest.mark.parametrize("options", [[], ["--from-trl", "train.py"]])
def test_a_file_that_exists_keeps_what_it_says(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(script())
    Path("job.yaml").write_text("mine")
    assert main(["init", "-o", "job.yaml", *options]) == 2
    assert capsys.readouterr().err.startswith("grpo: -o job.yaml: the file exists")
    assert Path("job.yaml").read_text() == "mine"
    assert main(["init", "-o", "/dev/null", *options]) == 0


def test_the_job_of_a_script_has_trls_defaults_and_plans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config_map, job = init(tmp_path, script())
    assert job["metadata"] == {"name": "train"}
    assert job["spec"] == {
        "model": {"name": MODEL},
        "dataset": {
            "name": "openai/gsm8k", "config": "main", "split": "train", "onLongPrompt": "Fail",
        },
        "rewards": [
            {
                "name": "letters",
                "python": {"function": "rewards:letters", "configMap": {"name": "train-rewards"}},
            }
        ],
        "training": {"beta": 0, "numTrainEpochs": 3, "numGenerations": 8, "promptsPerStep": 1},
        "adapter": {"use": "Never"},
        "checkpoint": {"volumeClaimTemplate": {"size": "30Gi", "accessMode": "ReadWriteOnce"}},
    }  # fmt: skip
    namespace: dict[str, Any] = {}
    exec(config_map["data"]["rewards.py"], namespace)
    assert namespace["letters"](completions=["ab", "c"]) == [2.0, 1.0]
    assert main(["plan", "-f", str(tmp_path / "job.yaml"), "--gpus", "1xH100"]) == 0
    assert capsys.readouterr().out.startswith("train  planned")


def test_settings_are_followed_to_constants(tmp_path: Path) -> None:
    text = script(
        "**common, learning_rate=RATE * 2, seed=args.seed, per_device_train_batch_size=size(), "
        'max_grad_norm=0.1 if RATE else 1.0, run_name=f"{NAME}-x"',
    )
    text = text.replace(
        "trainer =",
        "import argparse\n"
        "RATE = 1e-5 / 2\nNAME = 'a'\n"
        "common = {'beta': 0.1, **dict(temperature=0.7)}\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--seed', type=int, default='7')\n"
        "args = parser.parse_args()\n"
        "trainer =",
    )
    training = spec_of(tmp_path, text)["training"]
    assert (training["learningRate"], training["beta"], training["temperature"]) == (1e-5, 0.1, 0.7)
    assert (training["seed"], training["maxGradNorm"]) == (7, 0.1)
    said = "\n".join(notes(tmp_path))
    assert re.search(r"line 13: --seed = 7: the option's default was taken", said)
    assert re.search(r"line \d+: per_device_train_batch_size = size\(\): it is computed", said)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            "num_generations=4, per_device_train_batch_size=8, gradient_accumulation_steps=2",
            (4, 16),
        ),
        (
            "num_generations=16, gradient_accumulation_steps=4, per_device_train_batch_size=4",
            (4, 4),
        ),
    ],
)
def test_a_step_has_the_script_s_prompts(
    tmp_path: Path, given: str, expected: tuple[int, int]
) -> None:
    first = init(tmp_path, script(given), "--processes", "4")[-1]["spec"]["training"]
    assert first["promptsPerStep"] == expected[1]


def test_a_setting_that_is_changed_after_the_config_was_made_counts(tmp_path: Path) -> None:
    text = (
        script()
        .replace("args=GRPOConfig()", "args=config")
        .replace(
            "trainer =",
            "config = GRPOConfig(beta=0.1)\nconfig.beta = 0.2\nconfig.seed = pick()\n"
            "if pick():\n    config.top_k = 5\ntrainer =",
        )
    )
    assert spec_of(tmp_path, text)["training"]["beta"] == 0.2
    said = notes(tmp_path)
    assert any(note.startswith("line 10: seed = pick()") for note in said)
    assert any(note.startswith("line 12: top_k = 5: a condition") for note in said)


@pytest.mark.parametrize(
    "change", ["common['beta'] = 0.2", "common.update(beta=0.2)", "common |= {'beta': 0.2}"]
)
def test_a_dict_counts_as_it_is_when_the_config_is_made(tmp_path: Path, change: str) -> None:
    text = script("**common").replace("trainer =", f"common = {{'beta': 0.1}}\n{change}\ntrainer =")
    assert spec_of(tmp_path, text)["training"]["beta"] == 0.2
    assert notes(tmp_path) == []


def test_rewards_are_appended_in_order(tmp_path: Path) -> None:
    text = script(rewards="=rewards").replace(
        "trainer =",
        "rewards = [letters]\nrewards.append(lambda completions, **_: [0.0])\n"
        "if len(__file__) > 9:\n    rewards.append(letters)\ntrainer =",
    )
    rewards = spec_of(tmp_path, text)["rewards"]
    assert [reward["name"] for reward in rewards] == ["letters", "reward_2"]
    (note,) = [note for note in notes(tmp_path) if "reward_funcs" in note]
    assert note.startswith("line 11: reward_funcs = letters: the list changes here")


@pytest.mark.parametrize(
    ("given", "dtype", "noted"),
    [
        ("", None, False),
        ("bf16=True", None, False),
        ("bf16=False", "float32", True),
        ("use_cpu=True", None, True),
        ("use_cpu=True, bf16=False", "float32", False),
        ("model_init_kwargs={'dtype': 'bfloat16'}", "bfloat16", False),
        ("model_init_kwargs={'torch_dtype': torch.float16}", None, True),
    ],
)
def test_precision_is_what_trl_computes_in_or_named(
    tmp_path: Path, given: str, dtype: str | None, noted: bool
) -> None:
    training = spec_of(tmp_path, script(given))["training"]
    assert training.get("dtype") == dtype
    assert bool(notes(tmp_path)) == noted


def test_a_name_that_a_branch_binds_again_is_named(tmp_path: Path) -> None:
    text = script("learning_rate=rate").replace(
        "trainer =", "rate = 1e-5\nif len(__file__) > 9:\n    rate = 1e-4\ntrainer ="
    )
    assert "learningRate" not in spec_of(tmp_path, text)["training"]
    (note,) = [note for note in notes(tmp_path) if "learning_rate" in note]
    assert "rate is assigned at lines 8, 10, depending on conditions" in note


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (
            CHAT,
            {
                "name": "openai/gsm8k", "config": "main", "split": "train",
                "columns": {"goal": "answer"}, "promptColumn": "question",
                "systemPrompt": "Be brief.",
            },
        ),
        (
            'load_dataset("a/b", split="train").rename_column("q", "prompt").select(range(100))',
            {"name": "a/b", "split": "train[:100]", "promptColumn": "q"},
        ),
        (
            'load_dataset("a/b").rename_column(new_column_name="prompt", original_column_name="q")',
            {"name": "a/b", "promptColumn": "q"},
        ),
        (
            'load_dataset("a/b").rename_columns(column_mapping={"q": "prompt", "a": "answer"})',
            {"name": "a/b", "promptColumn": "q", "columns": {"answer": "a"}},
        ),
        (
            'load_dataset("a/b").map(lambda x: {"prompt": x["q"]}).rename_column("q", "text")',
            {"name": "a/b", "promptColumn": "text", "columns": {"text": "q"}},
        ),
        (
            'load_dataset("json", data_files="data/rows.jsonl", split="train")',
            {
                "files": {"volume": {"claimName": "train-data"}, "paths": ["rows.jsonl"]},
                "split": "train",
            },
        ),
        (
            'load_dataset("a/b", split="train").filter(lambda x: len(x["q"]) < 9)',
            {"files": {"volume": {"claimName": "train-data"}, "paths": ["train.jsonl"]}},
        ),
        (
            'load_dataset("a/b", split="train").map(lambda x: {"prompt": x["q"].strip()})',
            {"files": {"volume": {"claimName": "train-data"}, "paths": ["train.jsonl"]}},
        ),
        (
            "Dataset.from_list(rows)",
            {"files": {"volume": {"claimName": "train-data"}, "paths": ["train.jsonl"]}},
        ),
    ],
)  # fmt: skip
def test_rows_are_the_spec_s_or_written_by_the_script(
    tmp_path: Path, dataset: str, expected: dict[str, Any]
) -> None:
    spec = spec_of(tmp_path, script(dataset=dataset))
    taken = {key: value for key, value in spec["dataset"].items() if key != "onLongPrompt"}
    if "files" in expected:
        expected = {"files": expected["files"]}
    assert taken == expected
    made = expected.get("files", {}).get("paths") == ["train.jsonl"]
    assert made == any("to_json" in note and note.startswith("line 12") for note in notes(tmp_path))


def test_rewards_of_every_kind_keep_trl_s_names_and_weights(tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text("import helper\n\ndef near(completions, **_): ...\n")
    (tmp_path / "helper.py").write_text("import os, torch\nimport sympy.abc\nLIMIT = 1\n")
    rewards = (
        '=[letters, near, accuracy_reward, get_soft_overlong_punishment(9, 2), "org/judge", '
        "unknown(), vendor.score]"
    )
    text = script("reward_weights=[1, 2, 1, 1, 0.5, 1, 1]", rewards=rewards).replace(
        "trainer =",
        "import vendor\nfrom my_rewards import near\n"
        "from trl.rewards import accuracy_reward, get_soft_overlong_punishment\ntrainer =",
    )
    config_map, job = init(tmp_path, text)
    entries = job["spec"]["rewards"]
    assert [(entry["name"], entry.get("weight", 1)) for entry in entries] == [
        ("letters", 1),
        ("near", 2),
        ("accuracy_reward", 1),
        ("soft_overlong_punishment_reward", 1),
        ("judge", 0.5),
        ("reward_6", 1),
        ("score", 1),
    ]
    functions = [entry.get("python", {}).get("function") for entry in entries]
    assert functions == [
        "rewards:letters",
        "my_rewards:near",
        "trl.rewards:accuracy_reward",
        "rewards:reward_4",
        None,
        "rewards:reward_6",
        "vendor:score",
    ]
    assert sorted(config_map["data"]) == ["helper.py", "my_rewards.py", "rewards.py"]
    assert "reward_4 = get_soft_overlong_punishment(9, 2)" in config_map["data"]["rewards.py"]
    said = "\n".join(notes(tmp_path))
    assert "the training image must have the package 'vendor'" in said
    assert "helper.py imports it: the training image must have the package 'sympy'" in said
    assert "'torch'" not in said
    assert "rewards[].model.parameters" in said


ODD_REWARD = """\
try:
    import numpy as np
except ImportError:
    np = None
BREAKS = "a\u2028b\x0cc"

class Judge:
    \'\'\'Keeps
  odd text.\'\'\'
    def __call__(self, completions, **kwargs):
        return [float(BREAKS in text) for text in completions]

def main():
    limit = \'\'\'two
lines\'\'\'; judge = Judge()
    def near(completions, **kwargs):
        \'\'\'Text with less indentation:
 so.\'\'\'
        return [float(text == limit) for text in completions]
    trainer = GRPOTrainer(model="a/b", reward_funcs=[judge, near], train_dataset=load_dataset("a"))
main()
"""


def test_rewards_are_copied_with_what_they_need_wherever_it_is(tmp_path: Path) -> None:
    config_map, job = init(tmp_path, ODD_REWARD, "--parameters", "1B")
    text = config_map["data"]["rewards.py"]
    assert "GRPOTrainer" not in text
    namespace: dict[str, Any] = {}
    exec(text, namespace)
    names = [entry["python"]["function"].partition(":")[2] for entry in job["spec"]["rewards"]]
    judge, near = (namespace[name] for name in names)
    assert judge(completions=["xa\u2028b\x0cc", "a"]) == [1.0, 0.0]
    assert near(completions=["two\nlines", "two"]) == [1.0, 0.0]


def test_a_reward_that_needs_the_model_is_not_copied(tmp_path: Path) -> None:
    text = script(rewards="=judge").replace(
        "trainer =",
        "config = GRPOConfig(output_dir='o')\n"
        "def judge(completions, **kwargs):\n    return [config.seed for _ in completions]\n"
        "trainer =",
    )
    config_map, _ = init(tmp_path, text)
    assert "GRPOConfig(" not in config_map["data"]["rewards.py"]
    assert any("would run the script" in note for note in notes(tmp_path))


def test_what_goes_wrong_between_two_fields_is_taken_out_and_named(tmp_path: Path) -> None:
    training = spec_of(tmp_path, script("loss_type='grpo', epsilon=0.3, epsilon_high=0.2"))[
        "training"
    ]
    assert (training["epsilon"], training.get("epsilonHigh")) == (0.3, None)
    (note,) = [note for note in notes(tmp_path) if "epsilon_high" in note]
    assert note.endswith(
        "not allowed here: epsilonHigh must be at least epsilon (got 0.2, 0.3)"
    ) or ("epsilonHigh must be at least epsilon" in note)


def test_an_adapter_has_peft_s_defaults(tmp_path: Path) -> None:
    text = script("learning_rate=1e-4").replace(
        "args=", "peft_config=LoraConfig(r=4, use_rslora=True, bias='none'), args="
    )
    spec = spec_of(tmp_path, text)
    assert spec["adapter"] == {
        "use": "Always",
        "rank": 4,
        "alpha": 8,
        "dropout": 0,
        "targetModules": ["q_proj", "v_proj"],
        "learningRate": 1e-4,
    }
    assert any("use_rslora" in note for note in notes(tmp_path))


def test_a_configuration_of_trl_grpo_is_read_with_its_lines(tmp_path: Path) -> None:
    text = f"""
model_name_or_path: {MODEL}
dtype: bfloat16
dataset_name: trl-lib/DeepMath-103K
reward_funcs: [accuracy_reward, get_soft_overlong_punishment, my_lib.rewards.custom]
learning_rate: 1e-5
beta: 4e-2
warmup_steps: 5
max_steps: 50
use_peft: true
load_in_4bit: true
eval_strategy: steps
surprise: 1
env: {{A: b}}
"""
    spec = spec_of(tmp_path, text, name="config.yaml")
    assert spec["dataset"]["name"] == "trl-lib/DeepMath-103K"
    assert spec["training"]["dtype"] == "bfloat16"
    assert (spec["training"]["beta"], spec["training"]["warmupRatio"]) == (0.04, 0.1)
    assert spec["adapter"] == {
        "use": "Always",
        "rank": 16,
        "alpha": 32,
        "dropout": 0.05,
        "targetModules": ["q_proj", "v_proj"],
        "learningRate": 1e-5,
    }
    assert [entry["python"]["function"] for entry in spec["rewards"]] == [
        "trl.rewards:accuracy_reward",
        "rewards:soft_overlong_punishment_reward",
        "my_lib.rewards:custom",
    ]
    said = notes(tmp_path)
    for line, name in ((11, "load_in_4bit"), (12, "eval_strategy"), (13, "surprise"), (14, "env")):
        assert any(note.startswith(f"line {line}: {name}") for note in said), name


UNSLOTH = """
from unsloth import FastLanguageModel
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

CONFIG = {"model": "Qwen/Qwen2.5-3B-Instruct", "rank": 64}

def letters(completions, **kwargs):
    return [float(len(completion)) for completion in completions]

def load_model(rank):
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=CONFIG["model"], load_in_4bit=True, max_seq_length=1024
    )
    model = FastLanguageModel.get_peft_model(
        model, r=rank, target_modules=["q_proj", "o_proj"], lora_alpha=rank, lora_dropout=0
    )
    return model, tokenizer

def get_config(**more):
    return GRPOConfig(beta=0.01, **more)

def train():
    model, tokenizer = load_model(CONFIG["rank"])
    trainer = GRPOTrainer(
        model=model, processing_class=tokenizer, args=get_config(), reward_funcs=[letters],
        train_dataset=load_dataset("a/b", split="train"),
    )
    trainer.train()
"""


def test_dictionaries_that_a_call_of_dict_joins_all_count(tmp_path: Path) -> None:
    text = script().replace(
        "trainer =",
        "first = {'beta': 0.1}\nsecond = {'seed': 7}\n"
        "config = GRPOConfig(**dict(**first, top_p=0.9, **second))\ntrainer =",
    )
    training = spec_of(tmp_path, text.replace("args=GRPOConfig()", "args=config"))["training"]
    assert (training["beta"], training["topP"], training["seed"]) == (0.1, 0.9, 7)


def test_what_functions_of_the_script_return_is_followed(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, UNSLOTH)
    assert spec["model"]["name"] == "Qwen/Qwen2.5-3B-Instruct"
    adapter = spec["adapter"]
    assert (adapter["rank"], adapter["alpha"], adapter["dropout"]) == (64, 64, 0)
    assert adapter["targetModules"] == ["q_proj", "o_proj"]
    assert spec["training"]["beta"] == 0.01
    said = "\n".join(notes(tmp_path))
    assert "load_in_4bit = True: the base is trained in its full precision" in said
    assert "max_seq_length" in said
    assert "**more" not in said, "the script calls get_config without arguments"
    assert "processing_class" not in said

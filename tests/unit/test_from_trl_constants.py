"""Settings that scripts keep in classes and variables of the environment: the job has the value
that the script trains with, or a note names the setting."""

from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_cli.from_trl.script_reader import read_script
from tests.generated import cases
from tests.unit.trl_scripts import init, notes, script, spec_of

CLASSES = """
lr = 0.125
class Settings:
    lr = V
    rate = lr * 2
    extra: float = lr
@dataclass
class Record:
    lr: float = V
    rate: float = field(default=V)
    extra: float = field(default_factory=lambda: V)
class Late:
    def __init__(self, lr=V):
        self.lr = lr
class Inherited(Record):
    pass
@dataclass
class Nearer(Record):
    rate: float = V
    extra: float = V
@dataclass
class Other(Record):
    lr: float = V
    rate: float = V
@dataclass
class Both(Nearer, Other):
    extra = V
class Plain(Settings, Record):
    lr: float = V
class Level(Enum):
    LOW = V
    HIGH = LOW * 2
"""
MAKERS = [
    "Settings", "Settings()", "Record()", "Record(lr=V)", "Record(V)", "Record(**{'lr': V})",
    "Record(rate=V, lr=lr)", "Late()", "Late(V)", "Inherited()", "Inherited(rate=V)", "Nearer()",
    "Both()", "Both(lr=V)", "Both", "Plain()", "Plain",
]  # fmt: skip
CHANGES = [
    "", "made.lr = V", "made.lr += V", "setattr(made, 'lr', V)", "setattr(made, name, V)",
    "vars(made).update(rate=V)", "other = made\nother.rate = V", "Settings.lr = V",
    "def tune(settings):\n    settings.lr = V\ntune(made)", "for made.lr in (V, V):\n    pass",
    "if V > 0.5:\n    made = Settings", "del Settings.extra",
]  # fmt: skip
VALUES = [
    "made.lr", "made.rate", "made.extra", "float(made.lr)", "min(made.lr, V)", "max(V, made.rate)",
    "float(str(made.lr))", "round(made.lr)", "int(made.rate * 4)", "made.lr if V else 1",
    "str((made.lr,)).count('0')", "float(bool(made.lr))",
    "asdict(made)['rate']", "asdict(made)['extra']", "Level.HIGH.value",
]  # fmt: skip
OWN_FUNCTIONS = ["", "def round(number):\n    return 7", "float = int"]


def check_beta(text: str) -> None:
    """The beta that a script trains with is taken, or a note names it."""
    trained: list[float] = []
    names: dict[str, object] = {
        "__name__": "script",
        "Enum": Enum,
        "asdict": asdict,
        "contextmanager": contextmanager,
        "dataclass": dataclass,
        "field": field,
        "GRPOConfig": SimpleNamespace,
        "GRPOTrainer": lambda _, args: trained.append(args.beta),
    }
    try:
        exec(text, names)
    except (AttributeError, KeyError, TypeError, ValueError):
        return  # not a script that runs
    run = read_script(text, "train.py", lambda _: None)
    setting = run.config.get("beta")
    assert any(note.name == "beta" for note in run.notes) is (setting is None)
    assert setting is None or [setting.value] == trained


@given(
    maker=st.sampled_from(MAKERS),
    change=st.sampled_from(CHANGES),
    value=st.sampled_from(VALUES),
    own_function=st.sampled_from(OWN_FUNCTIONS),
)
@settings(max_examples=cases(400, gate=100))
def test_a_class_s_field_is_what_the_script_makes_of_it_or_named(
    maker: str, change: str, value: str, own_function: str
) -> None:
    parts = [own_function, CLASSES, "name = 'lr'", f"made = {maker}", change]
    text = "\n".join([*parts, f"trainer = GRPOTrainer('a/b', args=GRPOConfig(beta={value}))"])
    for number in range(1, 32):  # each another one
        text = text.replace("V", str(number / 8), 1)
    check_beta(text)


OTHERWISE = [
    "def deepen(depth):\n    made.beta *= 2\n    if depth:\n        deepen(depth - 1)\ndeepen(2)",
    "class Tree:\n    def walk(self, depth):\n        made.beta += 1\n        if depth:\n"
    "            self.walk(depth - 1)\nTree().walk(2)",
    "@contextmanager\ndef other():\n    made.beta = 2.0\n    yield\n    made.beta = 4.0\n"
    "opened = other()\nopened.__enter__()",
    "class Doubled:\n    @property\n    def beta(self):\n        return self.half * 2\n"
    "    @beta.setter\n    def beta(self, value):\n        self.half = value\n"
    "made = Doubled()\nmade.beta = 2.0\nmade.half = 4.0",
    "class Kept:\n    def __setattr__(self, key, value):\n        self.__dict__[key] = value * 2\n"
    "made = Kept()\nmade.beta = 2.0",
    "class Opened:\n    def __init__(self):\n        self.beta = 2.0\n    def __enter__(self):\n"
    "        self.beta = 4.0\n        return self\n    def __exit__(self, *_):\n        pass\n"
    "with Opened() as made:\n    pass",
]  # fmt: skip


@pytest.mark.parametrize("change", OTHERWISE)
def test_what_python_calls_otherwise_than_it_is_written_is_taken_or_named(change: str) -> None:
    made = "class Made:\n    beta = 1.0\nmade = Made()"
    check_beta(f"{made}\n{change}\ntrainer = GRPOTrainer('a/b', args=GRPOConfig(beta=made.beta))")


@dataclass
class Config:
    """Stands for GRPOConfig."""

    beta: float = 0.0
    temperature: float = 1.0


@pytest.mark.parametrize(
    ("decorator", "bases"),
    [
        *(("@dataclass", bases) for bases in (
            "Common, GRPOConfig", "GRPOConfig, Common", "Mine, Others", "Others, Mine"
        )),
        *(("", bases) for bases in ("GRPOConfig", "GRPOConfig, Common", "Mine", "Mine, Others")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("own_fields", ["pass", "temperature: float = 0.5", "beta = 0.75"])
def test_a_config_s_defaults_are_those_of_all_its_classes(
    tmp_path: Path, decorator: str, bases: str, own_fields: str
) -> None:
    classes = f"""
@dataclass
class Common:
    beta: float = 0.25
@dataclass
class Mine(Common, GRPOConfig):
    temperature: float = 0.75
@dataclass
class Others(GRPOConfig):
    beta: float = 0.5
    temperature: float = 0.625
{decorator}
class Made({bases}):
    {own_fields}
"""
    names: dict[str, Any] = {"GRPOConfig": Config, "dataclass": dataclass}
    exec(f"{classes}\nargs = Made()", names)
    text = script().replace("args=GRPOConfig()", "args=Made()")
    training = spec_of(tmp_path, text.replace("trainer =", f"{classes}trainer ="))["training"]
    assert training["beta"] == names["args"].beta
    assert training.get("temperature", 1.0) == names["args"].temperature


@pytest.mark.parametrize("decorator", ["", "@dataclass"])
@pytest.mark.parametrize(
    ("value", "beta"), [("0.25", 0.25), ("self.seed / 4", 0.75), ("self.temperature / 4", None)]
)
def test_what_a_config_sets_after_its_init_is_taken_or_named(
    tmp_path: Path, decorator: str, value: str, beta: float | None
) -> None:
    method = f"    def __post_init__(self):\n        self.beta = {value}\n"
    method = f"    learning_rate: float = 0.5\n{method}        super().__post_init__()\n"
    made = f"{decorator}\nclass Made(GRPOConfig):\n{method}"
    text = script().replace("args=GRPOConfig()", "args=Made('o', seed=3)")
    training = spec_of(tmp_path, text.replace("trainer =", f"{made}trainer ="))["training"]
    assert training["beta"] == (beta or 0)
    assert training.get("learningRate") == (0.5 if decorator else None)
    assert any(": beta = " in note for note in notes(tmp_path)) is (beta is None)


PARSED = """
@dataclass
class Options:
    rate: float = 0.5
@dataclass
class More(Options):
    seed: int = 3
"""


@pytest.mark.parametrize(
    ("parsing", "rate", "says"),
    [
        ("o = HfArgumentParser(More).parse_args_into_dataclasses()[0]", 0.5, "--rate = 0.5: the"),
        ("(o,) = TrlParser(More).parse_args_and_config(['--rate', '1'])", None, "its options"),
        ("o = argparse.ArgumentParser()\no.add_argument('--rate', default=0.5)\n"
         "o = o.parse_args(args=['--rate', '1'])", None, "its options"),
        ("g = parsers.add_parser('sft')\ng.add_argument('--rate', default=1.0)\n"
         "g = parsers.add_parser('grpo')\ng.add_argument('--rate', default=0.5)\n"
         "o = parser.parse_args()", None, "options of lines"),
        ("class More(Options):\n    def __post_init__(self):\n        self.rate *= 2\n"
         "(o,) = HfArgumentParser((More,)).parse_args_into_dataclasses()", None, "it is computed"),
        ("class More(BaseSettings):\n    rate: float = 0.5\no = More()", None, "environment"),
    ],
)  # fmt: skip
def test_a_parser_s_value_is_its_default_only_if_nothing_else_gives_it(
    tmp_path: Path, parsing: str, rate: float | None, says: str
) -> None:
    classes = "" if "class More" in parsing else PARSED
    text = script("learning_rate=o.rate").replace("trainer =", f"{classes}{parsing}\ntrainer =")
    assert spec_of(tmp_path, text)["training"].get("learningRate") == rate
    assert any(says in note for note in notes(tmp_path))


def test_no_note_names_a_default_of_a_value_that_is_not_taken(tmp_path: Path) -> None:
    fields = "lr_scheduler_kwargs={'num_cycles': float(os.getenv('LR', 0.5)), 'a': pick()}"
    spec = spec_of(tmp_path, script(fields))
    assert "lrSchedulerKwargs" not in spec["training"]
    assert not any("default" in note for note in notes(tmp_path))


@pytest.mark.parametrize(
    ("value", "rate"),
    [
        ("CFG.lr", 2e-6),
        ("CFG().lr", 2e-6),
        ("made.lr", 2e-6),
        ("float(os.environ.get('LR', '5e-6'))", 5e-6),
        ("float(os.getenv('LR', 5e-6))", 5e-6),
        ("min(1e-5, 2e-6)", 2e-6),
        ("float(os.environ['LR'])", None),
        ("float('fast')", None),
        ("Loop.lr", None),
        ("max(2e-6, key=abs)", None),
    ],
)
def test_a_rate_in_a_class_or_in_the_environment_is_taken(
    tmp_path: Path, value: str, rate: float | None
) -> None:
    made = "class CFG:\n    lr = 2e-6\nmade = CFG()\nclass Loop:\n    lr = Loop.lr\ntrainer ="
    text = script(f"learning_rate={value}").replace("trainer =", made)
    assert spec_of(tmp_path, text)["training"].get("learningRate") == rate
    assert any("learning_rate = " in note for note in notes(tmp_path)) is (rate is None)


OBJECTS = """
class Settings:
    bonus = 1.0
made = Settings()
def judge(completions, **_):
    return [made.bonus]
"""


@pytest.mark.parametrize(
    ("change", "bonus"),
    [
        ("", 1.0),
        ("made.bonus = 2.0", 2.0),
        ("Settings.bonus = 2.0", 2.0),
        ("setattr(made, 'bonus', 2.0)", 2.0),
        ("if Settings.bonus < 9:\n    made.bonus = 2.0", 2.0),
        ("Settings.half = Settings.bonus / 2\nmade.bonus += Settings.half", 1.5),
    ],
)
def test_an_object_that_a_reward_uses_has_the_script_s_fields(
    tmp_path: Path, change: str, bonus: float
) -> None:
    text = script(rewards="=judge").replace("trainer =", f"{OBJECTS}{change}\ntrainer =")
    names: dict[str, Any] = {}
    exec(init(tmp_path, text)[0]["data"]["rewards.py"], names)
    assert names["judge"]([]) == [bonus]
    assert not [note for note in notes(tmp_path) if "changes here" in note]


def test_a_field_that_a_function_sets_before_the_training_is_named(tmp_path: Path) -> None:
    text = script(rewards="=judge").replace("trainer =", f"{OBJECTS}trainer =")
    head, trainer = text.split("trainer =")
    trainer = trainer.replace("\n", "\n    ")
    text = f"{head}def main(bonus):\n    made.bonus = bonus\n    trainer ={trainer}\nmain(2.0)"
    assert "made.bonus = " not in init(tmp_path, text)[0]["data"]["rewards.py"]
    (note,) = [note for note in notes(tmp_path) if "the reward uses what changes here" in note]
    assert ": made: " in note


@pytest.mark.parametrize(
    ("change", "is_named"),
    [
        ("", False),
        ("def fill(table):\n    table['a'] = 2.0\nfill(made)", True),
        ("def fill():\n    made['a'] = 2.0\nfill()", True),
        ("def swap():\n    global made\n    made = {'a': 2.0}\nswap()", True),
        ("other = made\nother['a'] = 2.0", False),
        ("made['a'] = 2.0", False),
        ("if True:\n    made['a'] = 2.0", False),
        ("made = {'a': 2.0}", False),
    ],
)
def test_what_changes_a_reward_s_table_is_copied_or_named(
    tmp_path: Path, change: str, is_named: bool
) -> None:
    judge = "    made['calls'] = 1\n    return [made['a']]\n"
    made = f"made = {{'a': 1.0}}\n{change}\ndef judge(completions, **_):\n{judge}trainer ="
    text = script(rewards="=judge").replace("trainer =", made)
    names: dict[str, Any] = {}
    exec(init(tmp_path, text)[0]["data"]["rewards.py"], names)
    assert any("made: the reward uses what" in note for note in notes(tmp_path)) is is_named
    assert is_named or names["judge"]([]) == [2.0 if change else 1.0]


def test_a_parameter_hides_a_name_of_the_module_from_a_reward(tmp_path: Path) -> None:
    head, trainer = script(rewards="=judge").split("trainer =")
    made = "def judge(completions, **_):\n    return [bonus]\ntrainer ="
    body = f"{made}{trainer}".replace("\n", "\n    ")
    text = f"{head}bonus = 5\ndef main(bonus=2):\n    {body}\nmain()"
    assert "bonus = 5" not in init(tmp_path, text)[0]["data"]["rewards.py"]
    assert any("bonus: the reward uses this parameter" in note for note in notes(tmp_path))


def test_what_a_launcher_sets_is_not_the_script_s_default(tmp_path: Path) -> None:
    world = "int(os.environ.get('WORLD_SIZE', 1))"
    spec_of(tmp_path, script(f"per_device_train_batch_size=64 // {world}"))
    (note,) = [note for note in notes(tmp_path) if "WORLD_SIZE" in note]
    assert "what launches the script sets WORLD_SIZE; set training" in note


@pytest.mark.parametrize(
    ("moved", "is_named"),
    [
        (".to('cuda')", False),
        (".cuda()", False),
        (".to(device).to(torch.float16)", True),
        (".to(dtype=kind)", True),
    ],
)
def test_a_model_that_is_moved_to_a_gpu_is_the_model(
    tmp_path: Path, moved: str, is_named: bool
) -> None:
    loaded = "AutoModelForCausalLM.from_pretrained('Qwen/Qwen2.5-0.5B', dtype='bfloat16')"
    spec = spec_of(tmp_path, script(model=loaded + moved))
    assert spec["model"]["name"] == "Qwen/Qwen2.5-0.5B"
    assert any("as training.dtype says" in note for note in notes(tmp_path)) is is_named


@pytest.mark.parametrize(
    ("made", "rank"),
    [
        ("if USE_LORA:\n    lora = LoraConfig(r=32)\nelse:\n    lora = None", 32),
        ("lora = LoraConfig(r=32) if USE_LORA else None", 32),
        ("lora = LoraConfig(r=32)\nlora = wrap(lora)", 32),
        ("lora = LoraConfig(r=32) if USE_LORA else LoraConfig(r=4)", 8),
        ("lora = pick()", 8),
    ],
)
def test_the_only_adapter_of_a_script_is_taken_with_a_note(
    tmp_path: Path, made: str, rank: int
) -> None:
    text = script().replace("trainer =", f"{made}\ntrainer =")
    text = text.replace("reward_funcs", "peft_config=lora,\n    reward_funcs")
    assert spec_of(tmp_path, text)["adapter"]["rank"] == rank
    (note,) = [note for note in notes(tmp_path) if "peft_config" in note]
    taken = "the LoraConfig of line" if rank == 32 else "LoRA with PEFT's defaults"
    assert f"{taken}" in note
    assert "set adapter as it should be" in note


@pytest.mark.parametrize(
    ("read", "is_named"),
    [
        ("os.environ['URL']", True),
        ("os.getenv('URL')", True),
        ("os.environ.get('URL', 'http://localhost')", True),
        ("environ[KEYS[0]]", True),
        ("dict(URL=1)['URL']", False),
    ],
)
def test_a_variable_that_a_reward_reads_is_named_once(
    tmp_path: Path, read: str, is_named: bool
) -> None:
    judge = f"def judge(completions, **_):\n    return [{read}, {read}]\ntrainer ="
    text = script(rewards="=[judge, helper.score]").replace("trainer =", judge)
    (tmp_path / "helper.py").write_text(f"import os\ndef score(**_):\n    return {read}")
    spec_of(tmp_path, f"import helper\n{text}")
    named = [note for note in notes(tmp_path) if "set it in env, if the reward needs it" in note]
    assert len(named) == is_named


@pytest.mark.parametrize("name", ["models/mine", "outputs/sft/checkpoint-100", "./models/mine"])
def test_a_model_in_a_folder_is_no_repository_of_the_hub(tmp_path: Path, name: str) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    model = spec_of(tmp_path, script(model=f"'{name}'"))["model"]
    assert model["name"] == f"/models/{name.rpartition('/')[2]}"
    assert model["volume"] == {"claimName": "train-model"}
    assert any("put the folder on the claim of model.volume" in note for note in notes(tmp_path))


def test_a_dataset_in_a_folder_is_no_repository_of_the_hub(tmp_path: Path) -> None:
    (tmp_path / "openai" / "gsm8k").mkdir(parents=True)
    text = script()
    assert "files" in spec_of(tmp_path, text)["dataset"]
    assert any("gsm8k: it is a folder here; the rows are made" in note for note in notes(tmp_path))


NEIGHBOUR = """
import os
base = 0.25
lr = base * 2
other = float(os.getenv("LR", "0.5"))
twice = 0.125
if base:
    twice = 0.75
"""


@pytest.mark.parametrize(
    "imports",
    [
        "import settings",
        "import settings as s",
        "from settings import *",
        "from settings import lr, other, twice, base",
        "from configs.settings import lr, other, twice, base",
    ],
)
@pytest.mark.parametrize("name", ["lr", "other", "twice", "base"])
@pytest.mark.parametrize("change", ["", "settings.lr = 1.0", "base = 0.125"])
@pytest.mark.parametrize("above", ["", "lr = base = other = twice = 0.0625\n"])
def test_a_constant_of_a_module_beside_the_script_is_taken_or_named(
    tmp_path: Path, imports: str, name: str, change: str, above: str
) -> None:
    (tmp_path / "configs").mkdir()
    for folder in (tmp_path, tmp_path / "configs"):
        (folder / "settings.py").write_text(NEIGHBOUR)
    value = f"settings.{name}" if imports.startswith("import") else name
    if imports.endswith(" s"):
        value, change = value.replace("settings", "s"), change.replace("settings", "s")
    text = f"{above}{imports}\n{change}\n" + script(f"learning_rate={value}")
    names = dict[str, Any]()
    exec(NEIGHBOUR, names)
    module = SimpleNamespace(**names)
    names |= {"settings": module, "s": module}
    exec(change, names)
    expected = None if name == "other" else eval(value, names)
    assert spec_of(tmp_path, text)["training"].get("learningRate") == expected
    assert any("learning_rate = " in note for note in notes(tmp_path)) is (expected is None)

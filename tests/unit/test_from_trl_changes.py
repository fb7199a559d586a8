"""What a script changes of the objects that it gives its trainer: the job has it, or a note names
it."""

from collections.abc import Callable
from copy import copy, deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_cli.from_trl.script_reader import read_script
from tests.generated import cases
from tests.unit.trl_scripts import MODEL, init, notes, script, spec_of

OBJECTS = f"""
model = AutoModelForCausalLM.from_pretrained("{MODEL}", dtype=torch.bfloat16)
tokenizer = AutoTokenizer.from_pretrained("{MODEL}", padding_side="left")
lora = LoraConfig(r=4, target_modules=["q_proj"])
args = GRPOConfig(model_init_kwargs={{}}, reward_weights=[2.0])
rows = load_dataset("openai/gsm8k", "main", split="train")
LINE
trainer ="""
GIVEN = (
    "model=model, processing_class=tokenizer, peft_config=lora, args=args, train_dataset=rows, "
    "reward_funcs=letters"
)


def with_line(line: str, given_arguments: str = GIVEN) -> str:
    """A script that makes all objects, with a line between these and the trainer."""
    start = script().partition("trainer = ")[0]
    call = f"trainer = GRPOTrainer({given_arguments})"
    made = OBJECTS.replace("LINE", line).replace("trainer =", call)
    return f"{start}{made}\ntrainer.train()\n"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("for p in model.parameters():\n    p.requires_grad = False", "p.requires_grad = False:"),
        ("model.model.layers[0].requires_grad_(False)", "layers[0].requires_grad_: a job trains"),
        ("model.generation_config.no_repeat_ngram_size = 3", "no_repeat_ngram_size = 3: a job"),
        ("model.config.rope_scaling['factor'] = 2", "model.config.rope_scaling: a job trains"),
        ("model.config.update({'attention_dropout': 0.1})", "model.config.update: a job trains"),
        ("model.lm_head.weight = other", "model.lm_head.weight = other: a job trains"),
        ("model.load_state_dict(torch.load('a.pt'))", "model.load_state_dict: a job trains"),
        ("model.add_adapter(lora)", "model.add_adapter: a job trains"),
        ("model.half()", "model.half: a job trains"),
        ("model.to(torch.float16)", "model.to: a job trains"),
        ("tokenizer.add_eos_token = True", "tokenizer.add_eos_token = True: it changes"),
        ("tokenizer.chat_template += 'a'", "tokenizer.chat_template: it is computed"),
        ("tokenizer = AutoTokenizer.from_pretrained(model.name, eos_token='a')", "processing_c"),
        ("tokenizer = AutoTokenizer.from_pretrained('MODEL', eos_token='a')", "processing_class"),
        ("tokenizer = AutoTokenizer.from_pretrained('MODEL', revision='a')", "processing_class"),
        ("judge = AutoTokenizer.from_pretrained('a')\njudge.chat_template = 'b'", "judge.chat_t"),
        ("lora.modules_to_save.append('lm_head')", "modules_to_save = lora.modules_to_save.append"),
        ("args.model_init_kwargs['attn_implementation'] = 'sdpa'", "[attn_implementation] = sdpa"),
        ("rows.set_transform(str)", "train_dataset = rows"),
        ("exec(open('configurator.py').read())", "exec(open('configurator.py').read()): it may"),
        ("globals()['args'] = other", "globals()['args']: it may set anything"),
        ("globals().update(read())", "globals().update(read()): it may set anything"),
        ("from mine import GRPOTrainer", "class GRPOTrainer = mine: a job trains by TRL's own"),
        ("from .configs import GRPOConfig", "class GRPOConfig = configs: a job trains by TRL's"),
        ("def tune(a):\n    a.beta = 1\nif len(rows) > 9:\n    tune(args)", "= 1: a condition"),
    ],
)  # fmt: skip
def test_a_change_that_a_job_can_t_have_is_named(tmp_path: Path, line: str, says: str) -> None:
    spec = spec_of(tmp_path, with_line(line.replace("MODEL", MODEL)))
    assert any(says in note for note in notes(tmp_path)), notes(tmp_path)
    assert spec["training"]["beta"] == 0
    assert "chatTemplate" not in spec["model"]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "model.config.use_cache = False",
        "model.config.pad_token_id = tokenizer.pad_token_id",
        "model.eval()",
        "model.to('cuda')",
        "model.gradient_checkpointing_enable()",
        "tokenizer.pad_token = tokenizer.eos_token",
        "tokenizer.padding_side = 'left'",
        "tokenizer.save_pretrained('a')",
        "rows.set_format('numpy')",
        f"tokenizer = AutoTokenizer.from_pretrained('{MODEL}', use_fast=True)",
    ],
)
def test_a_change_without_effect_is_not_named(tmp_path: Path, line: str) -> None:
    spec_of(tmp_path, with_line(line))
    assert notes(tmp_path) == []


@pytest.mark.parametrize(
    ("line", "path", "value"),
    [
        ("lora.target_modules.append('k_proj')", "adapter.targetModules", ["q_proj", "k_proj"]),
        ("args.reward_weights[0] *= 2", "rewards.0.weight", 4.0),
        ("vars(args).pop('reward_weights', 0)", "rewards.0.weight", None),
        ("args = GRPOConfig(beta=1)\nvars(args).pop('beta', 0)", "training.beta", 0),
        ("kept = SimpleNamespace(beta=1)\nargs = GRPOConfig(**vars(kept))", "training.beta", 1),
        ("made = partial(GRPOConfig, beta=1, seed=2)\nargs = made(seed=3)", "training.beta", 1),
    ],
)  # fmt: skip
def test_a_change_that_a_job_can_have_is_taken(
    tmp_path: Path, line: str, path: str, value: object
) -> None:
    place: Any = spec_of(tmp_path, with_line(line))
    for part in path.split("."):
        place = place[int(part)] if part.isdigit() else place.get(part)
    assert place == value
    assert notes(tmp_path) == []


@pytest.mark.parametrize(
    "line",
    ["kw.setdefault('beta', 0.5)", "kw['beta'] = 0.5", "kw = kw | {'beta': 0.5}", "tune(kw)"],
)
def test_values_that_a_config_gives_its_base_are_taken(tmp_path: Path, line: str) -> None:
    tune = "def tune(entries):\n    entries['beta'] = 0.5"
    initializer = f"    def __init__(self, **kw):\n        {line}\n        super().__init__(**kw)"
    made = f"{tune}\nclass Made(GRPOConfig):\n{initializer}\nargs = Made(seed=3)"
    training = spec_of(tmp_path, with_line(made))["training"]
    assert (training["beta"], training["seed"]) == (0.5, 3)


def test_the_template_is_that_of_the_trainer_s_tokenizer(tmp_path: Path) -> None:
    line = "judge = AutoTokenizer.from_pretrained('a')\ntokenizer.chat_template = 'A'\n"
    spec = spec_of(tmp_path, with_line(f"{line}judge.chat_template = 'B'"))
    assert spec["model"]["chatTemplate"] == "A"
    # Without its argument, TRL loads a tokenizer of its own.
    others = GIVEN.replace("processing_class=tokenizer, ", "")
    assert "chatTemplate" not in spec_of(tmp_path, with_line(line, others))["model"]
    assert any("tokenizer.chat_template = 'A': it" in note for note in notes(tmp_path))


def test_weights_of_bfloat16_stay_so_without_autocast(tmp_path: Path) -> None:
    text = with_line("args.bf16 = False")
    assert spec_of(tmp_path, text)["training"]["dtype"] == "bfloat16"
    assert any("bf16 = False: a job's bfloat16 weights compute" in note for note in notes(tmp_path))


@pytest.mark.parametrize("setting", ["dtype=None", "torch_dtype=None", "dtype='auto'"])
def test_the_dtype_of_the_files_is_named(tmp_path: Path, setting: str) -> None:
    name, _, value = setting.partition("=")
    loading = f"AutoModelForCausalLM.from_pretrained('{MODEL}', {setting})"
    for text in (script(model=loading), script(f"model_init_kwargs={{'{name}': {value}}}")):
        assert "dtype" not in spec_of(tmp_path, text)["training"]
        assert any("the weights are loaded as training.dtype" in note for note in notes(tmp_path))


@pytest.mark.parametrize(
    ("rows", "shuffle", "says"),
    [
        ("load_dataset('a/b', split='train', streaming=True)", False, "(streaming): TRL trains"),
        ("load_dataset('a/b', split='train', streaming=False)", None, None),
        ("datasets.load_dataset('a/b', split='train')", None, None),
        ("utils.load_dataset('a/b', split='train')", None, "train_dataset = utils.load_dataset"),
        ("own.load_dataset('a/b', split='train')", None, "train_dataset = own.load_dataset"),
    ],
)
def test_rows_are_those_of_the_library(
    tmp_path: Path, rows: str, shuffle: bool | None, says: str | None
) -> None:
    imports = "import datasets, utils\nfrom my import own\n"
    spec = spec_of(tmp_path, imports + script("shuffle_dataset=True", dataset=rows))
    assert spec["dataset"].get("shuffle") in (shuffle, shuffle is None)
    assert ("files" in spec["dataset"]) is (says or "").startswith("train_dataset")
    assert says is None or any(says in note for note in notes(tmp_path))


@pytest.mark.parametrize(
    "definition",
    [
        "@app.command()\ndef main(beta: float = typer.Option(0.5, help='a')):",
        "@app.command()\ndef main(beta: float = typer.Option(default=0.5)):",
        "@click.option('--beta', default=0.25)\ndef main(beta=0.5):",
        "def main(beta=0.5):",
        "class Runner:\n  def main(self, beta=0.5):",
    ],
)
def test_a_parameter_that_a_command_line_gives_has_its_default_with_a_note(
    tmp_path: Path, definition: str
) -> None:
    lines = script("beta=beta").partition("trainer =")
    inner = "".join(f"    {line}\n" for line in (lines[1] + lines[2]).splitlines())
    calling = "main()" if "click" in definition else "app()"
    text = f"{lines[0]}{definition}\n{inner}{calling}\n"
    assert spec_of(tmp_path, text)["training"]["beta"] == 0.5
    assert any("beta = 0.5: the parameter's default was taken" in note for note in notes(tmp_path))


class Rows:
    """Stands for a dataset of one row."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.row = row

    def map(self, function: Callable[[dict[str, Any]], dict[str, Any]]) -> "Rows":
        """Return the rows that a function makes of these."""
        return Rows(self.row | function(self.row))


CHAT = "{'prompt': [{'role': 'system', 'content': S}, {'role': 'user', 'content': x['question']}]}"
ROW_STEPS = [
    "S = 'b'", "S = 'c'", f"def fmt(x):\n    return {CHAT}", f"fmt = lambda x: {CHAT}",
    "rows = rows.map(fmt)", f"rows = rows.map(lambda x: {CHAT})", "rows = make()",
]  # fmt: skip
ROW_BEGIN = f"""
rows = load_dataset('a/b', split='train')
def make():
    return rows.map(fmt)
S = 'a'
def fmt(x):
    return {CHAT}
"""


@given(steps=st.lists(st.sampled_from(ROW_STEPS), max_size=4))
@settings(max_examples=cases(600, gate=150))
def test_the_system_prompt_is_the_one_that_the_rows_have(steps: list[str]) -> None:
    text = "\n".join([ROW_BEGIN, *steps, "trainer = GRPOTrainer('a/b', train_dataset=rows)"])
    trained: list[Rows] = []
    names: dict[str, object] = {
        "load_dataset": lambda *_, **__: Rows({"question": "q"}),
        "GRPOTrainer": lambda _, train_dataset: trained.append(train_dataset),
    }
    exec(text, names)
    run = read_script(text, "train.py", lambda _: None)
    prompt = trained[0].row.get("prompt", [{}])
    assert run.dataset.is_made_by_script or run.dataset.system_prompt == prompt[0].get("content")


def test_an_object_that_a_reward_calls_is_changed_as_the_script_does(tmp_path: Path) -> None:
    lines = "scorer = load('a')\nscorer.eval()\nscorer.to('cuda')\nbox.table = {}\n"
    text = lines + "box.table['a'] = 1\nlogger.info('a')\n" + script()
    text = text.replace("float(len(completion))", "scorer(completion, box.table, logger)")
    (config_map, _) = init(tmp_path, f"box = Box()\nlogger = make()\n{text}")
    copied = config_map["data"]["rewards.py"]
    for line in (*lines.splitlines(), "box.table['a'] = 1"):
        assert line in copied
    assert "logger.info" not in copied


def test_no_variable_of_the_environment_gets_into_a_config_map(tmp_path: Path) -> None:
    lines = (
        "import os\nos.environ['A'] = 'SECRET'\nos.environ.update(TOKEN='hf_SECRET1234567890')\n"
    )
    text = lines + script().replace("float(len(completion))", "len(os.getcwd())")
    (config_map, _) = init(tmp_path, text)
    assert "SECRET" not in config_map["data"]["rewards.py"]


STEPS = st.sampled_from([
    "other = kw\nother['beta'] = V", "def late():\n    kw['beta'] = V\nlate()",
    "def turn():\n    global B\n    B = V\nturn()",
    "def fill(entries):\n    entries['beta'] = V\nfill(kw)",
    "C = V; B = C; args = GRPOConfig(beta=B)",
    "class Next(Config):\n    seed: int = 3\nargs = Next()",
    "class Last(Config):\n    def __init__(self):\n        self.beta = V\nargs = Last()",
    "B = V", "B = [V][0]", "B += V", "B, C = V, V", "(B := V)", "if V > 0.5:\n    B = V",
    "del kw['beta']", "for B in (V, V):\n    pass",
    "match V:\n    case 0.25:\n        B = V\n    case _:\n        kw = dict(beta=V)",
    "kw = {'beta': B}", "kw = dict(beta=V)", "kw['beta'] = V", "kw.update(beta=V)",
    "C = kw.pop('beta')", "kw |= {'beta': V}", "args = GRPOConfig(beta=B)",
    "args = GRPOConfig(**kw)", "args = Config()", "args = Config(beta=V)",
    "args = replace(args, beta=V)", "args = replace(args)", "args.beta = V", "args.beta += V",
    "args.beta: float = V", "args.beta, C = V, V", "setattr(args, 'beta', V)",
    "vars(args).update(beta=V)", "vars(args).update({'beta': V}, seed=3)", "args.__dict__ |= kw",
    "args.__dict__['beta'] = V", "vars(args)['be' 'ta'] = V", "vars(args).update(**kw)",
    "vars(args)[str('beta')] = V", "[setattr(args, 'beta', value) for value in (V, V)]",
    "[(B := value) for value in (V, V)]", "B > V and setattr(args, 'beta', V)",
    "object.__setattr__(args, 'beta', V)",
    "list(map(lambda config: setattr(config, 'beta', V), [args]))", "args.__init__(beta=V)",
    "vars(args).pop('beta', 0)", "del args.__dict__['seed']",
    "for name in ['beta']:\n    setattr(args, name, V)",
    "kw = {'beta': V, 'run_name': str(V)}\nargs = GRPOConfig(**kw)",
    "other = args\nother.beta = V", "if V > 0.5:\n    args.beta = V",
    "def tune(config, beta=V):\n    config.beta = beta", "tune(args)", "tune(args, V)",
    "tune(args, *[V])", "if V > 0.5:\n    tune(args)",
    "def make(beta=V):\n    made = GRPOConfig(beta=beta)\n    made.beta += V\n    return made",
    "def make(beta=V):\n    return GRPOConfig(beta=beta)", "args = make(**{'beta': V})",
    "def make():\n    return GRPOConfig(beta=B)", "args = make()", "args = make(V)",
    "@added\ndef make(beta=V):\n    return GRPOConfig(beta=beta)", "make = added(make)",
    "@Added\ndef make(beta=V):\n    return GRPOConfig(beta=beta)", "args = Added(make)()",
    "args = copy(args)\nargs.beta = V", "other = deepcopy(args)\nother.beta = V",
    "kw = {key: value for key, value in kw.items() if value > V}",
])  # fmt: skip
BEGIN = """
class Config(GRPOConfig):
    beta: float = 0.75
B, kw, args = 0.25, {"beta": 0.5}, GRPOConfig(beta=0.75)
def tune(config):
    pass
def added(function):
    def inner(*given):
        made = function(*given)
        made.beta += 1
        return made
    return inner
class Added:
    def __init__(self, function):
        self.function = function
    def __call__(self, *given):
        return added(self.function)(*given)
def make():
    return GRPOConfig(beta=0.5)
"""
ENDS = [
    "trainer = GRPOTrainer(MODEL, args=args)",
    "def main():\n    trainer = GRPOTrainer(MODEL, args=args)\nmain()",
    "def main(config):\n    trainer = GRPOTrainer(MODEL, args=config)\nmain(args)",
    "def go():\n    GRPOTrainer(MODEL, args=GRPOConfig(beta=LATE))\nLATE = V\ngo()\nLATE = V",
]


class Stub:
    """Stands for GRPOConfig, whose fields a script sets."""

    beta = 0.0

    def __init__(self, **fields: float) -> None:
        for name, value in fields.items():
            setattr(self, name, value)


@given(
    steps=st.lists(STEPS, max_size=6, unique_by=lambda step: step[:11]),
    end=st.sampled_from(ENDS),
    data=st.data(),
)
@settings(max_examples=cases(600, gate=50))
def test_a_setting_is_what_the_script_makes_of_it_or_named(
    steps: list[str], end: str, data: st.DataObject
) -> None:
    text = "\n".join([BEGIN, *steps, end])
    while "V" in text:
        value = data.draw(st.sampled_from(["0.25", "0.5", "0.75", "1.0"]))
        text = text.replace("V", value, 1)
    trained: list[float] = []
    names: dict[str, object] = {
        "GRPOConfig": Stub,
        "GRPOTrainer": lambda _, args: trained.append(args.beta),
        "MODEL": "a/b",
        "copy": copy,
        "deepcopy": deepcopy,
        "replace": lambda args, **fields: Stub(**({"beta": args.beta} | fields)),
    }
    try:
        exec(text, names)
    except (KeyError, TypeError):
        return  # not a script that runs, such as one that removes a key twice
    run = read_script(f"MODEL = 'a/b'\n{text}", "train.py", lambda _: None)
    setting = run.config.get("beta")
    is_named = any(note.name not in ("train_dataset", "reward_funcs") for note in run.notes)
    assert is_named or trained == [setting.value if setting else 0.0]


@pytest.mark.parametrize(
    "line",
    [
        "args.__setattr__('beta', 0.25)", "operator.setitem(vars(args), 'beta', 0.25)",
        "vars(args).__setitem__('beta', 0.25)", "GRPOConfig.__setattr__(args, 'beta', 0.25)",
        "GRPOConfig.__init__(args, beta=0.25)", "args.__dict__ = {'beta': 0.25}",
        "args = type(args)(beta=0.25)", "args = args.__class__(beta=0.25)",
        "class Late(GRPOConfig):\n    def __init__(self, **kw):\n"
        "        GRPOConfig.__init__(self, **kw)\nargs = Late(beta=0.25)",
        "class Kept:\n    def __setitem__(self, key, value):\n        setattr(args, key, value)\n"
        "Kept()['beta'] = 0.25",
        "class Made:\n    @cached_property\n    def args(self):\n"
        "        return GRPOConfig(beta=0.25)\nargs = Made().args",
        "os.environ['BETA'] = '0.25'\nargs.beta = float(os.environ['BETA'])",
        "os.environ.update(BETA='0.25')\nargs.beta = float(os.getenv('BETA', '1'))",
        "os.environ.setdefault('BETA', '0.25')\nargs.beta = float(os.environ.get('BETA', 1))",
    ],
)  # fmt: skip
def test_a_setting_by_methods_that_python_itself_has_is_taken(line: str) -> None:
    run = read_script(f"MODEL = 'a/b'\n{BEGIN}\n{line}\n{ENDS[0]}", "train.py", lambda _: None)
    assert run.config["beta"].value == 0.25


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("type(trainer)._compute_loss = len", "type(trainer)._compute_loss = len: a job trains"),
        ("vars(args)['beta'] = 1", "args.beta = 1: it changes here"),
        ("vars(trainer).update(beta=1)", "trainer.beta = 1: it changes here"),
        ("Trainer.create_optimizer = len", "Trainer.create_optimizer = len: a job trains by"),
        ("max(trainer, key=lambda made: setattr(made, 'beta', 1))", "made.beta = 1: a condition"),
        ("torch.backends.cuda.matmul.allow_tf32 = True", "allow_tf32 = True: set training.o"),
        ("torch.set_float32_matmul_precision('high')", "precision: set training.overrides.tf32"),
        ("exec(text, globals())", "exec(text, globals()): it may set anything"),
        ("locals()['args'] = other", "locals()['args']: it may set anything"),
        ("adapt(args)", "adapt(args): code of another file may change it"),
        ("helpers.tune(5, config=trainer.args)", "tune(trainer.args): code of another file may"),
    ],
)
def test_what_else_changes_the_training_is_named(line: str, says: str) -> None:
    imports = (
        "import helpers, torch\nfrom helpers import tune as adapt\n"
        "from transformers import Trainer\nfrom trl import GRPOConfig, GRPOTrainer"
    )
    text = f"{imports}\nMODEL = 'a/b'\n{BEGIN}\n{ENDS[0]}\n{line}"
    helpers = {"helpers": "def tune(config):\n    config.beta = 1"}
    run = read_script(text, "train.py", helpers.get)
    assert any(says in str(note) for note in run.notes), [str(note) for note in run.notes]


@pytest.mark.parametrize(
    "line",
    [
        "transformers.set_seed(3)",
        "if False:\n    model.push_to_hub('a/b')",
        "exec(text, {}, names)",
    ],
)
def test_what_changes_nothing_of_a_training_is_not_named(line: str) -> None:
    text = f"import transformers\nMODEL = 'a/b'\n{BEGIN}\n{line}\n{ENDS[0]}"
    notes_of = [note.name for note in read_script(text, "train.py", lambda _: None).notes]
    assert notes_of == ["train_dataset", "reward_funcs"]


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("max_prompt_length=read()", "set training.maxPromptLength"),
        ("vllm_sampling_params=SamplingParams(stop=['a'])", "topK and minP, and generation.stop"),
    ],
)
def test_a_computed_setting_of_another_version_says_what_to_set(setting: str, says: str) -> None:
    text = f"MODEL = 'a/b'\n{BEGIN}\nargs = GRPOConfig({setting})\n{ENDS[0]}"
    run = read_script(text, "train.py", lambda _: None)
    assert any(str(note).endswith(says) for note in run.notes), [str(note) for note in run.notes]


def test_a_loop_that_may_end_early_does_not_leave_the_script_by_its_else() -> None:
    wait = "for _ in range(9):\n    if ready():\n        break\nelse:\n    raise TimeoutError"
    run = read_script(f"MODEL = 'a/b'\n{BEGIN}\n{wait}\n{ENDS[0]}", "train.py", lambda _: None)
    assert run.config["beta"].value == 0.75


@pytest.mark.parametrize("decorator", ["added", "Added"])
def test_a_function_is_what_its_decorator_makes_of_it(decorator: str) -> None:
    made = f"@{decorator}\ndef make(beta):\n    return GRPOConfig(beta=beta)\nargs = make(0.25)"
    run = read_script(f"MODEL = 'a/b'\n{BEGIN}\n{made}\n{ENDS[0]}", "train.py", lambda _: None)
    assert run.config["beta"].value == 1.25

"""Scripts and configurations that make no sense: `grpo init` says so in one sentence, and runs
nothing."""

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_cli.__main__ import main
from grpo_cli.commands.init import render
from grpo_cli.from_trl.job_spec import job_documents
from grpo_cli.from_trl.script_reader import read_script
from grpo_cli.from_trl.trl_run import TrlError
from grpo_cli.show.kubectl_yaml import load_documents
from tests.generated import cases
from tests.unit.trl_scripts import CHAT, init, notes, script, spec_of


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def f(:", "train.py line 1: no Python"),
        ("x = 1\0", ": source code string cannot contain null bytes"),
        ("x = 1", "makes no GRPOTrainer"),
        (script() + "\ntrainer2 = GRPOTrainer('a')", "makes several trainers, at lines 8, 16"),
        (script(model="pick()"), "does not say which model is trained"),
        ("x = " + "(" * 3000 + ")" * 3000, ": too many nested parentheses"),
        (script(f"seed={'-' * 9000}1"), "nested too deeply"),
        (script(f"seed={'1' * 9000}"), ": Exceeds the limit"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    path = tmp_path / "train.py"
    path.write_text(text)
    assert main(["init", "--from-trl", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("grpo: ")
    assert says in line


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a", "holds no settings"),
        ("a: [", "line 1, column 5"),
        ("a: 1", "has no setting of `trl grpo`"),
        ("distributed_type: FSDP\ndebug: false", "configures `accelerate launch`"),
        ("[" * 3000, "nested too deeply"),
    ],
)
def test_a_yaml_file_of_something_else_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    assert main(["init", "--from-trl", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_options_that_mean_nothing_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "--model", "a/b"]) == 2
    assert "--model goes with --from-trl" in capsys.readouterr().err
    assert main(["init", "-o", str(tmp_path / "no" / "job.yaml")]) == 2
    assert main(["init", "--name", "No_name"]) == 2
    assert '--name: metadata.name is "No_name"; it takes' in capsys.readouterr().err
    assert main(["init", "--name", "123"]) == 0
    assert load_documents(capsys.readouterr().out)[0]["metadata"]["name"] == "123"
    (tmp_path / "train.py").write_text(script())
    assert main(["init", "--from-trl", str(tmp_path / "train.py"), "--name", "No_name"]) == 2
    assert '--name: metadata.name is "No_name"; it takes' in capsys.readouterr().err
    assert main(["init", "--from-trl", str(tmp_path / "none.py")]) == 2
    assert main(["init", "--from-trl", str(tmp_path)]) == 2


def check(text: str) -> None:
    """A text is refused in a sentence, or becomes a file that reads as it was meant."""
    try:
        run = read_script(text, "train.py", lambda _: None)
        documents = job_documents(run, "job", 1, "a/b", "1B")
    except TrlError as error:
        refusal, documents = str(error), None
    if documents is None:
        assert len(refusal.splitlines()) == 1
    else:
        text = render("train.py", documents, [str(note) for note in run.notes])
        assert load_documents(text) == documents


FULL = script(
    "output_dir='o', **{'beta': 0.1}, learning_rate=2 * 1e-6, report_to=['wandb']", dataset=CHAT
)


@given(data=st.data())
@settings(max_examples=cases(300, gate=30))
def test_a_damaged_script_is_read_or_refused_in_a_sentence(data: st.DataObject) -> None:
    text = FULL
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        length = data.draw(st.integers(0, 30))
        inserted = data.draw(
            st.sampled_from(["", "(", ")", "*", "**", "[", "{", ",", "\n", "é", "\0", "lambda: "])
            | st.text(max_size=5)
            | st.just(text[start : start + length] * 2)
        )
        text = text[:start] + inserted + text[start + length :]
    check(text)


NAMES = st.sampled_from(["a", "b", "c", "GRPOTrainer", "GRPOConfig", "letters", "load_dataset"])
OPERATIONS = ["+", "-", "*", "/", "//", "%", "**", "[]", "()", ".x"]
EXPRESSIONS = st.recursive(
    NAMES | st.integers(-9, 10**30).map(str) | st.text(max_size=4).map(repr),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda parts: f"[{', '.join(parts)}]")
        | st.tuples(inner, inner, st.sampled_from(OPERATIONS)).map(
            lambda parts: {"[]": f"{parts[0]}[{parts[1]}]", "()": f"f({parts[0]}, *{parts[1]})",
                           ".x": f"({parts[0]}).map({parts[1]})"}
            .get(parts[2], f"({parts[0]} {parts[2]} {parts[1]})")
        )
        | inner.map(lambda part: f"{{'k': {part}, **{{}}}}")
        | inner.map(lambda part: f"lambda x: {part}")
    ),
    max_leaves=8,
)  # fmt: skip


@given(
    bound=st.lists(st.tuples(NAMES, EXPRESSIONS), max_size=6),
    given_=st.dictionaries(
        st.sampled_from(["model", "args", "reward_funcs", "train_dataset", "peft_config"]),
        EXPRESSIONS,
    ),
)
@settings(max_examples=cases(300, gate=30))
def test_any_expressions_are_read_without_running_them(
    bound: list[tuple[str, str]], given_: dict[str, str]
) -> None:
    lines = [f"{name} = {value}" for name, value in bound]
    arguments = ", ".join(f"{name}={value}" for name, value in given_.items())
    check("\n".join([*lines, f"trainer = GRPOTrainer({arguments})"]))


@pytest.mark.parametrize(
    ("change", "row"),
    [
        ("if pick():\n    rows = load_dataset('a/b')\nrows = rows.map(str)", "assigned at lines"),
        (f"rows = {CHAT}\nrows = rows.map(lambda x: {{'goal': x['answer']}})", ".map("),
        ("rows = load_dataset('a/b').rename_column('question', 'prompt').map(lambda x: {'prompt': "
         "[{'role': 'system', 'content': 'a'}, {'role': 'user', 'content': x['prompt']}]})",
         ".map("),
        ("rows = load_dataset('json', data_files=['a/t.jsonl', 'b/t.jsonl'])", "t.jsonl"),
        ("rows = load_dataset('json', data_files='https://a/t.jsonl')", "t.jsonl"),
    ],
)  # fmt: skip
def test_rows_that_a_job_would_read_otherwise_are_the_script_s(
    tmp_path: Path, change: str, row: str
) -> None:
    text = script(dataset="rows").replace(
        "trainer =", f"rows = load_dataset('a')\n{change}\ntrainer ="
    )
    assert spec_of(tmp_path, text)["dataset"]["files"]["paths"] == ["train.jsonl"]
    (note,) = [note for note in notes(tmp_path) if "train_dataset" in note]
    assert row in note


@pytest.mark.parametrize(
    ("made", "value"),
    [
        ("def judge(completions, **_):\n    return [7.0]", 7.0),
        ("N = []\nN.append(7.0)\ndef judge(completions, **_):\n    return N", 7.0),
        ("import math; N = 7.5; M = math.floor(N)\n"
         "def judge(completions, **_):\n    return [M]", 7),
        ("text = open('/none')\n"
         "def judge(completions, **_):\n    text = 7.0\n    return [text]", 7.0),
        ("def funcs():\n    found = [letters]\n    found.append(first)\n    return found\n"
         "def first(completions, **_):\n    return [7.0]\njudge = funcs()", 7.0),
    ],
)  # fmt: skip
def test_the_reward_that_a_script_uses_is_the_one_that_is_copied(
    tmp_path: Path, made: str, value: float
) -> None:
    old = "def judge(completions, **_):\n    return [1.0]\n" if "judge =" not in made else ""
    text = script(rewards="=judge").replace("trainer =", f"{old}{made}\ntrainer =")
    config_map, job = init(tmp_path, text)
    namespace: dict[str, Any] = {}
    exec(config_map["data"]["rewards.py"], namespace)
    function = job["spec"]["rewards"][-1]["python"]["function"].partition(":")[2]
    assert namespace[function](completions=["a"]) == [value]


def test_what_depends_on_the_run_is_named(tmp_path: Path) -> None:
    text = """
if pick():
    import first as rewards
else:
    import second as rewards
def main(bonus=2.0, seed=3):
    def judge(completions, **_):
        return [bonus]
    model = AutoModelForCausalLM.from_pretrained("a/b")
    tokenizer = AutoTokenizer.from_pretrained("a/b")
    if tokenizer.chat_template is None:
        tokenizer.chat_template = "{{ messages }}"
    config = GRPOConfig(
        seed=seed, scale_rewards=["group"], report_to="trackio", trackio_space_id=5
    )
    trainer = GRPOTrainer(
        model, [rewards.one, judge], config, load_dataset("a/b"), processing_class=tokenizer
    )
    trainer.add_callback(stop)
"""
    spec = spec_of(tmp_path, text, "--parameters", "1B")
    assert "chatTemplate" not in spec["model"]
    said = "\n".join(notes(tmp_path))
    named = ["rewards.one: rewards is", "bonus:", "seed = 3:", "from_pretrained:", "add_callback"]
    for name in (*named, "chat_template = ", "scale_rewards", "trackio"):
        assert name in said


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("trainer.train(resume_from_checkpoint=True)", "resume_from_checkpoint = True: a job goes"),
        ("trainer.train('o/checkpoint-5')", "resume_from_checkpoint = 'o/checkpoint-5': a job"),
        ("trainer.push_to_hub('a/b')", "trainer.push_to_hub: set export.to to Hub"),
        ("wandb.init(project='a')", "wandb.init: set tracking.wandb"),
        ("os.environ['KEY'] = 'SECRET'", "os.environ['KEY']: set it in env"),
        ("os.environ.setdefault('KEY', 'SECRET')", "os.environ['KEY']: set it in env"),
        ("os.environ.update(KEY='SECRET')", "os.environ: set it in env"),
        ("os.environ['WANDB_PROJECT'] = 'p'", "['WANDB_PROJECT']: set tracking.wandb.project"),
        ("GRPOTrainer.compute_loss = f", "GRPOTrainer.compute_loss = f: a job trains by TRL's"),
        ("setattr(GRPOTrainer, '_loss', f)", "GRPOTrainer._loss = f: a job trains by TRL's"),
        ("SFTTrainer(model).train()", "SFTTrainer: a job trains by GRPO alone"),
        ("tokenizer.add_tokens(['<a>'])", "tokenizer.add_tokens: a job trains the model's files"),
        ("trainer.args.set_optimizer(beta1=0.8)", "trainer.args.set_optimizer: it changes here"),
    ],
)
def test_what_a_script_sets_beside_the_trainer_is_named(
    tmp_path: Path, line: str, says: str
) -> None:
    spec_of(tmp_path, f"{script()}\n{line}\n")
    assert any(says in note for note in notes(tmp_path))
    assert not any("SECRET" in note for note in notes(tmp_path))


def test_a_fresh_run_is_no_setting(tmp_path: Path) -> None:
    spec_of(tmp_path, script() + "\ntrainer.train(resume_from_checkpoint=None)\nmodel.train(True)")
    assert not any("resume" in note for note in notes(tmp_path))


@pytest.mark.parametrize(
    "rewards",
    ["list(map(str, FUNCS))", "[f for f in FUNCS]", "FUNCS + [x]", "sorted(FUNCS)", "pick(FUNCS)"],
)
def test_a_computed_list_of_rewards_is_named(tmp_path: Path, rewards: str) -> None:
    made = f"def pick(names):\n    return [TABLE[name] for name in names]\nchosen = {rewards}"
    text = script(rewards="=chosen").replace("trainer =", f"{made}\ntrainer =")
    (reward,) = spec_of(tmp_path, text)["rewards"]
    assert reward["python"]["function"] == "rewards:reward_1"
    assert any("reward_funcs" in note and "it is computed" in note for note in notes(tmp_path))


def test_a_list_in_a_list_of_rewards_is_spread(tmp_path: Path) -> None:
    text = script(rewards="=[*first, len]").replace("trainer =", "first = [letters]\ntrainer =")
    assert spec_of(tmp_path, text)["rewards"][0]["python"]["function"] == "rewards:letters"


def test_one_computed_entry_does_not_hide_the_others(tmp_path: Path) -> None:
    text = script("**more").replace(
        "trainer =", "more = dict(beta=0.5, learning_rate=rate())\ntrainer ="
    )
    assert spec_of(tmp_path, text)["training"]["beta"] == 0.5
    said = "learning_rate = rate(): it is computed when the script runs; set training.learningRate"
    assert any(said in note for note in notes(tmp_path))


def test_rewards_that_a_function_returns_beside_their_weights_are_found(tmp_path: Path) -> None:
    made = "def build():\n    def brief(completions, **_):\n        return [1.0]\n"
    made += "    return [letters, brief], [0.3, 0.7]\nchosen, weights = build()"
    text = script("reward_weights=weights", rewards="=chosen").replace(
        "trainer =", f"{made}\ntrainer ="
    )
    rewards = spec_of(tmp_path, text)["rewards"]
    assert [reward["name"] for reward in rewards] == ["letters", "brief"]


@pytest.mark.parametrize(
    ("loading", "paths"),
    [
        ("data_files='a.jsonl'", ["a.jsonl"]),
        ("data_files={'train': 'a.jsonl', 'test': 'b.jsonl'}, split='test'", ["b.jsonl"]),
        ("data_files={'train': 'a.jsonl', 'test': 'b.jsonl'})['test'", ["b.jsonl"]),
        ("data_files='a.jsonl', split='train[:9]'", ["train.jsonl"]),
        ("data_files={'train': 'a.jsonl'}, split='validation'", ["train.jsonl"]),
    ],
)
def test_the_files_are_those_of_the_split(tmp_path: Path, loading: str, paths: list[str]) -> None:
    closing = "]" if ")[" in loading else ")"
    spec = spec_of(tmp_path, script(dataset=f"load_dataset('json', {loading}{closing}"))
    assert spec["dataset"]["files"]["paths"] == paths
    assert any(paths[0] in note for note in notes(tmp_path))


@pytest.mark.parametrize("columns", ["'answer': x['question']", "'a': x['b'], 'c': x['b']"])
def test_columns_that_change_places_are_made_by_the_script(tmp_path: Path, columns: str) -> None:
    rows = f"load_dataset('a/b').map(lambda x: {{'prompt': x['answer'], {columns}}})"
    assert "files" in spec_of(tmp_path, script(dataset=rows))["dataset"]


@pytest.mark.parametrize(
    "text",
    [
        script("hub_token='SECRET1', push_to_hub=True, hub_model_id='a/b'"),
        script(dataset="load_dataset('a', token='hf_SECRETSECRET').shuffle()"),
        script(model="AutoModelForCausalLM.from_pretrained('a/b', token='SECRET')"),
        script("model_init_kwargs={'token': 'SECRET'}"),
        "p = ArgumentParser()\np.add_argument('--hub_token', default='SECRET')\n"
        + script("hub_token=p.parse_args().hub_token"),
        "model_name_or_path: a/b\nhub_token: SECRET\ndataset_name: a/b\nenv: {KEY: SECRET}",
    ],
)
def test_no_note_repeats_a_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    init(tmp_path, text, name="c.yaml" if text.startswith("model") else "train.py")
    assert "SECRET" not in capsys.readouterr().err
    assert "SECRET" not in (tmp_path / "job.yaml").read_text()
    assert any("token" in note.lower() for note in notes(tmp_path))


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("type=str2bool, default='false'", "--use-vllm is read by str2bool"),
        ("type=lambda text: text == 'yes', default='no'", "--use-vllm is read by lambda"),
        ("action='store_true'", "--use-vllm = False: the option's default was taken"),
    ],
)
def test_an_option_s_default_is_what_its_parser_makes_of_it(
    tmp_path: Path, option: str, says: str
) -> None:
    lines = f"p = ArgumentParser()\np.add_argument('--use-vllm', {option})\nargs = p.parse_args()"
    spec_of(tmp_path, f"{lines}\n{script('use_vllm=args.use_vllm')}")
    assert any(says in note for note in notes(tmp_path))


@pytest.mark.parametrize(
    "change",
    [
        "setattr(options, name, 1)",
        "vars(options).update(read())",
        "options.__dict__.update(read())",
        "if name:\n    vars(options)['beta'] = 1",
        "for name in names:\n    object.__setattr__(options, 'beta', 1)",
    ],
)
def test_options_that_a_script_replaces_are_named(tmp_path: Path, change: str) -> None:
    lines = "p = ArgumentParser()\np.add_argument('--beta', type=float, default=0.5)\n"
    text = f"{lines}options = p.parse_args()\n{change}\n{script('beta=options.beta')}"
    assert spec_of(tmp_path, text)["training"]["beta"] == 0.0
    assert any("beta = options.beta: " in note for note in notes(tmp_path))
    text = f"{lines}options = p.parse_args(['--beta', '1'])\n{script('beta=options.beta')}"
    assert spec_of(tmp_path, text)["training"]["beta"] == 0.0
    assert any("line 3 gives the parser its options" in note for note in notes(tmp_path))


@pytest.mark.parametrize(
    "lines",
    [
        "args = GRPOConfig(beta=getattr(Table, o.field))",
        "args = GRPOConfig(beta=table.get(o.field))",
        "args = GRPOConfig(beta=table.get(o.field, 1.0))",
        "setattr(args, o.field, 0.5)",
        "args = GRPOConfig(beta=len([0] * o.count) / 2)",
        "args = GRPOConfig(beta=len({**read(), 'a': 1}) / 2)",
        "args = GRPOConfig(beta=len(list({pick(): 1, 'a': 1})) / 2)",
        "args = GRPOConfig(beta={'beta': 0.5, **read()}['beta'])",
        "args = GRPOConfig(beta=(table | {pick(): 1})['beta'])",
        "args = GRPOConfig(beta=dict(table, **read())['beta'])",
        "table.update({pick(): 1})\nargs = GRPOConfig(beta=table['beta'])",
        "def total(*numbers):\n    return len(numbers)\nargs = GRPOConfig(beta=total(*read()))",
        "class Pair(NamedTuple):\n    beta: float = 0.25\nargs = GRPOConfig(beta=Pair(0.5).beta)",
        "@define\nclass Pair:\n    beta: float = 0.25\nargs = GRPOConfig(beta=Pair(0.5).beta)",
        "args = GRPOConfig('o', 4)",
        "args = GRPOConfig(*read())",
    ],
)
def test_a_setting_that_another_call_of_the_script_changes_is_named(
    tmp_path: Path, lines: str
) -> None:
    parsing = "p = ArgumentParser()\np.add_argument('--field', default='beta')\n"
    parsing += "p.add_argument('--count', type=int, default=2)\no = p.parse_args()\n"
    tables = "class Table:\n    beta = 0.5\ntable = {'beta': 0.5}\nargs = GRPOConfig()\n"
    text = script().replace("args=GRPOConfig()", "args=args")
    spec_of(tmp_path, text.replace("trainer =", f"{parsing}{tables}{lines}\ntrainer ="))
    named = ("--field = 'beta'", "beta = ", ": *", "line 16 sets it")
    assert any(name in note for note in notes(tmp_path) for name in named), notes(tmp_path)


def test_a_text_that_grows_takes_no_memory(tmp_path: Path) -> None:
    grown = "text = 'a'\n" + "text = text + text\n" * 13 + "text = text.replace('a', text)\n"
    path = tmp_path / "train.py"
    path.write_text(grown + script("run_name=text"))
    tracemalloc.start()
    read_script(path.read_text(), path.name, lambda _: None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * 2**20


def test_a_computed_setting_that_a_job_lacks_says_why(tmp_path: Path) -> None:
    model = "AutoModelForCausalLM.from_pretrained('a/b', quantization_config=make(), dtype=kind())"
    spec_of(
        tmp_path,
        script("output_dir=str(folder)", model=f"prepare_model_for_kbit_training({model})"),
    )
    said = "\n".join(notes(tmp_path))
    assert "output_dir = str(folder): the trainer chooses the folder" in said
    assert "quantization_config = make(): the base is trained in its full precision" in said
    assert "dtype = kind(): it is computed" in said


def test_unsloth_s_adapter_has_unsloth_s_defaults(tmp_path: Path) -> None:
    text = script(model="FastLanguageModel.get_peft_model('a/b', lora_alpha=64)")
    adapter = spec_of(tmp_path, text)["adapter"]
    assert (adapter["rank"], adapter["alpha"], len(adapter["targetModules"])) == (16, 64, 7)


def test_an_adapter_that_is_trained_on_is_named(tmp_path: Path) -> None:
    model = "PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained('a/b'), 'c/d')"
    assert spec_of(tmp_path, script(model=model))["model"]["name"] == "a/b"
    assert any(": a job begins a new adapter" in note for note in notes(tmp_path))


def test_a_file_that_launches_a_script_asks_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.sh"
    path.write_text("accelerate launch --num_processes 7 train.py \\\n  --config a.yaml")
    assert main(["init", "--from-trl", str(path)]) == 2
    assert "give the script or the YAML file that it launches" in capsys.readouterr().err

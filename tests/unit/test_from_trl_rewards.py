"""Rewards that a script collects in a list, and what their code must not carry into a ConfigMap."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_cli.__main__ import main
from tests.unit.trl_scripts import CHAT, MODEL, init, notes, script, spec_of

REWARDS = "\n".join(f"def {name}(completions, **_):\n    return [1.0]" for name in "abc")


def with_lines(lines: str, rewards: str = "=chosen") -> str:
    """A script with these lines above its trainer."""
    return script(rewards=rewards).replace("trainer =", f"{REWARDS}\n{lines}\ntrainer =")


@pytest.mark.parametrize(
    "change",
    [
        "chosen += [b, c]",
        "chosen.extend([b, c])",
        "chosen.append(b)\nchosen += (c,)",
        "chosen = chosen + [b] + [c]",
        "more = [b]\nmore.append(c)\nchosen.extend(more)",
        "def more():\n    return [b, c]\nchosen += more()",
        "chosen += [c]\nchosen.insert(1, b)",
        "for reward in (b, c):\n    chosen.append(reward)",
        "def add(reward):\n    chosen.append(reward)\nadd(b)\nadd(c)",
    ],
)
def test_what_a_script_adds_to_its_rewards_is_taken(tmp_path: Path, change: str) -> None:
    rewards = spec_of(tmp_path, with_lines(f"chosen = [a]\n{change}"))["rewards"]
    assert [reward["name"] for reward in rewards] == ["a", "b", "c"]
    assert not any("reward_funcs" in note for note in notes(tmp_path))


def test_lists_that_a_script_joins_are_taken(tmp_path: Path) -> None:
    text = with_lines("first = [a]\nfirst += [b]", rewards="=first + [c]")
    assert [reward["name"] for reward in spec_of(tmp_path, text)["rewards"]] == ["a", "b", "c"]


@pytest.mark.parametrize(
    "change",
    [
        "chosen += pick()", "chosen.extend(f for f in (b, c))", "if pick():\n    chosen += [b]",
        "for reward in pick():\n    chosen.append(reward)",
    ],
)  # fmt: skip
def test_other_changes_of_the_rewards_are_named(tmp_path: Path, change: str) -> None:
    rewards = spec_of(tmp_path, with_lines(f"chosen = [a]\n{change}"))["rewards"]
    assert [reward["name"] for reward in rewards] == ["a"]
    assert any("the list changes here: add what it adds" in note for note in notes(tmp_path))


KEY = "sk-proj-Abcdefghijklmnopq"
PLAIN = "0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize(
    ("lines", "line"),
    [
        (f"KEY = '{KEY}'\ndef judge(completions, **_):\n    return [KEY]", 14),
        (f"API_KEY: str = '{PLAIN}'\ndef judge(completions, **_):\n    return [API_KEY]", 14),
        (f"class Judge:\n    def __init__(self):\n        self.token = '{PLAIN}'\n"
         "judge = Judge()", 16),
        (f"judge = partial(a, api_key='{PLAIN}')", 14),
        (f"def judge(completions, **_):\n    return post(headers={{'a': 'Bearer {KEY}'}})", 15),
        ("from judges import judge", 0),
    ],
)  # fmt: skip
def test_a_reward_with_a_key_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: str, line: int
) -> None:
    (tmp_path / "judges.py").write_text(f"\nTOKEN = '{PLAIN}'\ndef judge(**_): ...\n")
    path = tmp_path / "train.py"
    path.write_text(with_lines(lines, rewards="=[judge]"))
    assert main(["init", "--from-trl", str(path)]) == 2
    captured = capsys.readouterr()
    place = f"train.py line {line}" if line else "judges.py:2"
    assert captured.err.startswith(f"grpo: {place}: the reward holds a key")
    assert "spec.env with valueFrom.secretKeyRef" in captured.err
    assert PLAIN not in captured.err
    assert KEY not in captured.err


@pytest.mark.parametrize(
    "lines",
    [
        "KEY = os.environ['KEY']", "API_KEY = 'EMPTY'", "EOS_TOKEN = '<|im_end|>0123456789ab'",
        "KEY = 'ground_truth_answer'", "TEXT = 'sk-learn is a long sentence about models'",
        "OPTIONS = {'key': 12345678901234567890}",
    ],
)  # fmt: skip
def test_other_texts_of_a_reward_are_taken(tmp_path: Path, lines: str) -> None:
    name = lines.partition(" ")[0]
    judge = f"import os\n{lines}\ndef judge(completions, **_):\n    return [{name}]"
    (reward,) = spec_of(tmp_path, with_lines(judge, rewards="=judge"))["rewards"]
    assert reward["name"] == "judge"


def test_a_model_that_the_environment_names_has_the_script_s_default(tmp_path: Path) -> None:
    text = script(model=f"os.getenv('MODEL', '{MODEL}')")
    assert spec_of(tmp_path, text)["model"]["name"] == MODEL
    assert any(
        "MODEL = " in note and "default of this variable" in note for note in notes(tmp_path)
    )


MAKERS = """
class Judge:
    def __init__(self, bonus=1.0):
        self.bonus = bonus
    def __call__(self, completions, **_):
        return [self.bonus]
class Named(Judge):
    __name__ = "other"
def make(bonus):
    def scaled(completions, **_):
        return [bonus]
    return scaled
judge = Judge(2.0)
maker = make(3.0)
named = Named()
"""


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        ("Judge(3.0)", "Judge"), ("make(2)", "scaled"), ("maker", "scaled"), ("named", "named"),
        ("partial(make(1), bonus=2)", "scaled"), ("partial(a, bonus=2)", "a"),
        ("lambda completions, **_: [1.0]", "reward_1"),
    ],
)  # fmt: skip
def test_a_reward_has_the_name_by_which_trl_logs_it(tmp_path: Path, entry: str, name: str) -> None:
    (reward,) = spec_of(tmp_path, with_lines(MAKERS, rewards=f"=[{entry}]"))["rewards"]
    assert reward["name"] == name


def test_a_file_that_a_reward_opens_is_named_and_opened_whole(tmp_path: Path) -> None:
    opening = "with open('words.txt') as file:\n    WORDS = set(file.read().split())\n"
    lines = f"{opening}TABLE = pd.read_csv('a.csv')\nwith open('log.txt') as log:\n    pass\n"
    judge = "def judge(completions, **_):\n    return [TABLE[word] for word in WORDS]"
    (config_map, _) = init(tmp_path, with_lines(f"{lines}{judge}", rewards="=judge"))
    assert opening in config_map["data"]["rewards.py"]
    opened = [note for note in notes(tmp_path) if "opens a file: a pod has none" in note]
    assert [note.partition(": ")[2].partition(":")[0] for note in opened] == ["open", "pd.read_csv"]


@pytest.mark.parametrize("imports", ["from neighbour import *", "from neighbour import scale"])
def test_a_reward_has_what_it_takes_from_a_module_beside_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imports: str
) -> None:
    (tmp_path / "neighbour.py").write_text("scale = 0.5\ndef other(completions, **_): return [2.0]")
    reward = "def judge(completions, **_):\n    return [scale * len(completions)]\n"
    text = script(rewards="=[judge, other]" if "*" in imports else "=judge")
    config_map, job = init(tmp_path, text.replace("trainer =", f"{imports}\n{reward}trainer ="))
    files = tmp_path / "files"
    files.mkdir()
    for name, content in config_map["data"].items():
        (files / name).write_text(content)
    monkeypatch.syspath_prepend(files)
    rewards = importlib.import_module("rewards")
    sys.modules.pop("rewards")
    sys.modules.pop("neighbour")
    names = [entry["python"]["function"].partition(":")[2] for entry in job["spec"]["rewards"]]
    scores = [getattr(rewards, name)(["a"]) for name in names]
    assert scores == [[0.5], [2.0]][: len(names)]


@pytest.mark.parametrize(
    ("made", "entry", "name"),
    [
        ("def préfixe(completions, **_):\n    return [7.0]", "préfixe", "pr_fixe"),
        ("class Judge:\n    def score(self, completions, **_):\n        return [7.0]\n"
         "judge = Judge()", "judge.score", "score"),
        ("class Judge:\n    @staticmethod\n    def score(completions, **_):\n"
         "        return [7.0]", "Judge.score", "score"),
        ("class Judge:\n    def __call__(self, completions, **_):\n        return [7.0]\n"
         "table = {'a': Judge()}", "table['a']", "Judge"),
    ],
)  # fmt: skip
def test_a_reward_that_the_spec_can_t_name_gets_a_name_in_its_file(
    tmp_path: Path, made: str, entry: str, name: str
) -> None:
    text = script(rewards=f"=[{entry}]").replace("trainer =", f"{made}\ntrainer =")
    (reward,) = spec_of(tmp_path, text)["rewards"]
    assert (reward["name"], reward["python"]["function"]) == (name, "rewards:reward_1")
    names: dict[str, Any] = {}
    exec(init(tmp_path, text)[0]["data"]["rewards.py"], names)
    assert names["reward_1"](["a"]) == [7.0]
    assert any("ASCII" in note for note in notes(tmp_path)) is not entry.isascii()


def test_a_relative_import_of_a_reward_is_named(tmp_path: Path) -> None:
    made = "from .parts import scale\ndef judge(completions, **_):\n    return [scale]\n"
    spec_of(tmp_path, script(rewards="=judge").replace("trainer =", f"{made}trainer ="))
    assert any("import = .parts: the files of a ConfigMap" in note for note in notes(tmp_path))


@pytest.mark.parametrize("chosen", ["TABLE[o.reward]", "[TABLE[name] for name in [o.reward]]"])
@pytest.mark.parametrize("default", ["letters", "nobody"])
def test_a_reward_that_an_option_s_default_chooses_is_taken_with_a_note(
    tmp_path: Path, chosen: str, default: str
) -> None:
    lines = f"p = ArgumentParser()\np.add_argument('--reward', default='{default}')\n"
    lines += "o = p.parse_args()\nTABLE = {'letters': letters, 'other': len}\ntrainer ="
    text = script(rewards=f"={chosen}").replace("trainer =", lines)
    (reward,) = spec_of(tmp_path, text)["rewards"]
    is_taken = default == "letters"
    assert (reward["python"]["function"] == "rewards:letters") is is_taken
    named = [note for note in notes(tmp_path) if f"--reward = '{default}': the option's" in note]
    assert len(named) == is_taken


def test_what_a_reward_imports_where_it_needs_it_is_copied_or_named(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("import vendor\nscale = 0.5\n")
    inner = "    import sympy\n    from neighbour import scale\n    return [scale]"
    text = script(rewards="=judge").replace(
        "trainer =", f"def judge(completions, **_):\n{inner}\ntrainer ="
    )
    assert sorted(init(tmp_path, text)[0]["data"]) == ["neighbour.py", "rewards.py"]
    said = "\n".join(notes(tmp_path))
    assert "rewards.py imports it: the training image must have the package 'sympy'" in said
    assert "neighbour.py imports it: the training image must have the package 'vendor'" in said


@pytest.mark.parametrize(
    "lines",
    [
        "words = set('ab')\nwords.add('c')",
        "words = dict(zip('ab', 'cd'))\nwords['c'] = 'e'",
        "words = sorted('ab')\nwords[0] = 'ccc'",
        "words = str.split('a b')\nwords[0] = 'ccc'",
        "words = list('ab')\nwords.append('c')\nif len(str(words)) > 99:\n    words = list('d')",
        "words = [['a']]\nwords[0].append('b')\nwords[len(words) * 0] = words[0] + ['c']",
        "table = {'a': set('ab')}\ntable['a'].add('c')\nwords = table['a']",
    ],
)
def test_a_reward_s_table_that_is_computed_has_the_script_s_changes(
    tmp_path: Path, lines: str
) -> None:
    judge = "def judge(completions, **_):\n    return [len(str(words))]"
    theirs, ours = dict[str, Any](), dict[str, Any]()
    exec(f"{lines}\n{judge}", theirs)
    exec(init(tmp_path, with_lines(f"{lines}\n{judge}", "=judge"))[0]["data"]["rewards.py"], ours)
    assert ours["judge"](["a"]) == theirs["judge"](["a"])


@pytest.mark.parametrize(
    ("reads", "options", "is_named"),
    [("answer", "", True), ("goal", "", False), ("answer", ", remove_columns=['answer']", False)],
)
def test_a_column_that_a_job_s_rows_have_under_another_name_is_named_where_a_reward_reads_it(
    tmp_path: Path, reads: str, options: str, is_named: bool
) -> None:
    rows = CHAT.removesuffix(")") + f"{options})"
    judge = f"def judge(completions, **columns):\n    return [len(columns['{reads}'])]\ntrainer ="
    text = script(rewards="=judge", dataset=rows).replace("trainer =", judge)
    assert spec_of(tmp_path, text)["dataset"]["columns"] == {"goal": "answer"}
    said = "column answer: a reward may read it; a job's rows have it as goal alone"
    assert any(said in note for note in notes(tmp_path)) is is_named

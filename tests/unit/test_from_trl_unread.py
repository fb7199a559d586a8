"""What `grpo init --from-trl` leaves to a person."""

from pathlib import Path

from tests.unit.trl_scripts import init, notes, script


def test_rewards_that_are_still_to_be_written_have_their_file(tmp_path: Path) -> None:
    recipe = "model_name_or_path: Qwen/Qwen2.5-0.5B\ndataset_name: a/b\nreward_funcs: [tags]\n"
    loop = script(rewards="=[rewards[name] for name in names]")
    for text, name in ((recipe, "recipe.yaml"), (loop, "train.py")):
        config_map, job = init(tmp_path, text, name=name)
        python = job["spec"]["rewards"][0]["python"]
        assert python["configMap"]["name"] == config_map["metadata"]["name"]
        assert list(config_map["data"]) == [f"{python['function'].partition(':')[0]}.py"]


def test_a_model_that_is_given_is_no_open_question(tmp_path: Path) -> None:
    text = "import sys\n" + script(model="sys.argv[1]")
    job = init(tmp_path, text, "--model", "Qwen/Qwen2.5-0.5B")[-1]
    assert job["spec"]["model"]["name"] == "Qwen/Qwen2.5-0.5B"
    assert not [note for note in notes(tmp_path) if "model" in note]


def test_a_reference_that_moves_is_named_beside_a_beta_that_is_computed(tmp_path: Path) -> None:
    init(tmp_path, "import sys\n" + script("beta=float(sys.argv[1]), sync_ref_model=True"))
    (note,) = (note for note in notes(tmp_path) if "sync_ref_model" in note)
    assert note.endswith("with a beta above 0 set reference.sync")

"""A spec is read as the API server reads it: nulls, whole numbers, folders in any spelling,
misspelt names."""

import copy
import posixpath
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic.alias_generators import to_camel

from grpo_api.job import GRPOJobSpec, SpecInvalid, parse_spec
from grpo_api.spec.other_names import NEAR_NAMES, OTHER_NAMES, other_name_hint
from grpo_api.spec.trl_places import SETTING_NAMES, place_of
from grpo_api.text.contract import RESERVED_MOUNTS
from grpo_api.text.schema import schema_fields, structural_schema
from tests.container_samples import NORMALISED
from tests.samples import GOOD, SPEC, changed

PARTS = st.sampled_from(
    ["models", "tmp", "etc", "grpo", "dev", "shm", "cache", "modelsx", "x", "models ", ".x", "..x"]
)
SLASHES = st.sampled_from(["/", "//", "/./", "/.//", "///"])


@st.composite
def dirty_paths(draw: st.DrawFn) -> str:
    """An absolute path, spelt as nobody would."""
    parts = draw(st.lists(PARTS, max_size=4))
    path = "".join(draw(SLASHES) + part for part in parts)
    return path + draw(st.sampled_from(["", "/", "//", "/.", "/./"])) or "/"


def mounted(path: str) -> dict[str, Any]:
    volume = {"name": "cache", "emptyDir": {}}
    mount = {"name": "cache", "mountPath": path}
    return changed({"podTemplate.spec.volumes": [volume], "volumeMounts": [mount]})


@given(dirty_paths())
def test_a_mount_is_rejected_just_where_its_folder_is_in_on_or_above_a_reserved_one(
    path: str,
) -> None:
    meant = posixpath.normpath(path).replace("//", "/")
    common = [posixpath.commonpath([meant, taken]) for taken in RESERVED_MOUNTS]
    shadows = any(
        shared in (meant, taken) for shared, taken in zip(common, RESERVED_MOUNTS, strict=True)
    )
    if not shadows:
        parse_spec(mounted(path))
        return
    with pytest.raises(SpecInvalid, match=r"spec\.volumeMounts\[0\]: mountPath must lie outside"):
        parse_spec(mounted(path))


@given(dirty_paths(), dirty_paths())
def test_a_mount_never_leads_upwards(before: str, after: str) -> None:
    with pytest.raises(SpecInvalid, match=r"mountPath must not contain `\.\.`"):
        parse_spec(mounted(f"{before}/..{after}"))


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """Every object in a spec whose fields are ours: those of settings, not of maps that users key
    themselves."""
    if isinstance(value, list):
        for item in value:
            yield from objects(item)
    elif isinstance(value, dict):
        yield value
        for item in value.values():
            yield from objects(item)


@given(st.sampled_from(sorted(GOOD)), st.randoms(use_true_random=False))
def test_nulls_and_whole_floats_change_nothing(name: str, random: Any) -> None:
    spec = changed(GOOD[name])
    plain = parse_spec(copy.deepcopy(spec))
    for part in objects(spec):
        for key, value in part.items():
            if isinstance(value, int) and not isinstance(value, bool):
                part[key] = float(value)
    unset = sorted(set(type(plain).model_fields) - {"model", "dataset", "rewards"})
    aliases = [type(plain).model_fields[field].alias or field for field in unset]
    spec |= {alias: None for alias in aliases if alias not in spec and random.random() < 0.5}
    assert parse_spec(spec) == plain


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"model": "Qwen/Qwen3-0.6B"},
            "spec.model: must be an object, with fields such as `name: …` below it "
            '(got "Qwen/Qwen3-0.6B")',
        ),
        (
            {"placement.nodeSelector": "gpu"},
            'spec.placement.nodeSelector: must be an object of keys and values (got "gpu")',
        ),
        ({"rewards": None}, "spec.rewards: is required"),
    ],
)
def test_a_wrong_value_is_answered_in_the_words_of_the_spec(
    changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(SpecInvalid) as caught:
        parse_spec(changed(changes))
    assert says in caught.value.problems


@pytest.mark.parametrize(
    ("pattern", "part"),
    [
        ("<answer>(", "'('"),
        ("a[b", "'[b'"),
        ("(?<=a+)b", "'(?<=a+)b'"),
        ("x{99999999999}", "'{99999999999}'"),
        (r"(a)\2", "'2'"),
        ("a**", "'*'"),
    ],
)
def test_the_part_of_a_pattern_that_is_not_understood_is_quoted(pattern: str, part: str) -> None:
    with pytest.raises(SpecInvalid) as caught:
        parse_spec(changed({"rewards.0.format.pattern": pattern}))
    assert f"not a regular expression at {part}: " in str(caught.value)


@pytest.mark.parametrize("name", NORMALISED)
def test_other_spellings_are_accepted(name: str) -> None:
    parse_spec(changed(NORMALISED[name]))


def test_a_required_field_that_is_null_is_missing() -> None:
    with pytest.raises(SpecInvalid, match=r"spec\.model: is required"):
        parse_spec(SPEC | {"model": None})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"training.learning_rate": 1e-6},
            "spec.training.learning_rate: unknown field; did you mean learningRate?",
        ),
        (
            {"training.learningrate": 1e-6},
            "spec.training.learningrate: unknown field; did you mean learningRate?",
        ),
        (
            {"placement.resources": {"limits": {}}},
            "spec.placement.resources: unknown field; did you mean spec.resources?",
        ),
        ({"lora": {}}, "spec.lora: unknown field; did you mean spec.adapter?"),
        ({"adapter.r": 8}, "spec.adapter.r: unknown field; did you mean spec.adapter.rank?"),
        (
            {"model.torchDtype": "bfloat16"},
            "spec.model.torchDtype: unknown field; did you mean spec.training.dtype?",
        ),
        (
            {"checkpoint.pvc": "a"},
            "spec.checkpoint.pvc: unknown field; did you mean spec.checkpoint.volume?",
        ),
        (
            {"training.klCoef": 1},
            "spec.training.klCoef: unknown field; did you mean spec.training.beta?",
        ),
        (
            {"training.save_steps": 1},
            "spec.training.save_steps: unknown field; did you mean spec.checkpoint.everySteps?",
        ),
        (
            {"deepspeed": {}},
            "spec.deepspeed: unknown field; the plan decides how ranks work together; see "
            "spec.placement",
        ),
        (
            {"training.tf32": True},
            "spec.training.tf32: unknown field; did you mean spec.training.overrides.tf32?",
        ),
        (
            {"generation.engine": "vLLM"},
            "spec.generation.engine: must be one of Auto, Transformers, Colocated, Servers; did "
            'you mean Colocated? (got "vLLM")',
        ),
        (
            {"env": {"A": "b"}},
            'spec.env: must be a list, with items such as `- name: …` below it (got {"A": "b"})',
        ),
        ({"gpus": {"min": 1}}, "spec.gpus: unknown field; did you mean spec.placement.gpus?"),
        (
            {"monitoring": {}},
            "spec.monitoring: unknown field; `kubectl explain grpojob.spec` lists what there is",
        ),
        ({"rewards.0.formatt": {}}, "spec.rewards[0].formatt: unknown field; did you mean format?"),
        ({"guard.max_kl": 1}, "spec.guard.max_kl: unknown field; did you mean maxKL?"),
        (
            {"podTemplate.spec.volumes": [{"name": "a", "configmap": {}}]},
            "spec.podTemplate.spec.volumes[0].configmap: unknown field; did you mean configMap?",
        ),
        (
            {
                "podTemplate.spec.volumes": [
                    {"name": "a", "projected": {"sources": [{"iscsi": {}}]}}
                ]
            },
            "spec.podTemplate.spec.volumes[0].projected.sources[0].iscsi: unknown field; "
            "`kubectl explain grpojob.spec.podTemplate.spec.volumes.projected.sources` lists what "
            "there is",
        ),
    ],
)
def test_an_unknown_field_is_answered_with_the_right_name(
    changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(SpecInvalid) as caught:
        parse_spec(changed(changes))
    assert says in caught.value.problems


@pytest.mark.parametrize("spelling", [str, to_camel])
@pytest.mark.parametrize("name", SETTING_NAMES)
def test_every_setting_of_trl_is_answered_with_its_place_or_the_reason(
    name: str, spelling: Callable[[str], str]
) -> None:
    place = place_of(name)
    assert place
    answer = other_name_hint(("training", spelling(name)))
    assert (place.reason if place.kind == "Refused" else f"spec.{place.path}") in answer


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model.revision": "main "}, 'model.revision: must be a commit, tag or branch, without '
         'blanks (got "main ")'),
        ({"generation.stop": "a"}, 'generation.stop: must be a list: write ["a"] (got "a")'),
        ({"training.dtype": "bf16"}, "training.dtype: must be one of Auto, bfloat16, float32; did "
         'you mean bfloat16? (got "bf16")'),
        ({"training.gradientCheckpointing": True}, "training.gradientCheckpointing: must be one of "
         "Auto, Enabled, Disabled; did you mean Enabled? (got true)"),
        ({"checkpoint.volumeClaimTemplate": {"size": "1Gi", "accessModes": ["ReadWriteMany"]}},
         "checkpoint.volumeClaimTemplate.accessModes: unknown field; did you mean accessMode?"),
        ({"rewards.0.python.kwargs": {"a": 2}}, "rewards[0].python.kwargs: unknown field; bind a "
         "reward's arguments in its file, as by functools.partial, and name the result"),
        ({"adapter.targetModules": ["q_proj", "all-linear"]}, "adapter.targetModules: all-linear "
         'stands alone and means all linear layers but the head (got ["q_proj", "all-linear"])'),
        ({"dataset.promptColumn": True}, "dataset.promptColumn: must be text; YAML reads y, n, "
         "yes, no, on and off without quotes as true and false (got true)"),
        ({"dataset.path": "a"}, "dataset.path: unknown field; did you mean name?"),
        ({"env": [{"name": "A B"}]}, "env[0].name: must be letters, digits, `_`, `-` and `.`, "
         'with a letter or `_` first (got "A B")'),
        ({"guard.stopOn": ["Nosignal"]}, "guard.stopOn[0]: must be one of 16 words, which `kubectl "
         'explain` lists; did you mean NoSignal? (got "Nosignal")'),
        ({"command": "python -m mine"}, "command: must be a list with each word as an item, such "
         'as ["python", "-m", "mine"] (got "python -m mine")'),
        ({"activeDeadlineSeconds": "24h"}, 'activeDeadlineSeconds: must be a whole number (got "24'
         'h")'),
        ({"training.seed": "7"}, 'training.seed: must be a whole number, without quotes (got "7")'),
        ({"resources.memory": "2Gi"}, "resources.memory: unknown field; did you mean "
         "limits.memory?"),
        ({"resources.limits": {"mem": "2Gi"}}, "resources.limits.mem: must be cpu, memory, "
         'ephemeral-storage, or such as hugepages-2Mi and rdma/hca (got "mem")'),
        ({"checkpoint": {"store": {"url": "s3://"}}}, "checkpoint.store.url: write it as "
         's3://BUCKET/FOLDER, gs://… or az://… (got "s3://")'),
        ({"tracking": {"wandb": {"token": "a"}}}, "tracking.wandb.token: unknown field; did you "
         "mean tokenSecretRef?"),
        ({"model.hfToken": "a"}, "model.hfToken: unknown field; did you mean tokenSecretRef?"),
        ({"rewards.0.type": "accuracy"}, "rewards[0].type: unknown field; `kubectl explain "
         "grpojob.spec.rewards` lists what there is"),
        ({"rewards.0.pattern": "a"}, "rewards[0].pattern: unknown field; did you mean "
         "spec.rewards[].format.pattern?"),
        ({"rewards.0": "accuracy"}, "rewards[0]: must be an object, with fields such as `accuracy: "
         '…` below it (got "accuracy")'),
        ({"rewards": {"accuracy": {}}}, "rewards: must be a list, with items such as `- accuracy: "
         '…` below it (got {"accuracy": {}})'),
        ({"tracking": ["wandb"]}, "tracking: must be an object, with fields such as `wandb: …` "
         'below it (got ["wandb"])'),
        ({"dataset.split": ["train"]}, 'dataset.split: must be text (got ["train"])'),
        ({"model.size": "7B"}, "model.size: unknown field; did you mean parameters?"),
        ({"restarts.max": 3}, "restarts.max: unknown field; did you mean limit?"),
        ({"backoffLimit": 3}, "backoffLimit: unknown field; did you mean spec.restarts.limit?"),
        ({"generation.enableThinking": False}, "generation.enableThinking: unknown field; did you "
         "mean spec.model.chatTemplateKwargs?"),
        ({"dataset.files": {"path": "a"}}, "dataset.files.path: unknown field; did you mean "
         "paths?"),
        ({"checkpoint.volume": {"name": "a"}}, "checkpoint.volume.name: unknown field; did you "
         "mean claimName?"),
        ({"placement.queue": "a"}, "placement.queue: unknown field; did you mean queueName?"),
        ({"placement.max": 8}, "placement.max: unknown field; did you mean "
         "spec.placement.gpus.max?"),
        ({"export.size": 8}, "export.size: unknown field; `kubectl explain grpojob.spec.export` "
         "lists what there is"),
    ],
)  # fmt: skip
def test_a_slip_of_a_user_is_answered_with_what_to_write(
    changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(SpecInvalid) as caught:
        parse_spec(changed(changes))
    assert f"spec.{says}" in caught.value.problems


def _named(place: str, name: str) -> dict[str, Any]:
    """A job with this model, dataset or reward model."""
    changes = {"rewards": [{"model": {"name": name}}]} if place == "rewards" else {}
    return changed(changes or {f"{place}.name": name})


@pytest.mark.parametrize("place", ["model", "dataset", "rewards"])
@pytest.mark.parametrize("name", [
    "Qwen/Qwen2.5-0.5B-Instruct/", "https://huggingface.co/a/b", "s3://bucket/a", "./a", "~/a",
    "a/b/c", "a/b@main", "hf://datasets/a/b", "a\u2011b", "a/.", "a//b", "-a",
])  # fmt: skip
def test_a_new_job_names_a_hub_id_or_an_absolute_path(place: str, name: str) -> None:
    job = _named(place, name)
    with pytest.raises(SpecInvalid, match="write a hub id such as openai/gsm8k"):
        parse_spec(job, creating=True)
    parse_spec(job)


@pytest.mark.parametrize("place", ["model", "dataset", "rewards"])
@pytest.mark.parametrize(
    "name", ["gpt2", "a", "a/b", "Qwen/Qwen2.5-0.5B", "/models/a", "/a/\u00e9/", "a_b/c-d.e"]
)
def test_hub_ids_and_absolute_paths_are_names(place: str, name: str) -> None:
    parse_spec(_named(place, name), creating=True)


def test_every_other_name_leads_to_a_field() -> None:
    paths = {path for path, _ in schema_fields(structural_schema(GRPOJobSpec, defaults=False))}
    assert set(OTHER_NAMES.values()) <= paths


def test_every_near_name_leads_to_a_field_of_its_section() -> None:
    fields = schema_fields(structural_schema(GRPOJobSpec, defaults=False), "spec")
    paths = {path.replace("[]", "") for path, _ in fields}
    for (section, _), field in NEAR_NAMES.items():
        first = field.partition(".")[0]  # `requests.cpu` is an entry of a map
        assert any(path == field or path.endswith(f".{section}.{first}") for path in paths)

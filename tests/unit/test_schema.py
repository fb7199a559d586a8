"""The CRD's schema says what the models say: fields, defaults, limits, descriptions; what has no
schema is rejected.

The API server's own judgement of the same samples is in tests/integration/test_bad_specs.py.
"""

import json
import re
from copy import deepcopy
from functools import cache
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, ValidationError

from grpo_api.job import GRPOJobSpec, SpecInvalid, parse_spec
from grpo_api.job_class import GRPOJobClass
from grpo_api.text.base import Model, Rule
from grpo_api.text.schema import NotStructural, Schema, schema_fields, structural_schema
from grpo_codegen import __main__ as codegen
from grpo_codegen.crd import definition, job_schema
from tests.class_samples import BAD_CLASSES
from tests.samples import BAD, GOOD, SPEC, Bad, changed
from tests.wrong_specs import CORRECTIONS


@cache
def job() -> Schema:
    """The schema of a whole job, which no test alters, made once."""
    return job_schema()


def defaulted(value: Any, schema: Schema) -> Any:
    """The value with the schema's defaults filled in, as the API server does it."""
    if isinstance(value, dict) and "properties" in schema:
        for name, child in schema["properties"].items():
            if name not in value and "default" in child:
                value[name] = deepcopy(child["default"])
        return {name: defaulted(part, schema["properties"][name]) for name, part in value.items()}
    if isinstance(value, list):
        return [defaulted(part, schema["items"]) for part in value]
    return value


@pytest.mark.parametrize("name", GOOD)
def test_models_accept_and_default_as_the_server_does(name: str) -> None:
    spec = changed(GOOD[name])
    served = defaulted(spec, job()["properties"]["spec"])
    parsed = parse_spec(served)
    assert parsed.model_dump(mode="json", exclude_none=True) == served
    assert parse_spec(changed(GOOD[name]), creating=True) == parsed


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_models_reject_what_the_server_refuses(bad: Bad) -> None:
    with pytest.raises(SpecInvalid) as caught:
        parse_spec(bad.spec, creating=True)
    assert any(problem.startswith(bad.path) for problem in caught.value.problems)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_what_a_person_should_write_is_accepted(name: str) -> None:
    wrong = next(bad.spec for bad in BAD if bad.name == name)
    parse_spec(changed(CORRECTIONS[name], wrong), creating=True)


PYDANTICS_WORDS = re.compile(
    r"\b(Input|String|List|Dictionary) should|Field required|[Vv]alue error|ModelSpec"
)


def test_no_answer_to_a_wrong_spec_has_pydantic_s_words() -> None:
    assert len(CORRECTIONS) >= 60
    problems: list[str] = []
    for bad in BAD:
        with pytest.raises(SpecInvalid) as caught:
            parse_spec(bad.spec, creating=True)
        problems += caught.value.problems
    assert [problem for problem in problems if PYDANTICS_WORDS.search(problem)] == []


def test_every_rule_has_a_spec_that_breaks_it() -> None:
    told = ""
    for bad in BAD:
        with pytest.raises(SpecInvalid) as caught:
            parse_spec(bad.spec, creating=True)
        told += str(caught.value)
    for bad in BAD_CLASSES:
        with pytest.raises(ValidationError) as refused:
            GRPOJobClass.model_validate({"spec": bad.spec}, strict=True, by_name=False)
        told += str(refused.value)
    assert [rule.message for rule in _rules(Model) if rule.message not in told] == []


def _rules(model: type[Model]) -> list[Rule]:
    """The rules of every model of the contract."""
    ours = [below for below in model.__subclasses__() if below.__module__.startswith("grpo_api.")]
    return [*model.RULES, *(rule for below in ours for rule in _rules(below))]


def test_all_problems_are_told_at_once_with_path_and_value() -> None:
    spec = changed({"training.beta": -1, "modell": {}, "placement.gpus": {"min": 4, "max": 2}})
    with pytest.raises(SpecInvalid) as caught:
        parse_spec(spec)
    assert sorted(caught.value.problems) == [
        "spec.modell: unknown field; did you mean model?",
        "spec.placement.gpus: max must be at least min",
        "spec.training.beta: must be at least 0 (got -1)",
    ]


@pytest.mark.parametrize("pattern", ["<answer>(", "a{99999999999}", "(" * 4000])
def test_what_is_not_a_regular_expression_is_rejected_before_anything_starts(pattern: str) -> None:
    with pytest.raises(
        SpecInvalid, match=r"spec\.rewards\[0\]\.format\.pattern: .*not a regular expression"
    ):
        parse_spec(changed({"rewards.0.format.pattern": pattern}))


def test_every_field_says_what_it_is() -> None:
    """A part that a status has more than once says it at the first of them."""
    fields = [(path, schema) for path, schema in schema_fields(job()) if _is_named(path)]
    described = {path.rpartition(".")[2] for path, schema in fields if schema.get("description")}
    silent = [path for path, schema in fields if not schema.get("description")]
    assert [path for path in silent if not path.startswith("status.")] == ["metadata"]
    assert {path.rpartition(".")[2] for path in silent} <= described


def test_every_optional_field_of_the_spec_says_what_happens_when_it_is_unset() -> None:
    spec = GRPOJobSpec.model_json_schema()
    silent = [
        f"{model.get('title')}.{name}"
        for model in (spec, *spec["$defs"].values())
        for name, field in model.get("properties", {}).items()
        if name not in model.get("required", ())
        and not re.search(r"Unset|Auto:", field["description"])
    ]
    kinds = ["format", "accuracy", "python", "http", "model"]
    assert silent == [f"RewardSpec.{kind}" for kind in kinds], (
        "a reward's kinds are explained by its rule"
    )


def test_of_the_status_only_the_generation_that_nobody_has_observed_has_a_default() -> None:
    status = job()["properties"]["status"]
    assert status["default"] == {"observedGeneration": 0}
    assert [path for path, schema in schema_fields(status) if "default" in schema] == []


def test_who_owns_which_field_of_a_part_of_the_status_is_not_kept() -> None:
    parts = [
        part.get("items", part)
        for part in job_schema()["properties"]["status"]["properties"].values()
    ]
    objects = [part for part in parts if part.get("type") == "object"]
    assert len(objects) > 10
    assert all(part["x-kubernetes-map-type"] == "atomic" for part in objects)


def test_the_definition_can_be_applied_by_tools_that_keep_a_copy_of_it() -> None:
    """`kubectl apply` and Argo CD put it into an annotation, which holds 262,144 bytes."""
    assert len(json.dumps(definition(), separators=(",", ":"))) <= 235_000


def test_columns_show_what_the_design_promises() -> None:
    columns = definition()["spec"]["versions"][0]["additionalPrinterColumns"]
    always = [column["name"].upper() for column in columns if column["priority"] == 0]
    assert always == [
        "PHASE",
        "REASON",
        "MODEL",
        "SIZE",
        "REFERENCE",
        "GPUS",
        "STEP",
        "KL",
        "REWARD",
        "RESTARTS",
        "AGE",
    ]
    known = {f".{path}" for path, _ in schema_fields(job())}
    for column in columns:
        path = re.sub(r"\[\?.*?\]", "[]", column["jsonPath"])
        assert path in known or path == ".metadata.creationTimestamp"


@pytest.mark.slow  # lint, a part of each run, does the same
def test_generated_files_are_fresh() -> None:
    assert codegen.stale_files(codegen.ROOT) == []


def test_check_fails_on_a_stale_file_and_writing_mends_it(
    tmp_path: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cheap = {path: render for path, render in codegen.OUTPUTS.items() if path.startswith("crds/")}
    monkeypatch.setattr(codegen, "OUTPUTS", cheap)
    assert codegen.main(["--root", str(tmp_path)]) == 0
    assert codegen.main(["--root", str(tmp_path), "--check"]) == 0
    (tmp_path / "crds/grpojob.yaml").write_text("stale")
    assert codegen.main(["--root", str(tmp_path), "--check"]) == 1
    assert "crds/grpojob.yaml is stale: run `make codegen`" in capsys.readouterr().err
    assert codegen.write_files(tmp_path) == ["crds/grpojob.yaml"]


class Unbounded(Model):
    """A text without a length."""

    text: str
    """Any text."""


class Alternatives(Model):
    """A union."""

    either: int | Annotated[str, Field(max_length=3)]
    """One or the other."""


class Tree(Model):
    """A model that contains itself."""

    below: Annotated[list["Tree"], Field(max_length=2)] = []
    """Smaller trees."""


class OneChoice(Model):
    """A literal with one value."""

    version: Literal["v1"] = "v1"
    """The only version."""


def test_a_single_choice_is_an_enum_as_crds_know_no_const() -> None:
    schema = structural_schema(OneChoice, defaults=True)["properties"]["version"]
    assert schema == {
        "description": "The only version.",
        "enum": ["v1"],
        "type": "string",
        "default": "v1",
    }


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Unbounded, "Unbounded.text: a string without maxLength"),
        (Alternatives, "Alternatives.either: a union"),
        (Tree, "recursive model"),
    ],
)
def test_a_model_without_a_structural_schema_is_rejected(model: type[Model], says: str) -> None:
    with pytest.raises(NotStructural, match=re.escape(says)):
        structural_schema(model, defaults=True)


def _is_named(path: str) -> bool:
    return not path.endswith(("[]", ".*"))


def test_the_sample_is_the_smallest_spec() -> None:
    for name in SPEC.keys() - {"export"}:
        with pytest.raises(SpecInvalid, match=f"spec.{name}: is required"):
            parse_spec({key: value for key, value in SPEC.items() if key != name})

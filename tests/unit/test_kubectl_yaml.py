"""YAML is read as kubectl reads it, and what is no YAML is told in one line."""

import pytest
import yaml

from grpo_cli.show.kubectl_yaml import KubectlDumper, load_documents, load_value

KUBECTL = {
    # what `kubectl label --local -o json` of Kubernetes 1.36 makes of a scalar without quotes
    **dict.fromkeys(["1:30", "190:20:30", "12:30:45", "1:30.5", "=", "0b_", "0xg", "e5"]),
    **dict.fromkeys(["2026-01-31", "2024-01-01T10:00:00Z", "1e400", "-1e400", "1.2.3", "nUll"]),
    **dict.fromkeys(["y", "Y", "yes", "on", "True"], True),
    **dict.fromkeys(["n", "N", "No", "OFF", "false"], False),
    "0100": 64, "0o100": 64, "0x1F": 31, "0X1F": 31, "0b11": 3, "0B1": 1, "08": 8, "0888": 888,
    "1_000": 1000, "1_0.5": 10.5, "+1": 1, "-0x1F": -31, "00": 0, "5.": 5, "+.5e3": 500,
    "5e-6": 5e-6, "1E5": 100_000, ".5e-1": 0.05, "-2.5e+3": -2500, "1.50": 1.5, "4.0": 4,
    "'5e-6'": "5e-6", "1.24B": "1.24B",
}  # fmt: skip
"""None: the text itself."""


@pytest.mark.parametrize("text", KUBECTL)
def test_a_scalar_is_what_kubectl_reads(text: str) -> None:
    wanted = text if KUBECTL[text] is None else KUBECTL[text]
    value = load_value(text)
    assert (type(value), value) == (type(wanted), wanted)


@pytest.mark.parametrize("text", [*KUBECTL, "~", "null", "on", ".inf", "=", "<<"])
def test_a_text_is_written_so_that_kubectl_reads_it_as_text(text: str) -> None:
    written = yaml.dump([text], Dumper=KubectlDumper)
    assert load_value(written) == yaml.safe_load(written) == [text]


def test_what_is_empty_is_null() -> None:
    assert load_value("[~, null, Null, NULL, ]") == [None] * 4
    assert load_value("a:") == {"a": None}


def test_keys_are_texts_and_anchors_are_merged() -> None:
    assert load_value("{2: a, true: b, <<: {c: d}}") == {"2": "a", "true": "b", "c": "d"}
    assert load_value("[&x {a: 1}, {<<: *x, a: 2}]") == [{"a": 1}, {"a": 2}]


def test_items_of_a_list_are_objects_of_the_stream() -> None:
    text = "kind: List\nitems: [{kind: A}, {kind: B}, 3]\n---\n---\nx\n---\nkind: C\n"
    assert [document["kind"] for document in load_documents(text)] == ["A", "B", "C"]


def test_a_second_document_of_a_value_is_named() -> None:
    with pytest.raises(ValueError, match="line 2, column 1: a second document begins here; give"):
        load_value("a: 1\n---\nb: 2")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "line 1, column 5: expected the node content, but found '<stream end>'"),
        ("a:\n\tb: 1", r"line 2, column 1: .* cannot start any token; indent by blanks"),
        ("a: &x {b: *x}", "line 1, column 4: an alias stands inside of its own anchor"),
        ("a: &x [[*x]]", "line 1, column 4: an alias stands inside of its own anchor"),
        ("{a: 1, b: 2,\na: 3}", "line 2, column 1: a is set twice; keep one of the two"),
        ("a: {{ .Values.b }}", "line 1, column 5: a key can't be a list or a mapping"),
        ("a: *b", "line 1, column 4: found undefined alias 'b'"),
        ("a: !!python/object:os.system x", "line 1, column 4: could not determine a constructor"),
        ("a: \x00", "character 4 is not allowed in YAML"),
        ("[" * 9999, "it is nested too deeply"),
    ],
)
def test_what_is_no_yaml_is_told_in_one_line_with_its_place(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=f"^{says}") as caught:
        load_documents(text)
    assert "\n" not in str(caught.value)

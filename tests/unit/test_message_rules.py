"""The rules of messages, and how errors and other programs' texts are made into sentences."""

import socket

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo_api.text.messages import (
    MAX_MESSAGE,
    connection_problem,
    plain_text,
    shorten,
    value_text,
)
from tests.generated import cases
from tests.message_rules import RULES, broken_rules

BAD = {
    "an object as Python prints it": "ClientConnectorError(ConnectionKey(host='10.0.0.7'))",
    "a class as Python prints it": "<class 'ValueError'>",
    "bytes as Python prints them": "HTTP 500: b'no'",
    "a traceback": "Traceback (most recent call last): …",
    "Go's word for nothing": "spec.name: Invalid value: <nil>",
    "an address of an object": "Session at 0x7f51f86eea50",
    "a secret": "https://user:password@hub.example/x",
    "more than one line": "one\ntwo",
}


def test_each_rule_refuses_what_it_is_about_and_takes_a_sentence() -> None:
    assert BAD.keys() == RULES.keys()
    for rule, message in BAD.items():
        assert broken_rules(message, 300) == [rule]
    assert broken_rules("x" * 301, 300) == ["301 characters, more than 300"]
    assert not broken_rules("pod run-1-0 waits: ImagePullBackOff (see `kubectl logs`).", 300)


def raised_from(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ConnectionRefusedError(111, "Connect call failed"), "connection refused by hub:8080"),
        (
            raised_from(OSError("Cannot connect to host"), ConnectionRefusedError()),
            "connection refused by hub:8080",
        ),
        (socket.gaierror(-2, "Name or service not known"), "hub:8080: name resolution failed"),
        (TimeoutError(), "hub:8080: no answer in time"),
        (ConnectionResetError(104, "reset"), "hub:8080: the connection was cut"),
        (OSError(113, "No route to host"), "hub:8080: no route to it"),
        (
            RuntimeError("GET https://hub/api/x: HTTP 503 Service Unavailable"),
            "hub:8080: HTTP 503 Service Unavailable",
        ),
        (ValueError(), "hub:8080: ValueError"),
    ],
)
def test_a_failed_request_is_told_in_a_plain_sentence(error: Exception, sentence: str) -> None:
    assert connection_problem(error, "hub:8080") == sentence


def test_what_is_no_secret_stays() -> None:
    text = "GET https://huggingface.co/api/models/team/model: HTTP 503; s3://bucket/run at node-0"
    assert plain_text(text) == text
    secrets = "https://me:word@hub/x with Bearer abcdefgh12345678== and hf_abcdefghijkl"
    assert plain_text(secrets) == "https://…@hub/x with Bearer … and hf_…"
    link = "GET https://me:word@cdn/x?X-Amz-Date=1&X-Amz-Signature=ab%3D of hf_hub_download"
    assert plain_text(link) == "GET https://…@cdn/x?… of hf_hub_download"
    page = "GET https://s3/bucket?list-type=2&prefix=runs%2F"
    assert plain_text(page) == page


@pytest.mark.parametrize("part", ["?key", "?a=1&", "://a", "Bearer ", '"key', "GET ://a: ", "sk-"])
def test_no_text_takes_more_than_a_moment(part: str) -> None:
    # An expression of quadratic or cubic time would take from minutes to days.
    text = "GET " + 50_000 * part
    assert plain_text(text)
    assert value_text({"a": text})
    assert connection_problem(OSError(text), "hub:8080")


def test_a_value_is_shown_as_json_without_secrets() -> None:
    env = {"WANDB_API_KEY": "0123456789abcdef", "A": None, "hub_token": "abc", "B": "hf_abcdefghij"}
    assert value_text(env) == ('{"WANDB_API_KEY": "…", "A": null, "hub_token": "…", "B": "hf_…"}')
    assert (
        value_text([{"name": "PASSWORD", "value": "x"}]) == '[{"name": "PASSWORD", "value": "…"}]'
    )
    assert value_text("s3://me:word@bucket") == '"s3://…@bucket"'
    assert (
        value_text({"answerColumn": "answer", "b": "é" * 90}, 40)[:28]
        == '{"answerColumn": "answer", "'
    )


TEXTS = st.lists(
    st.sampled_from([*BAD.values(), "Bearer abcdefgh12345678", "hf_abcdefghijkl"]) | st.text()
)


@settings(max_examples=cases(200))
@given(TEXTS.map(" ".join))
@example("://a://:0@")
def test_whatever_others_say_fits_into_a_condition(text: str) -> None:
    message = shorten(plain_text(text), MAX_MESSAGE)
    covered = {"Go's word for nothing", "an address of an object", "a secret", "more than one line"}
    assert not covered & set(broken_rules(message, MAX_MESSAGE))
    assert len(message) <= MAX_MESSAGE


@settings(max_examples=cases(100))
@given(st.text("ab ", min_size=300, max_size=600), st.text("cd", min_size=1, max_size=100))
def test_a_message_that_is_cut_keeps_what_to_do(start: str, advice: str) -> None:
    message = shorten(f"{start}. {advice}", 300)
    assert message.endswith(f"… {advice}")
    assert len(message) == 300

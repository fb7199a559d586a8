"""Holds each message of a decision, condition or event that the operator makes in a test to rules.

A plugin of pytest: the test that made a message which breaks one fails, with the rule and the
message. So nobody has to remember the rules where a message is written.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest

from grpo_api.text.messages import MAX_MESSAGE, plain_text
from grpo_operator.decide.decisions import Decision
from grpo_operator.report import conditions, events, status

RULES = {
    "an object as Python prints it": r"\b[A-Z]\w+\((?:[a-z_]+=|[A-Z]\w+\(|['\"])|<[\w.]+ object",
    "a class as Python prints it": r"<class '",
    "bytes as Python prints them": r"\bb['\"]",
    "a traceback": r"Traceback \(most recent|^\s*File \"",
    "Go's word for nothing": r"<nil>",
    "an address of an object": r"\b0x[0-9a-f]{6,}",
    "a secret": r"\bhf_[A-Za-z0-9]{8}|://[^\s/@]+:[^\s/@]+@|\bBearer [A-Za-z0-9]",
    "more than one line": r"\n",
}


@lru_cache(1000)
def broken_rules(message: str, most: int) -> list[str]:
    """The rules that a message breaks. Most messages are made again and again."""
    broken = [rule for rule, pattern in RULES.items() if re.search(pattern, message)]
    if len(message) > most:
        broken.append(f"{len(message)} characters, more than {most}")
    return broken


@pytest.fixture(autouse=True)
def _message_rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail the test that made a condition or an event with a bad message."""
    bad: list[str] = []

    def judge(where: str, message: str, most: int) -> None:
        bad.extend(f"{where}: {rule}: {message}" for rule in broken_rules(message, most))

    make_conditions, make_event = conditions.conditions, events._event
    make_decision = Decision.__init__

    def judged_conditions(*arguments: Any) -> Any:
        made = make_conditions(*arguments)
        for one in made:
            judge(f"{one.type} {one.reason}", one.message, MAX_MESSAGE)
        return made

    def judged_event(*arguments: Any, **fields: Any) -> Any:
        made = make_event(*arguments, **fields)
        judge(f"event {made['reason']}", made["message"], events.MAX_MESSAGE)
        return made

    def judged_decision(decision: Decision, *arguments: Any, **fields: Any) -> None:
        make_decision(decision, *arguments, **fields)
        # What others say is cleaned and cut where a condition is made of it.
        said = plain_text(decision.message)
        judge(f"decision {decision.reason}", said, len(said))

    monkeypatch.setattr(Decision, "__init__", judged_decision)
    monkeypatch.setattr(status, "conditions", judged_conditions)
    monkeypatch.setattr(events, "_event", judged_event)
    yield
    assert not bad, "\n".join(sorted(set(bad)))

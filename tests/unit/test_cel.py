"""Rules mean in Python what they mean to the API server."""

from types import SimpleNamespace

import pytest

from grpo_api.text.cel import predicate

JOB = SimpleNamespace(
    model=SimpleNamespace(name="a/b", base_name=None),
    names=["b", "a"],
    limits={"cpu": "1", "memory": "2Gi"},
    max_kl=0.5,
)


@pytest.mark.parametrize(
    ("cel", "expected"),
    [
        ("has(self.model.baseName)", False),
        ("!has(self.model.baseName) || self.model.baseName.startsWith('a')", True),
        ("has(self.maxKL) && self.maxKL > 0.0", True),
        ("self.maxKL != 0.5", False),
        ("self.model.name in ['a/b', '!has(c) && d']", True),
        ("self.names.exists(name, name == 'a') && size(self.names) == 2", True),
        ("self.names.all(name, name.matches('^[a-z]$'))", True),
        ("self.names.filter(name, name != 'a').size() == 1", True),
        ("(['c'] + self.names.map(name, name + 'x')).all(name, name in ['c', 'bx', 'ax'])", True),
        ("self.limits.all(name, quantity(self.limits[name]).compareTo(quantity('1')) >= 0)", True),
    ],
)
def test_a_rule_is_evaluated_on_a_model(cel: str, expected: bool) -> None:
    assert predicate(cel)(JOB) is expected


def test_a_dollar_is_the_end_of_a_text_as_it_is_in_re2() -> None:
    ends = predicate("self.matches('^[a-z]+$')")
    assert ends("abc")
    assert not ends("abc\n")

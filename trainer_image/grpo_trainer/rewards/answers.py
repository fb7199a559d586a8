"""Finding the answer in a text and comparing two answers: pure functions, linear in the length of
the text."""

from collections.abc import Callable
from decimal import Decimal, InvalidOperation

_HASH = "####"
_BOXED = "\\boxed{"
_CURRENCIES = "$€£"


def xml_answer(text: str) -> str | None:
    """The content of the last complete `<answer>…</answer>`, without surrounding space; None
    without one."""
    before, closing, _ = text.rpartition("</answer>")
    _, opening, answer = before.rpartition("<answer>")
    if not closing or not opening:
        return None
    return answer.strip()


def hash_answer(text: str) -> str | None:
    """The rest of the line after the last `####`, as GSM8K writes its answers; None without one."""
    _, mark, rest = text.rpartition(_HASH)
    if not mark:
        return None
    lines = rest.strip().splitlines()
    return lines[0].strip() if lines else ""


def boxed_answer(text: str) -> str | None:
    """The content of the last `\\boxed{…}`, nested braces included; None without a complete one."""
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    start += len(_BOXED)
    end = _closing_brace(text, start)
    return None if end is None else text[start:end].strip()


def _closing_brace(text: str, start: int) -> int | None:
    """Where the brace that was opened just before `start` is closed; a backslash escapes a
    brace."""
    depth, escaped = 1, False
    for position in range(start, len(text)):
        character = text[position]
        if not escaped and character in "{}":
            depth += 1 if character == "{" else -1
            if depth == 0:
                return position
        escaped = character == "\\" and not escaped
    return None


def whole_answer(text: str) -> str | None:
    """The whole text without surrounding space."""
    return text.strip()


def auto_answer(text: str) -> str | None:
    """By the first of XML, `####` and boxed that occurs in the text, else the whole text."""
    for extract in (xml_answer, hash_answer, boxed_answer):
        answer = extract(text)
        if answer is not None:
            return answer
    return whole_answer(text)


EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "Auto": auto_answer,
    "XML": xml_answer,
    "Hash": hash_answer,
    "Boxed": boxed_answer,
    "None": whole_answer,
}
"""By the values of `accuracy.extract`."""


def expected_answer(value: str | float) -> str:
    """The right answer in a dataset's cell: the text after `####` where that occurs, else all of
    it."""
    text = str(value)
    answer = hash_answer(text)
    return text.strip() if answer is None else answer


def parse_number(text: str) -> Decimal | None:
    """The number that a text such as `1,000`, `$18`, `-3.50` or `1e3` is; None if it is not a
    finite number.

    Thousands may be set off by commas; one currency sign in front and one full stop behind are left
    out.
    """
    bare = text.strip().removesuffix(".")
    sign = "-" if bare.startswith("-") else ""
    digits = bare.removeprefix("-").lstrip()
    if digits and digits[0] in _CURRENCIES:
        digits = digits[1:].lstrip()
    if not _commas_set_off_thousands(digits):
        return None
    try:
        value = Decimal(sign + digits.replace(",", ""))
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


def _commas_set_off_thousands(digits: str) -> bool:
    first, *groups = digits.split(".", maxsplit=1)[0].split(",")
    if not groups:
        return True
    return 1 <= len(first) <= 3 and all(len(group) == 3 for group in groups)


def is_same_number(answer: str, expected: str) -> bool:
    """Whether both are numbers, and the same one."""
    value = parse_number(answer)
    return value is not None and value == parse_number(expected)

"""Texts of other programs, brought to a length that a status takes."""


def cut(text: str, most: int) -> str:
    """The text, its end replaced by an ellipsis when it has more characters than that."""
    return text if len(text) <= most else text[: most - 1] + "…"

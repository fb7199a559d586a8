"""Prints what a program reads, as one document of JSON or YAML, the same for all commands."""

import json
from argparse import ArgumentParser
from typing import Any

from grpo_api.text.log_lines import finite_values


def add_output(parser: ArgumentParser, shown: str = "table") -> None:
    """Add `-o`; unset is what people read, by this name."""
    parser.add_argument(
        "-o", "--output", choices=(shown, "json", "yaml"), default=shown, help=f"unset: {shown}"
    )


def print_document(output: str, document: Any) -> None:
    """Print a value of dicts, lists and scalars in the form that `-o` names."""
    finite = finite_values(document)
    if output == "json":
        print(json.dumps(finite, ensure_ascii=False, indent=2))
        return
    import yaml

    from .kubectl_yaml import KubectlDumper

    text = yaml.dump(finite, Dumper=KubectlDumper, sort_keys=False, width=120, allow_unicode=True)
    print(text, end="")

"""Writes the objects of a job as YAML that people read: what was not taken first, as comments."""

from collections.abc import Sequence
from typing import Any

import yaml

from .kubectl_yaml import KubectlDumper

SMALL_JOB = """\
# A GRPO job. `grpo plan -f FILE --gpus 1xA100` plans it without a cluster, `kubectl apply -f FILE`
# runs it.
apiVersion: grpo.dev/v1alpha1
kind: GRPOJob
metadata:
  {name}
spec:
  model:
    name: {model}                 # a hub id, or a folder of model.volume
  dataset:
    name: openai/gsm8k            # or files, on a volume or in a ConfigMap
    config: main
    promptColumn: question
    systemPrompt: Think step by step. Put the result into \\boxed{{}}.
  rewards:
  - accuracy: {{answerColumn: answer, extract: Boxed, compare: Numeric}}
  training:
    maxSteps: 200                 # unset: one pass over the dataset
    numGenerations: 8             # completions per prompt
    promptsPerStep: 8
    maxCompletionLength: 512
  placement: {{gpus: {{max: 8}}}}
  checkpoint:                     # the trained model ends up here, too
    volumeClaimTemplate: {{size: {size}, accessMode: ReadWriteOnce}}
"""
SMALL_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"


class _Dumper(KubectlDumper):
    """Writes texts of several lines as blocks."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def render(source: str, documents: Sequence[dict[str, Any]], notes: Sequence[str]) -> str:
    """The YAML of a job that was made of a file."""
    head = [f"# Made of {_comment(source)} by `grpo init --from-trl`."]
    if notes:
        head.append("# Not taken as it stands:")
        head += [f"# - {_comment(note)}" for note in notes]
    bodies = [
        yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)
        for document in documents
    ]
    return "\n".join(head) + "\n" + "---\n".join(bodies)


def small_job(name: str) -> str:
    """A small commented job."""
    name_line = yaml.dump({"name": name}, Dumper=KubectlDumper).strip()  # '123' stays a text
    return SMALL_JOB.format(name=name_line, model=SMALL_MODEL, size="30Gi")


def _comment(text: str) -> str:
    """A text that ends no comment line."""
    return "".join(letter if letter.isprintable() else " " for letter in text)

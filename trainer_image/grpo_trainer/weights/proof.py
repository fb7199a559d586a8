"""Proves on every rank that a model holds exactly the weights of its checkpoint.

Wrong weights train without an error. ZeRO-3 silently takes rank 0's file. DDP overwrites the
policies of the other ranks and leaves their references as they were. Each rank compares its own
elements (all, or its ZeRO-3 partition) with the same slice of its own file, bit for bit. The ranks
exchange fingerprints of what they hold whole. That needs no network beyond those, and costs one
read of the rank's share. It must come before TRL wraps anything, since wrapping overwrites what
differs.

The file may have a parameter under another key or in another form: transformers merges the experts
of a mixture, for example. Such a parameter is gathered alone and compared in the file's form,
converted by transformers itself. A fresh adapter is in no file: it must be the same on all ranks.
One that was loaded is proven by its own file.
"""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from peft import PeftModel
from safetensors import SafetensorError
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

from ..gang import ranks
from ..runtime.errors import DiskFailed, DriftedApart, WeightsDiffer, is_volume_away
from .checkpoint_files import WeightFiles
from .parameters import (
    Share,
    TensorKey,
    adapter_key,
    combined_fingerprint,
    fingerprint,
    gathered_share,
    is_bitwise_equal,
    is_partitioned,
    local_share,
    parameters_by_name,
    tensor_keys,
)

CHUNK = 1 << 24
"""Elements compared at a time: 64 MiB in float32 is all that the proof adds to the memory of a
rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The result of a proof and its cost."""

    what: str
    """Which model."""
    parameters: int
    """Parameters compared with a file."""
    converted: int
    """Those of them that were gathered and converted to the file's form."""
    across_ranks: int
    """Parameters that no file has, compared between ranks only."""
    bytes: int
    """Bytes that this rank compared."""
    seconds: float
    """Duration on this rank."""
    fingerprint: str
    """One name for the weights; the same for the same weights, parallelism and world size."""


@dataclass(slots=True, kw_only=True)
class _Finding:
    """What one rank found."""

    fingerprints: dict[str, str] = field(default_factory=dict)
    """Fingerprint of this rank's elements by parameter."""
    whole: dict[str, str] = field(default_factory=dict)
    """Those that every rank holds whole, so that they can be compared between ranks."""
    different: str = ""
    """First parameter that is not as in the file; empty if all are."""
    expected: str = ""
    """What the file has instead, in words."""
    is_unread: bool = False
    """Whether its volume did not answer instead."""
    bytes: int = 0
    """Bytes compared."""


@dataclass(frozen=True, slots=True)
class _Parameter:
    """One parameter of a model, and where its values should be."""

    model: nn.Module
    name: str
    tensor: nn.Parameter
    key: TensorKey


def prove_weights(
    model: nn.Module, files: WeightFiles, what: str, *, adapter_only: bool = False
) -> Proof:
    """Compares every parameter with the checkpoint, or those of the adapter. A collective: all
    ranks must call it.

    Raises:
        WeightsDiffer: on any rank; every rank raises the same, naming the first parameter, the
            ranks and fingerprints.
        DiskFailed: the same, of a volume that does not answer.
    """
    start = time.perf_counter()
    keys = tensor_keys(model, files.shapes)
    if adapter_only:
        keys = {name: key for name, key in keys.items() if adapter_key(name)}
    _same_keys(keys, what)
    _same_configuration(model, what)
    finding = _Finding()
    parameters = parameters_by_name(model)
    for name, key in keys.items():
        _compare(_Parameter(model, name, parameters[name], key), files, finding)
    findings = ranks.gather(finding)
    _judge(findings, what)
    forms = Counter(key.form for key in keys.values())
    seconds = time.perf_counter() - start
    # Whole on every rank: the first rank's weights are all. Partitioned: the ranks' shares in
    # order.
    distinct_findings = findings[:1] if finding.whole else findings
    shares = [combined_fingerprint(item.fingerprints.values()) for item in distinct_findings]
    return Proof(
        what=what,
        parameters=len(keys) - forms["absent"],
        converted=forms["converted"],
        across_ranks=forms["absent"],
        bytes=finding.bytes,
        seconds=seconds,
        fingerprint=combined_fingerprint(shares),
    )


def prove_equal(model: nn.Module, what: str) -> None:
    """Compares the parameters that all ranks hold whole (plain, DDP, ZeRO-2) by fingerprint. A
    collective.

    Under ZeRO-3 every element lives on one rank only, so there is nothing that could differ.

    Raises:
        DriftedApart: names the first parameter and the ranks. They began with the same weights
            (`prove_weights`), so that their last checkpoint is good and deserves another try.
    """
    finding = _Finding()
    for name, parameter in parameters_by_name(model).items():
        if not is_partitioned(parameter):
            finding.whole[name] = fingerprint(parameter)
    difference = _between_ranks(ranks.gather(finding))
    if difference:
        raise DriftedApart(
            f"{what}: {difference}. They were the same at the start: the memory or the network of "
            "one has failed. If it comes again, keep the job off that node"
        )


def _same_keys(keys: dict[str, TensorKey], what: str) -> None:
    """All ranks must gather the same parameters, or they wait for each other for ever."""
    everyone = ranks.gather(list(keys.items()))
    for number, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            mine, first = next(
                pair for pair in zip_longest(theirs, everyone[0]) if pair[0] != pair[1]
            )
            raise WeightsDiffer(
                f"{what}: rank {number} finds {_parameter_description(mine)} in its files, rank 0 "
                f"{_parameter_description(first)}; the ranks have different files"
            )


def _same_configuration(model: nn.Module, what: str) -> None:
    """Equal weights compute other numbers with another epsilon, scale or rotary base. Each rank's
    own engine would compute them, too."""
    config: Any = model.config
    # Where a node has the files says nothing of them.
    everyone = ranks.gather(config.to_dict() | {"_name_or_path": ""})
    for number, theirs in enumerate(everyone):
        for name in sorted(theirs.keys() | everyone[0].keys()):
            mine, first = theirs.get(name), everyone[0].get(name)
            if mine != first:
                raise WeightsDiffer(
                    f"{what}: {name} in config.json is {mine!s:.80} on rank {number}, and "
                    f"{first!s:.80} on rank 0. Compare the model's files on the nodes"
                )


def _parameter_description(item: tuple[str, TensorKey] | None) -> str:
    return f"parameter {item[0]} ({item[1].form})" if item else "no further parameter"


def _compare(parameter: _Parameter, files: WeightFiles, finding: _Finding) -> None:
    """Adds one parameter to the finding. After the first difference only fingerprints are taken."""
    converted = parameter.key.form == "converted"
    # Gathering is a collective: whether a parameter is gathered follows from its key alone, on
    # which all ranks have agreed (_same_keys), and never from what this rank has found so far.
    with (gathered_share if converted else local_share)(parameter.tensor) as share:
        name, digest = parameter.name, fingerprint(share.tensor)
        finding.fingerprints[name] = digest
        finding.bytes += share.tensor.nbytes
        if share.is_whole:
            finding.whole[name] = digest
        if finding.different or parameter.key.form == "absent":
            return
        try:
            pairs = _slice_pairs(parameter.key.name, share, files)
            if converted:
                pairs = _converted_pairs(parameter, share, files)
            if not all(_is_as_loaded(mine, theirs) for mine, theirs in pairs):
                finding.different = name
                finding.expected = _expected_text(parameter.key, share, files)
        except (SafetensorError, OSError, KeyError) as error:
            finding.different, finding.expected = name, f"can't be read ({error!r})"
            finding.is_unread = is_volume_away(error)


def _slice_pairs(
    key: str, share: Share, files: WeightFiles
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of this rank's elements and the file's, a chunk at a time."""
    for start in range(0, share.tensor.numel(), CHUNK):
        mine = share.tensor[start : start + CHUNK]
        yield mine, files.read(key, share.start + start, share.start + start + mine.numel())


def _converted_pairs(
    parameter: _Parameter, share: Share, files: WeightFiles
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of the whole parameter in the file's form and the file's tensors."""
    model = parameter.model
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    whole = {parameter.key.name: share.tensor.view(share.shape)}
    for key, tensor in revert_weight_conversion(base, whole).items():
        yield tensor.reshape(-1), files.read(key, 0, tensor.numel())


def _is_as_loaded(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether the file's elements, cast to the model's dtype as loading does, are the same bits."""
    return is_bitwise_equal(mine, theirs.to(device=mine.device, dtype=mine.dtype))


def _expected_text(key: TensorKey, share: Share, files: WeightFiles) -> str:
    if key.form == "converted":
        return "has others in its own form"
    theirs = files.read(key.name, share.start, share.stop).to(share.tensor.dtype)
    return f"has {fingerprint(theirs)}"


def _judge(findings: list[_Finding], what: str) -> None:
    """Raises for the first parameter, in the model's order, that is wrong anywhere."""
    # the files first: that a rank differs from its own file names the fault better than that it
    # differs from its peers
    wrong = [number for number, finding in enumerate(findings) if finding.different]
    if wrong:
        first = findings[wrong[0]]
        place = f"{what}: parameter {first.different} on {ranks.rank_names(wrong)}"
        if first.is_unread:
            raise DiskFailed(f"{place}: the file {first.expected}")
        mine = first.fingerprints[first.different]
        raise WeightsDiffer(
            f"{place} is not the checkpoint's: it has fingerprint {mine}, the file "
            f"{first.expected}. Compare the model's files on the nodes"
        )
    if difference := _between_ranks(findings):
        raise WeightsDiffer(
            f"{what}: {difference}. The ranks read different files, or initialised at random"
        )


def _between_ranks(findings: list[_Finding]) -> str:
    """A sentence about the first parameter that differs between ranks; empty if all are equal."""
    for name, value in findings[0].whole.items():
        values = [finding.whole.get(name) for finding in findings]
        others = [number for number, theirs in enumerate(values) if theirs != value]
        if others:
            return (
                f"parameter {name} differs between ranks: rank 0 has fingerprint {value}, "
                f"{ranks.rank_names(others)} {values[others[0]]}"
            )
    return ""

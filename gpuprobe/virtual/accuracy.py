"""How far a virtual GPU's figures may be off, by the operators that a program calls.

``accuracy.json`` has the result of comparing allocations with those of torch's own CUDA code, by
operator: which allocate the same in all calls, and for the others how much more or less. Source:
``benchmarks/virtual_accuracy.py``, from what ``benchmarks/oracle.py`` collects.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any, Final, NamedTuple

from gpuprobe.model.plans.estimate import Margin

SMALL: Final = 16 << 10
"""Bytes of a difference that does not count: less than a hundredth of the smallest segment."""

LISTED: Final = 3
"""Names in a sentence."""


class Difference(NamedTuple):
    """How much more (``above``) and less (``below``) torch allocates in a call: bytes, and bytes
    for each byte of its arguments and results on the GPU.
    """

    above: tuple[int, float]
    below: tuple[int, float]

    def bytes(self, size: int) -> tuple[int, int]:
        """Both for a call with tensors of ``size`` bytes."""
        first, second = (fixed + round(share * size) for fixed, share in self)
        return first, second


@functools.cache
def _document() -> dict[str, Any]:
    text = resources.files("gpuprobe.virtual").joinpath("accuracy.json").read_text("utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


@functools.cache
def _compared_types() -> frozenset[Any]:
    """The dtypes in which operators were compared. Kernels of integers are those of the int64 that
    was compared, but for the size of an element, and those of float16 are bfloat16's: of 140 calls
    in float16 none differs for an operator that is equal in the others.
    """
    import torch

    names = {"bool", "uint8", "int8", "int16", "int32", "float16", *_document()["dtypes"]}
    return frozenset(getattr(torch, name) for name in names)


@functools.cache
def compared() -> tuple[frozenset[str], dict[str, Difference], Difference]:
    """The operators that are equal, the differences of others, and what is taken for those that
    were not compared, which nineteen of twenty that differ are within.
    """
    document = _document()

    def difference(entry: dict[str, Any]) -> Difference:
        return Difference(tuple(entry["above"]), tuple(entry["below"]))

    return (
        frozenset(document["equal"]),
        {name: difference(entry) for name, entry in document["differences"].items()},
        difference(document["not_compared"]),
    )


def known_equal(operator: Any) -> bool:
    """Whether an operator's allocations were compared and equal in all calls; of torch's operators
    that return nothing new also those that were not compared: all 71 that were are equal.
    """
    name = str(operator)
    equal, differences, _ = compared()
    return name in equal or (name not in differences and returns_nothing_new(operator))


def returns_nothing_new(operator: Any) -> bool:
    """Whether an operator of torch returns views or its arguments alone."""
    return str(operator).startswith("aten.") and all(
        result.alias_info is not None for result in operator._schema.returns
    )


def in_compared_types(args: Sequence[Any], result: Any) -> bool:
    """Whether the tensors of a call have dtypes in which operators were compared. Of a list of
    tensors the first counts.
    """
    types = _compared_types()
    for value in (*args, result):
        each = value[0] if isinstance(value, list | tuple) and value else value
        dtype = getattr(each, "dtype", None)
        if dtype is not None and dtype not in types:
            return False
    return True


class CalledOperators:
    """The operators of a run that are not known to be equal, with the bytes of their tensors."""

    def __init__(self) -> None:
        self._largest: dict[str, int] = {}
        self._causes: dict[str, float] = {}

    def note(self, name: str, size: int) -> None:
        """A call with tensors of ``size`` bytes on a GPU, arguments and results together."""
        self._largest[name] = max(size, self._largest.get(name, 0))

    def cause(self, text: str, share: float) -> None:
        """Something else by which a peak may differ, a phrase, and by up to which share of it."""
        self._causes[text] = share

    def sizes(self) -> dict[str, int]:
        """The bytes of the largest call of each operator."""
        return dict(self._largest)

    def clear(self) -> None:
        """Forget all of them."""
        self._largest.clear()
        self._causes.clear()

    def margin(self, peak: int) -> Margin:
        """What a peak of ``peak`` bytes may be off by. Calls follow one another, so that the
        largest difference of one operator counts, and none if all are of up to `SMALL` bytes.
        """
        _, differences, unknown = compared()
        found = {
            name: differences.get(name, unknown).bytes(size) for name, size in self._largest.items()
        }
        share = round(sum(self._causes.values()) * peak)
        names = sorted(
            (name for name, sides in found.items() if max(sides) > SMALL),
            key=lambda name: (-max(found[name]), name),
        )
        return Margin(
            below=share + (max(below for _, below in found.values()) if names else 0),
            above=share + (max(above for above, _ in found.values()) if names else 0),
            why=_listed([*self._causes, *(name.split(".")[1] for name in names)]),
        )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {more} more" if more > 0 else "")

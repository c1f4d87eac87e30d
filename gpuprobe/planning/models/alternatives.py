"""The changes to a model's run that suggestions try: each is another script."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpuprobe.catalogue.gpus import parse_spec
from gpuprobe.errors import GpuprobeError
from gpuprobe.model.plans.estimate import EstimatedChange
from gpuprobe.model.plans.request import EstimateRequest
from gpuprobe.model.text import human_bytes
from gpuprobe.planning.alternatives import no_eight_bit
from gpuprobe.planning.models.run import ModelRun
from gpuprobe.planning.models.script import script
from gpuprobe.planning.suggestions import Alternative, Changes, Skipped


class _Change:
    """A change: its ``name``, the ``fields`` of the run that it sets, the ``options`` to write."""

    def __init__(self, name: str, options: str, **fields: Any) -> None:
        self.name = name
        self.options = options
        self.fields = fields


_TOO_LARGE = 1.1
"""Times the GPU's memory: a run that needs more does not fit, though its need is interpolated."""


class ModelChanges:
    """The changes of a model's run, the easiest to adopt first: a `Provider`. Their scripts are in
    ``folder``, which must exist until the suggestions are made.
    """

    def __init__(self, run: ModelRun, folder: Path) -> None:
        self._run = run
        self._folder = folder
        self._written = 0

    def __call__(self, request: EstimateRequest) -> Changes:
        """Yield each change alone, then together with the easier ones until the run fits."""
        yield from self._batches(request)
        for steps in _families(self._run):
            for changes in steps:
                result = yield from self._change(request, changes)
                if result is not None and result.fits:
                    break

    def _batches(self, request: EstimateRequest) -> Changes:
        """Halve the batch size until the run fits. What takes more than the GPU has by the line
        through the two sizes before is skipped.
        """
        model, *_ = parse_spec(request.gpu)
        known: list[tuple[int, int]] = []  # sizes, and the bytes that they need
        for size in _halves(self._run.batch_size):
            change = _smaller_batch(self._run, size)
            if len(known) > 1:
                (more, high), (less, low) = known[-2:]
                expected = low - (high - low) * (less - size) // (more - less)
                if expected > _TOO_LARGE * model.total_memory:
                    about = human_bytes(expected)
                    yield Skipped(change.name, f"by the two before, it needs about {about}")
                    continue
            result = yield from self._change(request, [change])
            if result is None or result.failed:
                continue
            if result.fits:
                return
            known.append((size, result.needed))

    def _change(
        self, request: EstimateRequest, changes: list[_Change]
    ) -> Generator[Alternative | Skipped, EstimatedChange | None, EstimatedChange | None]:
        """Try changes together; returns the estimate with them. A run whose weights, gradients and
        optimizer state alone exceed the GPU is skipped.
        """
        name = " and ".join(change.name for change in changes)
        run = self._run
        for change in changes:
            run = run.changed(**change.fields)
        reason = ""
        if run.optimizer == "adamw-8bit" and self._run.optimizer != "adamw-8bit":
            reason = no_eight_bit()
        try:
            run.check()
        except GpuprobeError as error:
            reason = reason or str(error)
        model, *_ = parse_spec(request.gpu)
        if run.least_memory > model.total_memory:
            size = human_bytes(run.least_memory)
            reason = reason or f"weights, gradients and optimizer state alone are {size}"
        if reason:
            yield Skipped(name, reason)
            return None
        self._written += 1
        path = self._folder / f"change_{self._written}.py"
        path.write_text(script(run), encoding="utf-8")
        changed = replace(request, script=str(path), ranks=run.ranks)
        return (yield Alternative(name, changed, " ".join(change.options for change in changes)))


def _families(run: ModelRun) -> Iterator[list[list[_Change]]]:
    """The changes to try after smaller batches. Each family is a change alone, then with more
    and more others.
    """
    easier = [_smaller_batch(run, 1)] if run.batch_size > 1 else []
    if run.inference:
        if run.method != "qlora":
            yield _growing(_QUANTIZED, easier)
        return
    if not run.checkpointing:
        yield _growing(_CHECKPOINTING, easier)
        easier = [_CHECKPOINTING, *easier]
    if run.method == "full":
        if run.optimizer in ("adamw", "adamw-fused"):
            yield _growing(_EIGHT_BIT, easier)
        yield _growing(_LORA, easier)
    if run.method != "qlora":
        yield _growing(_QLORA, easier)[-1:]
        two, eight = _with_ranks(2 * run.ranks), _with_ranks(8 * run.ranks)
        yield [[two], *_growing(eight, easier), [*easier, _with_ranks(64 * run.ranks)]]


def _growing(change: _Change, easier: Sequence[_Change]) -> list[list[_Change]]:
    """A change alone, with the first of the easier ones, with the first two, and so on."""
    return [[*easier[:count], change] for count in range(len(easier) + 1)]


def _halves(value: int) -> Iterator[int]:
    while value > 1:
        value //= 2
        yield value


def _smaller_batch(run: ModelRun, size: int) -> _Change:
    accumulated = "" if run.inference else ", with gradient accumulation"
    return _Change(f"batch size {size}{accumulated}", f"--batch-size {size}", batch_size=size)


def _with_ranks(ranks: int) -> _Change:
    options = f"--ranks {ranks} --sharding fsdp"
    return _Change(f"{ranks} GPUs with FSDP2", options, ranks=ranks, sharding="fsdp")


_CHECKPOINTING = _Change("activation checkpointing", "--checkpointing", checkpointing=True)
_EIGHT_BIT = _Change("8-bit optimizer", "--optimizer adamw-8bit", optimizer="adamw-8bit")
_LORA = _Change("LoRA", "--method lora", method="lora")
_QLORA = _Change(
    "QLoRA", "--method qlora", method="qlora", ranks=1, dtype="bf16", optimizer="adamw"
)
_QUANTIZED = _Change("4-bit weights", "--method qlora", method="qlora", dtype="bf16")

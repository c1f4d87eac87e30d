"""The changes to a model's run that suggestions try: each is another script."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from gpuprobe.catalogue.gpus import parse_spec
from gpuprobe.errors import GpuprobeError
from gpuprobe.model.plans.estimate import EstimatedChange
from gpuprobe.model.text import human_bytes
from gpuprobe.planning.alternatives import no_eight_bit
from gpuprobe.planning.models.run import ModelRun
from gpuprobe.planning.models.script import script
from gpuprobe.planning.suggestions import Alternative, Changes, Skipped
from gpuprobe.planning.trials import Request


class _Change:
    """A change: its ``name``, the ``fields`` of the run that it sets, the ``options`` to write."""

    def __init__(self, name: str, options: str, **fields: Any) -> None:
        self.name = name
        self.options = options
        self.fields = fields


class ModelChanges:
    """The changes of a model's run, the easiest to adopt first: a `Provider`. Their scripts are in
    ``folder``, which must exist until the suggestions are made.
    """

    def __init__(self, run: ModelRun, folder: Path) -> None:
        self._run = run
        self._folder = folder
        self._written = 0

    def __call__(self, request: Request) -> Changes:
        """Yield each change alone; if none is enough, more and more of them together."""
        enough = False
        for change in _changes(self._run):
            found = yield from self._change(request, [change])
            enough = enough or found
        if enough:
            return
        for several in _together(self._run):
            if (yield from self._change(request, several)):
                return

    def _change(
        self, request: Request, changes: list[_Change]
    ) -> Generator[Alternative | Skipped, EstimatedChange | None, bool]:
        """Try changes together; returns whether the run fits with them. A run whose weights,
        gradients and optimizer state alone exceed the GPU is skipped.
        """
        name = " and ".join(change.name for change in changes)
        run = self._run
        for change in changes:
            run = run.changed(**change.fields)
        reason = ""
        if run.optimizer == "adamw-8bit" and self._run.optimizer != "adamw-8bit":
            reason = no_eight_bit(request["engine"])
        try:
            run.check()
        except GpuprobeError as error:
            reason = reason or str(error)
        model, *_ = parse_spec(request["gpu"])
        if run.least_memory > model.total_memory:
            size = human_bytes(run.least_memory)
            reason = reason or f"weights, gradients and optimizer state alone are {size}"
        if reason:
            yield Skipped(name, reason)
            return False
        self._written += 1
        path = self._folder / f"change_{self._written}.py"
        path.write_text(script(run), encoding="utf-8")
        changed = {**request, "script": str(path), "ranks": run.ranks}
        result = yield Alternative(name, changed, " ".join(change.options for change in changes))
        return result is not None and result.fits


def _changes(run: ModelRun) -> Iterator[_Change]:
    """The changes that the run does not have yet."""
    half = max(1, run.batch_size // 2)
    if run.batch_size > 1:
        name = f"batch size {half}"
        if not run.inference:
            name += ", with gradient accumulation"
        yield _Change(name, f"--batch-size {half}", batch_size=half)
    if run.inference:
        if run.method != "qlora":
            yield _QUANTIZED
        return
    if not run.checkpointing:
        yield _CHECKPOINTING
    if run.method == "full" and run.optimizer in ("adamw", "adamw-fused"):
        yield _EIGHT_BIT
    if run.method == "full":
        yield _LORA
    if run.method != "qlora":
        yield _QLORA
        for ranks in (2 * run.ranks, 8 * run.ranks):
            options = f"--ranks {ranks} --sharding fsdp"
            yield _Change(f"{ranks} GPUs with FSDP2", options, ranks=ranks, sharding="fsdp")


_CHECKPOINTING = _Change("activation checkpointing", "--checkpointing", checkpointing=True)
_EIGHT_BIT = _Change("8-bit optimizer", "--optimizer adamw-8bit", optimizer="adamw-8bit")
_LORA = _Change("LoRA", "--method lora", method="lora")
_QLORA = _Change(
    "QLoRA", "--method qlora", method="qlora", ranks=1, dtype="bf16", optimizer="adamw"
)
_QUANTIZED = _Change("4-bit weights", "--method qlora", method="qlora", dtype="bf16")


def _together(run: ModelRun) -> Iterator[list[_Change]]:
    """Changes together, of which each needs less memory than the one before."""
    smallest = []
    if run.batch_size > 1:
        smallest = [_Change("batch size 1", "--batch-size 1", batch_size=1)]
    if run.inference:
        yield [*smallest, _QUANTIZED]
        return
    less = [*smallest, *([] if run.checkpointing else [_CHECKPOINTING])]
    if less[1:]:
        yield less
    if less and run.method == "full":
        yield [*less, _EIGHT_BIT]
        yield [*less, _LORA]
    if less and run.method != "qlora":
        yield [*less, _QLORA]
        for ranks in (8, 16, 64):
            if ranks > run.ranks:
                options = f"--ranks {ranks} --sharding fsdp"
                more = _Change(f"{ranks} GPUs with FSDP2", options, ranks=ranks, sharding="fsdp")
                yield [*less, more]

"""The changes to a user's script that suggestions try, without an edit of its source.

`gpuprobe.planning.changes` makes each in the process of its estimate.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

from gpuprobe.allocator.settings import in_environment
from gpuprobe.errors import GpuprobeError
from gpuprobe.model.plans.request import EstimateRequest, ParameterSource
from gpuprobe.planning.program import parameter_source
from gpuprobe.planning.suggestions import Alternative, Changes, Skipped


class Change(NamedTuple):
    """A change: its ``name`` in a few words, its ``key`` in `gpuprobe.planning.changes`, and
    ``how``: what to write.
    """

    name: str
    key: str
    how: str


EXPANDABLE: Final = Change(
    "expandable segments",
    "expandable",
    "PYTORCH_ALLOC_CONF=expandable_segments:True in the environment",
)
FUSED: Final = Change("fused optimizer", "fused", "fused=True for the optimizer")
BF16: Final = Change(
    "bf16 autocast",
    "bf16",
    'with torch.autocast("cuda", dtype=torch.bfloat16): around the forward pass',
)
CHECKPOINT: Final = Change(
    "activation checkpointing",
    "checkpoint",
    "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) for the repeated blocks",
)
EIGHT_BIT: Final = Change(
    "8-bit optimizer", "8bit", "bitsandbytes.optim.AdamW8bit (Adam8bit) for AdamW (Adam)"
)
OFFLOAD: Final = Change(
    "optimizer on the CPU",
    "offload",
    "torchao.optim.CPUOffloadOptimizer, or DeepSpeed's ZeRO-Offload: slower steps",
)
ACCUMULATE: Final = Change(
    "gradient accumulation",
    "accumulate",
    "half the batch at a time, and optimizer.step() at every second one",
)


def with_expandable(conf: str | None) -> str:
    """Allocator settings with expandable segments."""
    expandable = "expandable_segments:True"
    return f"{conf},{expandable}" if conf else expandable


def expandable_already(conf: str | None) -> bool:
    """Whether these allocator settings, or for None those of the environment, have expandable
    segments.
    """
    return "expandable_segments:true" in (in_environment() if conf is None else conf).lower()


def no_eight_bit() -> str:
    """Why an 8-bit optimizer cannot be estimated; "" if it can."""
    return "" if find_spec("bitsandbytes") else "bitsandbytes is not installed"


def script_changes(request: EstimateRequest) -> Changes:
    """The changes of a user's script, the easiest to adopt first."""

    def changed(change: Change) -> Alternative:
        return Alternative(change.name, replace(request, change=change.key), change.how)

    if expandable_already(request.conf):
        yield Skipped(EXPANDABLE.name, "set already")
    else:
        conf = with_expandable(request.conf)
        yield Alternative(EXPANDABLE.name, replace(request, conf=conf), EXPANDABLE.how)
    for change in (FUSED, BF16, CHECKPOINT):
        yield changed(change)
    reason = no_eight_bit()
    if reason:
        yield Skipped(EIGHT_BIT.name, reason)
    else:
        yield changed(EIGHT_BIT)
    yield changed(OFFLOAD)
    yield from _smaller_batches(request)
    if request.ranks > 1:
        twice = 2 * request.ranks
        how = "of use if the program shards its model or optimizer"
        yield Alternative(f"{twice} ranks", replace(request, ranks=twice), how)


def _smaller_batches(request: EstimateRequest) -> Changes:
    """The batch in parts, half as large each time, until one fits: what training computes stays the
    same.
    """
    parameter = None if request.module else batch_parameter(request)
    if parameter is None:
        reason = "the script has no option or constant that names a batch size"
        yield Skipped(ACCUMULATE.name, reason)
        return
    name = parameter.option or parameter.constant
    if parameter.value < 2:
        yield Skipped(ACCUMULATE.name, f"{name} {parameter.value} cannot be halved")
        return
    parts, value = 1, parameter.value
    while value > 1:
        parts, value = 2 * parts, value // 2
        changed = replace(
            request,
            parameter=parameter,
            value=value,
            change=ACCUMULATE.key,
            steps=2 * request.steps,
        )
        how = f"{name} {value}, and optimizer.step() once for {parts} of them"
        result = yield Alternative(f"{ACCUMULATE.name} ({name} {value})", changed, how)
        if result is None or result.failed or result.fits:
            return


_BATCH: Final = re.compile(r"batch[-_]?size|^-*batch$|^-*bs$|micro[-_]?batch", re.IGNORECASE)


def batch_parameter(request: EstimateRequest) -> ParameterSource | None:
    """The option or constant of the script that is its batch size; None without one."""
    given = [word.partition("=")[0] for word in request.arguments if word.startswith("-")]
    for name in (*given, *_names(request.script)):
        if _BATCH.search(name) and "eval" not in name.lower() and "val_" not in name.lower():
            try:
                found = parameter_source(request.script, name, request.arguments)
            except GpuprobeError:  # a name that is neither
                continue
            if found.value:
                return found
    return None


def _names(script: str) -> Iterator[str]:
    """The options and the constants at the top level of a script."""
    tree = ast.parse(Path(script).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, str) and re.fullmatch(r"--?[A-Za-z][\w-]*", value):
            yield value
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        yield from (target.id for target in targets if isinstance(target, ast.Name))

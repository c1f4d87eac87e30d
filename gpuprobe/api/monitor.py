"""What the screens of this machine show of its processes and errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuprobe.model.machine.devices import Inventory
from gpuprobe.model.values import Unavailable
from gpuprobe.reporters.text.info import device_names, error_lines

if TYPE_CHECKING:
    from gpuprobe.model.machine.process import ProcessDetails


def process_details(pid: int, ticks: int) -> ProcessDetails:
    """The arguments, folder and environment of the process that started at ``ticks`` (clock ticks
    since boot; 0 for any process with this id), with secrets replaced by ``<secret>``: the values
    of variables such as ``HF_TOKEN`` and ``WANDB_API_KEY`` wherever they appear, tokens of known
    forms, and values of options such as ``--password``.
    """
    from dataclasses import replace

    from gpuprobe.probes.host import process_details as read
    from gpuprobe.reporters.support_bundle import Redactor

    found = read(pid, ticks)
    variables = () if isinstance(found.environment, Unavailable) else found.environment
    redactor = Redactor(dict(variables))
    if not isinstance(found.environment, Unavailable):
        found = replace(found, environment=redactor.environment(variables))
    if not isinstance(found.arguments, Unavailable):
        found = replace(found, arguments=redactor.arguments(found.arguments))
    return found


def errors_of(inventory: Inventory) -> list[str]:
    """The values that could not be read, in a sentence per device, status and reason."""
    lines = error_lines(inventory, device_names(inventory))
    return [line.strip().removeprefix("! ") for line in lines]

"""The GPUs of a virtual machine in a process: selected until the first use, unusable in a fork."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

from gpuprobe.torch_support.process_gpus import NAME, used

_IN_A_FORK: Final = (
    "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must "
    "use the 'spawn' start method"
)
"""torch's own words: ``_lazy_init`` in ``torch/cuda/__init__.py``."""


class Use:
    """Which process first used the GPUs, and what it set before that. A setting of the program's
    counts until then, as it does for CUDA.
    """

    def __init__(self) -> None:
        self._setting = os.environ.get(NAME)
        self._pid: int | None = None
        self.select: Callable[[str | None], Any] = lambda setting: None
        self.begin: Callable[[], Any] = lambda: None  # called at the first use

    def ask(self) -> None:
        """The program asks which GPUs there are."""
        setting = os.environ.get(NAME)
        if self._pid is None and setting != self._setting:
            self._setting = setting
            self.select(setting)

    def use(self) -> None:
        """The program uses a GPU. Raises RuntimeError in a process that was forked off from one
        that had, as CUDA does.
        """
        self.ask()
        if self._pid is None:
            self.begin()
            self._pid = os.getpid()
            used()
        elif self.after_fork():
            raise RuntimeError(_IN_A_FORK)

    @property
    def here(self) -> bool:
        """Whether this process uses the GPUs."""
        return self._pid == os.getpid()

    def after_fork(self) -> bool:
        """Whether the GPUs were used in the process that this one was forked off from."""
        return self._pid is not None and self._pid != os.getpid()

"""``torch.distributed.checkpoint`` in a pretended job: this rank writes its own part."""

from __future__ import annotations

import functools
import sys
from typing import Any, Final

from gpuprobe.patching import Patches

_MODULE: Final = "torch.distributed.checkpoint"


class Checkpoints:
    """Saves and loads of one rank, without the plans of the others."""

    def __init__(self, patches: Patches) -> None:
        self._patches = patches
        self._installed = False

    def install(self) -> None:
        """Do so now, if the program has imported it. To import it here would cost 400 ms."""
        if self._installed or _MODULE not in sys.modules:
            return
        self._installed = True
        from torch.distributed.checkpoint import default_planner, metadata, utils

        wrapper: Any = utils._DistWrapper
        original = wrapper.__init__

        @functools.wraps(original)
        def init(this: Any, group: Any, use_dist: bool, coordinator_rank: int) -> None:
            original(this, group, False, coordinator_rank)

        self._patches.set(wrapper, "__init__", init)
        # The plan of one rank does not cover what is sharded. What is wrong with a plan is a list,
        # of nothing for one that is fine; in early versions True is the answer for that.
        fine = default_planner._validate_global_plan([], metadata.Metadata({}))
        self._patches.set(default_planner, "_validate_global_plan", lambda plan, about: fine)

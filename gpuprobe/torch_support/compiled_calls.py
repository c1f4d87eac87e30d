"""Calls of the graphs that torch compiled: their kernels are no operators of the dispatcher."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

from gpuprobe.patching import Patches, when_imported

_MODULE: Final = "torch._inductor.output_code"


def follow_compiled_calls(
    patches: Patches,
    called: Callable[[Sequence[object], Collection[int]], None],
    returned: Callable[[Sequence[object]], None],
) -> None:
    """Report each call of a compiled graph until ``patches`` are undone: ``called`` gets its inputs
    and the positions of those that it changes, ``returned`` its results. They must not raise.
    """

    def install() -> None:
        kind: Any = sys.modules[_MODULE].CompiledFxGraph
        original = kind.__call__

        @functools.wraps(original)
        def call(graph: Any, inputs: Any) -> Any:
            called(inputs, graph.mutated_input_idxs)
            results = original(graph, inputs)  # which clears the list of inputs
            returned(results)
            return results

        patches.set(kind, "__call__", call)

    patches.add(when_imported(_MODULE, install))

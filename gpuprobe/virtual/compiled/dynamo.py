"""Dynamo on a virtual device: functions of torch that gpuprobe replaced are torch's to it."""

from __future__ import annotations

import functools
import types
from typing import Any, Final

import torch

from gpuprobe.code_origin import PACKAGE
from gpuprobe.patching import Patches, original_of, originals, patch
from gpuprobe.virtual.generators import Generator
from gpuprobe.virtual.machine import Machine

_NOT_THE_PROGRAMS: Final = (
    "allocator",
    "hazard_watch",
    "hazards",
    "model",
    "torch_support",
    "virtual",
)
"""Packages that work while an operator of the program's runs."""


def load() -> None:
    """Import the compiler, and have it make its tables of torch's own functions. Those that it
    made already, of what it found while this device was in use, are made again.
    """
    with originals():
        from torch._dynamo import trace_rules
        from torch._dynamo.variables import builder
        from torch._dynamo.variables import torch as functions

        kind: Any = builder.VariableBuilder
        trace_rules.clear_lru_cache()
        for cached in (
            functions.TorchInGraphFunctionVariable._get_handlers,
            getattr(functions, "get_overridable_functions", None),
            kind._id_dispatch,
        ):
            if cached is None:
                continue
            getattr(cached, "__func__", cached).cache_clear()
        for name in (
            "constant_fold_functions",
            "constant_fold_functions_need_guards",
            "tracing_state_functions",
        ):
            table = getattr(functions, name, {})
            if hasattr(table, "cache_clear"):  # a function that makes the table, since torch 2.7
                table.cache_clear()
            else:
                table.update({original_of(function): value for function, value in table.items()})
        trace_rules.get_torch_obj_rule_map()
        functions.TorchInGraphFunctionVariable._get_handlers()


def install(machine: Machine, patches: Patches) -> None:
    from torch._dynamo import trace_rules
    from torch._dynamo.variables import builder

    kind: Any = builder.VariableBuilder
    entry = "_call_impl" if hasattr(kind, "_call_impl") else "__call__"  # torch before 2.7
    wrap = getattr(kind, entry)

    def call(self: Any, value: Any) -> Any:
        if type(value) is types.FunctionType:
            value = original_of(value)
        return wrap(self, value)

    patches.set(kind, entry, call)
    inner = kind._wrap

    def wrapped(self: Any, value: Any) -> Any:
        # By its exact type, torch's own is told apart from what cannot be traced.
        return self.wrap_user_defined(value) if type(value) is Generator else inner(self, value)

    patches.set(kind, "_wrap", wrapped)

    clear = trace_rules.clear_lru_cache

    def cleared() -> None:
        """``init_process_group`` has the tables made again."""
        clear()
        with originals():
            trace_rules.get_torch_obj_rule_map()

    patches.set(trace_rules, "clear_lru_cache", cleared)
    _optimizers(machine, patches)
    _guards(machine, patches)
    # Operators that the program runs eagerly call gpuprobe: none of that is to be compiled.
    rules: Any = trace_rules
    before = list(rules.SKIP_DIRS)
    rules.SKIP_DIRS.extend(f"{PACKAGE}{room}/" for room in _NOT_THE_PROGRAMS)
    rules._recompile_re()

    def undo() -> None:
        rules.SKIP_DIRS[:] = before
        rules._recompile_re()

    patches.add(undo)


def _guards(machine: Machine, patches: Patches) -> None:
    """Guards of a tensor compare the keys that its operators go by. Older versions compile with all
    dispatch modes off, but run guards with this device's on, which is one of those keys: newer
    ones tell guards of the modes that are to be left out.
    """
    if hasattr(torch._C._dynamo.guards, "set_is_in_mode_without_ignore_compile_internals"):
        return
    from torch._dynamo import guards

    def as_they_run(original: Any) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            with machine.dispatch:
                return original(*args, **kwargs)

        return call

    patches.set(
        guards.CheckFunctionManager, "__init__", as_they_run(guards.CheckFunctionManager.__init__)
    )
    patches.set(guards, "get_guard_fail_reason", as_they_run(guards.get_guard_fail_reason))


def _optimizers(machine: Machine, patches: Patches) -> None:
    """While Dynamo traces an optimizer's step it has it make its state: for the program, on its
    device.
    """
    from torch._dynamo.variables import optimizer as optimizers

    variable: Any = optimizers.OptimizerVariable
    original = variable.call_method

    def call_method(self: Any, tx: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        if name != "_init_group":
            return original(self, tx, name, *args, **kwargs)
        kind = type(self.value)
        made = kind._init_group

        @functools.wraps(made)
        def init_group(*given: Any, **options: Any) -> Any:
            with machine.dispatch:
                return made(*given, **options)

        restore = patch(kind, "_init_group", init_group)
        try:
            return original(self, tx, name, *args, **kwargs)
        finally:
            restore()

    patches.set(variable, "call_method", call_method)

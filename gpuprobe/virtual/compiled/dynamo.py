"""Dynamo on a virtual device: functions of torch that gpuprobe replaced are torch's to it."""

from __future__ import annotations

import functools
import types
from typing import Any, Final

from gpuprobe.code_origin import PACKAGE
from gpuprobe.model.place import program_name
from gpuprobe.patching import Patches, original_of, originals, patch
from gpuprobe.torch_support import compile_notes
from gpuprobe.virtual.frames import place_of
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
            functions.tracing_state_functions,
            functions.get_overridable_functions,
            kind._id_dispatch,
        ):
            getattr(cached, "__func__", cached).cache_clear()
        for name in ("constant_fold_functions", "constant_fold_functions_need_guards"):
            table = getattr(functions, name)
            table.update({original_of(function): value for function, value in table.items()})
        trace_rules.get_torch_obj_rule_map()
        functions.TorchInGraphFunctionVariable._get_handlers()


def install(machine: Machine, patches: Patches) -> None:
    from torch._dynamo import trace_rules
    from torch._dynamo.variables import builder

    kind: Any = builder.VariableBuilder
    wrap = kind._call_impl

    def call(self: Any, value: Any) -> Any:
        if type(value) is types.FunctionType:
            value = original_of(value)
        return wrap(self, value)

    patches.set(kind, "_call_impl", call)
    inner = kind._wrap

    def wrapped(self: Any, value: Any) -> Any:
        # By its exact type, torch's own is told apart from what cannot be traced.
        return self.wrap_user_defined(value) if type(value) is Generator else inner(self, value)

    patches.set(kind, "_wrap", wrapped)

    _optimizers(machine, patches)
    _breaks(machine, patches)
    # Operators that the program runs eagerly call gpuprobe: none of that is to be compiled.
    rules: Any = trace_rules
    before = list(rules.SKIP_DIRS)
    rules.SKIP_DIRS.extend(f"{PACKAGE}{room}/" for room in _NOT_THE_PROGRAMS)
    rules._recompile_re()

    def undo() -> None:
        rules.SKIP_DIRS[:] = before
        rules._recompile_re()

    patches.add(undo)


def _breaks(machine: Machine, patches: Patches) -> None:
    """Note graph breaks and recompilations, with their lines and reasons."""
    from torch._dynamo import convert_frame, symbolic_convert

    translator: Any = symbolic_convert.InstructionTranslatorBase
    log = translator.log_graph_break

    def log_graph_break(self: Any, code_options: Any, reason: Any, exc: Any) -> None:
        if not exc.logged:
            stack = getattr(exc, "real_stack", None)
            file, line = (
                (stack[-1].filename, stack[-1].lineno)
                if stack
                else (code_options["co_filename"], code_options["co_firstlineno"])
            )
            what = str(exc).strip().partition("\n")[0]
            compile_notes.note(f"graph break at {place_of(file, line)}: {what}")
        log(self, code_options, reason=reason, exc=exc)

    patches.set(translator, "log_graph_break", log_graph_break)
    module: Any = convert_frame
    reasons_of = module.get_and_maybe_log_recompilation_reasons

    def recompilation(entries: Any, frame: Any, *args: Any) -> Any:
        found = reasons_of(entries, frame, *args)
        if entries:
            code = frame.f_code
            reason = found[0].partition("\n")[0] if found else "no guard is known"
            where = place_of(code.co_filename, code.co_firstlineno)
            compile_notes.note(f"{program_name(code.co_name)} at {where} compiled again: {reason}")
        return found

    patches.set(module, "get_and_maybe_log_recompilation_reasons", recompilation)


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

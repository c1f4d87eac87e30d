"""``torch.compile`` on a virtual device."""

from __future__ import annotations

import functools
import importlib.util
import sys
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

from gpuprobe.patching import Patches
from gpuprobe.virtual.machine import Machine

EAGERLY = "torch.compile is disabled, so the code runs eagerly: fused kernels would save memory"
_EXTRA = "Triton is not installed: pip install 'gpuprobe[compile]'"


class Compiler:
    """Makes torch's compiler work for a machine, when the program first asks for it."""

    def __init__(self, machine: Machine, patches: Patches) -> None:
        self.machine = machine
        self._patches = patches
        self._lock = threading.Lock()
        self._why: str | None = None

    def prepare(self) -> str:
        """Why nothing can be compiled; "" where it can. The compiler is imported here."""
        with self._lock:
            if self._why is None:
                self._why = self._install()
            return self._why

    def _install(self) -> str:
        if importlib.util.find_spec("triton") is None:
            return _EXTRA
        patches = Patches()
        try:
            from gpuprobe.virtual.compiled import dynamo

            with warnings.catch_warnings():  # of torch's own, as it imports its compiler
                warnings.simplefilter("ignore")
                dynamo.load()
                from gpuprobe.virtual.compiled import inductor, tracing

            if self.machine.tracing is None:
                tracing.install(self.machine, patches)
            dynamo.install(self.machine, patches)
            inductor.install(self.machine, patches)
        except Exception as error:  # noqa: BLE001 - a torch with another compiler: it says so
            patches.undo()
            return f"torch {torch.__version__}: {type(error).__name__}: {_first_line(error)}"
        self._patches.add(patches.undo)
        self._patches.add(torch._dynamo.reset)  # what was compiled for this machine
        return ""


def install(machine: Machine, patches: Patches) -> None:
    """Replace ``torch.compile``, and have code that was given to it before prepare the compiler,
    too.
    """
    compiler = Compiler(machine, patches)
    original = torch.compile

    @functools.wraps(original)
    def compile_(model: Any = None, **options: Any) -> Any:
        if options.get("disable") or not (why := compiler.prepare()):
            return original(model, **options)
        machine.assume(f"{EAGERLY} ({why})")
        if model is None:
            return lambda function: function
        machine.compiled[_name_of(model)] = None
        return model

    patches.set(torch, "compile", compile_)
    compile_module: Callable[..., None] = torch.nn.Module.compile

    @functools.wraps(compile_module)
    def compile_in_place(module: Any, *args: Any, **options: Any) -> None:
        if compiler.prepare():
            compile_(module)
        else:
            compile_module(module, *args, **options)

    patches.set(torch.nn.Module, "compile", compile_in_place)
    # Where the program has got hold of `torch.compile` before, it comes by here.
    for kind in (torch._TorchCompileInductorWrapper, torch._TorchCompileWrapper):
        patches.set(kind, "__init__", _preparing(compiler, patches, kind.__init__))
    if "torch._dynamo.convert_frame" in sys.modules:
        _frames(compiler, patches)


def _preparing(
    compiler: Compiler, patches: Patches, original: Callable[..., None]
) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if compiler.prepare():
            _frames(compiler, patches)

    return init


def _frames(compiler: Compiler, patches: Patches) -> None:
    """Code that was given to the compiler before this device was in use is compiled for it, or
    runs as it is.
    """
    from torch._dynamo import convert_frame

    kind: Any = convert_frame.CatchErrorsWrapper
    original = kind.__call__

    def call(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        if why := compiler.prepare():
            compiler.machine.assume(f"{EAGERLY} ({why})")
            compiler.machine.compiled[frame.f_code.co_qualname] = None
            return _as_it_is(frame.f_code, patches)
        return original(self, frame, *args, **kwargs)

    patches.set(kind, "__call__", call)


def _as_it_is(code: types.CodeType, patches: Patches) -> Any:
    """What has Dynamo run a frame without compiling it. That of torch 2.6 skips such code from then
    on, until its cache is reset.
    """
    from torch._dynamo import types as dynamo_types

    made = getattr(dynamo_types, "ConvertFrameReturn", None)  # since torch 2.7
    if made is not None:
        return made()
    patches.add(lambda: torch._C._dynamo.eval_frame.reset_code(code))
    return None


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _name_of(code: Any) -> str:
    """What a reader knows a module or a function by."""
    if isinstance(code, torch.nn.Module):
        return type(code).__qualname__
    return str(getattr(code, "__qualname__", type(code).__qualname__))

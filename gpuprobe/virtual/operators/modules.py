"""Extension modules on a machine without CUDA: what is declared of them stands in for them.

An extension module calls the CUDA driver, so its functions cannot run on a virtual GPU, and often
it cannot even be imported. Where a package has declared its functions (`register_operator`), the
program gets those. Of others the error names the function, or the operator, and how to declare it.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

import torch
import torch._ops

from gpuprobe.errors import NotModelled
from gpuprobe.patching import Patches, when_imported
from gpuprobe.torch_support.tensors import tensors_in
from gpuprobe.virtual.frames import where
from gpuprobe.virtual.machine import Machine
from gpuprobe.virtual.operators import registry
from gpuprobe.virtual.operators.running import names_of, ran

_CPP_EXTENSION: Final = "torch.utils.cpp_extension"
_WITHOUT_CUDA: Final = re.compile(r"lib(cuda|cudart|cublas|cudnn|nvrtc|nccl|c10_cuda|torch_cuda)\b")
"""In the linker's message, where a library needs one of CUDA's."""


def install(machine: Machine, patches: Patches) -> None:
    stand_ins = _StandIns(machine, patches)
    sys.meta_path.insert(0, stand_ins)
    patches.add(lambda: sys.meta_path.remove(stand_ins))
    patches.add(stand_ins.forget)
    for name in registry.modules() & set(sys.modules):
        stand_ins.replace(sys.modules[name])
    _operators(machine, patches)
    patches.add(when_imported(_CPP_EXTENSION, functools.partial(_built, stand_ins, patches)))


class _StandIns(importlib.abc.MetaPathFinder):
    """Comes before Python's own finders, for the modules that are declared."""

    def __init__(self, machine: Machine, patches: Patches) -> None:
        self._machine = machine
        self._patches = patches
        self._made: list[ModuleType] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in registry.modules() or not registry.of_module(fullname):
            return None
        found = None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            found = find and find(fullname, path, target)
            if found is not None:
                break
        return ModuleSpec(fullname, _Loader(self, found), origin="declared for virtual GPUs")

    def replace(self, module: ModuleType) -> None:
        """Put the declared functions in the place of a module's own."""
        for name, declaration in registry.of_module(module.__name__).items():
            original = getattr(module, name, None)
            self._patches.set(module, name, _function(self._machine, declaration, original))

    def make(self, module: ModuleType, why: str) -> None:
        """Make a module of the declared functions only."""
        name = module.__name__
        for function, declaration in registry.of_module(name).items():
            setattr(module, function, _function(self._machine, declaration, None))
        module.__dict__["__getattr__"] = functools.partial(_undeclared, name)
        self._made.append(module)
        self._machine.assume(
            f"{name} cannot be imported here ({why}): its declared functions are used"
        )

    def forget(self) -> None:
        """Real programs of this process are not to find what was made for this device."""
        for module in self._made:
            if sys.modules.get(module.__name__) is module:
                del sys.modules[module.__name__]


class _Loader(importlib.abc.Loader):
    """Imports the real module where there is one and that works, and declares its functions."""

    def __init__(self, stand_ins: _StandIns, spec: ModuleSpec | None) -> None:
        self._stand_ins = stand_ins
        self._spec = spec
        self._why = "" if spec is not None else "it is not installed"

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        if self._spec is None:
            return None
        try:
            return importlib.util.module_from_spec(self._spec)
        except (ImportError, OSError) as error:
            self._why = _first_line(error)
            return None

    def exec_module(self, module: ModuleType) -> None:
        if not self._why:
            assert self._spec is not None
            assert self._spec.loader is not None
            module.__spec__, module.__loader__ = self._spec, self._spec.loader
            try:
                self._spec.loader.exec_module(module)
            except (ImportError, OSError) as error:
                self._why = _first_line(error)
        if self._why:
            self._stand_ins.make(module, self._why)
        else:
            self._stand_ins.replace(module)


def _undeclared(module: str, name: str) -> Any:
    """A function of a module that stands in for one, of which nothing is declared."""
    if name.startswith("__"):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotModelled(
            f"{where()}: {module}.{name} runs CUDA code, which a virtual GPU cannot",
            hint=f"gpuprobe.virtual.register_operator('{module}.{name}', results=...)",
        )

    return refuse


def _function(
    machine: Machine, declaration: registry.Declaration, original: Callable[..., Any] | None
) -> Callable[..., Any]:
    """What a program calls in place of an extension's function."""
    results = declaration.results
    assert results is not None  # `register_operator` sees to it
    names = names_of(results)

    @functools.wraps(results)
    def call(*args: Any, **kwargs: Any) -> Any:
        place = max(map(machine.place_of, tensors_in((args, kwargs))), default=-1)
        if original is not None and place < 0:
            return original(*args, **kwargs)
        if not machine.valueless:
            raise NotModelled(
                f"{where()}: {declaration.name} runs CUDA code, which a virtual GPU cannot run "
                "with values",
                hint="--compute shapes, compute='shapes'",
            )
        made = results(*args, **kwargs)
        index = max(place, *map(machine.place_of, tensors_in(made)), 0)
        ran(machine, declaration, (names, args, kwargs), made, index, frozenset(), notify=True)
        return made

    return call


# -- operators


def _operators(machine: Machine, patches: Patches) -> None:
    """Operators whose library cannot be loaded are defined by their declared schema, where the
    program first asks for them.
    """
    namespace: Any = torch._ops._OpNamespace
    find = namespace.__getattr__
    defining: set[str] = set()  # ``Library.define`` asks for what it defines

    def find_operator(self: Any, name: str) -> Any:
        try:
            return find(self, name)
        except AttributeError:
            full = f"{self.name}::{name}"
            found = None if full in defining else registry.of_operator(full)
            if found is None or not found.schema:
                raise
        defining.add(full)
        try:
            library = torch.library.Library(self.name, "FRAGMENT")
            library.define(name + found.schema)
        finally:
            defining.remove(full)
        patches.add(library._destroy)
        return find(self, name)

    patches.set(namespace, "__getattr__", find_operator)
    ops: Any = type(torch.ops)
    load_library = ops.load_library

    def load(self: Any, path: Any) -> None:
        with _loading(machine, str(path)):
            load_library(self, path)

    patches.set(ops, "load_library", load)


@contextmanager
def _loading(machine: Machine, path: str) -> Iterator[None]:
    """A library that needs CUDA's would be there on a real machine: the program goes on, up to
    the first operator that nothing is known of.
    """
    try:
        yield
    except OSError as error:
        if not _WITHOUT_CUDA.search(str(error)):
            raise
        machine.assume(f"{path} cannot be loaded here ({_first_line(error)})")


def _built(stand_ins: _StandIns, patches: Patches) -> None:
    """``torch.utils.cpp_extension.load`` and its kin: nothing is built of what is declared."""
    extension: Any = sys.modules[_CPP_EXTENSION]
    for name in ("load", "load_inline"):
        build = getattr(extension, name)
        patches.set(extension, name, functools.partial(_build, stand_ins, build))


def _build(
    stand_ins: _StandIns, build: Callable[..., Any], name: str, *args: Any, **options: Any
) -> Any:
    if not registry.of_module(name):
        return build(name, *args, **options)
    module = ModuleType(name)
    stand_ins.make(module, "its CUDA code is not built")
    return module


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]

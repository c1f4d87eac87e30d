"""Operators of extensions on a virtual device: as declared, as their Python code does, or by their
fake implementation.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from gpuprobe.errors import NotModelled, ProgramFailed, ValueNeeded
from gpuprobe.torch_support.callers import TORCH
from gpuprobe.torch_support.tensors import tensors_in
from gpuprobe.virtual.frames import where
from gpuprobe.virtual.machine import Machine
from gpuprobe.virtual.operators.registry import Declaration, of_operator
from gpuprobe.virtual.reads import known
from gpuprobe.virtual.unknown import NO_SHAPE_RULE

_TORCHS: Final = frozenset(
    {
        "_c10d_functional",
        "_c10d_functional_autograd",
        "_quantized",
        "aten",
        "bc",
        "c10d",
        "debugprims",
        "dtensor",
        "export",
        "fsdp",
        "higher_order",
        "inductor",
        "mkl",
        "mkldnn",
        "onednn",
        "prim",
        "prims",
        "profiler",
        "quantized",
        "quantized_decomposed",
        "rngprims",
        "sparse",
        "static_runtime",
        "streams",
        "symm_mem",
        "xnnpack",
    }
)
"""Namespaces of torch's own operators."""

_KERNEL: Final = re.compile(r"^(\w+)(?:\[alias\])?: registered at (.*):\d+ ::", re.MULTILINE)
"""One line of ``torch._C._dispatch_dump``: a dispatch key, and the file of who registered it."""

_CPP: Final = re.compile(r"\.(c|cc|cpp|cu|cuh|cxx|h|hpp)$")
_CUDA: Final = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
_CUSTOM_OPS: Final = f"{TORCH}_library/custom_ops.py"
_NO_FAKE: Final = ("There was no fake impl registered", NO_SHAPE_RULE)


@dataclass(frozen=True, slots=True)
class Extension:
    """What is known of one operator of an extension."""

    name: str
    declaration: Declaration | None
    in_python: bool
    """What CUDA tensors would run is Python code."""
    on_host: bool
    """The CPU has a kernel."""

    @property
    def declares_accesses(self) -> bool:
        found = self.declaration
        return found is not None and (found.reads is not None or found.writes is not None)


def extension_of(func: Any) -> Extension | None:
    """None for torch's own operators."""
    schema = func._schema
    if schema.name.partition("::")[0] in _TORCHS:
        return None
    try:
        dump = torch._C._dispatch_dump(schema.name + _overload(schema.overload_name))
    except RuntimeError:  # `sym_size` and its kin, which the dispatcher does not know
        dump = ""
    kernels = dict(_KERNEL.findall(dump))
    composite = kernels.get("CompositeExplicitAutograd")
    cuda = kernels.get("CUDA", composite)
    return Extension(
        schema.name,
        of_operator(schema.name, schema.overload_name or "default"),
        in_python=cuda is not None and _in_python(cuda),
        on_host="CPU" in kernels or composite is not None,
    )


def _overload(name: str) -> str:
    return f".{name}" if name else ""


def _in_python(file: str) -> bool:
    """Whether a kernel is Python code of a program's or a package's."""
    return not _CPP.search(file) and (not file.startswith(TORCH) or file == _CUSTOM_OPS)


class Extensions:
    """What a dispatch mode does with operators of extensions. ``apart``: runs Python code whose
    operators come back to the mode.
    """

    def __init__(self, machine: Machine, apart: Callable[..., Any]) -> None:
        self._machine = machine
        self._apart = apart
        self._failed: set[Any] = set()

    def run(
        self,
        extension: Extension,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        index: int,
        valueless: bool,
        usual: Callable[[], Any],
    ) -> Any:
        """One call with tensors of device ``index``. ``usual`` runs it as an operator of torch's.

        Raises NotModelled, or ValueNeeded where values would help, for an operator of which
        nothing is known.
        """
        declaration = extension.declaration
        made = None if declaration is None else declaration.results
        if made is not None and valueless:
            result = self._apart(made, args, kwargs)
            reported = False
        elif extension.in_python and func not in self._failed:
            result = self._python(extension, func, args, kwargs, valueless, usual)
            reported = True
        else:
            result = self._usual(extension, valueless, usual)
            reported = not extension.declares_accesses
            if valueless and declaration is None:
                self._machine.assume(
                    f"{extension.name}: a workspace that its CUDA code allocates is not counted"
                )
        if declaration is not None:
            names = [argument.name for argument in func._schema.arguments]
            written = _written_by(func._schema)
            ran(self._machine, declaration, (names, args, kwargs), result, index, written,
                notify=not reported)  # fmt: skip
        return result

    def _python(
        self,
        extension: Extension,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        valueless: bool,
        usual: Callable[[], Any],
    ) -> Any:
        """The operator's Python code, with all that it allocates. Where it needs values that are
        not there, the fake implementation.
        """
        kernel = functools.partial(func.redispatch, _CUDA)
        try:
            return self._apart(kernel, args, kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if not valueless:
                raise
            failure = error
        try:
            result = usual()
        except RuntimeError as error:
            if _lacks_fake(error):
                raise failure from None
            raise
        self._failed.add(func)
        line = str(failure).strip().partition("\n")[0]
        self._machine.assume(
            f"{extension.name}: only its results are counted, since its Python code does not run "
            f"without values ({type(failure).__name__}: {line})"
        )
        return result

    def _usual(self, extension: Extension, valueless: bool, usual: Callable[[], Any]) -> Any:
        if not valueless and not extension.on_host:
            raise NotModelled(
                f"{where()}: {extension.name} has only a CUDA kernel, which a virtual GPU cannot "
                "run with values",
                hint=f"--compute shapes, compute='shapes' (with {_declare(extension.name)}, unless "
                "it has a fake implementation)",
            )
        try:
            return usual()
        except RuntimeError as error:
            if not _lacks_fake(error):
                raise
        raise no_fake(extension)


def _lacks_fake(error: Exception) -> bool:
    return any(text in str(error) for text in _NO_FAKE)


def no_fake(extension: Extension) -> ProgramFailed:
    """The error for an operator of which only its CUDA code knows the results' shapes."""
    place = where()
    name = extension.name
    message = f"{place}: {name} has no fake implementation, which gives its results' shapes"
    hint = f"torch.library.register_fake({name!r}), or {_declare(name)}"
    if extension.on_host:
        return ValueNeeded(message, hint=f"--compute real, {hint}", place=place)
    return NotModelled(message, hint=hint)


def _declare(name: str) -> str:
    return f"gpuprobe.virtual.register_operator({name!r}, results=...)"


def _written_by(schema: Any) -> frozenset[str]:
    return frozenset(
        argument.name
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def names_of(function: Callable[..., Any]) -> list[str]:
    """The names of a Python function's parameters, in order."""
    return list(inspect.signature(function).parameters)


def ran(
    machine: Machine,
    declaration: Declaration,
    call: tuple[Sequence[str], tuple[Any, ...], dict[str, Any]],
    result: Any,
    index: int,
    written: frozenset[str],
    *,
    notify: bool,
) -> None:
    """After a call of something declared: its workspace, what it wrote, and its accesses if they
    are to be reported (``notify``). ``call``: the names of the parameters, and the arguments.
    """
    names, args, kwargs = call
    nbytes = declaration.workspace_of(args, kwargs)
    if nbytes > 0:
        device = machine.devices[index]
        device.free(device.malloc(nbytes, machine.stream(index)))
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    writes = written if declaration.writes is None else declaration.writes
    out = [*tensors_in([value for name, value in given.items() if name in writes])]
    out += tensors_in(result)
    if machine.shapes:
        for tensor in out:
            known.forget(machine, tensor)
    if notify:
        machine.queued(index)
    if notify and machine.observer is not None:
        reads = given if declaration.reads is None else declaration.reads
        into = [*tensors_in([value for name, value in given.items() if name in reads])]
        machine.observer.fused(declaration.name, index, into, out)

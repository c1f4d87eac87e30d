"""What packages declare of their CUDA code: results, workspace and accesses, by name.

A declaration is plain data and functions; nothing here imports torch. Packages that declare theirs
in an entry point are asked when the program first uses what it is about.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from gpuprobe.errors import ConfigError, UsageError

GROUP: Final = "gpuprobe.operators"
"""The group of entry points. An entry point is named after the namespace of the operators, or the
extension module, that it declares; its value is a function without arguments, or a module, that
calls `register_operator`.
"""

_OPERATOR: Final = re.compile(r"\w+::\w+(\.\w+)?")
_FUNCTION: Final = re.compile(r"\w+(\.\w+)+")


@dataclass(frozen=True, slots=True)
class Declaration:
    """One operator, or one function of an extension module: see `register_operator`."""

    name: str
    results: Callable[..., Any] | None
    workspace: int | Callable[..., int]
    reads: frozenset[str] | None
    writes: frozenset[str] | None
    schema: str

    def workspace_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Bytes that the kernel needs while it runs."""
        found = self.workspace
        return int(found(*args, **kwargs)) if callable(found) else found


_declared: dict[str, Declaration] = {}
_asked: set[str] = set()
_entries: list[Any] | None = None
_lock = threading.RLock()


def register_operator(
    name: str,
    *,
    results: Callable[..., Any] | None = None,
    workspace: int | Callable[..., int] = 0,
    reads: Iterable[str] | None = None,
    writes: Iterable[str] | None = None,
    schema: str = "",
) -> None:
    """Declare what a CUDA operator does to memory, for virtual GPUs, which cannot run it.

    ``name``: ``"mylib::attention"`` is an operator of ``torch.library``, with the name of an
    overload (``"mylib::attention.out"``) that one only; ``"mylib_cuda.attention"`` is a function
    of an extension module. A module that cannot be imported without CUDA is replaced by one that
    has the functions declared for it.

    ``results`` is called with the arguments of a call, and returns what that returns; tensors that
    it makes (``torch.empty_like``) are allocated on the virtual GPU, in the order of the calls.
    Functions need it. Operators that have a fake implementation (``torch.library.register_fake``)
    do without.

    ``workspace``: bytes that are allocated after the results and freed when the call returns; a
    number, or a function of the arguments.

    ``reads`` and ``writes``: names of the arguments that the kernel reads and writes, for hazards.
    Without them an operator's schema decides; a function reads all tensors it is given. Results
    are always written.

    ``schema``: the operator's, ``"(Tensor x, float p) -> Tensor"``, to define it where the
    library that does so cannot be loaded.

    A later declaration of the same name replaces the earlier one. Raises UsageError for a name or
    an argument that cannot mean anything.
    """
    operator = _OPERATOR.fullmatch(name) is not None
    if not operator and _FUNCTION.fullmatch(name) is None:
        raise UsageError(
            f"{name!r} is neither an operator nor a function of a module",
            hint="'namespace::operator', or 'module.function'",
        )
    if not operator and results is None:
        raise UsageError(
            f"{name}: a function needs results=",
            hint="a Python function with the same arguments that returns tensors like its results",
        )
    if schema and not (operator and schema.lstrip().startswith("(") and "->" in schema):
        raise UsageError(
            f"{name}: {schema!r} is no schema of an operator",
            hint="for example '(Tensor x, float p) -> Tensor'",
        )
    if not callable(workspace) and (type(workspace) is not int or workspace < 0):
        raise UsageError(f"{name}: workspace={workspace!r} is no number of bytes")
    for what, names in (("reads", reads), ("writes", writes)):
        if isinstance(names, str):
            raise UsageError(f"{name}: {what}={names!r} is text", hint=f"a list: [{names!r}]")
    with _lock:
        _declared[name] = Declaration(
            name,
            results,
            workspace,
            None if reads is None else frozenset(reads),
            None if writes is None else frozenset(writes),
            schema.strip(),
        )


def of_operator(name: str, overload: str = "default") -> Declaration | None:
    """The declaration of ``namespace::operator``, None where there is none."""
    with _lock:
        _ask(name.partition("::")[0])
        return _declared.get(f"{name}.{overload}") or _declared.get(name)


def of_module(name: str) -> dict[str, Declaration]:
    """The functions that are declared for a module, by their names in it."""
    with _lock:
        _ask(name)
        return {
            found.rpartition(".")[2]: declaration
            for found, declaration in _declared.items()
            if "::" not in found and found.rpartition(".")[0] == name
        }


def modules() -> set[str]:
    """Modules of which functions are declared, or may be by an entry point."""
    with _lock:
        named = {name.rpartition(".")[0] for name in _declared if "::" not in name}
        return named | {entry.name for entry in _all_entries()}


def _all_entries() -> list[Any]:
    global _entries
    if _entries is None:
        from importlib import metadata  # 20 ms, of programs that use an extension

        _entries = list(metadata.entry_points(group=GROUP))
    return _entries


def _ask(name: str) -> None:
    """Have the packages that declare what is in a namespace, or module, do so: once. Raises
    ConfigError where that fails.
    """
    if name in _asked:
        return
    _asked.add(name)
    for entry in _all_entries():
        if entry.name != name:
            continue
        try:
            found = entry.load()
            if callable(found):
                found()
        except Exception as error:
            line = str(error).strip().partition("\n")[0]
            raise ConfigError(
                f"the entry point {entry.name!r} in {GROUP} ({entry.value}) failed: "
                f"{type(error).__name__}: {line}",
                hint="its package declares operators for virtual GPUs: report it there",
            ) from error

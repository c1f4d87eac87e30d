"""``torch.cuda.jiterator``: a program's own elementwise functions, written in C++.

On CUDA they are compiled. Here their expressions are evaluated with tensors: numbers, names,
arithmetic, comparisons, the conditional operator, calls of mathematical functions, declarations
and assignments. Anything else is not modelled with values. Without values only the shape matters.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import torch

from gpuprobe.patching import Patches
from gpuprobe.virtual.machine import Machine
from gpuprobe.virtual.unknown import not_modelled

_FUNCTION: Final = re.compile(
    r"(?P<name>\w+)\s*\((?P<parameters>[^()]*)\)\s*\{(?P<body>.*)\}", re.S
)
_TOKEN: Final = re.compile(
    r"\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?[fFlLuU]*)|(?P<name>[A-Za-z_][\w:]*)"
    r"|(?P<sign>&&|\|\||[<>=!]=|[-+*/%<>!?:(),]))"
)
_LEVELS: Final[tuple[dict[str, Callable[[Any, Any], Any]], ...]] = (
    {"||": torch.logical_or},
    {"&&": torch.logical_and},
    {"==": torch.eq, "!=": torch.ne},
    {"<": torch.lt, ">": torch.gt, "<=": torch.le, ">=": torch.ge},
    {"+": torch.add, "-": torch.sub},
    {"*": torch.mul, "/": torch.div, "%": torch.fmod},
)
_NAMED: Final = {"fabs": torch.abs, "fmax": torch.fmax, "fmin": torch.fmin, "max": torch.maximum,
                 "min": torch.minimum, "pow": torch.pow}  # fmt: skip
_PLAIN: Final = (
    "abs", "acos", "asin", "atan", "atan2", "ceil", "cos", "cosh", "erf", "exp", "expm1", "floor",
    "fmod", "log", "log10", "log1p", "log2", "round", "rsqrt", "sin", "sinh", "sqrt", "tan",
    "tanh", "trunc",
)  # fmt: skip


class _Unknown(Exception):
    """Something that is not evaluated here."""


class _Expression:
    """Evaluates one expression, by descent through its levels of precedence."""

    def __init__(self, text: str, names: dict[str, Any], dtype: torch.dtype) -> None:
        self._names = names
        self._dtype = dtype
        self._tokens: list[str] = []
        at = 0
        text = text.strip()
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None:
                raise _Unknown(text[at:])
            self._tokens.append(found[0].strip())
            at = found.end()

    def value(self) -> Any:
        found = self._conditional()
        if self._tokens:
            raise _Unknown(self._tokens[0])
        return found

    def _take(self, *wanted: str) -> str:
        if self._tokens and self._tokens[0] in wanted:
            return self._tokens.pop(0)
        return ""

    def _require(self, wanted: str) -> None:
        if not self._take(wanted):
            raise _Unknown(self._tokens[0] if self._tokens else "the end")

    def _conditional(self) -> Any:
        chosen = self._binary(0)
        if not self._take("?"):
            return chosen
        first = self._conditional()
        self._require(":")
        return torch.where(chosen.bool(), first, self._conditional())

    def _binary(self, level: int) -> Any:
        if level == len(_LEVELS):
            return self._unary()
        found = self._binary(level + 1)
        while sign := self._take(*_LEVELS[level]):
            other = self._binary(level + 1)
            whole = sign == "/" and not (found.is_floating_point() or found.is_complex())
            if whole:  # as C++ divides
                found = torch.div(found, other, rounding_mode="trunc")
            else:
                found = _LEVELS[level][sign](found, other)
        return found

    def _unary(self) -> Any:
        if self._take("-"):
            return -self._unary()
        if self._take("+"):
            return self._unary()
        if self._take("!"):
            return torch.logical_not(self._unary())
        return self._primary()

    def _primary(self) -> Any:
        if self._take("("):
            found = self._conditional()
            self._require(")")
            return found
        if not self._tokens:
            raise _Unknown("the end")
        token = self._tokens.pop(0)
        if token[0].isdigit() or token[0] == ".":
            digits = token.rstrip("fFlLuU")
            return torch.tensor(float(digits) if set(digits) & set(".eE") else int(digits)).cuda()
        name = token.removeprefix("std::").removeprefix("::")
        if self._take("("):
            given = [self._conditional()]
            while self._take(","):
                given.append(self._conditional())
            self._require(")")
            if name == "T":
                return given[0].to(self._dtype)
            if name in _NAMED:
                return _NAMED[name](*given)
            if name in _PLAIN:
                return getattr(torch, name)(*given)
        elif name in self._names:
            return self._names[name]
        raise _Unknown(token)


def evaluated(code: str, values: list[Any], numbers: dict[str, Any], outputs: int) -> list[Any]:
    """Results of the function in ``code`` for tensors of one dtype and shape."""
    found = _FUNCTION.search(code)
    if found is None:
        raise _Unknown(code)
    parameters = [item.split() for item in found["parameters"].split(",")]
    names = [words[-1].lstrip("&*") for words in parameters]
    dtype = values[0].dtype
    known: dict[str, Any] = dict(zip(names, values, strict=False))
    known.update(
        {name: torch.tensor(value, device="cuda", dtype=dtype) for name, value in numbers.items()}
    )
    references = [
        name for words, name in zip(parameters, names, strict=True) if "&" in "".join(words)
    ]
    for statement in filter(
        None, map(str.strip, re.sub(r"//[^\n]*", "", found["body"]).split(";"))
    ):
        if statement.startswith("return"):
            return [_Expression(statement.removeprefix("return"), known, dtype).value()]
        target, sign, text = statement.partition("=")
        words = target.split()
        if not sign or not 1 <= len(words) <= 3:
            raise _Unknown(statement)
        known[words[-1]] = _Expression(text, known, dtype).value().to(dtype)
    return [known[name] for name in references[:outputs]]


def install(machine: Machine, patches: Patches) -> None:
    """Source: ``CompileAndLaunchKernel`` in ``aten/src/ATen/native/cuda/jit_utils`` and
    ``jiterator.cu``: the result of `torch.result_type` of all tensors, which are broadcast.
    """

    def launch(
        code: str, name: str, by_reference: bool, outputs: int, tensors: Any, numbers: Any
    ) -> Any:
        dtype = tensors[0].dtype
        for tensor in tensors[1:]:
            dtype = torch.promote_types(dtype, tensor.dtype)
        shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
        made = [torch.empty(shape, dtype=dtype, device=tensors[0].device) for _ in range(outputs)]
        if not machine.shapes:
            before, machine.local.paused = machine.local.paused, True
            try:
                with torch.no_grad():
                    # C++ calculates with whole numbers where it is given truth values.
                    wide = torch.int32 if dtype is torch.bool else dtype
                    given = [tensor.to(dtype).to(wide).expand(shape) for tensor in tensors]
                    results = evaluated(code, given, dict(numbers), outputs)
                    for target, result in zip(made, results, strict=True):
                        target.copy_(result)
            except _Unknown as unknown:
                raise not_modelled(f"the jiterator function {name}, at '{unknown}'") from None
            finally:
                machine.local.paused = before
        machine.queued(tensors[0].get_device())
        if machine.observer is not None:
            machine.observer.fused(name, tensors[0].get_device(), tensors, made)
        return made[0] if outputs == 1 else tuple(made)

    patches.set(torch._C, "_cuda_jiterator_compile_and_launch_kernel", launch)

"""Random numbers on virtual devices: each has a generator of its own, as each CUDA device has.

Numbers are drawn by the host's kernels, which give what a host generator of the same seed gives
for the same sequence of draws. So after ``torch.manual_seed(0)`` the host and each device begin
with the same numbers, and go on independently.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

_Real: Any = torch._C.Generator
_lock = threading.RLock()
# By what C++ code hands over, which is not the object that the program has.
_of_devices: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


class _Kind(type(_Real)):  # type: ignore[misc]
    """``isinstance(torch.default_generator, torch.Generator)`` stays true."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, _Real)


class Generator(_Real, metaclass=_Kind):
    """``torch.Generator`` that may require to be a CUDA device's."""

    def __new__(cls, device: Any = "cpu") -> Any:
        wanted = torch.device(device)
        made = super().__new__(cls, device="cpu")
        if wanted.type == "cuda" and wanted.index is None:
            wanted = torch.device("cuda", torch.cuda.current_device())
        made._device = wanted
        if wanted.type == "cuda":
            _of_devices[made._cdata] = made
        return made

    @property
    def device(self) -> torch.device:
        return self._device

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> Any:
        return self


@contextmanager
def drawing_from(state: Any) -> Iterator[Any]:
    """The host's kernels draw from a generator, or begin with a state (a tensor), instead of the
    host's default generator, which stays as it is.
    """
    host = torch.default_generator
    generator = state if isinstance(state, _Real) else None
    with _lock:
        before = host.get_state()
        host.set_state(state if generator is None else generator.get_state())
        try:
            yield
        finally:
            if generator is not None:
                generator.set_state(host.get_state())
            host.set_state(before)


class Generators:
    """The default generators of a machine's devices.

    A seed that the program gave before there was a device holds for them too, as torch keeps it
    until CUDA is initialised (``torch.cuda._lazy_call``).
    """

    def __init__(self, count: int) -> None:
        self.default = tuple(Generator(torch.device("cuda", index)) for index in range(count))
        for generator in self.default:
            generator.manual_seed(torch.default_generator.initial_seed())

    def draw(self, place: int, args: Iterable[Any]) -> Any:
        """The context in which a kernel with these arguments draws, on a device or (``place`` < 0)
        the host: a generator among them is used as it is. Raises torch's error for one of the
        other kind (``check_generator`` in ``aten/src/ATen/core/Generator.h``).
        """
        kind = "cuda" if place >= 0 else "cpu"
        for given in args:
            if isinstance(given, _Real):
                found = "cuda" if given._cdata in _of_devices else "cpu"
                if found != kind:
                    raise RuntimeError(
                        f"Expected a '{kind}' device type for generator but found '{found}'"
                    )
                return nullcontext()
        return drawing_from(self.default[place]) if place >= 0 else nullcontext()

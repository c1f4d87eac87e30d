"""Random numbers on virtual devices: each has a generator of its own, as each CUDA device has.

Numbers are drawn by the host's kernels, which give what a host generator of the same seed gives
for the same sequence of draws. So after ``torch.manual_seed(0)`` the host and each device begin
with the same numbers, and go on independently.

To a program a device's generator is CUDA's: a seed and an offset of 64 bits each, which every draw
advances by as much as on CUDA. The host's kernels need more than that to go on from. It is kept
for every state that the program was given; a state of the program's own making (DTensor adds to
offsets) begins numbers of its own, the same ones whenever it comes again.
"""

from __future__ import annotations

import struct
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import torch

from gpuprobe.catalogue.gpus import GpuModel
from gpuprobe.torch_support.tensors import is_meta, tensors_in

_Real: Any = torch._C.Generator
_lock = threading.RLock()
# By what C++ code hands over, which is not the object that the program has.
_of_devices: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

_STATE: Final = struct.Struct("<Qq")
"""Seed and offset. Source: ``CUDAGeneratorImpl::get_state`` in
``aten/src/ATen/cuda/CUDAGeneratorImpl.cpp``; `set_state` takes a state without an offset, too."""
Key = tuple[int, int]
"""Seed and offset."""
_KEPT: Final = 512  # states remembered by their bytes, for copies of what `get_state` gave
_MIXER: Final = 0x9E3779B97F4A7C15  # the golden ratio in 64 bits: neighbours get seeds far apart
_MASK: Final = (1 << 64) - 1


class _Kind(type(_Real)):  # type: ignore[misc]
    """``isinstance(torch.default_generator, torch.Generator)`` stays true."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, _Real)


class States:
    """What the host's kernels go on from, for states of 16 bytes that programs were given."""

    def __init__(self) -> None:
        # By the very memory that was given, as long as it is there, else by its contents.
        self._given: dict[int, tuple[Any, Key, Any]] = {}
        self._kept: OrderedDict[Key, Any] = OrderedDict()

    def keep(self, holder: Any, key: Key, numbers: Any) -> None:
        """``holder``: the tensor that the program, or autograd, has of it."""
        storage = holder.untyped_storage()
        identity = storage._cdata

        def gone(reference: Any) -> None:
            if self._given.get(identity, (None,))[0] is reference:
                del self._given[identity]

        self._given[identity] = (weakref.ref(storage, gone), key, numbers)
        self._kept[key] = numbers
        self._kept.move_to_end(key)
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)

    def find(self, key: Key, holder: Any = None) -> Any | None:
        if holder is not None:
            known = self._given.get(holder.untyped_storage()._cdata)
            if known is not None and known[1] == key:  # the program may have written to it
                return known[2]
        return self._kept.get(key)

    def held(self, holder: Any) -> Any | None:
        """What was kept for this very memory."""
        known = self._given.get(holder.untyped_storage()._cdata)
        return None if known is None else known[2]


STATES: Final = States()


class Generator(_Real, metaclass=_Kind):
    """``torch.Generator`` that may require to be a CUDA device's."""

    _shared: dict[str, Any]

    def __new__(cls, device: Any = "cpu") -> Any:
        wanted = torch.device(device)
        made = super().__new__(cls, device="cpu")
        if wanted.type == "cuda" and wanted.index is None:
            wanted = torch.device("cuda", torch.cuda.current_device())
        made._device = wanted
        if wanted.type == "cuda":
            made._seed, made._offset = made.initial_seed(), 0
            made._shared = {}  # what generators of one state have in common
            _of_devices[made._cdata] = made
        return made

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def _on_device(self) -> bool:
        return bool(self._device.type == "cuda")

    @property
    def key(self) -> Key:
        return self._seed, self._offset

    def manual_seed(self, seed: int) -> Any:
        super().manual_seed(seed)
        if self._on_device:
            self._seed, self._offset = seed & _MASK, 0
        return self

    def seed(self) -> int:
        chosen: int = super().seed()
        if self._on_device:
            self._seed, self._offset = chosen, 0
        return chosen

    def initial_seed(self) -> int:
        known = getattr(self, "_seed", None)
        return super().initial_seed() if known is None else known

    def get_state(self) -> Any:
        """A host tensor of 16 bytes, for a host's generator of 5,056."""
        if not self._on_device:
            return super().get_state()
        state = torch.frombuffer(bytearray(_STATE.pack(*self.key)), dtype=torch.uint8)
        STATES.keep(state, self.key, self.numbers())
        return state

    def set_state(self, state: Any) -> Any:
        """Raises torch's errors: TypeError, and RuntimeError for a state of another size."""
        if not self._on_device:
            super().set_state(state)
            return self
        if not isinstance(state, torch.Tensor) or state.dtype is not torch.uint8 or state.is_cuda:
            raise TypeError("RNG state must be a torch.ByteTensor")
        sizes = (_STATE.size, _STATE.size // 2)
        if state.numel() not in sizes:
            raise RuntimeError("RNG state is wrong size")
        if is_meta(state):  # without values nothing is drawn either
            return self
        seed, offset = _STATE.unpack(bytes(state.tolist()).ljust(_STATE.size, b"\0"))
        numbers = STATES.find((seed, offset), state)
        if numbers is None:
            self._begin(seed, offset)
        else:
            self._seed, self._offset = seed, offset
            self.set_numbers(numbers)
        return self

    def _begin(self, seed: int, offset: int) -> None:
        """Numbers for a state that the program made up."""
        _Real.manual_seed(self, (seed + offset * _MIXER) & _MASK)
        self._seed, self._offset = seed, offset

    def get_offset(self) -> int:
        if not self._on_device:
            return super().get_offset()
        return self._offset

    def set_offset(self, offset: int) -> Any:
        """Raises RuntimeError for an offset that is no multiple of 4, as CUDA's generator does."""
        if not self._on_device:
            return super().set_offset(offset)
        if offset % 4:
            raise RuntimeError("offset must be a multiple of 4")
        numbers = STATES.find((self._seed, offset))
        if numbers is None:
            self._begin(self._seed, offset)
        else:
            self._offset = offset
            self.set_numbers(numbers)
        return self

    def advance(self, by: int) -> None:
        """A draw took so many numbers from each thread of its launch: see `increment`."""
        self._offset += -(-by // 4) * 4

    def clone_state(self) -> Any:
        if not self._on_device:
            return super().clone_state()
        made = type(self)(self._device)
        made.set_numbers(self.numbers())
        made._seed, made._offset = self._seed, self._offset
        return made

    def graphsafe_get_state(self) -> Any:
        """A generator with this one's state, not with a copy: see `graphsafe_set_state`. Source:
        ``CUDAGeneratorImpl::graphsafe_get_state``.
        """
        if not self._on_device:
            return super().graphsafe_get_state()
        made = self.clone_state()
        made._shared = self._shared
        return made

    def graphsafe_set_state(self, state: Any) -> Any:
        """Draw from the state of another generator. What this one has drawn from its own until now
        is kept with that, for when it is set again.
        """
        if not self._on_device:
            return super().graphsafe_set_state(state)
        other: dict[str, Any] = state._shared
        if other is not self._shared:
            self._shared.update(key=self.key, numbers=self.numbers())
            self._shared = other
            self.set_numbers(other.get("numbers", state.numbers()))
            self._seed, self._offset = other.get("key", state.key)
        return self

    def __reduce__(self) -> Any:
        if not self._on_device:
            return super().__reduce__()
        return torch.Generator, (self._device,), self.get_state()

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, torch.Tensor):
            self.set_state(state)
        else:
            super().__setstate__(state)

    def numbers(self) -> Any:
        """What the host's kernels go on from."""
        return _Real.get_state(self)

    def set_numbers(self, numbers: Any) -> None:
        """Go on from there, offset and seed aside."""
        _Real.set_state(self, numbers)


_BLOCK: Final = 256  # block_size_bound
WORDS: Final = 4  # curand4_engine_calls: numbers that one call of the engine gives


def threads(count: int, processors: int, threads_per_processor: int) -> int:
    """How many threads draw ``count`` numbers. Source: as `increment`."""
    grid = min(processors * (threads_per_processor // _BLOCK), -(-count // _BLOCK))
    return _BLOCK * grid


def increment(count: int, processors: int, threads_per_processor: int) -> int:
    """By how much a draw of ``count`` numbers advances the offset: what one thread takes.

    Source: ``calc_execution_policy`` in ``aten/src/ATen/native/cuda/DistributionTemplates.h``.
    """
    if count <= 0:
        return 0
    each = threads(count, processors, threads_per_processor)
    return ((count - 1) // (each * WORDS) + 1) * WORDS


def drawn_by(func: Any, args: tuple[Any, ...], result: Any, model: GpuModel) -> int:
    """By how much a call of an operator that draws advances the offset."""
    name = func._schema.name
    if "attention" in name:
        return _drawn_by_attention(func, args)
    tensor = args[0] if name == "aten::multinomial" else next(tensors_in(result), None)
    return 0 if tensor is None else drawn(tensor, model)


def _drawn_by_attention(func: Any, args: tuple[Any, ...]) -> int:
    """32 for each head for flash attention, a number for each score for the memory-efficient
    kernel. Source: ``mha_fwd`` in ``flash_attn/flash_api.cpp``, ``_efficient_attention_forward``
    in ``attention.cu``, both in ``aten/src/ATen/native/transformers/cuda``.
    """
    names = [argument.name for argument in func._schema.arguments]
    at = names.index("dropout_p")
    if at >= len(args) or not args[at] or args[0].dim() != 4:
        return 0
    outer = func._schema.name.startswith("aten::_scaled_dot_product")
    heads, length = (1, 2) if outer else (2, 1)
    query, key = args[:2]
    each = query.size(length) * key.size(length) if "efficient" in func._schema.name else 32
    return int(query.size(0) * query.size(heads) * each)


def drawn(tensor: Any, model: GpuModel) -> int:
    """`increment` of a draw for every element of a tensor, on a GPU."""
    return increment(
        tensor.numel(), model.multi_processor_count, model.max_threads_per_multi_processor
    )


@contextmanager
def drawing_from(state: Any) -> Iterator[Any]:
    """The host's kernels draw from a generator, or begin with what one's `Generator.numbers` were,
    instead of the host's default generator, which stays as it is.
    """
    host = torch.default_generator
    generator = state if isinstance(state, _Real) else None
    with _lock:
        before = host.get_state()
        host.set_state(state if generator is None else _Real.get_state(generator))
        try:
            yield
        finally:
            if generator is not None:
                _Real.set_state(generator, host.get_state())
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

    def of_call(self, place: int, args: Iterable[Any]) -> Any | None:
        """The generator of a device that a kernel with these arguments draws from; None on the
        host (``place`` < 0). Raises torch's error for one of the other kind
        (``check_generator`` in ``aten/src/ATen/core/Generator.h``).
        """
        kind = "cuda" if place >= 0 else "cpu"
        for given in args:
            if isinstance(given, _Real):
                known = _of_devices.get(given._cdata)
                found = "cpu" if known is None else "cuda"
                if found != kind:
                    raise RuntimeError(
                        f"Expected a '{kind}' device type for generator but found '{found}'"
                    )
                return known
        return self.default[place] if place >= 0 else None

    def draw(self, place: int, args: Iterable[Any]) -> Any:
        """The context in which a kernel with these arguments draws, on a device or (``place`` < 0)
        the host: a generator among them is used as it is. Raises as `of_call`.
        """
        generator = self.of_call(place, args)
        if generator is None or generator is not self.default[place]:
            return nullcontext()
        return drawing_from(generator)

    def advance(self, place: int, args: Iterable[Any], by: int) -> None:
        """A kernel with these arguments has drawn on a device: see `increment`."""
        generator = self.of_call(place, args)
        if generator is not None and by:
            generator.advance(by)

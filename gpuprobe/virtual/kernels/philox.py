"""The random numbers that CUDA's kernels draw: ``virtual_gpu(random="cuda")``.

Each thread of a launch has a Philox generator of its own: the device's seed is its key, and its
counter holds the generator's offset and the number of the thread, so that what an element gets
depends on how many threads there are, and so on the GPU.

Sources: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Philox4x32-10);
``curand_philox4x32_x.h``, ``curand_uniform.h`` and ``curand_normal.h`` of the CUDA toolkit;
``distribution_nullary_kernel`` and ``calc_execution_policy`` in
``aten/src/ATen/native/cuda/DistributionTemplates.h``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch

from gpuprobe.catalogue.gpus import GpuModel
from gpuprobe.virtual.generators import WORDS, Key, threads
from gpuprobe.virtual.machine import Machine

_WORD: Final = 0xFFFFFFFF
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_ROUNDS: Final = 10
_STEP: Final = 2.0**-32  # CURAND_2POW32_INV
_STEP_OF_CIRCLE: Final = float(torch.tensor(_STEP * 2 * math.pi, dtype=torch.float32))
_FLOATING: Final = (torch.float32, torch.float16, torch.bfloat16)
_WHOLE: Final = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_WIDE: Final = 1 << 28
"""Ranges of whole numbers from which on 64 bits are drawn for each: ``random_from_to_kernel``."""


def words(count: int, key: Key, model: GpuModel) -> Any:
    """What ``count`` elements get: 64-bit integers of 32 bits, by turn of the threads, word of a
    call of the generator, and thread. In this order they belong to the elements; the last ones to
    none.
    """
    seed, offset = key
    each = threads(count, model.multi_processor_count, model.max_threads_per_multi_processor)
    turns = offset // WORDS + torch.arange((count - 1) // (each * WORDS) + 1)[:, None]
    thread = torch.arange(each)
    counter = torch.broadcast_tensors(turns & _WORD, turns >> 32, thread, torch.zeros_like(thread))
    return torch.stack(ten_rounds(list(counter), seed & _WORD, seed >> 32), 1)


def ten_rounds(counter: list[Any], low: int, high: int) -> list[Any]:
    """Four words for each counter. Products wrap at 64 bits, as torch's integers do: their bits
    are right, the sign is not.
    """
    for _ in range(_ROUNDS):
        first, second = counter[0] * _MULTIPLIERS[0], counter[2] * _MULTIPLIERS[1]
        counter = [
            (second >> 32 & _WORD) ^ counter[1] ^ low,
            second & _WORD,
            (first >> 32 & _WORD) ^ counter[3] ^ high,
            first & _WORD,
        ]
        low, high = low + _WEYL[0] & _WORD, high + _WEYL[1] & _WORD
    return counter


def uniform(count: int, key: Key, model: GpuModel) -> Any:
    """From 0 (included) to 1: ``curand_uniform4``, and 0 in place of 1."""
    made = words(count, key, model).flatten()[:count].to(torch.float32) * _STEP + _STEP / 2
    return made.masked_fill_(made == 1, 0)


def normal(count: int, key: Key, model: GpuModel) -> Any:
    """``curand_normal4``: Box and Muller's transform of two pairs of words. CUDA's fast sine and
    cosine differ from these by about 1e-6.
    """
    drawn = words(count, key, model).to(torch.float32)
    radius = torch.sqrt(torch.log(drawn[:, 0::2] * _STEP + _STEP / 2) * -2)
    angle = (drawn[:, 1::2].double() * _STEP_OF_CIRCLE + _STEP_OF_CIRCLE / 2).float()
    made = torch.stack((torch.sin(angle) * radius, torch.cos(angle) * radius), 2)
    return made.flatten()[:count]


def _of_normal(result: Any, key: Key, model: GpuModel, mean: float = 0.0, std: float = 1.0) -> Any:
    return normal(result.numel(), key, model) * std + mean


def _of_uniform(result: Any, key: Key, model: GpuModel, low: float = 0.0, high: float = 1.0) -> Any:
    return uniform(result.numel(), key, model) * (high - low) + low


def _of_range(result: Any, key: Key, model: GpuModel, low: int, high: int | None = None) -> Any:
    if high is None or high - low >= _WIDE:
        return None
    count = result.numel()
    return words(count, key, model).flatten()[:count] % (high - low) + low


def _of_count(result: Any, key: Key, model: GpuModel, high: int) -> Any:
    return _of_range(result, key, model, 0, high)


_DRAWS: Final[dict[str, tuple[Callable[..., Any], tuple[torch.dtype, ...], int | None]]] = {
    "randn": (_of_normal, _FLOATING, None),
    "randn_like": (_of_normal, _FLOATING, None),
    "normal_": (_of_normal, _FLOATING, 1),
    "rand": (_of_uniform, _FLOATING, None),
    "rand_like": (_of_uniform, _FLOATING, None),
    "uniform_": (_of_uniform, _FLOATING, 1),
    "randint": (_of_count, _WHOLE, 0),
    "randint.low": (_of_range, _WHOLE, 0),
    "random_.to": (_of_count, _WHOLE, 1),
    "random_.from": (_of_range, _WHOLE, 1),
}
"""By operator: what draws its numbers, of which dtypes, and where its numbers begin among the
arguments, if it has any."""


def redraw(
    machine: Machine, place: int, drawn_with: tuple[Any, ...], func: Any, given: Any, result: Any
) -> None:
    """Put the numbers of a device's kernel in the place of those that the host's kernel drew, with
    the generator among the arguments ``drawn_with``, if there is one. What is of another
    distribution, or does not lie in memory in order, keeps the host's, and the machine assumes
    them. ``given``: the arguments that the host's kernel was given.
    """
    generator = machine.generators.of_call(place, drawn_with)
    if generator is None:
        return
    if not _redrawn(func, given, result, generator.key, machine.devices[place].model):
        name = func._schema.name.removeprefix("aten::")
        machine.assume(f"random numbers of {name} are those of the host's kernel, not CUDA's")


def _redrawn(func: Any, args: tuple[Any, ...], result: Any, key: Key, model: GpuModel) -> bool:
    name = func._schema.name.removeprefix("aten::")
    row = _DRAWS.get(f"{name}.{func._schema.overload_name}") or _DRAWS.get(name)
    if row is None or not isinstance(result, torch.Tensor):
        return False
    draw, dtypes, begin = row
    if result.dtype not in dtypes or not result.is_contiguous():
        return False
    if result.numel():
        some = () if begin is None else args[begin : begin + 2]
        numbers = [number for number in some if isinstance(number, (int, float))]
        drawn = draw(result, key, model, *numbers)
        if drawn is None:
            return False
        result.copy_(drawn.view(result.shape))
    return True

"""Radix sorts: what ``cub::DeviceRadixSort`` takes beside its inputs and outputs.

Source: ``dispatch_radix_sort.cuh`` (``InvokeOnesweep``, ``InvokeSingleTile``) and the policies of
``tuning_radix_sort.cuh`` for compute capability 8.0, scaled to 8-byte keys; the sizes of a tile
differ a little between architectures, the copies of keys and values do not.
"""

from __future__ import annotations

from typing import Final

__all__ = ["radix_sort_bytes"]

_SINGLE_TILE: Final = 256 * 19  # threads, keys of 4 bytes that each holds
_ONESWEEP_TILE: Final = 384 * 21
_DIGITS: Final = 256  # 8 bits a pass
_ALIGN: Final = 256  # alias_temporaries


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def radix_sort_bytes(count: int, bits: int, key: int, value: int) -> int:
    """Bytes of temporary storage for ``count`` pairs, whose keys differ in their lowest ``bits``.

    ``key``, ``value``: bytes of one of them. At least 1, as cub asks for.
    """
    widest = max(key, value, 4)
    if count <= _SINGLE_TILE * 4 // widest:
        return 1
    passes = max(1, -(-bits // 8))
    blocks = -(-count // (_ONESWEEP_TILE * 4 // widest))
    sizes = [passes * _DIGITS * 4, blocks * _DIGITS * 4, passes * 4]
    if passes > 1:
        sizes += [count * key, count * value]
    return sum(map(_aligned, sizes)) + _ALIGN - 1

"""Storages that several processes use: CUDA memory that a program sends to another process.

Whether their values are computed is noted next to the memory, where all of these processes read it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from gpuprobe.patching import Patches


class SharedStorages:
    """The shared storages of this process. It keeps none alive."""

    def __init__(self, noted: Callable[[int, int], int]) -> None:
        """``noted``: `gpuprobe.native.values.skipping.Skipping.shared_known`."""
        self._noted = noted
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        """Each one and its address, by its number."""

    def add(self, storage: UntypedStorage) -> None:
        """A storage is shared from now on."""
        self.storages[storage._cdata] = StorageWeakRef(storage), storage.data_ptr()

    def known(self, key: int) -> bool | None:
        """Whether the values of a storage are computed, by its number; None if it is not shared.
        They are unknown if no process can note it, as for expandable segments.
        """
        address = self._address(key)
        return None if address is None else self._noted(address, -1) == 1

    def note(self, key: int, known: bool) -> None:
        """The values of a storage, if it is shared, are computed from now on, or are not."""
        address = self._address(key)
        if address is not None:
            self._noted(address, known)

    def _address(self, key: int) -> int | None:
        reference, address = self.storages.get(key, (None, 0))
        if reference is None:
            return None
        if reference.expired():
            del self.storages[key]
            return None
        return address


def follow(shared: SharedStorages, share: Callable[[Any], None], patches: Patches) -> None:
    """Call ``share`` with each storage that the program sends, and add each that it receives."""
    sends, receives = torch.UntypedStorage._share_cuda_, torch.UntypedStorage._new_shared_cuda

    @functools.wraps(sends)
    def send(storage: UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        handle = sends(storage, *args, **kwargs)
        share(storage)
        return handle

    @functools.wraps(receives)
    def receive(*args: Any, **kwargs: Any) -> Any:
        storage = receives(*args, **kwargs)
        shared.add(storage)
        return storage

    patches.set(torch.UntypedStorage, "_share_cuda_", send)
    patches.set(torch.UntypedStorage, "_new_shared_cuda", staticmethod(receive))

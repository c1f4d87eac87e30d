"""The store of a rank that runs without the others."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

_ANSWER: Final = b"\1" * 128
"""The value of the other ranks' keys. It has the size of an ``ncclUniqueId``, which every rank but
the first reads and which NCCL's documentation calls opaque.
"""


class LoneStore(dist.Store):
    """A store with this rank's values. Keys of other ranks exist from the start, and counters
    include their increments: no wait blocks.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._timeout = timedelta(minutes=30)

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set(self, key: str, value: Any) -> None:
        with self._lock:
            self._values[key] = _bytes(value)

    def get(self, key: str) -> bytes:
        with self._lock:
            return self._values.get(key, _ANSWER)

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            count = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(count).encode()
            return count

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        with self._lock:
            if self._values.get(key, b"") == _bytes(expected):
                self._values[key] = _bytes(desired)
            return self._values.get(key, _bytes(expected))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether this rank has set them: who checks, and does not wait, expects no answer."""
        with self._lock:
            return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Every key is there."""

    def delete_key(self, key: str) -> bool:
        with self._lock:
            return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        with self._lock:
            return len(self._values)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    # The names by which C++ code calls a store that is written in Python: `PythonStore` in
    # torch/csrc/distributed/c10d/init.cpp.
    compareSet = compare_set
    deleteKey = delete_key
    getNumKeys = num_keys
    setTimeout = set_timeout

    def append(self, key: str, value: Any) -> None:
        with self._lock:
            self._values[key] = self._values.get(key, b"") + _bytes(value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)

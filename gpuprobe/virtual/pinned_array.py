"""A NumPy view of pinned memory that tells the hazard engine when it is used."""

from __future__ import annotations

from typing import Any

__all__ = ["watched"]


def watched(feed: Any, tensor: Any, array: Any) -> Any:
    """``array`` as a subclass that reports reads and writes of ``tensor``'s memory. Taking the
    array reads nothing by itself.
    """
    import numpy as np  # there already: torch made the array with it

    class PinnedArray(np.ndarray):
        """Reports what goes through Python; C code that takes the buffer is not seen."""

        def _tell(self, write: bool, op: str) -> None:
            feed.host_use(tensor, write, op, "numpy")

        def __getitem__(self, key: Any) -> Any:
            self._tell(False, "numpy index")
            return np.asarray(self)[key]

        def __setitem__(self, key: Any, value: Any) -> None:
            self._tell(True, "numpy assignment")
            np.asarray(self)[key] = value

        def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
            outputs = kwargs.get("out", ())
            self._tell(any(item is self for item in outputs), f"numpy {ufunc.__name__}")
            plain = [np.asarray(item) if isinstance(item, PinnedArray) else item for item in inputs]
            if outputs:
                kwargs["out"] = tuple(
                    np.asarray(item) if isinstance(item, PinnedArray) else item for item in outputs
                )
            return getattr(ufunc, method)(*plain, **kwargs)

        def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
            self._tell(func.__name__ in ("copyto", "put", "place"), f"numpy {func.__name__}")
            plain = [np.asarray(item) if isinstance(item, PinnedArray) else item for item in args]
            return func(*plain, **kwargs)

        def fill(self, value: Any) -> None:
            self._tell(True, "numpy fill")
            np.asarray(self).fill(value)

        def sum(self, *args: Any, **kwargs: Any) -> Any:
            self._tell(False, "numpy sum")
            return np.asarray(self).sum(*args, **kwargs)

        def tolist(self) -> Any:
            self._tell(False, "numpy tolist")
            return np.asarray(self).tolist()

        def copy(self, order: Any = "C") -> Any:
            self._tell(False, "numpy copy")
            return np.asarray(self).copy(order)

    return array.view(PinnedArray)

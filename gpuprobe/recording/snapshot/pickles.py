"""Reading a pickle that holds plain data and nothing else.

What is kept out here: names of any kind (classes, functions, the extension registry),
persistent ids, and lengths larger than the file. What no in-process reader can keep out is an
interpreter fault: a short pickle can make CPython hash a tuple nested a hundred thousand deep,
which overflows the C stack, or allocate a memo table of billions of entries
(python/cpython#115952). `gpuprobe.recording.snapshot.worker` therefore runs this in a separate
process, with limits.
"""

from __future__ import annotations

import io
import pickle
from typing import IO, Any, NoReturn

from gpuprobe.errors import SnapshotError
from gpuprobe.model.io.files import gc_paused

HINT = "create one with torch.cuda.memory._dump_snapshot(path)"
UNSAFE_HINT = "a memory snapshot contains plain data only; do not unpickle this file"

# What other files begin with. A pickle of protocol 2 and up begins with 0x80.
_OTHERS = (
    (b"PK\x03\x04", "a zip archive, such as torch.save writes"),
    (b"\x1f\x8b", "gzip data: unpack it first"),
    (b"\x28\xb5\x2f\xfd", "zstandard data: unpack it first"),
    (b"\x89GPTRC", "a trace chunk of a gpuprobe recording"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x7fELF", "a program"),
    (b"{", "text, perhaps JSON"),
    (b"<", "text, perhaps HTML"),
)


_OLD_PICKLES = (b"(dp", b"(lp", b"(d", b"(l", b"}q", b"]q")
"""What dictionaries and lists of protocols 0 and 1 begin with."""


def _is_text(start: bytes) -> bool:
    try:
        text = start.decode("utf-8", "ignore")
    except UnicodeDecodeError:  # pragma: no cover - errors are ignored
        return False
    return bool(text) and all(c.isprintable() or c in "\r\n\t\ufeff" for c in text)


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler for plain data, which resolves no names."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise SnapshotError(
            f"not loaded: the pickle asks for {module}.{name}, so loading it could run code",
            hint=UNSAFE_HINT,
        )

    def persistent_load(self, pid: object) -> NoReturn:
        raise SnapshotError("not loaded: the pickle has persistent ids", hint=UNSAFE_HINT)


class _Bounded:
    """A file that refuses to read more bytes than it has left.

    The unpickler allocates the length that a pickle declares for a string before it reads it.
    """

    def __init__(self, stream: IO[bytes], size: int) -> None:
        self._stream = io.BufferedReader(stream) if isinstance(stream, io.RawIOBase) else stream
        self._size = size

    def _check(self, count: int) -> None:
        # Reading ahead by a little is what buffering does; the end of the file ends it.
        if count > self._size + _READ_AHEAD:
            raise SnapshotError(
                f"the pickle claims to hold {count} bytes in a file of {self._size}", hint=HINT
            )

    def read(self, count: int) -> bytes:
        self._check(count)
        return self._stream.read(count)

    def readinto(self, buffer: Any) -> int:
        self._check(len(buffer))
        found: int = self._stream.readinto(buffer)  # type: ignore[attr-defined]
        return found

    def readline(self) -> bytes:
        return self._stream.readline()

    def peek(self, count: int) -> bytes:
        peeked: bytes = self._stream.peek(min(count, _READ_AHEAD))  # type: ignore[attr-defined]
        return peeked


_READ_AHEAD = 1 << 20


def load_plain(stream: IO[bytes], size: int) -> object:
    """The object pickled in a buffered ``stream`` of ``size`` bytes: dicts, lists, numbers, text.

    Raises SnapshotError for anything else.
    """
    try:
        start: bytes = stream.peek(8)  # type: ignore[attr-defined]
    except OSError as error:
        raise SnapshotError(f"it cannot be read: {error.strerror or error}") from error
    if not start:
        raise SnapshotError("the file is empty", hint=HINT)
    for magic, what in _OTHERS:
        if start.startswith(magic):
            raise SnapshotError(f"not a memory snapshot: this is {what}", hint=HINT)
    with gc_paused():
        try:
            return _PlainUnpickler(_Bounded(stream, size), encoding="utf-8").load()
        except SnapshotError:
            raise
        except MemoryError:
            raise SnapshotError(
                "the pickle requests more memory than a snapshot of its size can need", hint=HINT
            ) from None
        except EOFError:
            raise SnapshotError(
                "the pickle is truncated", hint="it was not written or copied completely"
            ) from None
        # The unpickler raises whatever the operations of the pickle raise.
        except Exception as error:  # noqa: BLE001
            if start[:1] != b"\x80" and not start.startswith(_OLD_PICKLES):
                # Any text begins as some pickle of protocol 0 might.
                raise SnapshotError(
                    "not a recording or a memory snapshot: this is "
                    + ("text" if _is_text(start) else "some other file"),
                    hint=f"a recording is a directory; a snapshot: {HINT}",
                ) from None
            raise SnapshotError(
                f"not a recording or a memory snapshot: not a readable pickle ({_oneline(error)})",
                hint=HINT,
            ) from None


def _oneline(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:199] + "…"

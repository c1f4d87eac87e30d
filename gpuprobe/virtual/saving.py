"""Files and foreign code that want the bytes of tensors which have no values.

A checkpoint has the size that it would have. What was not computed is zeros in it, in memory that
the operating system hands out when it is written, which nobody does.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any, Final

import torch

from gpuprobe.patching import Patches
from gpuprobe.virtual.frames import where
from gpuprobe.virtual.machine import Machine, Tag, is_meta

_NORESERVE: Final = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Linux's flag for memory that is not counted before it is written; from Python 3.13 on it has a
name. Source: ``include/uapi/asm-generic/mman-common.h``."""

_PIECE: Final = 1 << 20  # bytes of zeros that are written at once


def install(machine: Machine, patches: Patches) -> None:
    """After all else that replaces ``data_ptr``."""
    if not machine.shapes:
        return
    _torch_save(machine, patches)
    if hasattr(mmap, "MAP_ANONYMOUS"):
        _addresses(machine, patches)


def _torch_save(machine: Machine, patches: Patches) -> None:
    """``torch.save`` leaves room for what has no values, as ``torch.serialization.skip_data``
    does; within a stream that has begun, where torch cannot leave room, it writes zeros.
    """
    writer = torch._C.PyTorchFileWriter
    begun: set[int] = set()
    _within_streams(begun, patches)
    original = writer.write_record
    device = torch._C.StorageBase.device.__get__
    from_buffer = torch.frombuffer

    def write_record(self: Any, name: str, data: Any, size: int, *rest: Any) -> Any:
        storage = getattr(data, "_untyped_storage", data)
        if isinstance(storage, torch.UntypedStorage) and device(storage).type == "meta":
            machine.assume(f"{where()}: values that were not computed are saved as zeros")
            if id(self) not in begun:
                return self.write_record_metadata(name, size)
            with mmap.mmap(-1, max(1, size)) as zeros:  # pages that are only read take no memory
                view = from_buffer(zeros, dtype=torch.uint8)
                try:
                    return original(self, name, view.untyped_storage(), size, *rest)
                finally:
                    del view
        return original(self, name, data, size, *rest)

    patches.set(writer, "write_record", write_record)
    original_file = torch.UntypedStorage._write_file

    def write_file(storage: Any, file: Any, is_real: bool, save_size: bool, element: int) -> None:
        """Of the format before torch 1.6, which pickles of tensors still have: the number of
        elements, then their bytes (``THPStorage_writeFile`` in ``torch/csrc/StorageMethods.cpp``).
        """
        host = storage.cpu() if storage.is_cuda else storage
        if device(host).type != "meta":
            return original_file(host, file, is_real, save_size, element)
        machine.assume(f"{where()}: values that were not computed are saved as zeros")
        size = storage.nbytes()
        if save_size:
            file.write((size // element).to_bytes(8, "little"))
        zeros = bytes(min(size, _PIECE))
        for at in range(0, size, _PIECE):
            file.write(zeros[: size - at])
        file.flush()  # what follows may be written to the descriptor
        return None

    original_read = torch.UntypedStorage._set_from_file

    def set_from_file(storage: Any, file: Any, offset: Any, is_real: bool, element: int) -> Any:
        """Storages are put on their device first, and filled then."""
        tag = machine.tags.get(storage._cdata)
        if tag is None or device(storage).type != "meta":
            return original_read(storage, file, offset, is_real, element)
        host = torch.UntypedStorage(storage.nbytes(), device="cpu")
        original_read(host, file, offset, is_real, element)
        tag.values = host if host.nbytes() <= machine.limits.floating else None
        return storage

    patches.set(torch.UntypedStorage, "_write_file", write_file)
    patches.set(torch.UntypedStorage, "_set_from_file", set_from_file)


def _within_streams(begun: set[int], patches: Patches) -> None:
    """Keep ``begun`` the ids of writers to streams that hold something already, or cannot go back,
    as those of ``torch.distributed.checkpoint``.
    """
    opener: Any = torch.serialization._open_zipfile_writer_buffer
    enter, leave = opener.__init__, opener.__exit__

    def init(this: Any, buffer: Any, *args: Any, **kwargs: Any) -> None:
        try:
            fresh = buffer.tell() == 0
        except (AttributeError, OSError):  # a stream that cannot go back
            fresh = False
        enter(this, buffer, *args, **kwargs)
        if not fresh:
            begun.add(id(this.file_like))

    def done(this: Any, *args: Any) -> None:
        begun.discard(id(this.file_like))
        leave(this, *args)

    patches.set(opener, "__init__", init)
    patches.set(opener, "__exit__", done)


def _addresses(machine: Machine, patches: Patches) -> None:
    """Host tensors without values have an address each, of zeros: code that looks for tensors
    that share memory compares addresses, and writers of files (safetensors) read from them.
    """
    of_tensor, of_storage = torch.Tensor.data_ptr, torch.UntypedStorage.data_ptr

    def tensor_address(tensor: Any) -> int:
        if machine.local.inside or not is_meta(tensor):
            return of_tensor(tensor)
        tag = machine.tag_of(tensor)
        if tag is None or not _wanting(tag):
            return of_tensor(tensor)
        return _zeros(machine, tag) + tensor.storage_offset() * tensor.element_size()

    def storage_address(storage: Any) -> int:
        address = of_storage(storage)
        tag = None if address else machine.tags.get(storage._cdata)
        return address if tag is None or not _wanting(tag) else _zeros(machine, tag)

    patches.set(torch.Tensor, "data_ptr", tensor_address)
    patches.set(torch.UntypedStorage, "data_ptr", storage_address)


def _wanting(tag: Tag) -> bool:
    return tag.place < 0 and tag.nbytes > 0


def _zeros(machine: Machine, tag: Tag) -> int:
    """The address of as many zeros as a storage has bytes, which live as long as it does."""
    held = machine.zeros.get(tag.key)
    if held is None or len(held) < tag.nbytes:
        machine.assume(f"{where()}: values that were not computed are zeros for code outside torch")
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        held = machine.zeros[tag.key] = mmap.mmap(-1, tag.nbytes, flags=flags)
    return ctypes.addressof(ctypes.c_char.from_buffer(held))

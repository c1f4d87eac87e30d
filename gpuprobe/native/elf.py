"""Shared libraries as ELF files: the symbols that one needs, and new ones that forward calls.

The runtime (`gpuprobe.native.runtime`) is one library of plain functions. The libraries that torch
links to differ by CUDA version in file name, symbol versions and the functions that are needed, so
they are written here, for the torch that is installed, without a compiler: each exported function
is one jump. Sources: System V ABI (gABI 4.1), its x86-64 and AArch64 supplements, and the chapter
on symbol versioning of the LSB core specification.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from gpuprobe.errors import DataError

_MAGIC: Final = b"\x7fELF\x02\x01\x01"
"""64 bits, little-endian, version 1: x86-64 and AArch64 Linux."""
_X86_64: Final = 62
_AARCH64: Final = 183
_PAGE: Final = 0x10000
"""Alignment of segments. AArch64 kernels may have pages of 64 KiB."""

_SHT_STRTAB, _SHT_DYNAMIC, _SHT_DYNSYM = 3, 6, 11
_SHT_GNU_VERDEF, _SHT_GNU_VERNEED, _SHT_GNU_VERSYM = 0x6FFFFFFD, 0x6FFFFFFE, 0x6FFFFFFF
_DT_NEEDED: Final = 1
_DT_SONAME: Final = 14


@dataclass(frozen=True)
class Needed:
    """A function that a library needs from others. ``library`` and ``version`` are empty where it
    was linked without symbol versions.
    """

    name: str
    library: str = ""
    version: str = ""


@dataclass(frozen=True)
class Library:
    """What the dynamic linker reads in a shared library: its name, the libraries and functions that
    it needs, and those that it exports.
    """

    soname: str
    libraries: tuple[str, ...]
    needed: tuple[Needed, ...]
    exported: tuple[str, ...]


class Forward(Enum):
    """What an exported function does when it is called."""

    JUMP = "jump"
    """Calls the target with the caller's arguments."""
    NAMED = "named"
    """Calls the target with its own name and the caller's first argument."""


@dataclass(frozen=True)
class Export:
    """An exported function, the function it forwards to, and the symbol version it has, if any."""

    name: str
    target: str
    forward: Forward = Forward.JUMP
    version: str = ""


def read_library(path: Path) -> Library:
    """The undefined symbols and the needed libraries of a shared library.

    Only headers and the dynamic symbol table are read: some milliseconds for a file of 500 MB.
    Raises DataError for a file that is not a 64-bit little-endian ELF file, is truncated or
    contradicts itself, and OSError.
    """
    try:
        return _read_library(path)
    except (struct.error, IndexError, ValueError) as error:  # an offset that is beyond its table
        raise DataError(f"{path} is a damaged ELF file: {error}") from None


def _read_library(path: Path) -> Library:
    with path.open("rb") as file:
        file_size = file.seek(0, 2)
        file.seek(0)
        head = file.read(64)
        if not head.startswith(_MAGIC) or len(head) < 64:
            raise DataError(f"{path} is not a 64-bit little-endian ELF file")
        (table,) = struct.unpack_from("<Q", head, 40)
        size, count = struct.unpack_from("<HH", head, 58)
        if not count:
            raise DataError(f"{path} has no section headers")

        def part(offset: int, length: int) -> bytes:
            # Before it is read: a length of 2**60 must not become a buffer.
            if offset + length > file_size:
                raise DataError(f"{path} is truncated")
            file.seek(offset)
            return file.read(length)

        raw = part(table, size * count)
        # Of each section header: type, offset, size, link to another section.
        sections = [struct.unpack_from("<4xI16xQQI", raw, size * i) for i in range(count)]

        def contents(kind: int) -> tuple[bytes, bytes]:
            """The section of a type, and the strings that it refers to."""
            for found, offset, length, link in sections:
                if found == kind:
                    strings = b""
                    if link < count and sections[link][0] == _SHT_STRTAB:
                        strings = part(*sections[link][1:3])
                    return part(offset, length), strings
            return b"", b""

        symbols, names = contents(_SHT_DYNSYM)
        versions, _ = contents(_SHT_GNU_VERSYM)
        needs, need_names = contents(_SHT_GNU_VERNEED)
        dynamic, dynamic_names = contents(_SHT_DYNAMIC)
    entries = list(struct.iter_unpack("<qQ", dynamic[: len(dynamic) // 16 * 16]))
    return Library(
        next((_string(dynamic_names, value) for tag, value in entries if tag == _DT_SONAME), ""),
        tuple(_string(dynamic_names, value) for tag, value in entries if tag == _DT_NEEDED),
        tuple(_undefined(symbols, names, versions, dict(_version_needs(needs, need_names)))),
        tuple(
            _string(names, name)
            for name, _, _, section, _, _ in struct.iter_unpack("<IBBHQQ", symbols)
            if section and name
        ),
    )


def _string(table: bytes, at: int) -> str:
    return table[at : table.index(b"\0", at)].decode()


def _version_needs(section: bytes, names: bytes) -> Iterator[tuple[int, tuple[str, str]]]:
    """The (library, version) of each version index."""
    at = 0
    left = len(section) // 16  # of 16 bytes each: more are entries that overlap
    while at + 16 <= len(section):
        _, count, file, first, following = struct.unpack_from("<HHIII", section, at)
        one = at + first
        left -= 1 + count
        if left < 0:
            raise ValueError("its version table has entries that overlap")
        for _ in range(count):
            _, _, index, name, next_one = struct.unpack_from("<IHHII", section, one)
            yield index & 0x7FFF, (_string(names, file), _string(names, name))
            one += next_one
        if not following:
            return
        at += following


def _undefined(
    symbols: bytes, names: bytes, versions: bytes, needs: Mapping[int, tuple[str, str]]
) -> Iterator[Needed]:
    for number, (name, _, _, section, _, _) in enumerate(struct.iter_unpack("<IBBHQQ", symbols)):
        if section or not name:
            continue
        index = 0
        if versions:
            (index,) = struct.unpack_from("<H", versions, 2 * number)
        yield Needed(_string(names, name), *needs.get(index & 0x7FFF, ("", "")))


class _Strings:
    """A string table: each string once."""

    def __init__(self) -> None:
        self.bytes = bytearray(b"\0")
        self._at: dict[str, int] = {"": 0}

    def add(self, text: str) -> int:
        if text not in self._at:
            self._at[text] = len(self.bytes)
            self.bytes += text.encode() + b"\0"
        return self._at[text]


def _hash(name: str) -> int:
    """The hash function of symbol tables and version definitions (gABI, figure 5-13)."""
    value = 0
    for byte in name.encode():
        value = (value << 4) + byte
        value = (value ^ ((value & 0xF0000000) >> 24)) & 0x0FFFFFFF
    return value


def _x86_64(at: int, slot: int, name: int | None) -> bytes:
    """``jmp *slot``; for a named function ``mov %rdi, %rsi; lea name, %rdi`` before it."""
    code = b""
    if name is not None:
        code = b"\x48\x89\xfe\x48\x8d\x3d" + struct.pack("<i", name - (at + 10))
    end = at + len(code) + 6
    return (code + b"\xff\x25" + struct.pack("<i", slot - end)).ljust(16, b"\xcc")


def _aarch64(at: int, slot: int, name: int | None) -> bytes:
    """``adrp x16; ldr x16; br x16``; for a named function ``mov x1, x0; adrp x0; add x0``
    before it.
    """
    words: list[int] = []

    def page(register: int, target: int) -> int:
        pages = (target >> 12) - ((at + 4 * len(words)) >> 12)
        return 0x90000000 | (pages & 3) << 29 | (pages >> 2 & 0x7FFFF) << 5 | register

    if name is not None:
        words.append(0xAA0003E1)
        words.append(page(0, name))
        words.append(0x91000000 | (name & 0xFFF) << 10)
    words.append(page(16, slot))
    words.append(0xF9400210 | (slot & 0xFFF) >> 3 << 10)
    words.append(0xD61F0200)
    return struct.pack(f"<{len(words)}I", *words).ljust(24, b"\0")


_MACHINES: Final = {
    "x86_64": (_X86_64, 6, _x86_64, 16),  # machine, R_X86_64_GLOB_DAT, code, its size
    "aarch64": (_AARCH64, 1025, _aarch64, 24),  # R_AARCH64_GLOB_DAT
}
MACHINES: Final = tuple(_MACHINES)
"""The processors that libraries can be written for, as `platform.machine` names them."""


def library_bytes(
    soname: str, exports: Sequence[Export], needed: Sequence[str], machine: str
) -> bytes:
    """A shared library named ``soname`` whose functions forward to those of ``needed`` libraries.

    ``machine`` is one of `MACHINES`. The loader resolves the targets when it loads the library.
    """
    number, relocation, code, code_size = _MACHINES[machine]
    strings = _Strings()
    versions = [*dict.fromkeys(export.version for export in exports if export.version)]
    targets = [*dict.fromkeys(export.target for export in exports)]
    # The first symbol is null; then the targets, undefined here, and the exports.
    count = 1 + len(targets) + len(exports)
    texts = bytearray()
    text_at = {}
    for export in exports:
        if export.forward is Forward.NAMED:
            text_at[export.name] = len(texts)
            texts += export.name.encode() + b"\0"

    target_names = [strings.add(name) for name in targets]
    export_names = [strings.add(export.name) for export in exports]
    needed_names = [strings.add(name) for name in needed]
    definitions = bytearray()
    for index, name in enumerate([soname, *versions] if versions else [], 1):
        last = index == len(versions) + 1
        definitions += struct.pack(
            "<HHHHIII", 1, int(index == 1), index, 1, _hash(name), 20, 0 if last else 28
        )
        definitions += struct.pack("<II", strings.add(name), 0)
    soname_at = strings.add(soname)

    at = 64 + 56 * 4

    def place(length: int, alignment: int = 8) -> int:
        nonlocal at
        at = -(-at // alignment) * alignment
        start = at
        at += length
        return start

    hash_at = place(4 * (2 + 2 * count))
    symbols_at = place(24 * count)
    strings_at = place(len(strings.bytes))
    versym_at = place(2 * count)
    verdef_at = place(len(definitions))
    rela_at = place(24 * len(targets))
    text_start = place(code_size * len(exports), 16)
    names_at = place(len(texts))
    read_only = at
    at = -(-at // _PAGE) * _PAGE
    data_at = at
    slots_at = place(8 * len(targets))
    tags = [*((_DT_NEEDED, name) for name in needed_names), (_DT_SONAME, soname_at)]
    tags += [(4, hash_at), (5, strings_at), (6, symbols_at), (10, len(strings.bytes)), (11, 24)]
    tags += [(7, rela_at), (8, 24 * len(targets)), (9, 24)]
    if versions:
        tags += [(0x6FFFFFF0, versym_at), (0x6FFFFFFC, verdef_at), (0x6FFFFFFD, len(versions) + 1)]
    tags.append((0, 0))
    dynamic_at = place(16 * len(tags))
    end = at

    slot = {name: slots_at + 8 * i for i, name in enumerate(targets)}
    symbols = bytearray(24)
    versym = bytearray(struct.pack("<H", 0))
    for name_at in target_names:
        symbols += struct.pack("<IBBHQQ", name_at, 0x12, 0, 0, 0, 0)
        versym += struct.pack("<H", 1)
    machine_code = bytearray()
    for i, export in enumerate(exports):
        here = text_start + code_size * i
        named = names_at + text_at[export.name] if export.forward is Forward.NAMED else None
        machine_code += code(here, slot[export.target], named)
        symbols += struct.pack("<IBBHQQ", export_names[i], 0x12, 0, 7, here, code_size)
        versym += struct.pack("<H", 2 + versions.index(export.version) if export.version else 1)
    relocations = b"".join(
        struct.pack("<QQq", slots_at + 8 * i, (1 + i) << 32 | relocation, 0)
        for i in range(len(targets))
    )
    names = [*targets, *(export.name for export in exports)]

    # Sections, for linkers (a Triton launcher links to libcuda) and tools: nm, gdb.
    labels = _Strings()
    sections = [struct.pack("<IIQQQQIIQQ", *[0] * 10)]

    def section(
        name: str, kind: int, flags: int, start: int, length: int, link: int, info: int, entry: int
    ) -> None:
        label = labels.add(name)
        align = 16 if name == ".text" else 8
        sections.append(
            struct.pack(
                "<IIQQQQIIQQ", label, kind, flags, start, start, length, link, info, align, entry
            )
        )

    section(".hash", 5, 2, hash_at, 4 * (2 + 2 * count), 2, 0, 4)
    section(".dynsym", _SHT_DYNSYM, 2, symbols_at, 24 * count, 3, 1, 24)
    section(".dynstr", _SHT_STRTAB, 2, strings_at, len(strings.bytes), 0, 0, 0)
    section(".gnu.version", _SHT_GNU_VERSYM if versions else 1, 2, versym_at, 2 * count, 2, 0, 2)
    section(
        ".gnu.version_d",
        _SHT_GNU_VERDEF if versions else 1,
        2,
        verdef_at,
        len(definitions),
        3,
        len(versions) + 1 if versions else 0,
        0,
    )
    section(".rela.dyn", 4, 2, rela_at, len(relocations), 2, 0, 24)
    section(".text", 1, 6, text_start, len(machine_code), 0, 0, 0)
    section(".rodata", 1, 2, names_at, len(texts), 0, 0, 0)
    section(".got", 1, 3, slots_at, 8 * len(targets), 0, 0, 8)
    section(".dynamic", _SHT_DYNAMIC, 3, dynamic_at, 16 * len(tags), 3, 0, 16)
    label = labels.add(".shstrtab")
    label_bytes = bytes(labels.bytes)
    sections.append(struct.pack("<IIQQQQIIQQ", label, 3, 0, 0, end, len(label_bytes), 0, 0, 1, 0))
    section_table = -(-(end + len(label_bytes)) // 8) * 8

    out = bytearray(section_table + 64 * len(sections))
    out[:64] = struct.pack(
        "<16sHHIQQQIHHHHHH",
        _MAGIC,
        3,  # ET_DYN
        number,
        1,
        0,
        64,
        section_table,
        0,
        64,
        56,
        4,
        64,
        len(sections),
        len(sections) - 1,
    )
    segments = [
        (1, 5, 0, read_only, _PAGE),  # PT_LOAD: read and execute
        (1, 6, data_at, end - data_at, _PAGE),  # PT_LOAD: read and write
        (2, 6, dynamic_at, 16 * len(tags), 8),  # PT_DYNAMIC
        (0x6474E551, 6, 0, 0, 16),  # PT_GNU_STACK: not executable
    ]
    for i, (kind, flags, start, length, align) in enumerate(segments):
        struct.pack_into(
            "<IIQQQQQQ", out, 64 + 56 * i, kind, flags, start, start, start, length, length, align
        )

    def put(start: int, data: bytes | bytearray) -> None:
        out[start : start + len(data)] = data

    # A hash table of one bucket would make each lookup linear; one bucket a symbol keeps it short.
    buckets = [0] * count
    chains = [0] * count
    for index, name in enumerate(names, 1):
        bucket = _hash(name) % count
        chains[index], buckets[bucket] = buckets[bucket], index
    put(hash_at, struct.pack(f"<{2 + 2 * count}I", count, count, *buckets, *chains))
    put(symbols_at, symbols)
    put(strings_at, strings.bytes)
    put(versym_at, versym)
    put(verdef_at, definitions)
    put(rela_at, relocations)
    put(text_start, machine_code)
    put(names_at, texts)
    put(dynamic_at, b"".join(struct.pack("<qQ", *tag) for tag in tags))
    put(end, label_bytes)
    put(section_table, b"".join(sections))
    return bytes(out)

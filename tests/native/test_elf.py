"""Libraries that are written without a compiler: they load, forward calls, and read back."""

# ruff: noqa: E501 - C sources, as the compiler reads them
from __future__ import annotations

import ctypes
import platform
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from gpuprobe.errors import DataError
from gpuprobe.native.elf import (
    MACHINES,
    Export,
    Forward,
    Library,
    Needed,
    library_bytes,
    read_library,
)

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in MACHINES,
    reason="the native engine runs on Linux, on x86-64 and aarch64",
)

_TARGETS = """
typedef struct { int a; double b; char c[64]; } big;
typedef struct { int x, y; } pair;
long sum(int a, long b, short c, char d, long e, long f, long g, int h) { return a + 2*b + 3*c + 5*d + 7*e + 11*f + 13*g + 17*h; }
double mixed(float a, double b, int c, double d) { return a + 10*b + 100*c + 1000*d; }
big by_value(big in, int more) { in.a += more; in.b *= 2; in.c[63]++; return in; }
pair two(pair in) { pair out = {in.y, in.x}; return out; }
const char *named(const char *name, void *first) { static char text[64]; __builtin_sprintf(text, "%s %ld", name, (long)first); return text; }
"""


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compiled library with the functions of `_TARGETS`."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("targets")
    (folder / "t.c").write_text(_TARGETS)
    out = folder / "libgpn-targets.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", out, folder / "t.c", f"-Wl,-soname,{out.name}"],
        check=True,
    )
    return out


class _Big(ctypes.Structure):
    _fields_ = (("a", ctypes.c_int), ("b", ctypes.c_double), ("c", ctypes.c_char * 64))


class _Pair(ctypes.Structure):
    _fields_ = (("x", ctypes.c_int), ("y", ctypes.c_int))


def _written(folder: Path, exports: list[Export], needed: list[str], soname: str) -> Path:
    path = folder / soname
    path.write_bytes(library_bytes(soname, exports, needed, platform.machine()))
    return path


def test_calls_are_forwarded_with_all_kinds_of_arguments(targets: Path, tmp_path: Path) -> None:
    exports = [Export(f"cu_{name}", name) for name in ("sum", "mixed", "by_value", "two")]
    path = _written(tmp_path, exports, [targets.name], "libcu.so.1")
    ctypes.CDLL(str(targets), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(path))
    library.cu_sum.restype = ctypes.c_long
    numbers = [1, 2, 3, 4, 5, 6, 7, 8]
    factors = [1, 2, 3, 5, 7, 11, 13, 17]
    library.cu_sum.argtypes = [ctypes.c_long] * 8
    assert library.cu_sum(*numbers) == sum(a * b for a, b in zip(numbers, factors, strict=True))
    library.cu_mixed.restype = ctypes.c_double
    library.cu_mixed.argtypes = [ctypes.c_float, ctypes.c_double, ctypes.c_int, ctypes.c_double]
    assert library.cu_mixed(1, 2, 3, 4) == 4321
    library.cu_by_value.restype = _Big
    library.cu_by_value.argtypes = [_Big, ctypes.c_int]
    out = library.cu_by_value(_Big(1, 2.5, b"x" * 63 + b"y"), 41)
    assert (out.a, out.b, out.c[-1:]) == (42, 5.0, b"z")
    library.cu_two.restype = _Pair
    library.cu_two.argtypes = [_Pair]
    swapped = library.cu_two(_Pair(1, 2))
    assert (swapped.x, swapped.y) == (2, 1)


def test_a_named_function_passes_its_name_and_the_first_argument(
    targets: Path, tmp_path: Path
) -> None:
    names = ["cuOne", "cuAnother"]
    exports = [Export(name, "named", Forward.NAMED) for name in names]
    path = _written(tmp_path, exports, [targets.name], "libcu.so.2")
    ctypes.CDLL(str(targets), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(path))
    for name in names:
        function = library[name]
        function.restype = ctypes.c_char_p
        assert function(ctypes.c_long(77), 2, 3) == f"{name} 77".encode()


def test_versions_are_those_that_linkers_find(targets: Path, tmp_path: Path) -> None:
    exports = [
        Export("a", "sum", version="libx.so.1"),
        Export("b", "sum", version="V_2"),
        Export("c", "sum"),
    ]
    path = _written(tmp_path, exports, [targets.name], "libx.so.1")
    source = tmp_path / "use.c"
    source.write_text("extern long a(int), b(int); long use(void) { return a(1) + b(2); }")
    compiler = shutil.which("cc")
    assert compiler  # `targets` has it
    used = tmp_path / "libuse.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", used, source, path], check=True)
    needed = {one.name: (one.library, one.version) for one in read_library(used).needed}
    assert needed["a"] == ("libx.so.1", "libx.so.1")
    assert needed["b"] == ("libx.so.1", "V_2")
    readelf = shutil.which("readelf")
    if readelf:
        text = subprocess.run(
            [readelf, "-V", path], check=True, capture_output=True, text=True
        ).stdout
        assert "V_2" in text
        assert "libx.so.1" in text


_names = st.text(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_", min_size=1, max_size=40
)


@given(
    st.lists(st.tuples(_names, _names, st.sampled_from(list(Forward)), st.sampled_from(["", "V1", "V2"])),
             unique_by=lambda item: item[0], max_size=30),
    st.lists(_names.map(lambda name: f"lib{name}.so.1"), max_size=3, unique=True),
    st.sampled_from(MACHINES),
)  # fmt: skip
def test_names_that_are_written_are_read(
    tmp_path_factory: pytest.TempPathFactory,
    exports: list[tuple[str, str, Forward, str]],
    needed: list[str],
    machine: str,
) -> None:
    path = tmp_path_factory.getbasetemp() / "round.so"
    path.write_bytes(
        library_bytes("libround.so.1", [Export(*one) for one in exports], needed, machine)
    )
    found = read_library(path)
    assert found.soname == "libround.so.1"
    assert found.libraries == tuple(needed)
    assert found.exported == tuple(name for name, *_ in exports)
    assert found.needed == tuple(Needed(target) for target in dict.fromkeys(e[1] for e in exports))


@pytest.fixture(scope="module")
def sample() -> bytes:
    exports = [Export("a", "x", version="V1"), Export("b", "y", Forward.NAMED)]
    return library_bytes("libs.so.1", exports, ["libn.so"], platform.machine())


def _read(path: Path, data: bytes) -> Library | None:
    path.write_bytes(data)
    try:
        return read_library(path)
    except DataError:
        return None


def test_each_truncated_file_is_a_data_error(tmp_path: Path, sample: bytes) -> None:
    path = tmp_path / "cut.so"
    # The section headers, which come last, are needed in whole.
    for length in [*range(400), *range(400, len(sample), 997), len(sample) - 1]:
        assert _read(path, sample[:length]) is None, length
    assert _read(path, sample) is not None


@settings(max_examples=examples(300))
@given(st.data())
def test_damaged_files_raise_data_errors_only(
    tmp_path_factory: pytest.TempPathFactory, sample: bytes, data: st.DataObject
) -> None:
    # Headers, tables and section headers: not the padding between segments.
    table = struct.unpack_from("<Q", sample, 40)[0]
    places = st.one_of(
        st.integers(0, 63), st.integers(64, 1400), st.integers(table, len(sample) - 1)
    )
    damaged = bytearray(sample)
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(places)
        damaged[at : at + 1] = bytes([data.draw(st.integers(0, 255))])
    _read(tmp_path_factory.getbasetemp() / "damaged.so", bytes(damaged))


@pytest.mark.parametrize("field", [24, 32])  # of a section header: offset, size
def test_a_section_of_exabytes_is_not_read(tmp_path: Path, sample: bytes, field: int) -> None:
    table, count = struct.unpack_from("<Q", sample, 40)[0], struct.unpack_from("<H", sample, 60)[0]
    for section in range(1, count):
        damaged = bytearray(sample)
        kind = struct.unpack_from("<I", sample, table + 64 * section + 4)[0]
        struct.pack_into("<Q", damaged, table + 64 * section + field, 1 << 62)
        read = _read(tmp_path / "huge.so", bytes(damaged))
        assert read is None or kind not in (6, 11), section


def test_version_entries_that_overlap_end(tmp_path: Path) -> None:
    # 64 KiB of entries that each begin one byte after the other, with 65535 versions each.
    size = 1 << 16
    entry = struct.pack("<HHIII", 1, 0xFFFF, 0, 0, 1)
    section = (entry * (size // 16))[:size]
    head = bytearray(64)
    head[:7] = b"\x7fELF\x02\x01\x01"
    struct.pack_into("<Q", head, 40, 64 + size)
    struct.pack_into("<HH", head, 58, 64, 3)
    headers = bytearray(64 * 3)
    struct.pack_into("<4xI16xQQI", headers, 64, 0x6FFFFFFE, 64, size, 2)
    struct.pack_into("<4xI16xQQI", headers, 128, 3, 64, 16, 0)
    (tmp_path / "loop.so").write_bytes(bytes(head) + section + bytes(headers))
    with pytest.raises(DataError, match="overlap"):
        read_library(tmp_path / "loop.so")


def test_a_text_file_is_a_data_error(tmp_path: Path) -> None:
    (tmp_path / "libc.so").write_text("/* GNU ld script */ INPUT(/lib/libc.so.6)")
    with pytest.raises(DataError, match="not a 64-bit"):
        read_library(tmp_path / "libc.so")

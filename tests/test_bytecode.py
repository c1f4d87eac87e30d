"""Bytecode of gpuprobe's modules is written whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from gpuprobe.bytecode import _Loader

resource = pytest.importorskip("resource")  # Windows has no limit of file sizes

PROGRAM = """\
import resource, sys
import gpuprobe.bytecode as bytecode

bytecode.write_whole()
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
import gpuprobe.model.trace
import gpuprobe.recording.writer
"""


@pytest.mark.parametrize("limit", [4096, resource.RLIM_INFINITY])
def test_a_limit_of_file_sizes_leaves_no_part_of_a_module(tmp_path: Path, limit: int) -> None:
    command = [sys.executable, "-X", f"pycache_prefix={tmp_path}", "-c", PROGRAM, str(limit)]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    subprocess.run(command, env=environment, check=True)
    written = {file.name.partition(".")[0]: file for file in tmp_path.rglob("*.pyc")}
    assert "bytecode" in written
    assert ("writer" in written) == (limit != 4096)
    for name in ("trace", "writer"):
        assert name not in written or written[name].stat().st_size > 4096
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and file.suffix != ".pyc"]


def test_a_disk_that_takes_a_part_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Half(FileIO):
        def write(self, data: Any) -> int:
            return super().write(data[: len(data) // 2])

    loader = _Loader("name", str(tmp_path / "name.py"))
    target = tmp_path / "__pycache__" / "name.pyc"
    monkeypatch.setattr("gpuprobe.bytecode.FileIO", Half)
    loader.set_data(str(target), b"0123456789")
    assert list(tmp_path.rglob("*.*")) == []
    monkeypatch.undo()
    loader.set_data(str(target), b"0123456789")
    assert target.read_bytes() == b"0123456789"

"""Scripts that handle an out-of-memory error."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuprobe.planning.program import handler_of


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("try:\n    f()\nexcept torch.OutOfMemoryError:\n    g()", 3),
        ("try:\n    f()\nexcept (ValueError, torch.cuda.OutOfMemoryError):\n    g()", 3),
        ("try:\n    f()\nexcept RuntimeError as e:\n    print('out of memory' in str(e))", 3),
        ("@find_executable_batch_size(starting_batch_size=8)\ndef train(batch):\n    f()", 2),
        ("try:\n    f()\nexcept RuntimeError:\n    g()", 0),
        ("print('out of memory')", 0),
        ("not python (", 0),
    ],
)
def test_the_first_handler_is_found(script: str, line: int, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(script)
    assert handler_of(str(path)) == (f"train.py:{line}" if line else "")
    assert handler_of(str(tmp_path / "missing.py")) == ""

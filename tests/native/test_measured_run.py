"""``--compute real`` of a large program: it is measured, and then started again."""

from __future__ import annotations

from pathlib import Path

from native_commands import gpuprobe

PROGRAM = """\
import sys, torch
print("begins")
large = torch.empty(320 << 20, device="cuda")
total = torch.ones(4, device="cuda").sum()
print("total", total.item())
print("warning", total.item(), file=sys.stderr)
"""


def test_nothing_is_printed_of_values_that_were_not_computed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    done = gpuprobe("run", "--gpu", "t4", "--compute", "real", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["begins", "begins", "total 4.0"]
    assert done.stderr.count("warning") == 1
    assert "starting again" in done.stderr

"""Memory in inference mode: that of the kernels that torch runs there."""

from __future__ import annotations

import json
from pathlib import Path

import warm_python

PROGRAM = """\
import json, torch, torch.nn.functional as F

x = torch.randn(4, 16, 64, 64, device="cuda")
s = torch.randn(8, 64, 256, device="cuda")
lstm = torch.nn.LSTM(256, 256, batch_first=True).cuda()
calls = {
    "bilinear": lambda: F.interpolate(x, scale_factor=4, mode="bilinear"),
    "nearest": lambda: F.interpolate(x, scale_factor=2),
    "lstm": lambda: lstm(s),
    "matmul": lambda: s @ s.transpose(1, 2),
    "attention": lambda: F.scaled_dot_product_attention(s, s, s),
}

def peaks(mode):
    found = {}
    for name, call in calls.items():
        with mode():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            call()
            found[name] = torch.cuda.max_memory_allocated() - before
    return found

peaks(torch.no_grad)  # workspaces
print(json.dumps([peaks(torch.inference_mode), peaks(torch.no_grad)]))
"""


def test_it_is_the_same_as_without_gradients(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    words = ("run", "--quiet", "--gpu", "t4", "--compute", "shapes", "program.py")
    done = warm_python.gpuprobe(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    inference, no_grad = json.loads(done.stdout)
    assert inference == no_grad
    assert inference["bilinear"] == 4 * 16 * 256 * 256 * 4

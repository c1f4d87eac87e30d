"""Warnings name the program's lines, as without gpuprobe, by the filters of those lines."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import warm_python
from native_commands import gpuprobe

PROGRAM = """\
import warnings
import numpy
import torch
from torch import nn

net = nn.Linear(8, 8, device=DEVICE)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
x = torch.ones(4, 8, device=DEVICE)
fixed = numpy.ones(4)
fixed.flags.writeable = False

torch.from_numpy(fixed)
for _ in range(2):
    torch.tensor(x)
torch.tensor(x)
float(net(x).sum())
scheduler.step()
scheduler.step(5)
net(x).sum().grad
nn.functional.mse_loss(net(x), torch.zeros(4, 1, device=DEVICE))
nn.functional.softmax(x)
torch.ones(2, 3, 4, device=DEVICE).T
torch.range(0, 3, device=DEVICE)
torch.add(x, 1, out=torch.empty(3, device=DEVICE))
torch.ones(2, device=DEVICE).storage()
torch.frombuffer(b"abcd", dtype=torch.uint8)
torch.tensor([numpy.ones(2), numpy.ones(2)])
nn.L1Loss(size_average=True)
nn.utils.weight_norm(nn.Linear(2, 2))
net(x).sum().backward(create_graph=True)
warnings.warn("deprecated", DeprecationWarning)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    torch.tensor(x)
print([(one.filename[-8:], one.lineno) for one in caught])
warnings.filterwarnings("error", module="__main__")
try:
    torch.tensor(x)
except UserWarning as error:
    print("raised", error)
"""


def lines_of(stderr: str) -> list[str]:
    """File, line and category of each warning."""
    return re.findall(r"^\S*?([^/\s]+\.py:\d+: \w+Warning)", stderr, re.MULTILINE)


@pytest.mark.parametrize("options", [(), ("--level", "trace", "--hazards")], ids=["run", "hazards"])
def test_warnings_name_the_lines_that_they_name_without_gpuprobe(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM.replace("DEVICE", '"cpu"'))
    alone = subprocess.run(
        [warm_python.shared().python, str(script)], capture_output=True, text=True, check=True
    )
    assert len(lines_of(alone.stderr)) > 15
    script.write_text(PROGRAM.replace("DEVICE", '"cuda"'))
    done = gpuprobe("run", "--quiet", "--gpu", "t4", *options, "train.py", cwd=tmp_path)
    assert lines_of(done.stderr) == lines_of(alone.stderr)
    assert done.stdout.splitlines()[:2] == alone.stdout.splitlines()

"""Dropout between the layers of a recurrent network: new in each call, and the backward pass's is
that of its forward.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from native_commands import python

pytestmark = pytest.mark.slow

PROGRAM = """
import gpuprobe

with gpuprobe.virtual_gpu("h100-80gb", "real"):
    import copy
    import torch
    from gpuprobe.native.values import twins

    for kind in (torch.nn.LSTM, torch.nn.GRU):
        host = kind(8, 16, num_layers=3, dropout=0.4)
        model = copy.deepcopy(host).cuda()
        x = torch.randn(5, 4, 8)
        device_x = x.cuda().requires_grad_()
        outs = [model(device_x)[0] for _ in range(2)]
        assert not torch.equal(*(out.cpu() for out in outs))
        seeds = list(twins._seeds.values())[-2:]
        grads = []
        for seed, out in zip(seeds, outs):
            torch.manual_seed(seed)
            x_there = x.clone().requires_grad_()
            expected = host(x_there)[0]
            torch.testing.assert_close(out.detach().cpu(), expected.detach())
            (found,) = torch.autograd.grad(out.square().sum(), device_x)
            (wanted,) = torch.autograd.grad(expected.square().sum(), x_there)
            torch.testing.assert_close(found.cpu(), wanted)
            grads.append(found.cpu())
        assert not torch.equal(*grads)
        model.eval()
        torch.testing.assert_close(model(device_x)[0].detach().cpu(), host.eval()(x)[0].detach())
print("done")
"""


def test_the_backward_pass_has_the_dropout_of_its_forward(tmp_path: Path) -> None:
    done = python("-c", PROGRAM, cwd=tmp_path)
    assert done.stdout == "done\n", done.stderr

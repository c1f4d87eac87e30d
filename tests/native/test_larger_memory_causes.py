"""``gpuprobe explain``: memory that is needed, but larger than it must be, and moments that are
equally high.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from native_commands import gpuprobe


def explain(tmp_path: Path, program: str) -> dict[str, Any]:
    (tmp_path / "train.py").write_text(program)
    # The budget: however busy the machine is.
    options = ("--gpu", "t4", "--json", "--max-seconds", "900", "--compute", "shapes")
    done = gpuprobe("explain", *options, "train.py", cwd=tmp_path)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def line_of(program: str, text: str) -> int:
    return next(number for number, line in enumerate(program.splitlines(), 1) if text in line)


START = """\
import torch
import torch.nn.functional as F
from torch import nn

"""

GATHERED = (
    START
    + """\
def messages(weights, kinds, atoms):
    matrices = weights[kinds]
    return torch.bmm(matrices, atoms.unsqueeze(-1)).squeeze(-1)

weights = nn.Parameter(torch.randn(4, 48, 48, device="cuda"))
kinds = torch.arange(4096, device="cuda") % 4
for step in range(3):
    atoms = torch.randn(4096, 48, device="cuda")
    messages(weights, kinds, messages(weights, kinds, atoms)).square().mean().backward()
    weights.grad = None
"""
)

BEAMS = (
    START
    + """\
layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6)).cuda()

@torch.no_grad()
def decode(article):
    memory = article.repeat_interleave(8, dim=0)
    keys = [layer(memory) for layer in layers]
    x = torch.randn(16, 1, 256, device="cuda")
    for token in range(3):
        for key in keys:
            x = x + F.scaled_dot_product_attention(x, key, key)
    return x

for number in range(3):
    decode(torch.randn(2, 512, 256, device="cuda"))
"""
)

MASKED = (
    START
    + """\
head = nn.Linear(64, 8000).cuda()
optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
chosen = torch.arange(2048) % 8 == 0
for step in range(3):
    scores = head(torch.randn(2048, 64, device="cuda"))
    scores = scores[chosen.cuda()]
    F.cross_entropy(scores, torch.zeros(256, dtype=torch.long, device="cuda")).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
)

CORNER = (
    START
    + """\
masks = [torch.ones(2048, 2048, dtype=torch.bool).tril().cuda() for _ in range(6)]
for length in (64, 96, 128):
    for mask in masks:
        scores = torch.randn(4, length, length, device="cuda")
        scores.masked_fill(~mask[:length, :length], float("-inf")).softmax(-1)
"""
)

SMOOTHED = (
    START
    + """\
head = nn.Linear(64, 8000).cuda()
labels = torch.zeros(1024, dtype=torch.long, device="cuda")
for step in range(3):
    scores = head(torch.randn(1024, 64, device="cuda")).log_softmax(-1)
    truth = scores.detach().clone()
    truth.fill_(0.1 / 7999)
    truth.scatter_(1, labels.unsqueeze(1), 0.9)
    F.kl_div(scores, truth, reduction="batchmean").backward()
    head.zero_grad()
"""
)

WIDE = (
    START
    + """\
head = nn.Linear(64, 8000).cuda().half()
body = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(10)), nn.Linear(2048, 64)).cuda().half()
labels = torch.zeros(1024, dtype=torch.long, device="cuda")

def model(x):
    with torch.no_grad():
        hidden = body(x)
    logits = head(hidden).float()
    return logits, F.cross_entropy(logits, labels)

for step in range(4):
    logits, loss = model(torch.randn(1024, 2048, device="cuda", dtype=torch.half))
    loss.backward()
    head.zero_grad()
"""
)


@pytest.mark.parametrize(
    ("program", "rule", "made", "words"),
    [
        (GATHERED, "repeated-values", "matrices =", "are the same matrices many times"),
        (BEAMS, "repeated-values", ".repeat_interleave", "are the same values 8 times"),
        (MASKED, "computed-in-whole", "scores = head", "the rest is computed and thrown away"),
        (CORNER, "resident-data", "masks =", "the rest waits on the GPU"),
        (SMOOTHED, "one-hot", "truth = scores", "are one-hot vectors"),
        (WIDE, "widened", "logits = head", "copies in a type of 4 bytes"),
    ],
    ids=["gathered", "beams", "masked", "corner", "smoothed", "wide"],
)
def test_the_first_cause_of_memory_that_is_larger_than_it_must_be(
    tmp_path: Path, program: str, rule: str, made: str, words: str
) -> None:
    found = explain(tmp_path, program)
    first = found["causes"][0]
    assert first["rule"] == rule, first
    assert first["made_at"]["line"] == line_of(program, made)
    assert words in first["sentence"]
    effect = first["effect"]
    assert effect["certainty"] == "replayed"
    assert effect["after"] < 0.95 * effect["before"]


CACHE = (
    START
    + """\
keys = torch.empty(8, 4096, 64, device="cuda")
layer = nn.Linear(64, 64).cuda()
with torch.no_grad():
    for start in range(0, 4096, 512):
        x = torch.full((8, 512, 64), 1.0, device="cuda")
        keys[:, start : start + 512] = layer(x)
        x + F.scaled_dot_product_attention(x, keys[:, : start + 512], keys[:, : start + 512])
"""
)


def test_a_buffer_that_later_steps_fill_is_no_cause(tmp_path: Path) -> None:
    # The cache of the allocator has free blocks of one operator.
    assert {one["rule"] for one in explain(tmp_path, CACHE)["causes"]} <= {"fragments"}


MOMENTS = (
    START
    + """\
import os
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"  # since torch 2.15 the backward pass alone has one
net = nn.Sequential(*(nn.Linear(512, 512) for _ in range(16))).cuda()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
logs = {}

def inputs():
    raw = torch.randn(9200, 512, device="cuda")
    logs["raw"] = raw
    raw.mul_(2)
    return torch.ones(1, 512, device="cuda")

for number in range(4):
    net(inputs()).square().mean().backward()
    logs.clear()
    optimizer.step()
    optimizer.zero_grad()
"""
)


def test_two_moments_that_are_equally_high_have_one_cause_and_both_edits(tmp_path: Path) -> None:
    first = explain(tmp_path, MOMENTS)["causes"][0]
    assert "Alone, this saves little" in first["sentence"]
    assert "logs['raw']" in first["sentence"]
    assert "temporaries of the optimizer" in first["sentence"]
    effect = first["effect"]
    assert effect["certainty"] == "tried"
    assert effect["after"] < 0.9 * effect["before"]
    assert (
        "+optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, foreach=False)"
        in (effect["patch"])
    )
    assert '+    logs["raw"] = raw.detach().cpu()' in effect["patch"]


NUMBERS = (
    START
    + """\
net = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
losses = []
for step in range(8):
    x = torch.randn(8192, 1024, device="cuda")
    loss = net(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
    del x, loss
"""
)


def test_numbers_that_are_kept_for_a_plot_are_no_cause(tmp_path: Path) -> None:
    assert explain(tmp_path, NUMBERS)["causes"] == []

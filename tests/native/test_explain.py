"""``gpuprobe explain``: cause, holder and remedy of programs whose truth is known."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import warm_python
from native_commands import gpuprobe

MIB = 1 << 20


def explain(
    tmp_path: Path, program: str, *options: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Without values, unless ``options`` compute them: that takes longer than all else."""
    (tmp_path / "train.py").write_text(program)
    # The budget: however busy the machine is.
    options = ("--max-seconds", "900", "--compute", "shapes", *options)
    done = gpuprobe("explain", "--gpu", "t4", "--json", *options, "train.py", cwd=tmp_path)
    return done, json.loads(done.stdout)


def line_of(program: str, text: str) -> int:
    """The number of the first line that contains a text."""
    return next(number for number, line in enumerate(program.splitlines(), 1) if text in line)


START = """\
import torch
from torch import nn

net = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 64)).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

"""

LOSSES = (
    START
    + """\
losses = []
for step in range(6):
    x = torch.randn(4096, 64, device="cuda")
    reg = net(x).square().mean()
    loss = net(x).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(reg)
"""
)

VARIABLE = (
    START
    + """\
def train(steps):
    for step in range(steps):
        x = torch.randn(4096, 64, device="cuda")
        big = torch.randn(96 * 2048, 64, device="cuda")
        total = big.sum()
        loss = net(x).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

train(4)
"""
)

RESULT = (
    START
    + """\
class Output(dict):
    pass

def validate(head):
    kept = []
    for part in range(4):
        x = torch.randn(2048, 64, device="cuda")
        with torch.no_grad():
            out = Output(logits=x @ head, inputs=x)
        kept.append(out["logits"].cpu())
    return len(kept)

print(validate(torch.randn(64, 4096, device="cuda")))
"""
)

EVALUATION = (
    START
    + """\
def main():
    for epoch in range(2):
        for step in range(3):
            loss = net(torch.randn(256, 64, device="cuda")).abs().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        net.eval()
        total = 0
        for part in range(12):
            result = net(torch.randn(4096, 64, device="cuda"))
            total += result.abs().mean()
        net.train()
        print(total.item())

main()
"""
)

CYCLE = (
    START
    + """\
import gc
gc.disable()  # when it runs by itself depends on what else the process has

class State:
    def __init__(self, data):
        self.data = data
        self.me = self

for step in range(6):
    x = torch.randn(4096, 64, device="cuda")
    state = State(x.repeat(4, 1))
    loss = net(x).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
)

REPEATED = (
    START
    + """\
def attend(scores, mask):
    many = mask[None].repeat(16, 1, 1)
    return (scores + many).sum()

mask = torch.randn(256, 256, device="cuda")
for step in range(3):
    total = attend(torch.randn(16, 256, 256, device="cuda"), mask)
"""
)

STREAMS = """\
import torch

def copy(part):
    with torch.cuda.stream(torch.cuda.Stream()):
        buffer = torch.empty(16 << 20, dtype=torch.uint8, device="cuda")
        buffer[: len(part)] = part
    torch.cuda.synchronize()

part = torch.ones(1 << 20, dtype=torch.uint8, device="cuda")
for call in range(6):
    copy(part)
"""

AVERAGE = (
    START
    + """\
class Agent:
    average = None

    def step(self):
        loss = net(torch.randn(4096, 64, device="cuda")).abs().mean()
        extra = net(torch.randn(4096, 64, device="cuda")).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if self.average is None:
            self.average = extra
        else:
            self.average = extra / 2 + self.average / 2

agent = Agent()
for step in range(8):
    agent.step()
"""
)

_SLOT = RESULT.replace('out["logits"]', "out.logits")
NAMESPACE = _SLOT.replace(
    "class Output(dict):\n    pass", "from types import SimpleNamespace as Output"
)
NAMED_TUPLE = _SLOT.replace(
    "class Output(dict):\n    pass",
    "from collections import namedtuple\nOutput = namedtuple('Output', 'logits inputs')",
)

ATTRIBUTE = (
    START
    + """\
class Pipeline:
    def step(self):
        self.batch = torch.randn(4096, 12, 64, device="cuda")
        loss = net(self.batch.mean(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

pipeline = Pipeline()
for step in range(3):
    pipeline.step()
"""
)

CONTROL = (
    START
    + """\
for step in range(4):
    x = torch.randn(4096, 64, device="cuda")
    loss = net(x).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    del x, loss
"""
)


@pytest.mark.parametrize(
    ("program", "rule", "made", "holder", "edit"),
    [
        (LOSSES, "kept-graphs", "reg = net(x)", "losses", "    losses.append(reg.detach())"),
        (EVALUATION, "evaluation", "result = net", "", "        with torch.no_grad():"),
        (VARIABLE, "live-variable", "big = torch.randn", "big (a Tensor in train", ""),
        (RESULT, "live-variable", "logits=x @", "out", "        out['logits'] = None"),
        (NAMESPACE, "live-variable", "logits=x @", "out", "        out.logits = None"),
        (ATTRIBUTE, "live-variable", "self.batch =", "batch", "        self.batch = None"),
        (
            NAMED_TUPLE,
            "live-variable",
            "logits=x @",
            "out",
            "        out = out._replace(logits=None)",
        ),
        (CYCLE, "cycle", "x.repeat", "State.me", ""),
        (
            REPEATED,
            "repeated-values",
            ".repeat(16",
            "many",
            "    many = mask[None].expand(16, -1, -1)",
        ),
    ],
)
def test_the_first_cause_names_line_and_holder_and_its_fix_was_tried(
    tmp_path: Path, program: str, rule: str, made: str, holder: str, edit: str
) -> None:
    options = ("--compute", "real") if program is REPEATED else ()  # a try compares the outputs
    done, found = explain(tmp_path, program, *options)
    assert done.returncode == 1, done.stderr
    first = found["causes"][0]
    assert first["rule"] == rule
    assert first["made_at"]["line"] == line_of(program, made)
    assert holder in first["holder"]
    assert first["remedy"]
    assert first["effect"]["before"] == found["allocated"]
    assert first["effect"]["after"] < found["allocated"]
    if edit:
        assert first["effect"]["certainty"] == "tried"
        assert f"+{edit}" in first["effect"]["patch"]
        (tmp_path / "fix.patch").write_text(first["effect"]["patch"])
        subprocess.run(["git", "apply", "fix.patch"], cwd=tmp_path, check=True)
        fixed, report = explain(tmp_path, (tmp_path / "train.py").read_text(), *options)
        assert report["allocated"] == first["effect"]["after"], fixed.stderr
    assert sum(row["bytes"] for row in found["needs"]["rows"]) == found["allocated"]


FAILURES = (
    START
    + """\
def check(features):
    raise ValueError(len(features))

def process(batch):
    features = net(batch)
    check(features)

failures = []
for step in range(8):
    batch = torch.randn(4096, 64, device="cuda")
    try:
        process(batch)
    except ValueError as error:
        failures.append(error)
print(torch.cuda.max_memory_allocated())
"""
)

CACHED = """\
import functools
import torch

class Kernel:
    def __init__(self, x):
        self.gram = torch.exp(-torch.cdist(x, x))

    @functools.lru_cache(maxsize=16)
    def weights(self, noise):
        return 1 / (self.gram.diagonal() + noise)

for trial in range(6):
    x = torch.rand(1024, 16, device="cuda")
    kernel = Kernel(x)
    answer = torch.exp(-torch.cdist(x[:128], x)) @ kernel.weights(0.1)
print(torch.cuda.max_memory_allocated())
"""


@pytest.mark.parametrize(
    ("program", "rule", "before", "after"),
    [
        (FAILURES, "cycle handled-exception kept-tensors", "append(error)", "append(str(error))"),
        (CACHED, "cached-results", "maxsize=16", "maxsize=1"),
    ],
)
def test_what_is_replayed_is_what_the_changed_program_needs(
    tmp_path: Path, program: str, rule: str, before: str, after: str
) -> None:
    _, found = explain(tmp_path, program)
    first = found["causes"][0]
    assert first["rule"] in rule.split()
    effect = first["effect"]
    assert (effect["certainty"], effect["bound"]) == ("replayed", "exact")
    assert before in program
    (tmp_path / "fixed.py").write_text(program.replace(before, after))
    done = gpuprobe("run", "--gpu", "t4", "--quiet", "fixed.py", cwd=tmp_path)
    measured = int(done.stdout.splitlines()[-1])
    assert effect["before"] > 1.5 * measured
    assert abs(effect["after"] - measured) < 0.02 * measured


LIMITED = """\
import functools
import torch

@functools.cache
def mask(length):
    return torch.ones(length, length, device="cuda").triu()

for length in range(900, 1100, 20):
    print(mask(length).shape)
"""


def test_a_cache_without_a_limit_is_limited_and_tried(tmp_path: Path) -> None:
    _, found = explain(tmp_path, LIMITED)
    first = found["causes"][0]
    assert (first["rule"], first["effect"]["certainty"]) == ("cached-results", "tried")
    assert "\n+@functools.lru_cache(maxsize=1)\n" in first["effect"]["patch"]
    assert first["effect"]["after"] < 0.5 * first["effect"]["before"]


PAIRS = """\
import torch

images = torch.nn.Linear(64, 32).cuda()
x = torch.randn(4096, 64, device="cuda")
for step in range(3):
    a, b = images(x), images(x + 1)
    {pairs}.mean().backward()
    images.zero_grad()
"""


@pytest.mark.parametrize(
    ("pairs", "remedy"),
    [
        ("torch.nn.functional.logsigmoid(a @ b.T + 1)", "compute it in chunks, each under torch.u"),
        ("(a.sum(1) - b.sum(1, keepdim=True)).square()", "if their elements belong together one "),
    ],
)
def test_a_loss_of_all_pairs(tmp_path: Path, pairs: str, remedy: str) -> None:
    _, found = explain(tmp_path, PAIRS.format(pairs=pairs))
    first = found["causes"][0]
    assert first["rule"] == "broadcast-intermediate"
    assert first["made_at"]["line"] == line_of(PAIRS, "{pairs}")
    assert first["remedy"].startswith(remedy)
    assert "of which 4 B remain" in first["sentence"]


def test_the_edit_that_saves_most_is_shown(tmp_path: Path) -> None:
    _, found = explain(tmp_path, AVERAGE)
    first = found["causes"][0]
    assert first["rule"] == "kept-graph"
    assert first["effect"]["certainty"] == "tried"
    # Where the first value is stored, only the first step's graph goes.
    assert "+            self.average = (extra / 2 + self.average / 2)" in first["effect"]["patch"]
    assert first["effect"]["after"] < 0.6 * first["effect"]["before"]


def test_scratch_of_matrix_products_makes_no_cause_too_small(tmp_path: Path) -> None:
    """32 MiB for each on this GPU, while a backward pass runs (since torch 2.15)."""
    program = LOSSES.replace("4096, 64", "512, 64")
    _, found = explain(tmp_path, program, "--gpu", "h100-80gb")
    assert found["causes"][0]["rule"] == "kept-graphs"
    assert found["causes"][0]["effect"]["certainty"] == "tried"


def test_a_program_that_needs_its_memory_has_no_cause(tmp_path: Path) -> None:
    done, found = explain(tmp_path, CONTROL)
    assert (done.returncode, found["causes"]) == (0, [])
    options = ("--gpu", "t4", "--compute", "shapes")
    shown = gpuprobe("explain", *options, "train.py", cwd=tmp_path)
    assert "All of it is needed" in shown.stdout
    # Which lines have it, and what uses it.
    assert "needed later by the backward pass of" in shown.stdout.replace("\n", " ")


LOGITS = """\
import torch
from torch import nn

net = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(6)], nn.Linear(1024, 1024)).cuda()
labels = torch.zeros(2048, dtype=torch.long, device="cuda")
for step in range(3):
    logits = net(torch.randn(2048, 1024, device="cuda"))
    nn.functional.cross_entropy(logits, labels).backward()
    net.zero_grad()
"""


ARGUMENT = """\
import torch

net = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

def measure(x):
    total = x.sum()
    del x
    return torch.randn(192 * 1024, 64, device="cuda").sum() + total

def train():
    for step in range(3):
        big = torch.randn(192 * 1024, 64, device="cuda")
        total = measure(big)
        net(torch.randn(64, 64, device="cuda")).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

train()
"""


def test_an_argument_of_the_call_in_progress_cannot_be_deleted(tmp_path: Path) -> None:
    _, found = explain(tmp_path, ARGUMENT)
    assert not found["causes"]


def test_a_variable_that_ends_a_little_late_is_no_cause_and_is_named(tmp_path: Path) -> None:
    _, found = explain(tmp_path, LOGITS)
    assert found["causes"] == []
    assert found["late_variable"] == "8.0 MiB of them kept by the variable logits"
    options = ("--gpu", "t4", "--compute", "shapes")
    # An estimate does not search for holders, and must not take it for something that is kept.
    estimated = gpuprobe("estimate", *options, "train.py", cwd=tmp_path)
    assert "Memory that is not needed" not in estimated.stdout


def test_needed_memory_has_the_suggestion_of_a_report(tmp_path: Path) -> None:
    few = LOGITS.replace("2048", "8192").replace("1024)).cuda()", "64)).cuda()")
    _, found = explain(tmp_path, few)
    assert (found["causes"], found["smaller"]["id"]) == ([], "checkpoint")
    shown = gpuprobe("explain", "--gpu", "t4", "--compute", "shapes", "train.py", cwd=tmp_path)
    assert "try: Use activation checkpointing" in shown.stdout


FEATURES = """\
import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 512)) for _ in range(6)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        self.features = [x]
        for layer in self.layers:
            self.features.append(layer(self.features[-1]))
        return torch.stack([one.mean(0) for one in self.features])


encoder, probe = Encoder().cuda().eval(), nn.Linear(512, 8).cuda()
optimizer = torch.optim.SGD(probe.parameters())
for step in range(3):
    with torch.no_grad():
        means = encoder(torch.randn(8192, 512, device="cuda"))
    probe(means).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_an_evaluation_has_no_backward_pass_to_recompute_for(tmp_path: Path) -> None:
    _, found = explain(tmp_path, FEATURES)
    assert found["causes"] == []
    assert (found["smaller"] or {"id": ""})["id"] != "checkpoint"


ENSEMBLE = (
    START
    + """\
import copy
kept = []
for step in range(10):
    loss = net(torch.randn(64, 64, device="cuda")).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2:
        kept = [*kept, copy.deepcopy(net)][-4:]
with torch.no_grad():
    x = torch.randn(64, 64, device="cuda")
    print(sum(one(x) for one in kept).norm())
"""
)


def test_what_the_end_of_the_program_uses_does_not_grow_for_nothing(tmp_path: Path) -> None:
    _, found = explain(tmp_path, ENSEMBLE)
    assert found["causes"] == []


GRADIENTS_OF_BEFORE = """\
import torch
from torch import nn

runs = []
for width in (1024, 2048, 4096):
    net = nn.Sequential(nn.Linear(512, width), nn.ReLU(), nn.Linear(width, 8)).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    runs.append(net)
    for step in range(3):
        net(torch.randn(8, 512, device="cuda")).sum().backward()
        optimizer.step()
        if step < 2:
            optimizer.zero_grad()
"""


def test_gradients_that_an_optimizer_has_read_are_not_called_unread(tmp_path: Path) -> None:
    _, found = explain(tmp_path, GRADIENTS_OF_BEFORE)
    gradients = [one for one in found["causes"] if "gradients" in one["sentence"]]
    assert gradients
    assert all("requires_grad_" not in one["remedy"] for one in gradients)
    assert gradients[0]["rule"] == "late-zero-grad"


SMALL = """\
import torch
from torch import nn

actor, critic = (
    nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()).cuda() for _ in "ab"
)
optimizer = torch.optim.SGD([*actor.parameters(), *critic.parameters()])
for step in range(3):
    x = torch.randn(256, 64, device="cuda")
    loss = actor(x).square().mean() + critic(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_kilobytes_are_no_cause(tmp_path: Path) -> None:
    """Two losses, one of which could have its backward pass first; the rest is cuBLAS's."""
    _, found = explain(tmp_path, SMALL)
    assert found["causes"] == []
    large = SMALL.replace("256", "65536")
    assert [cause["rule"] for cause in explain(tmp_path, large)[1]["causes"]] == ["summed-losses"]


EVALUATED = (
    "import os\n"
    + START
    + """\
size = SIZE
for step in range(4):
    net(torch.randn(64, 64, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
net.eval()
total = 0
for _ in range(6):
    total += net(torch.randn(size, 64, device="cuda")).square().mean()
"""
)


def test_a_second_run_with_other_tensors_is_not_searched(tmp_path: Path) -> None:
    """Nothing would hold those of the first run, as if the program needed them all."""
    size = "4096 + int.from_bytes(os.urandom(2), 'big')"
    program = EVALUATED.replace("SIZE", size)
    _, found = explain(tmp_path, program)
    assert not found["searched"]
    assert any("a second run made other tensors" in note for note in found["notes"])
    assert [cause["rule"] for cause in found["causes"]] == ["evaluation"]


REPLICAS = """\
import torch
from torch import nn

layers = [nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU()]
layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
net = nn.DataParallel(nn.Sequential(*layers)).cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
labels = torch.zeros(64, dtype=torch.long, device="cuda")
for step in range(3):
    loss = nn.functional.cross_entropy(net(torch.randn(64, 3, 64, 64).cuda()), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_gradients_that_nccl_adds_up_are_read(tmp_path: Path) -> None:
    """DataParallel calls it without an operator of torch."""
    _, found = explain(tmp_path, REPLICAS, "--gpu", "2xt4")
    assert "unread-gradients" not in [one["rule"] for one in found["causes"]]


def test_memory_in_the_cache_of_old_streams(tmp_path: Path) -> None:
    _, found = explain(tmp_path, STREAMS)
    first = found["causes"][0]
    assert (first["rule"], first["made_at"]["line"]) == ("old-streams", 5)
    assert first["bytes"] == 5 * 16 * MIB  # of the five streams before the last
    assert first["effect"]["reserved"]
    assert first["effect"]["certainty"] == "untried"


PRODUCTS = """\
import torch

weight = torch.randn(512, 2048, device="cuda")
part = torch.randn(2048, 512, device="cuda")
for call in range(6):
    with torch.cuda.stream(torch.cuda.Stream()):
        total = (part @ weight).sum(1)
    torch.cuda.synchronize()
"""


GARBAGE_AT_THE_END = (
    START
    + """\
import copy
import gc

gc.disable()

class Unit(nn.Module):
    def __init__(self, owner):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1 << 20))
        self.log = owner.record

class Owner(nn.Module):
    def __init__(self):
        super().__init__()
        self.unit = Unit(self)

    def record(self, x):
        pass

class Average:
    def __init__(self, model):
        self.model = model
        self.kept = []

    def step(self):
        self.kept.append(torch.ones(1 << 21, device="cuda"))
        torch.stack([one.detach().sum() for one in self.model.parameters()])

average = Average(Owner().cuda())
for step in range(4):
    x = torch.randn(64, 64, device="cuda")
    loss = net(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    average.step()
    copy.deepcopy(average.model).half()
"""
)


def test_garbage_of_a_program_that_ends_and_the_name_by_which_a_line_stores(tmp_path: Path) -> None:
    done, answer = explain(tmp_path, GARBAGE_AT_THE_END)
    assert done.returncode == 1, done.stderr
    causes = {one["rule"]: one for one in answer["causes"]}
    assert set(causes) == {"kept-tensors", "cycle"}
    assert "Unit.log" in causes["cycle"]["holder"]
    kept = causes["kept-tensors"]
    assert kept["kept_at"]["line"] == line_of(GARBAGE_AT_THE_END, "self.kept.append")
    assert "average.kept" in kept["holder"]
    assert "stored as self.kept at" in kept["sentence"]


def test_a_stream_with_a_workspace_of_cublas_is_old_too(tmp_path: Path) -> None:
    _, found = explain(tmp_path, PRODUCTS)
    first = found["causes"][0]
    assert (first["rule"], first["made_at"]["line"]) == ("old-streams", 7)


RETAINED = (
    START
    + """\
for step in range(3):
    x = torch.randn(4096, 64, device="cuda")
    first = net(x).abs().mean()
    first.backward(retain_graph=True)
    second = net(x).square().mean()
    second.backward()
    optimizer.step()
    optimizer.zero_grad()
    del second
"""
)


def test_a_graph_that_the_backward_pass_keeps(tmp_path: Path) -> None:
    _, found = explain(tmp_path, RETAINED)
    first = found["causes"][0]
    assert first["rule"] == "retained-graph"
    assert f"at line {line_of(RETAINED, 'retain_graph')}" in first["sentence"]
    assert "first.grad_fn" in first["holder"]
    effect = first["effect"]
    assert effect["certainty"] == "tried"
    assert effect["after"] < effect["before"]
    assert "+    first.backward()\n" in effect["patch"]


SEVERAL_NAMES = (
    START
    + """\
def evaluate():
    losses = []
    for _ in range(4):
        losses.append(net(torch.randn(16384, 64, device="cuda")).square().mean())
    return {"loss": torch.stack(losses).mean()}

for step in range(4):
    losses = evaluate()
    best = losses["loss"]
    loss = net(torch.randn(64, 64, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
)


def test_of_several_causes_of_one_graph_the_best_remedy_is_first(tmp_path: Path) -> None:
    """Without the graph of ``best``, ``losses`` keeps it."""
    _, found = explain(tmp_path, SEVERAL_NAMES)
    first, second = found["causes"]
    assert first["effect"]["after"] <= second["effect"]["after"]
    assert (first["effect"]["certainty"], second["effect"]["certainty"]) == ("tried", "tried")


SPARE = (
    START.replace("\n\n", "\n\nspare = nn.Linear(4096, 4096).cuda()\n", 1)
    + """\
for step in range(3):
    loss = net(torch.randn(64, 64, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
)


def test_a_module_that_is_never_used_is_deleted(tmp_path: Path) -> None:
    """No line stores its parameters by their names."""
    _, found = explain(tmp_path, SPARE)
    first = found["causes"][0]
    assert first["holder"].startswith("spare.")
    assert "+del spare\n" in first["effect"]["patch"]
    assert first["effect"]["after"] < 80 << 20  # while it exists


TWO_PARTS = (
    START
    + """\
class Part:
    pass

trainer = Part()
trainer.data, trainer.results = Part(), Part()
trainer.results.outputs = []
for step in range(6):
    trainer.data.batch = torch.randn(70000, 64, device="cuda")
    out = net(trainer.data.batch[:1024])
    trainer.results.outputs.append(out.detach().repeat(64, 1))
    out.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    del out
    torch.ones(1 << 24, device="cuda").sum()
"""
)


def test_of_an_object_that_has_much_the_part_with_the_most_is_named(tmp_path: Path) -> None:
    _, found = explain(tmp_path, TWO_PARTS)
    first = found["causes"][0]
    assert first["holder"].startswith("trainer.results.outputs")
    assert first["kept_at"]["line"] == line_of(TWO_PARTS, "outputs.append")


OUTPUTS_OF_A_CLASS = (
    START
    + """\
class Output:
    def __init__(self, logits):
        self.logits = logits

def model(x):
    return Output(net(x))

for epoch in range(2):
    for step in range(3):
        loss = model(torch.randn(64, 64, device="cuda")).logits.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for step in range(3):
        outputs = model(torch.randn(16384, 64, device="cuda"))
        print(outputs.logits.shape)
"""
)


def test_an_object_with_a_graph_is_made_without_gradients(tmp_path: Path) -> None:
    """It has no ``detach``."""
    _, found = explain(tmp_path, OUTPUTS_OF_A_CLASS)
    first = found["causes"][0]
    assert first["effect"]["certainty"] == "tried", first
    added = [row for row in first["effect"]["patch"].splitlines() if row.startswith("+ ")]
    assert added == [
        "+        with torch.no_grad():",
        '+            outputs = model(torch.randn(16384, 64, device="cuda"))',
    ]


IN_A_CLOSURE = (
    START
    + """\
outputs = []

def closure():
    optimizer.zero_grad()
    outputs.append(net(torch.randn(16384, 64, device="cuda")).detach())
    loss = net(torch.randn(64, 64, device="cuda")).square().mean()
    loss.backward()
    return loss

for step in range(8):
    optimizer.step(closure)
"""
)


def test_outputs_of_a_closure_are_not_the_state_of_the_optimizer(tmp_path: Path) -> None:
    """In a later step, too, whose trace does not have the step that made them."""
    _, found = explain(tmp_path, IN_A_CLOSURE)
    first = found["causes"][0]
    assert first["rule"] == "kept-tensors"
    assert first["made_at"]["line"] == line_of(IN_A_CLOSURE, "outputs.append")
    assert "outputs" in first["holder"]


OPTIMIZER = """\
import torch

parts = [torch.nn.Linear(512, 512) for _ in range(16)]
net = torch.nn.Sequential(*parts).cuda()
optimizer = getattr(torch.optim, "{kind}")(net.parameters(){options})  # which no edit finds
for step in range(4):
    net(torch.randn(8, 512, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


DECAYED = ", lr=0.1, momentum=0.9, weight_decay=0.1"


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("AdamW", ""),
        ("NAdam", ""),
        ("Adamax", ""),
        ("SGD", DECAYED),
        ("SGD", f"{DECAYED}, nesterov=True"),
    ],
)
def test_what_an_optimizer_needs_without_foreach(tmp_path: Path, kind: str, options: str) -> None:
    """Some need two temporaries for a parameter where foreach needs one."""
    _, found = explain(tmp_path, OPTIMIZER.format(kind=kind, options=options))
    first = found["causes"][0]
    assert first["rule"] == "foreach-temporaries"
    without = OPTIMIZER.format(kind=kind, options=f"{options}, foreach=False")
    (tmp_path / "fixed.py").write_text(f"{without}print(torch.cuda.max_memory_allocated())\n")
    run = ("--gpu", "t4", "--compute", "shapes", "--quiet")
    measured = int(gpuprobe("run", *run, "fixed.py", cwd=tmp_path).stdout)
    assert abs(first["effect"]["after"] - measured) < 0.001 * measured


def test_gradients_that_are_freed_earlier_are_there_for_the_whole_step_of_the_optimizer(
    tmp_path: Path,
) -> None:
    """It reads them before it makes its largest temporaries, and they are freed when it returns."""
    program = """\
import torch

layers = []
for _ in range(8):
    layers += [torch.nn.Linear(1024, 1024), torch.nn.GELU()]
    layers += [torch.nn.Linear(1024, 1024), torch.nn.GELU(), torch.nn.GELU()]
net = torch.nn.Sequential(*layers).cuda()
optimizer = torch.optim.RMSprop(net.parameters(), momentum=0.9, weight_decay=0.1, foreach=True)
for step in range(4):
    loss = net(torch.randn(1024, 1024, device="cuda")).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(torch.cuda.max_memory_allocated())
"""
    _, found = explain(tmp_path, program)
    first = found["causes"][0]
    assert first["rule"] == "late-zero-grad"
    zero, step = "    optimizer.zero_grad()\n", "    optimizer.step()\n"
    (tmp_path / "fixed.py").write_text(program.replace(zero, "").replace(step, step + zero))
    done = gpuprobe("run", "--gpu", "t4", "--quiet", "fixed.py", cwd=tmp_path)
    measured = int(done.stdout.splitlines()[-1])
    assert abs(first["effect"]["after"] - measured) < 0.01 * measured


def test_a_program_that_fails_by_a_value_is_run_again_with_all_values(tmp_path: Path) -> None:
    program = """\
import torch

big = torch.ones(70 << 20, device="cuda")  # more than is computed on the way
net = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
kept = []
for step in range(4):
    x = torch.randn(1 << 14, 512, device="cuda")
    loss = net(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    kept.append({5: x}[int(big[:5].sum())])
"""
    done, found = explain(tmp_path, program, "--compute", "auto")
    assert "it failed: running it again" in done.stderr
    assert (done.returncode, found["ended"]) == (1, "complete")
    assert "kept" in " ".join(cause["sentence"] for cause in found["causes"])
    wrong = "raise ValueError('unknown\\nmore')"
    (tmp_path / "wrong.py").write_text(f"import torch\ntorch.ones(9, device='cuda')\n{wrong}\n")
    done = gpuprobe("explain", "--gpu", "t4", "wrong.py", cwd=tmp_path)
    assert done.returncode == 5
    assert re.search(r"the program failed: ValueError: unknown \(.*wrong\.py:3\)\n", done.stderr)


def test_an_explanation_keeps_the_files_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "last.pt").write_text("trained for a week")
    saves = "with open('last.pt', 'wb') as file:\n    torch.save(net.state_dict(), file)\n"
    done, found = explain(tmp_path, RETAINED + saves)
    assert done.returncode == 1, done.stderr
    assert "last.pt is kept: what the program writes there is discarded" in found["notes"]
    assert (tmp_path / "last.pt").read_text() == "trained for a week"


KEPT_ERROR = (
    START
    + """\
LAST = None

def attempt(x):
    rows = x.repeat(8, 1)
    raise ValueError("no such layout")

try:
    attempt(torch.randn(16384, 64, device="cuda"))
except ValueError as error:
    LAST = error
for step in range(3):
    x = torch.randn(2048, 64, device="cuda")
    loss = net(x).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
)


def test_an_exception_that_a_global_keeps(tmp_path: Path) -> None:
    _, found = explain(tmp_path, KEPT_ERROR)
    first = found["causes"][0]
    assert first["rule"] == "handled-exception"
    assert "the exception LAST outlives its handling" in first["sentence"]
    assert first["kept_at"]["line"] == line_of(KEPT_ERROR, "LAST = error")
    shown = gpuprobe("explain", "--gpu", "t4", "train.py", cwd=tmp_path)
    assert f"train.py:{first['kept_at']['line']}" in shown.stdout


CACHE = (
    START
    + """\
cache = {}

def features(key, x):
    if key not in cache:
        cache[key] = net(x).detach()
    return cache[key]

for step in range(24):
    x = torch.ones(4096, 64, device="cuda")
    new = features(step, x)
    loss = nn.functional.mse_loss(net(x[:64]), new[:64]) + features(max(0, step - 2), x).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
)


def test_a_cache_that_is_read_on_the_gpu_is_limited(tmp_path: Path) -> None:
    """Not moved to the CPU: where the program reads it, the values would be on the wrong device."""
    _, found = explain(tmp_path, CACHE)
    first = found["causes"][0]
    assert (first["rule"], first["effect"]["certainty"]) == ("kept-tensors", "tried")
    line = line_of(CACHE, "return cache[key]")
    assert f"line {line} reads entries" in first["remedy"]
    assert first["code"].startswith("while len(cache) >")
    assert "+        while len(cache) > " in first["effect"]["patch"]
    shown = gpuprobe("run", "--gpu", "t4", "--level", "trace", "train.py", cwd=tmp_path)
    assert "limit the entries" in shown.stderr or "limit its entries" in shown.stderr
    assert not re.search(r"^gpuprobe: +\.detach\(\)\.cpu\(\)", shown.stderr, re.MULTILINE)


def test_copies_on_the_cpu_with_which_the_program_fails_are_no_fix(tmp_path: Path) -> None:
    program = (
        CACHE.replace("cache = {}", "cache = []").partition("def features")[0]
        + """\
def newest(items):
    *_, last = items
    return last

for step in range(24):
    x = torch.ones(4096, 64, device="cuda")
    cache.append(net(x).detach())
    loss = nn.functional.mse_loss(net(x), newest(cache))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
    )
    _, found = explain(tmp_path, program)
    first = found["causes"][0]
    assert (first["rule"], first["effect"]["certainty"]) == ("kept-tensors", "replayed")
    assert "same device" in first["effect"]["note"]
    assert first["remedy"].endswith("with copies on the CPU alone the program fails")
    assert first["code"] == ""


STEPS_OF_A_MODULE = """\
import torch
from torch import nn

net = nn.Linear(64, 1024).cuda()

class Loop:
    def validate(self):
        self.outputs = []
        for _ in range(16):
            self.outputs.append(step(torch.rand(4096, 64, device="cuda")))
        return sum(out["loss"].item() for out in self.outputs)

@torch.no_grad()
def step(batch):
    out = net(batch)
    return {returned}

print(Loop().validate())
"""


def test_tensors_in_dictionaries_are_copied_by_an_edit(tmp_path: Path) -> None:
    returned = '{"loss": out.mean(), "x": out}'
    _, found = explain(tmp_path, STEPS_OF_A_MODULE.replace("{returned}", returned))
    first = found["causes"][0]
    assert (first["rule"], first["effect"]["certainty"]) == ("kept-tensors", "tried")
    assert "append({name: value.detach().cpu() for name, value" in first["effect"]["patch"]


SAWTOOTH = """\
import torch
from torch import nn

class State:
    def __init__(self, x):
        self.x, self.hooks = x, [Callback(self)]

class Callback:
    def __init__(self, state):
        self.state = state

def step():
    state = State(torch.randn(4096, 256, device="cuda"))
    state.out = net(state.x)
    state.out.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

net = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(30):
    step()
"""


def test_cycles_are_found_whenever_the_collector_runs(tmp_path: Path) -> None:
    """By itself it runs at other moments in the run that looks for them."""
    _, found = explain(tmp_path, SAWTOOTH)
    first = found["causes"][0]
    assert first["rule"] == "cycle"
    assert "State" in first["sentence"]
    assert first["effect"]["before"] > 2 * first["effect"]["after"]


def test_no_file_is_left(tmp_path: Path) -> None:
    """One of the runs ends at the peak, without Python's shutdown."""
    (tmp_path / "temporary").mkdir()
    program = STEPS_OF_A_MODULE.replace("{returned}", '{"loss": out.mean(), "x": out}')
    (tmp_path / "train.py").write_text(program)
    done = gpuprobe(
        *("explain", "--gpu", "t4", "--max-seconds", "900", "train.py"),
        cwd=tmp_path,
        cold=True,
        TMPDIR=str(tmp_path / "temporary"),
    )
    assert done.returncode == 1, done.stderr  # it has a remedy
    assert not [*(tmp_path / "temporary").iterdir()]


def test_an_edit_that_does_not_fit_is_no_trial(tmp_path: Path) -> None:
    """A number among the values cannot be moved: nothing is known of copies on the CPU."""
    returned = '{"loss": out.mean(), "n": 1, "x": out}'
    _, found = explain(tmp_path, STEPS_OF_A_MODULE.replace("{returned}", returned))
    first = found["causes"][0]
    assert (first["rule"], first["effect"]["certainty"]) == ("kept-tensors", "replayed")
    assert first["effect"]["note"].startswith("not tried: the edit does not fit")
    assert "fails" not in first["remedy"]


READ_AGAIN = """\
import torch
from torch import nn

encoder = nn.Linear(64, 1024).cuda().eval()
head = nn.Linear(1024, 1).cuda()
optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
cache = {}

@torch.no_grad()
def features(key):
    if key not in cache:
        cache[key] = encoder(torch.ones(4096, 64, device="cuda"))
    return cache[key]

for step in range(24):
    loss = head(features(step % 12)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_results_that_are_read_again_are_no_activations_to_recompute(tmp_path: Path) -> None:
    _, found = explain(tmp_path, READ_AGAIN)
    assert (found["causes"], found["smaller"]["id"]) == ([], "kept-results")


NUMBERS = (
    START
    + """\
losses = []
for step in range(24):
    x = torch.randn(8192, 64, device="cuda")
    out = net(x)
    loss = nn.functional.mse_loss(out, torch.randn_like(out))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
    del out, loss
print(torch.stack(losses).mean())
"""
)


def test_losses_that_keep_the_memory_of_all_elements(tmp_path: Path) -> None:
    _, found = explain(tmp_path, NUMBERS)
    first = found["causes"][0]
    assert first["rule"] == "kept-tensors"
    assert "one number in the memory of all elements" in first["sentence"]
    assert "losses (a list of" in first["sentence"]


RETRY = (
    START.replace("import nn", "import nn  # noqa")
    + """\
def work(n):
    x = torch.randn(n << 28, device="cuda")
    return (x + 1) * (x + 2)

try:
    work(6)
except torch.OutOfMemoryError:
    work(4)
"""
)


def test_frames_of_a_handled_exception_are_found_where_memory_runs_out(tmp_path: Path) -> None:
    done, found = explain(tmp_path, RETRY)
    assert done.returncode == 1, done.stderr
    assert found["causes"][0]["rule"] == "handled-exception"
    assert "kept by OutOfMemoryError" in found["causes"][0]["holder"]
    assert found["ended"] == "out of memory"


LARGE = """\
import torch

blocks = [torch.randn(1 << 30, device="cuda") for _ in range(5)]
torch._foreach_add_(blocks, 1.0)
"""


def test_a_program_without_enough_memory_is_explained_on_an_endless_gpu(tmp_path: Path) -> None:
    done, found = explain(tmp_path, LARGE)
    assert found["allocated"] >= 5 << 32
    assert found["ended"] == "out of memory"
    assert found["causes"] == [], done.stderr


def test_an_error_that_no_one_handles_keeps_nothing(tmp_path: Path) -> None:
    """The operator that ran out of memory has its arguments, and its error is still raised."""
    program = """\
import torch

x = torch.ones(1 << 27, device="cuda", requires_grad=True)
net = torch.nn.Sequential(*(torch.nn.Sigmoid() for _ in range(40)))
net(x).sum().backward()
"""
    done, found = explain(tmp_path, program)
    assert found["ended"] == "out of memory"
    assert found["causes"] == [], done.stderr
    assert not found["failed"]


def test_the_fix_of_a_program_without_enough_memory_was_tried(tmp_path: Path) -> None:
    """On the endless GPU, where the unchanged program runs to its end, too."""
    program = LOSSES.replace("range(6)", "range(30)").replace("4096, 64", "200_000, 64")
    done, found = explain(tmp_path, program)
    assert found["ended"] == "out of memory"
    effect = found["causes"][0]["effect"]
    assert effect["certainty"] == "tried", done.stderr
    assert "+    losses.append(reg.detach())" in effect["patch"]
    assert effect["before"] == found["allocated"] > found["capacity"] > 2 * effect["after"]


def test_a_script_for_torchrun_is_explained_as_a_job_of_one_process(tmp_path: Path) -> None:
    distributed = """\
import os
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group("nccl")
net = nn.parallel.DistributedDataParallel(net)
losses = []
"""
    done, found = explain(tmp_path, LOSSES.replace("losses = []\n", distributed))
    cause = found["causes"][0]
    assert cause["rule"] == "kept-graphs"
    assert cause["effect"]["certainty"] == "tried", done.stderr
    assert found["notes"][0].startswith("other ranks: ")
    for command, hint in (
        ("estimate", "--ranks N, for one rank of N"),
        ("run", "gpuprobe run --gpu t4 -- torchrun --nproc-per-node gpu train.py"),
    ):
        done = gpuprobe(command, "--gpu", "t4", "train.py", cwd=tmp_path)
        assert done.returncode == 5
        assert hint in done.stderr


RANKS = (
    START.replace("nn.Linear(1024, 64)).cuda()", "nn.Linear(1024, 64))")
    + """\
import os
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
torch.distributed.init_process_group("nccl")
net = nn.parallel.DistributedDataParallel(net.cuda())
kept = []
for step in range(5):
    loss = net(torch.randn(4096, 64, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank:
        kept.append(net(torch.randn(4096, 64, device="cuda")))
torch.distributed.destroy_process_group()
"""
)


@pytest.mark.parametrize("rows", ["4096", "4096 if rank else 65536"])
def test_of_a_job_each_rank_is_explained(tmp_path: Path, rows: str) -> None:
    """Also if the rank with the highest peak is another one than that which keeps memory."""
    (tmp_path / "train.py").write_text(
        RANKS.replace("loss = net(torch.randn(4096", f"loss = net(torch.randn({rows}")
    )
    options = ("--gpu", "2xt4", "--compute", "shapes", "--max-seconds", "900")
    command = ("torchrun", "--standalone", "--nproc-per-node", "2", "train.py")
    ranks = warm_python.ranks()
    done = gpuprobe("explain", "--json", *options, "--", *command, cwd=tmp_path, **ranks)
    found = json.loads(done.stdout)
    assert found["program"] == " ".join(command)
    assert (found["device"], found["ended"]) == ("cuda:1", "complete")
    assert "kept" in found["causes"][0]["sentence"]
    assert found["causes"][0]["effect"]["certainty"] != "tried"
    (other,) = found["ranks"]
    assert other.startswith("rank 0: ")
    assert other.endswith(" allocated at its peak on cuda:0; no cause")
    assert "no edit or setting is tried" in found["notes"][0]


ENDLESS = (
    START
    + """\
import time
kept = []
for step in range(9):
    x = torch.randn(4096, 64, device="cuda")
    loss = net(x).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    kept.append(x.clone())
time.sleep(600)
"""
)


def test_a_program_that_does_not_end_is_explained_as_far_as_it_came(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ENDLESS)
    options = ("--gpu", "t4", "--compute", "shapes", "--max-seconds", "24")
    done = gpuprobe("explain", "--json", *options, "train.py", cwd=tmp_path)
    found = json.loads(done.stdout)
    assert found["ended"] == "stopped"
    assert re.fullmatch(r"after 12 s, in step \d+", found["detail"])
    first = found["causes"][0]
    assert first["kept_at"]["line"] == line_of(ENDLESS, "kept.append")
    assert "kept" in first["sentence"]
    assert first["made_at"]["line"] == line_of(ENDLESS, "x.clone()")
    assert first["effect"]["certainty"] == "replayed"
    assert "--max-seconds" in found["notes"][0]
    assert len(found["causes"]) == 1  # the growth of the same list is no other cause


def test_a_program_without_a_step_in_the_time_is_one_line(tmp_path: Path) -> None:
    """In a new process: a warm one has imported torch, and records from the start."""
    (tmp_path / "train.py").write_text("import time; time.sleep(600)")
    done = gpuprobe("explain", "--max-seconds", "6", "train.py", cwd=tmp_path, cold=True)
    assert (done.returncode, done.stdout) == (5, "")
    assert "the program made no step in 3 s" in done.stderr
    assert "--max-seconds 24" in done.stderr


def test_a_program_that_was_stopped_before_it_used_the_gpu_is_not_told_to(tmp_path: Path) -> None:
    program = "import torch\nwhile True:\n    torch.randn(64, 64) @ torch.randn(64, 64)\n"
    (tmp_path / "train.py").write_text(program)
    done = gpuprobe("explain", "--max-seconds", "16", "train.py", cwd=tmp_path)
    assert done.stdout == ""
    assert " in 8 s\n" in done.stderr
    assert "hint: " in done.stderr
    assert "--max-seconds 64" in done.stderr


@pytest.mark.parametrize(
    ("program", "code", "text"),
    [
        ("raise ValueError('no data')\n", 5, "the program failed: ValueError: no data"),
        ("import sys; sys.exit(3)\n", 5, "the program ended with code 3\n"),
        ("input()\n", 5, "EOFError"),
        ("print('nothing')\n", 4, "allocated no memory on the GPU"),
    ],
)
def test_what_cannot_be_explained_is_one_line(
    tmp_path: Path, program: str, code: int, text: str
) -> None:
    (tmp_path / "train.py").write_text(program)
    done = gpuprobe("explain", "train.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, "")
    errors = [line for line in done.stderr.splitlines(keepends=True) if "error:" in line]
    assert len(errors) == 1
    assert text in errors[0]
    assert "hint: " in done.stderr


def test_what_fails_on_any_gpu_is_explained_by_the_steps_before_it_ran_out(tmp_path: Path) -> None:
    """On the GPU without a limit this program fails as well, so that it shows no peak."""
    program = LOSSES.replace("range(6)", "range(30)").replace("4096, 64", "200_000, 64")
    program = program.replace("append(reg)", "append(net[:2](x))") + "raise ValueError('no end')\n"
    done, found = explain(tmp_path, program)
    assert done.returncode == 1, done.stderr
    assert found["ended"] == "out of memory"
    assert found["failed"]
    assert "losses (a list of" in found["causes"][0]["sentence"]
    assert any("the run that ran out of memory" in note for note in found["notes"])


BEST = """\
import copy
import torch
from torch import nn

net = nn.Sequential(*[nn.Linear(512, 512) for _ in range(12)]).cuda()
optimizer = torch.optim.AdamW(net.parameters())
state = None
for epoch in range(3):
    for batch in range(3):
        loss = net(torch.randn(8, 512, device="cuda")).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        value = net(torch.randn({batch}, 512, device="cuda")).square().mean().item()
    # Each time, whatever the value: a copy that is loaded in the end is needed.
    state = copy.deepcopy(net.state_dict())
net.load_state_dict(state)
"""


def test_the_best_weights_are_kept_on_the_cpu(tmp_path: Path) -> None:
    program = BEST.format(batch=8)
    _, found = explain(tmp_path, program)
    # Gradients of the step before are there too; their end would not change the peak, which is as
    # high in an optimizer's step.
    (first,) = (one for one in found["causes"] if one["effect"]["certainty"] == "tried")
    assert first["rule"] == "kept-tensors"
    assert "state['" in first["holder"]
    assert "an OrderedDict" in first["holder"]
    added = 'value.to("cpu", copy=True) for name, value in net.state_dict().items()'
    assert added in first["effect"]["patch"]
    assert "late-zero-grad" not in [one["rule"] for one in found["causes"]]


def test_gradients_are_freed_before_an_evaluation(tmp_path: Path) -> None:
    program = BEST.format(batch=8192).replace(
        "AdamW(net.parameters())", "SGD(net.parameters(), 0.1)"
    )
    _, found = explain(tmp_path, program)
    first = next(one for one in found["causes"] if one["rule"] == "late-zero-grad")
    assert first["effect"]["certainty"] == "tried"
    assert "+        optimizer.zero_grad(set_to_none=True)" in first["effect"]["patch"]
    weights = 12 * 4 * 512 * (512 + 1)
    saved = first["effect"]["before"] - first["effect"]["after"]
    assert abs(saved - weights) < 0.05 * weights


EVALUATIONS = """\
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(1024, 1024), nn.Linear(1024, 1024)

    def forward(self, x):
        x = torch.relu(self.first(x))
        return torch.relu(self.second(x)).square()

def train():
    net = Net().cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        net(torch.randn(8, 1024, device="cuda")).mean().backward()
        optimizer.step()
    net.eval()
    for batch in range(2):
        out = net(torch.randn(1024, 1024, device="cuda"))

train()
"""


def test_an_evaluation_is_one_cause(tmp_path: Path) -> None:
    """The one before, which a variable keeps, and the one that runs; its graph has the weights."""
    _, found = explain(tmp_path, EVALUATIONS)
    evaluated = [one for one in found["causes"] if one["rule"] == "evaluation"]
    (cause,) = evaluated
    assert cause["made_at"]["line"] in (10, 11, 22)  # the layers, and their input
    assert cause["effect"]["certainty"] == "tried"


VALIDATION = """\
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(8))

    def attend(self, hidden):
        scores = hidden @ hidden.t()
        return scores.exp().mean(1)

    def forward(self, x):
        hidden = x
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return self.attend(hidden)

def run(net, x):
    return net(x).mean()

def validate(net):
    net.eval()
    for batch in range(3):
        value = run(net, torch.randn(4096, 1024, device="cuda"))
    net.train()

net = Net().cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    run(net, torch.randn(8, 1024, device="cuda")).backward()
    optimizer.step()
validate(net)
validate(net)  # of the same lines, called elsewhere
"""


def test_what_variables_of_several_functions_keep_of_an_evaluation_is_one_cause(
    tmp_path: Path,
) -> None:
    _, found = explain(tmp_path, VALIDATION)
    first = found["causes"][0]
    assert first["rule"] == "evaluation"
    assert "the autograd graphs of value in validate and others" in first["sentence"]
    assert "+@torch.no_grad()\n def validate(net):" in first["effect"]["patch"]


META = """\
import torch
from torch import nn

net = nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 8)).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

def task():
    losses = [0 for _ in range(6)]
    for step in range(6):
        losses[step] += net(torch.randn(4096, 256, device="cuda")).square().mean()
    return losses[-1] / 6

for step in range(3):
    loss = task()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_of_the_losses_in_a_list_the_one_that_is_trained_keeps_its_graph(tmp_path: Path) -> None:
    _, found = explain(tmp_path, META)
    first = found["causes"][0]
    assert first["rule"] == "kept-graphs"
    assert "losses (a list of 6" in first["sentence"]
    assert "each tensor" not in first["sentence"]
    line = line_of(META, "loss.backward()")
    assert f"Not all of them: line {line} runs the backward pass of one" in first["remedy"]
    assert not first["code"]


POOL = """\
import random
import torch
from torch import nn

class Pool:
    def __init__(self, size):
        self.size, self.images = size, []

    def query(self, image):
        if len(self.images) < self.size:
            self.images.append(image)
            return image
        index = random.randrange(self.size)
        old, self.images[index] = self.images[index].clone(), image
        return old

net = nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.Adam(net.parameters())
pool = Pool(50)
for step in range(12):
    x = torch.randn(512, 1024, device="cuda")
    pool.query(net(x)[:16].detach().clone())
    loss = net(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_pool_that_is_not_full_yet_does_not_grow_without_end(tmp_path: Path) -> None:
    _, found = explain(tmp_path, POOL)
    assert all(cause["rule"] != "growth" for cause in found["causes"])
    endless = POOL.replace("if len(self.images) < self.size:", "if image is not None:")
    _, found = explain(tmp_path, endless)
    assert "growth" in {cause["rule"] for cause in found["causes"]}


CACHED_METHOD = """\
import functools
import torch
from torch import nn

class World:
    def __init__(self, width):
        self.net = nn.Linear(width, width).cuda()
        self.optimizer = torch.optim.Adam(self.net.parameters())

    @functools.lru_cache(maxsize=1)
    def steps(self):
        return 3

    def train(self):
        for _ in range(self.steps()):
            self.net(torch.randn(8, self.net.in_features, device="cuda")).mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

World(2048).train()
torch.cuda.synchronize()
large = nn.Linear(5000, 5000).cuda()
print(large(torch.randn(8, 5000, device="cuda")).shape)
"""


def test_what_a_cached_method_keeps_when_the_program_goes_on(tmp_path: Path) -> None:
    _, found = explain(tmp_path, CACHED_METHOD)
    first = found["causes"][0]
    assert first["rule"] == "cached-results"
    assert "World.steps" in first["sentence"]
    assert "do not cache a method" in first["remedy"]
    assert first["kept_at"]["line"] == line_of(CACHED_METHOD, "lru_cache")


FROZEN = """\
import torch
from torch import nn

class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [part for _ in range(6) for part in (nn.Linear(256, 256), nn.Tanh())]
        self.encoder = nn.Sequential(*layers)
        self.encoder.requires_grad = False
        self.head = nn.Linear(256, 4)

    def forward(self, x):
        return self.head(self.encoder(x))

model = Classifier().cuda()
optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
for _ in range(3):
    loss = model(torch.randn(16384, 256, device="cuda")).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_the_part_whose_gradients_nothing_reads_is_named(tmp_path: Path) -> None:
    _, found = explain(tmp_path, FROZEN)
    first = found["causes"][0]
    assert first["rule"] == "unread-gradients"
    assert "are gradients of model.encoder that nothing reads" in first["sentence"]
    assert first["code"] == "model.encoder.requires_grad_(False)"


PROMPTS = """\
import torch
from torch import nn

def encoder():
    return nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(256, 256), nn.Tanh())))

class Prompted(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = encoder(), encoder()
        self.prompt = nn.Linear(256, 256)

    def forward(self, x):
        return self.image(x) @ self.text(self.prompt(x[:256])).t()

model = Prompted().cuda()
optimizer = torch.optim.SGD(model.prompt.parameters(), lr=0.1)
for _ in range(3):
    loss = model(torch.randn(8192, 256, device="cuda")).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

ADAPTED = """\
import torch
from torch import nn

class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(256, 1024)
        self.low = nn.Sequential(nn.Linear(256, 8), nn.Linear(8, 1024))

    def forward(self, x):
        return (self.base(x) + self.low(x)).unflatten(1, (4, 256)).mean(1).tanh()

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(Adapted() for _ in range(4)))

    def forward(self, x):
        return self.layers(x)

model = Model().cuda()
trained = [value for name, value in model.named_parameters() if ".low." in name]
optimizer = torch.optim.SGD(trained, lr=0.1)
for _ in range(3):
    loss = model(torch.randn(64, 256, device="cuda")).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_several_parts_whose_gradients_nothing_reads_are_named(tmp_path: Path) -> None:
    _, found = explain(tmp_path, PROMPTS)
    first = found["causes"][0]
    assert "are gradients of model.image and model.text that nothing reads" in first["sentence"]
    parts = "model.image.requires_grad_(False); model.text.requires_grad_(False)"
    assert first["code"] == parts


def test_a_part_of_which_adapters_are_trained_is_not_to_be_frozen(tmp_path: Path) -> None:
    _, found = explain(tmp_path, ADAPTED)
    first = found["causes"][0]
    assert first["rule"] == "unread-gradients"
    assert not first["code"]  # nor torch.no_grad(), as gradients pass through it


CRITICS = """\
import torch
from torch import nn

class Critics(nn.Module):
    def __init__(self):
        super().__init__()
        part = lambda: nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 1))
        self.parts = nn.ModuleList(part() for _ in range(3))

    def forward(self, real, fake):
        return [(part(real), part(fake)) for part in self.parts]

generator = nn.Linear(64, 256).cuda()
critics = Critics().cuda()
of_generator = torch.optim.SGD(generator.parameters(), lr=0.1)
of_critics = torch.optim.SGD(critics.parameters(), lr=0.1)
for _ in range(3):
    real = torch.randn(8192, 256, device="cuda")
    fake = generator(torch.randn(8192, 64, device="cuda")).tanh()
    few = critics(real[:512], fake.detach()[:512])
    loss = sum((r - 1).square().mean() + f.square().mean() for r, f in few)
    of_critics.zero_grad()
    loss.backward()
    of_critics.step()
    loss = sum((r - f).abs().mean() for r, f in critics(real, fake))
    of_generator.zero_grad()
    loss.backward()
    of_generator.step()
"""


def test_critics_of_one_generator_have_one_graph_and_pass_gradients_to_it(tmp_path: Path) -> None:
    _, found = explain(tmp_path, CRITICS)
    first = found["causes"][0]
    assert first["rule"] == "unread-gradients"
    assert "gradients that are read pass through this part" in first["remedy"]
    assert "no_grad" not in first["code"]
    # Each loss has the graph of the generator: a second backward pass would fail.
    assert all(cause["rule"] != "summed-losses" for cause in found["causes"])


GOAL = """\
import torch
from torch import nn

def features():
    layers = [part for _ in range(4) for part in (nn.Linear(256, 256), nn.Tanh())]
    return nn.Sequential(*layers).cuda()

small = nn.Linear(256, 256).cuda()
net = features()
optimizer = torch.optim.SGD(small.parameters(), lr=0.1)

def loss_of(x):
    fake = net(small(x[:2048]))
    goal = net(x)
    still = goal.detach()
    return (fake.mean() - still.mean()).square()

for _ in range(3):
    loss = loss_of(torch.randn(16384, 256, device="cuda"))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


PENALTY = """\
import torch
from torch import nn

critic = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Softplus(), nn.Conv2d(16, 1, 3)).cuda()
optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
for _ in range(6):
    real = torch.rand(8, 3, 96, 96, device="cuda")
    mixed = (real * 0.5).requires_grad_()
    out = critic(mixed)
    out.backward(torch.ones_like(out), create_graph=True)
    penalty = (mixed.grad.flatten(1).norm(dim=1) - 1).square().mean()
    optimizer.zero_grad()
    penalty.backward()
    optimizer.step()
    optimizer.zero_grad()
    del real, mixed, out, penalty
"""


def test_gradients_and_their_graphs_are_one_cause(tmp_path: Path) -> None:
    """Of tensors that no name leads to any more; the line that made them has one."""
    _, found = explain(tmp_path, PENALTY)
    (first,) = found["causes"]
    assert first["rule"] == "gradient-graph"
    assert "is for the variable mixed" in first["sentence"]


def test_where_a_detached_result_saves_little_no_graph_is_made(tmp_path: Path) -> None:
    _, found = explain(tmp_path, GOAL)
    first = found["causes"][0]
    assert first["effect"]["certainty"] == "tried"
    assert "+    with torch.no_grad():\n+        goal = net(x)" in first["effect"]["patch"]
    assert first["code"] == "with torch.no_grad():"


ANSWERS = """\
import torch

class Cache:
    def __init__(self, size):
        self.keys = torch.randn(size, 1 << 18, device="cuda")

class Answer:
    def __init__(self):
        self.meta = {}

def ask(size):
    answer = Answer()
    answer.meta["output"] = {"cache": Cache(size)}
    return answer

log = []
for turn in range(8):
    log.append(ask(4 + turn))
    torch.randn(1 << 20, device="cuda").sum().item()
"""


def test_the_line_that_stores_an_object_of_a_library(tmp_path: Path) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    library, rest = ANSWERS.split("class Answer", 1)
    (folder / "library.py").write_text(library)
    start = f"import sys\nimport torch\nsys.path.append({str(folder)!r})\n"
    program = f"{start}from library import Cache\n\nclass Answer{rest}"
    _, found = explain(tmp_path, program)
    first = found["causes"][0]
    assert "log (a list of" in first["sentence"]
    assert first["kept_at"]["line"] == line_of(program, 'answer.meta["output"]')
    assert "it is stored as answer.meta at" in first["sentence"]


NEVER_ENDS = """\
import pathlib, subprocess, sys, time
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path("id").write_text(str(other.pid))
while True:
    time.sleep(0.1)
"""


def test_a_program_that_is_stopped_ends_with_what_it_has_started(tmp_path: Path) -> None:
    """Which has its standard error open, and so would keep a pipe of it open."""
    (tmp_path / "train.py").write_text(NEVER_ENDS)
    command = [sys.executable, "-m", "gpuprobe", "explain", "--gpu", "t4", "--max-seconds", "4"]
    done = subprocess.run([*command, "train.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 5
    assert "the program made no step in 2 s" in done.stderr
    with contextlib.suppress(psutil.NoSuchProcess):
        other = psutil.Process(int((tmp_path / "id").read_text()))
        assert other.status() == psutil.STATUS_ZOMBIE  # nothing waits for it

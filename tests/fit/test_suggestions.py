"""What would make a run fit: changes in the order of their provider, together, and larger GPUs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import astuple, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_python
from hypothesis import given
from hypothesis import strategies as st

import gpuprobe
from gpuprobe.catalogue.gpus import find
from gpuprobe.errors import ConfigError
from gpuprobe.model.plans.estimate import Estimate, EstimatedChange
from gpuprobe.model.plans.request import EstimateRequest
from gpuprobe.model.values import Bytes
from gpuprobe.planning.alternatives import batch_parameter, script_changes
from gpuprobe.planning.changes import apply
from gpuprobe.planning.suggestions import Alternative, Changes, Skipped, Suggested, suggest
from gpuprobe.reporters.sections.plans import estimate_sections
from gpuprobe.reporters.terminal import Style
from gpuprobe.reporters.text import draw

pytestmark = pytest.mark.simulated

GIB = 1 << 30
NOTHING = Bytes(0)
REQUEST = EstimateRequest("train.py", ("--batch-size", "8"), gpu="t4", steps=2)


def estimate(reserved: int, gpu: str = "t4") -> Estimate:
    model = find(gpu)
    return Estimate(
        gpu=gpu,
        devices=1,
        steps=2,
        peak_allocated=Bytes(reserved),
        peak_reserved=Bytes(reserved),
        reserved_low=Bytes(reserved),
        reserved_high=Bytes(reserved),
        context_low=Bytes(model.context_low),
        context_high=Bytes(model.context_high),
        capacity=Bytes(model.total_memory),
        verdict="does not fit",
        attributed=Bytes(reserved),
        by_category=(),
        by_module=(),
        by_line=(),
        assumed=(),
        not_modelled=(),
    )


class Trials:
    """Estimates of requests: ``needs`` in GiB by a GPU, a change or a setting."""

    def __init__(self, needs: dict[str, float | str], capacity: float = 15) -> None:
        self.needs = needs
        self.capacity = capacity
        self.requests: list[EstimateRequest] = []

    def __call__(self, request: EstimateRequest) -> dict[str, Any]:
        self.requests.append(request)
        gpu = request.gpu
        key = request.change or request.conf or gpu
        need = self.needs[key]
        if isinstance(need, str):
            return {"error": need}
        capacity = self.capacity if gpu == "t4" else find(gpu).total_memory / GIB
        verdict = "fits" if need <= capacity else "does not fit"
        return {"verdict": verdict, "total": {"at_most": int(need * GIB)}}


def made(
    trials: Trials, provider: Callable[[Any], Iterable[Alternative | Skipped]], **rest: Any
) -> Suggested:
    return suggest(estimate(18 * GIB), REQUEST, provider, trials, **rest)


def changes(*names: str) -> Callable[[Any], Iterable[Alternative]]:
    """A provider without feedback."""
    return lambda request: [
        Alternative(name, replace(request, change=name), f"how {name}") for name in names
    ]


def test_changes_are_tried_in_their_order_and_those_that_fit_are_first() -> None:
    trials = Trials({"rtx-4000-ada": 19, "a": 17, "b": 14, "c": "it failed", "d": 12})
    notes: list[str] = []
    found = made(trials, changes("a", "b", "c", "d"), notify=notes.append)
    assert [(one.name, one.fits) for one in found.changes] == [
        ("b", True),
        ("d", True),
        ("a", False),
    ]
    assert found.not_tried == ("c: it failed",)
    assert [request.change for request in trials.requests] == ["", "a", "b", "c", "d"]
    assert [note.partition(" (")[0] for note in notes] == [f"trying {name}" for name in "abcd"]
    assert found.added_to(estimate(18 * GIB)).suggestions == found.changes


def test_changes_that_are_not_enough_alone_are_tried_together() -> None:
    trials = Trials({"rtx-4000-ada": 19, "a": 17, "b": 18.5, "c": 16, "a+c": 14.5, "x": 1})
    found = made(trials, changes("a", "b", "c"))
    assert [(one.name, one.fits) for one in found.changes] == [
        ("a and c", True),  # b saves nothing
        ("a", False),
        ("b", False),
        ("c", False),
    ]
    assert found.changes[0].how == "how a; how c"


def test_changes_of_one_key_are_not_combined() -> None:
    def provider(request: Any) -> Iterable[Alternative]:
        for size in ("4", "2"):
            yield Alternative(size, replace(request, arguments=(size,), change=size))

    trials = Trials({"rtx-4000-ada": 19, "4": 17, "2": 16})
    assert [one.name for one in made(trials, provider).changes] == ["4", "2"]


def test_settings_of_the_allocator_are_joined_with_a_change() -> None:
    def provider(request: Any) -> Iterable[Alternative]:
        yield Alternative("e", replace(request, conf="expandable_segments:True"))
        yield Alternative("a", replace(request, change="a"))

    trials = Trials({"rtx-4000-ada": 19, "expandable_segments:True": 17, "a": 16})
    made(trials, provider)
    assert trials.requests[-1].change == "a"
    assert trials.requests[-1].conf == "expandable_segments:True"


def test_a_generator_gets_the_results() -> None:
    received: list[EstimatedChange | None] = []

    def provider(request: Any) -> Changes:
        received.append((yield Skipped("z", "impossible")))
        received.append((yield Alternative("a", replace(request, change="a"))))

    found = made(Trials({"rtx-4000-ada": 19, "a": 14}), provider)
    assert received[0] is None
    assert received[1] == EstimatedChange("a", "", "fits", Bytes(14 * GIB))
    assert found.not_tried == ("z: impossible",)


def test_the_time_is_bounded() -> None:
    now = [0.0]
    trials = Trials({"rtx-4000-ada": 19, "a": 17, "b": 16})

    def slow(request: Any) -> dict[str, Any]:
        now[0] += 20
        return trials(request)

    provider = changes("a", "b", "c")
    found = suggest(estimate(18 * GIB), REQUEST, provider, slow, limit=60, clock=lambda: now[0])
    assert [one.name for one in found.changes] == ["a", "b"]
    assert found.not_tried == ("c: the time for suggestions was over",)


def test_ctrl_c_keeps_what_was_tried() -> None:
    trials = Trials({"rtx-4000-ada": 19, "a": 14})

    def interrupted(request: Any) -> dict[str, Any]:
        if request.change == "b":
            raise KeyboardInterrupt
        return trials(request)

    found = suggest(estimate(18 * GIB), REQUEST, changes("a", "b"), interrupted)
    assert [one.name for one in found.changes] == ["a"]
    assert found.not_tried == ("other changes: interrupted",)
    assert found.gpus


@given(st.integers(1 * GIB, 300 * GIB))
def test_the_smallest_gpus_hold_it_and_all_smaller_ones_do_not(reserved: int) -> None:
    trials = Trials({model.name: 1 for model in gpus()})
    found = suggest(estimate(reserved), REQUEST, changes(), trials).gpus
    named = [one.gpu for one in found]
    for model in gpus():
        needed = round(reserved * 1.02) + model.context_high
        smaller = len(found) < 4 or model.total_memory < found[-1].capacity
        assert (model.name in named) == (needed <= model.total_memory) or not smaller
    assert [one.estimated for one in found] == [True, False, False, False][: len(found)]
    assert [one.capacity for one in found] == sorted(one.capacity for one in found)


def gpus() -> list[Any]:
    from gpuprobe.catalogue.file import all_models

    return list(all_models())


def test_a_gpu_on_which_the_estimate_does_not_fit_is_left_out() -> None:
    trials = Trials({"rtx-4000-ada": 23, "rtx-a4500": 19.5})
    found = made(trials, changes()).gpus
    assert [(one.gpu, one.estimated) for one in found] == [
        ("rtx-a4500", True),
        ("a10", False),
        ("l4", False),
        ("a10g", False),
    ]
    assert found[0].needed == int(19.5 * GIB)


# -- scripts


@pytest.mark.parametrize(
    ("source", "arguments", "expected"),
    [
        ('p.add_argument("--batch-size", default=8)', [], ("--batch-size", "", 8)),
        (
            'p.add_argument("--batch-size", default=8)',
            ["--batch-size", "4"],
            ("--batch-size", "", 4),
        ),
        ("EVAL_BATCH_SIZE = 64\nBATCH_SIZE = 32", [], ("", "BATCH_SIZE", 32)),
        ('p.add_argument("--bs", default=2)', [], ("--bs", "", 2)),
        ("", ["--per_device_train_batch_size=16"], ("--per_device_train_batch_size", "", 16)),
        ("WIDTH = 8\nbatches = 3", [], None),
    ],
)
def test_the_batch_size_of_a_script(
    tmp_path: Path, source: str, arguments: list[str], expected: tuple[str, str, int] | None
) -> None:
    path = tmp_path / "train.py"
    path.write_text(source, encoding="utf-8")
    found = batch_parameter(replace(REQUEST, script=str(path), arguments=tuple(arguments)))
    assert (None if found is None else astuple(found)) == expected


def test_the_changes_of_a_script(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("BATCH_SIZE = 8", encoding="utf-8")
    request = replace(REQUEST, script=str(path), arguments=(), ranks=2)
    provider = script_changes(request)
    found = [next(provider)]
    result: EstimatedChange | None = None
    try:
        while True:
            no = EstimatedChange("", "", "does not fit", NOTHING)
            result = no if isinstance(found[-1], Alternative) else None
            found.append(provider.send(result))
    except StopIteration:
        pass
    assert [one.name for one in found] == [
        "expandable segments",
        "fused optimizer",
        "bf16 autocast",
        "activation checkpointing",
        "8-bit optimizer",
        "optimizer on the CPU",
        *(f"gradient accumulation (BATCH_SIZE {size})" for size in (4, 2, 1)),
        "4 ranks",
    ]
    (eight_bit,) = (one for one in found if one.name == "8-bit optimizer")
    kind = Skipped if find_spec("bitsandbytes") is None else Alternative
    assert isinstance(eight_bit, kind)
    last = found[-2]
    assert isinstance(last, Alternative)
    assert (last.request.value, last.request.steps) == (1, 4)


def adamw(step: bool = True) -> Callable[[], None]:
    def run() -> None:
        model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4))).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            model(torch.randn(8, 512, device="cuda")).sum().backward()
            if step:
                optimizer.step()
            optimizer.zero_grad()

    return run


def test_an_optimizer_on_the_cpu_needs_no_memory_of_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def peak(step: bool) -> int:
        return gpuprobe.estimate(adamw(step), "t4", steps=1).peak_allocated

    with_state, without_step = peak(True), peak(False)
    monkeypatch.setattr(torch.optim.Optimizer, "__init__", torch.optim.Optimizer.__init__)
    apply("offload")
    assert peak(True) == without_step < with_state


SCRIPT = """\
import argparse
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=512)
args = parser.parse_args()
WIDTH = 4096


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(8))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = CALL
        return x


with torch.device("cuda"):
    model = Net()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(10):
    x = torch.randn(args.batch_size, 128, WIDTH, device="cuda")
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def command(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    words = ["estimate", "--gpu", "t4", "--steps", "1", *options, str(path)]
    return warm_python.gpuprobe(*words, cwd=path.parent)


def test_an_estimate_that_does_not_fit_ends_with_what_to_do(tmp_path: Path) -> None:
    path, runs = tmp_path / "train.py", tmp_path / "runs"
    # A new file each: what a run appends to an older one is discarded.
    count = "import tempfile\ntempfile.mkstemp(dir='runs')\n"
    runs.mkdir()
    text = count + SCRIPT.replace("torch\n", "torch, torch.utils.checkpoint\n", 1)

    def plain(*options: str, call: str = "block(x)") -> tuple[str, str]:
        path.write_text(text.replace("CALL", call), encoding="utf-8")
        before = len(list(runs.iterdir()))
        done = command(path, "--verbose", "--no-suggestions", *options)
        assert len(list(runs.iterdir())) == before + 1  # it ran once
        lines = done.stdout.splitlines()
        assert lines[0] == lines[-1]
        needed = re.search(r"([\d.]+ .iB) of 14\.6 GiB", lines[0])
        assert needed is not None
        return done.stdout, needed[1]

    path.write_text(text.replace("CALL", "block(x)"), encoding="utf-8")
    done = command(path, "--verbose")
    assert done.returncode == 1, done.stderr
    output = " ".join(done.stdout.split())
    verdict = done.stdout.splitlines()[0]
    assert verdict.startswith("t4: does not fit (")
    assert f"{verdict}; with bf16 autocast it fits (" in output[-200:]
    table = done.stdout.partition("What would make it fit\n")[2].partition("\n\n")[0]
    rows = dict(re.findall(r"^ +(\S.*?)  +([\d.]+ GiB)  (?:fits|does not fit)$", table, re.M))
    untried = find_spec("bitsandbytes") is None
    assert len(rows) == 7 - untried
    assert f"{len(rows)} changes tried" in table
    assert ("  - 8-bit optimizer: " in done.stdout) == untried
    assert re.search(r"^ +rtx4090 +[\d.]+ GiB +23.5 GiB  estimated there$", done.stdout, re.M)
    assert len(list(runs.iterdir())) >= 8
    # Each is what the script needs with that change in its source, or in the settings.
    checkpointed = "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)"
    assert rows["activation checkpointing"] == plain(call=checkpointed)[1]
    without, needed = plain("--conf", "expandable_segments:True")
    assert rows["expandable segments"] == needed
    assert "What would" not in without


def test_if_nothing_is_enough_the_title_is_another() -> None:
    found = made(Trials({"rtx-4000-ada": 19, "a": 17}), changes("a")).added_to(estimate(18 * GIB))
    lines = list(draw.lines(estimate_sections(found), Style()))
    assert "What would help, but is not enough" in lines
    assert lines[0] == lines[-1]


# -- all GPUs


def test_fit_on_all_gpus_of_the_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", warm_python.shared().python)
    names = ("t4", "a10", "a100-40gb")
    models = [find(name) for name in names]
    monkeypatch.setattr("gpuprobe.catalogue.gpus.all_models", lambda: models)
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("CALL", "block(x)"), encoding="utf-8")
    from gpuprobe.planning.fit import fit_program

    notes: list[str] = []
    request = EstimateRequest(str(path), gpu="all", steps=1, suggest=True)
    found = fit_program(request, "batch-size", notify=notes.append)
    assert [one.gpu for one in found.choices] == list(names)
    largest = [one.largest for one in found.choices]
    assert None not in largest
    assert largest == sorted(largest, key=lambda value: value or 0)
    assert found.gpu == "a100-40gb"
    assert found.largest == largest[-1]
    assert found.not_tried == ("changes to the run: with --gpu all; --gpu GPU tries them",)
    # With what is known of two GPUs, the border on the next is found at once.
    assert sum(note.startswith("a100-40gb: ") for note in notes) <= 4


def test_all_is_no_gpu_of_an_estimate(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="unknown GPU 'all'"):
        gpuprobe.estimate(lambda: None, "all")

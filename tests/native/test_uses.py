"""The uses of memory on a simulated GPU: programs whose blocks each have a known need."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from native_commands import gpuprobe

MIB = 1 << 20


def needs_of(tmp_path: Path, program: str, *options: str) -> dict[str, Any]:
    """The needs at the high water mark of a program."""
    (tmp_path / "program.py").write_text(program)
    done = gpuprobe(
        *("run", "--gpu", "t4", "--level", "trace", "--trace-steps", "all", *options),
        *("--output", "run.gpuprobe", "program.py"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    shown = gpuprobe("report", "--json", "run.gpuprobe", cwd=tmp_path)
    found: dict[str, Any] = json.loads(shown.stdout)["needs"]
    assert sum(row["bytes"] for row in found["rows"]) == found["total"]
    return found


def lines(needs: dict[str, Any], need: str) -> dict[int, tuple[int, int | None, str]]:
    """Of the blocks in a state of at least 1 MiB, by the line that made them: bytes, the line of
    the last use, and its operator."""
    return {
        line["line"]: (
            line["bytes"],
            line["last_use"]["line"] if line["last_use"] else None,
            line["by"],
        )
        for row in needs["rows"]
        if row["need"] == need
        for line in row["lines"]
        if line["bytes"] >= MIB
    }


PROGRAM = """\
import torch

a = torch.randn(1 << 20, device="cuda")
b = torch.randn(2 << 20, device="cuda")
c = torch.empty(3 << 20, device="cuda")
early = torch.randn(4 << 20, device="cuda")
b.add_(1)
view = a[: 1 << 19]
peak = torch.randn(5 << 20, device="cuda")
del peak
d = view * 2
e = early.sum()
"""


@pytest.mark.parametrize("compute", ["real", "shapes"])
def test_views_in_place_operators_and_memory_that_nothing_uses(
    tmp_path: Path, compute: str
) -> None:
    needs = needs_of(tmp_path, PROGRAM, "--compute", compute)
    assert lines(needs, "never_used_again") == {7 - 3: (8 * MIB, 7, "add_")}
    assert lines(needs, "never_used") == {5: (12 * MIB, None, "")}
    assert lines(needs, "not_used_yet") == {
        3: (4 * MIB, 11, "mul"),
        6: (16 * MIB, 12, "sum"),
    }
    assert lines(needs, "in_use") == {9: (20 * MIB, None, "")}
    assert needs["freed_after_use"] == (4 + 16 + 20) * MIB


TRAINING = """\
import torch

net = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 512))
net = net.cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
history = []
for step in range(4):
    x = torch.randn(2048, 512, device="cuda")
    out = net(x)
    loss = out.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(out)
"""


def test_outputs_that_a_list_keeps_are_never_used_again(tmp_path: Path) -> None:
    needs = needs_of(tmp_path, TRAINING)
    assert lines(needs, "never_used_again")[9][0] == 3 * 4 * MIB  # of the three earlier steps


def test_memory_made_after_the_last_search_has_the_holder_of_the_older(tmp_path: Path) -> None:
    """The functions that run are searched after 4 steps and after 8, and this one returns."""
    head, body = TRAINING.replace("range(4)", "range(11)").split("history = []\n")
    body = "".join(f"    {line}\n" for line in ["history = []", *body.splitlines()])
    needs_of(tmp_path, f"{head}def train():\n{body}train()\n")
    shown = json.loads(gpuprobe("report", "--json", "run.gpuprobe", cwd=tmp_path).stdout)
    cause = shown["causes"][0]
    assert cause["bytes"] == 10 * 4 * MIB
    assert "kept by history (a list in train)" in cause["sentence"]


def test_workspaces_of_cublas_are_not_followed(tmp_path: Path) -> None:
    needs_of(tmp_path, TRAINING.replace("range(4)", "range(6)"))
    (stream,) = (tmp_path / "run.gpuprobe").glob("*.jsonl")
    held = [
        record
        for record in map(json.loads, stream.read_text().splitlines())
        if record.get("type") == "held"
    ]
    assert any(record["holder"]["name"].startswith("history") for record in held)
    assert "outside" not in {record["holder"].get("root") for record in held}


OVER_LISTS = """\
import torch

small = [torch.randn(1 << 18, device="cuda") for _ in range(3)]
large = [torch.randn(1 << 19, device="cuda") for _ in range(2)]
half = torch.randn(1 << 20, device="cuda").half()
roots = torch._foreach_sqrt([*small, *large])
mixed = torch._foreach_mul([half, half[::2]], 2.0)
peak = torch.randn(4 << 20, device="cuda")
del peak
torch._foreach_add_(roots, 1.0)
print(mixed[1].sum())
"""


def test_lists_of_tensors_are_uses_of_each(tmp_path: Path) -> None:
    needs = needs_of(tmp_path, OVER_LISTS)
    assert lines(needs, "never_used_again") == {
        3: (3 * MIB, 6, "_foreach_sqrt"),
        4: (4 * MIB, 6, "_foreach_sqrt"),
        5: (2 * MIB, 7, "_foreach_mul"),
    }
    assert lines(needs, "not_used_yet") == {
        6: (7 * MIB, 10, "_foreach_add_"),
        7: (1 * MIB, 11, "sum"),
    }
    assert lines(needs, "never_used") == {7: (2 * MIB, None, "")}


COMPILED = """\
import torch

@torch.compile
def work(x, y):
    return (x * 2 + y).relu()

x = torch.randn(1 << 20, device="cuda")
y = torch.randn(1 << 20, device="cuda")
unused = torch.randn(2 << 20, device="cuda")
out = work(x, y)
peak = torch.randn(4 << 20, device="cuda")
del peak
total = out.sum()
"""


def test_a_call_of_a_compiled_graph_is_a_use(tmp_path: Path) -> None:
    needs = needs_of(tmp_path, COMPILED)
    assert lines(needs, "never_used_again") == {
        7: (4 * MIB, 3, "compiled graph"),  # the line of the function that is compiled
        8: (4 * MIB, 3, "compiled graph"),
    }
    assert set(lines(needs, "never_used")) == {9}


REPLAYED = """\
import torch

static = torch.zeros(1 << 20, device="cuda")
idle = torch.randn(2 << 20, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    result = static * 2
graph.replay()
peak = torch.randn(4 << 20, device="cuda")
graph.replay()
del peak
"""


def test_a_replay_uses_what_its_graph_captured(tmp_path: Path) -> None:
    needs = needs_of(tmp_path, REPLAYED)
    assert set(lines(needs, "never_used")) == {4}
    later = lines(needs, "needed_later")
    assert later[3] == (4 * MIB, 10, "replay of a CUDA graph")
    assert later[7] == (4 * MIB, 10, "replay of a CUDA graph")


FAILING = """\
import torch

kept = [torch.randn(256 << 20, device="cuda") for _ in range(3)]
needed = torch.randn(1 << 20, device="cuda")
try:
    needed.repeat(4096)
except torch.OutOfMemoryError:
    pass
"""


def test_an_operator_that_runs_out_of_memory_uses_its_arguments(tmp_path: Path) -> None:
    needs = needs_of(tmp_path, FAILING)
    assert 4 not in lines(needs, "never_used")


def test_a_step_with_too_many_uses_has_none(tmp_path: Path) -> None:
    """Instead of uses that are not complete, which would be taken for all."""
    (tmp_path / "program.py").write_text(
        "import gpuprobe.sampler.tracing.uses as uses\nuses.MOST_USES = 5\n" + PROGRAM
    )
    done = gpuprobe(
        *("run", "--gpu", "t4", "--level", "trace", "--output", "run.gpuprobe", "program.py"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    shown = gpuprobe("report", "--json", "run.gpuprobe", cwd=tmp_path)
    assert "not traced" in json.loads(shown.stdout)["needs"]["unavailable"]


def test_the_option_prints_what_it_costs(tmp_path: Path) -> None:
    """It implies level trace. That hardware needs it: `tests/sampler/test_uses_option.py`."""
    (tmp_path / "program.py").write_text(PROGRAM)
    done = gpuprobe("run", "--gpu", "t4", "--uses", "--output", "run", "program.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    cost = re.search(r"--uses: about \S+ \S+ of the host for each of (\d+) ", done.stderr)
    assert cost is not None
    assert int(cost[1]) >= PROGRAM.count("torch.")
    shown = gpuprobe("report", "--json", "run", cwd=tmp_path)
    assert lines(json.loads(shown.stdout)["needs"], "never_used") == {5: (12 * MIB, None, "")}

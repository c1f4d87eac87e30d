"""What recording a program costs on the native engine: counters, trace, hazards; and an estimate.

    python benchmarks/recording_cost.py [--pairs 5] [--steps 8] [--layers 48]

GPT-2 XL (48 layers of 1,600) is trained on a simulated H100 with ``--compute shapes``, each time in
a process: bare, on the same engine without a recorder, and under ``gpuprobe run``. Compared is the
processor time of the whole process, from the start of Python to its end, which includes importing
torch. Each round runs all of them in turn; printed are the ratios of each round and their medians.

Then the processor time of ``gpuprobe estimate`` of a small script, in seconds.

Exit code 1 where a median is above its goal.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

GOALS = {"counters": 1.1, "trace": 1.3, "hazards": 1.6}
ESTIMATE = 3.0
"""Seconds of processor time."""
OPTIONS = {"counters": (), "trace": ("--level", "trace"), "hazards": ("--hazards",)}
GPU = "h100-80gb"

PROGRAM = """\
import sys

import torch
import torch.nn.functional as F
from torch import nn

STEPS, LAYERS = map(int, sys.argv[1:])
WIDTH, HEADS, WORDS = 1600, 25, 50257


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        batch, length, _ = x.shape
        qkv = self.attention(self.ln_1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        y = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        y = y.transpose(1, 2).reshape(batch, length, WIDTH)
        x = x + self.dropout(self.projection(y))
        y = F.gelu(self.up(self.ln_2(x)), approximate="tanh")
        return x + self.dropout(self.down(y))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(1024, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)

    def forward(self, words):
        x = self.wte(words) + self.wpe(torch.arange(words.shape[1], device=words.device))
        for block in self.h:
            x = block(x)
        return self.ln_f(x) @ self.wte.weight.T


with torch.device("cuda"):
    model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(STEPS):
    words = torch.randint(0, WORDS, (1, 512), device="cuda")
    F.cross_entropy(model(words).flatten(0, 1), words.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
SMALL = """\
import torch
from torch import nn

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    x, y = torch.randn(32, 64, device="cuda"), torch.randint(0, 10, (32,), device="cuda")
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
"""
BARE = f"""\
import runpy, sys
import gpuprobe

del sys.argv[0]
with gpuprobe.virtual_gpu("{GPU}", "shapes"):
    runpy.run_path("program.py", run_name="__main__")
"""


def seconds(folder: Path, *command: str) -> float:
    """Processor time of a process of Python and all that it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        # With bytecode, as installed: compiling gpuprobe's modules takes a second.
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def one_round(folder: Path, arguments: tuple[str, ...]) -> dict[str, float]:
    """The ratios to the bare program, and the seconds of an estimate."""
    bare = seconds(folder, "bare.py", "program.py", *arguments)
    run = ("-m", "gpuprobe", "run", "--gpu", GPU, "--compute", "shapes", "--force", "-q")
    row = {
        name: seconds(folder, *run, *options, "program.py", *arguments) / bare
        for name, options in OPTIONS.items()
    }
    estimate = seconds(folder, "-m", "gpuprobe", "estimate", "--gpu", GPU, "small.py")
    return {**row, "estimate": estimate, "bare": bare}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--layers", type=int, default=48)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, text in (("program", PROGRAM), ("small", SMALL), ("bare", BARE)):
            (folder / f"{file}.py").write_text(text)
        for _ in range(options.pairs):
            rows.append(one_round(folder, (str(options.steps), str(options.layers))))
            print(
                f"bare {rows[-1]['bare']:5.2f} s",
                *(f"{name} {rows[-1][name]:.2f}" for name in GOALS),
                f"estimate {rows[-1]['estimate']:.2f} s",
                sep="   ",
                flush=True,
            )
    missed = False
    for name, goal in {**GOALS, "estimate": ESTIMATE}.items():
        median = statistics.median(row[name] for row in rows)
        print(f"{name:<10} median {median:.2f}   goal: at most {goal}")
        missed = missed or median > goal
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())

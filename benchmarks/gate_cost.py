"""What a check costs, next to importing and building the model that it checks.

    python benchmarks/gate_cost.py [--runs 3] [--against CHECKOUT]

The program is GPT-2 124M (12 layers, 768 wide, 12 heads, 50,257 tokens), written with torch alone,
with two training steps of 2 x 256 tokens. ``build`` is a process that imports torch and builds the
model, and ends. ``check`` is `gpuprobe check --compute shapes` of the whole program against its
baseline. Both are timed in turns, as separate processes; the ratio compares the medians of the
processor's time, which other work on the machine does not change much.

With ``--against``, the same passing check is also timed, in the same turns, with the gpuprobe of
another checkout: the ratio is what a change of gpuprobe costs a check that passes.

Exit code 1 where a check takes more than 2.5 times as long.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BAR = 2.5

MODEL = """\
import sys

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, LENGTH, WIDTH, HEADS, DEPTH = 50257, 1024, 768, 12, 12


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.c_fc = nn.Linear(WIDTH, 4 * WIDTH)
        self.c_out = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).view(b, n, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(b, n, c))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))


class GPT2(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.wpe = nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(DEPTH))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


model = GPT2()
if "build" not in sys.argv:
    model = model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(2):
        tokens = torch.randint(VOCABULARY, (2, 257), device="cuda")
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def timed(command: list[str], folder: str, checkout: Path | None = None) -> tuple[float, float]:
    """Seconds of processor time, and of the clock, of one process and its children. ``checkout``:
    whose gpuprobe it imports, default the installed one."""
    environment = dict(os.environ)
    if checkout is not None:
        environment["PYTHONPATH"] = str(checkout.resolve())
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    wall = time.perf_counter() - start
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--against", type=Path, help="a checkout of another version")
    given = parser.parse_args()
    runs = given.runs
    os.environ["OMP_NUM_THREADS"] = "1"
    found: dict[str, list[tuple[float, float]]] = {"build": [], "check": []}
    if given.against is not None:
        found["against"] = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "gpt2.py").write_text(MODEL, encoding="utf-8")
        options = ["--gpu", "a100-40gb", "--compute", "shapes", "--baseline", "m.json"]
        gpuprobe = [sys.executable, "-m", "gpuprobe"]
        update = [*gpuprobe, "baseline", "update", "gpt2.py", *options]
        timed(update, folder, given.against)  # both read the older one's
        for _ in range(runs):
            found["build"].append(timed([sys.executable, "gpt2.py", "build"], folder))
            check = [*gpuprobe, "check", "gpt2.py", *options]
            found["check"].append(timed(check, folder))
            if given.against is not None:
                found["against"].append(timed(check, folder, given.against))
                now, then = found["check"][-1][0], found["against"][-1][0]
                print(f"check {now:.2f} s, against {then:.2f} s: {now / then:.3f} times")
            one, two = (found[name][-1][0] for name in ("build", "check"))
            print(f"build {one:.1f} s, check {two:.1f} s: {two / one:.2f} times", flush=True)
    middle = {
        name: [statistics.median(column) for column in zip(*rows, strict=True)]
        for name, rows in found.items()
    }
    print(f"{'':8} {'processor':>10} {'clock':>10}")
    for name, (used, wall) in middle.items():
        print(f"{name:8} {used:>8.1f} s {wall:>8.1f} s")
    ratio = middle["check"][0] / middle["build"][0]
    if "against" in middle:
        paired = [now[0] / then[0] for now, then in
                  zip(found["check"], found["against"], strict=True)]  # fmt: skip
        print(f"of the other checkout's processor time: {statistics.median(paired):.3f}")
    print(f"a check takes {ratio:.2f} times as long; the bar is {BAR}")
    return 0 if ratio <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())

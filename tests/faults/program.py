"""A training program with parts of `parts.py`: ``program.py SEED PART@PLACE ...``."""

from __future__ import annotations

import sys
from os import getpid
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import descriptors  # noqa: F401
import endings  # noqa: F401
import memory  # noqa: F401
import processes  # noqa: F401
import replaced  # noqa: F401
import signals  # noqa: F401
import streams  # noqa: F401
from parts import PARTS, Run

STEPS = 3


def do(run: Run, plan: dict[str, list[str]], place: str) -> None:
    for name in plan.pop(place, ()):
        run.note("part", name)
        PARTS[name].act(run)


def train(run: Run, plan: dict[str, list[str]]) -> None:
    do(run, plan, "start")
    import torch
    from torch import nn

    run.device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    run.module = model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    do(run, plan, "model")
    for step in range(STEPS):
        inputs = torch.rand(6, 4, device=run.device)
        if step == 1:
            hook = model[1].register_forward_hook(lambda *args: do(run, plan, "forward"))
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if step == 1:
            hook.remove()
            do(run, plan, "backward")
        optimizer.step()
        if step == 1:
            do(run, plan, "step")
        elif step > 1:
            for later in run.later:
                later()
        run.note_tensors("loss", [loss])
    do(run, plan, "end")
    for later in run.later:
        later()
    run.note_tensors("parameters", [*model.parameters(), *(p.grad for p in model.parameters())])


def main() -> None:
    plan: dict[str, list[str]] = {}
    for word in sys.argv[2:]:
        name, _, place = word.partition("@")
        plan.setdefault(place, []).append(name)
    run = Run(int(sys.argv[1]))
    try:
        train(run, plan)
        print("trained", flush=True)
    except SystemExit:
        raise
    except BaseException:
        run.note("raises" if getpid() == run.process else "a child raises")
        raise


if __name__ == "__main__":
    main()

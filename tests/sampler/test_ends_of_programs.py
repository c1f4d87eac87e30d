"""What ends a program after its steps keeps nothing of it alive."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import warm_python

PROGRAM = """\
import gc, sys, weakref
import torch
from gpuprobe.sampler.hooks.optimizer_steps import Enough, limit, limit_without_optimizer

class Variable:
    pass

def train(optimize):
    of_the_program = Variable()
    references.append(weakref.ref(of_the_program))
    weight = torch.ones(4, requires_grad=True)
    if optimize:
        optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(3):
        weight.sum().backward()
        if optimize:
            optimizer.step()

references = []
gc.disable()
optimize = sys.argv[1] == "optimizer"
with limit(lambda: 2) if optimize else limit_without_optimizer(lambda: 2, Enough):
    try:
        train(optimize)
    except Enough:
        print("ended")
print("freed" if references[0]() is None else "waits for the garbage collector")
"""


@pytest.mark.parametrize("kind", ["optimizer", "none"])
def test_a_program_that_was_ended_leaves_no_reference_cycle(tmp_path: Path, kind: str) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    words = (warm_python.shared().python, str(tmp_path / "program.py"), kind)
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stdout == "ended\nfreed\n", done.stderr

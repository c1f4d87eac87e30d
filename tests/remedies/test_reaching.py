"""Where a variable still has the value that a statement bound."""

from __future__ import annotations

import ast
import random
from contextlib import nullcontext, suppress
from textwrap import dedent, indent

import pytest

from gpuprobe.remedies.edits import Detach, NoGrad, apply
from gpuprobe.remedies.reaching import ControlFlow
from gpuprobe.remedies.text import ProgramText, Refusal, Refused, parsed


def _program(rng: random.Random, depth: int, in_loop: bool) -> str:
    """A block of statements that bind ``x`` and use it."""
    lines = []
    for _ in range(rng.randint(1, 4)):
        kind = rng.choice(("bind", "use", "use", "exit", "if", "loop", "try", "with", "match"))

        def block(loop: bool = in_loop) -> str:
            return indent(_program(rng, depth - 1, loop), "    ")

        if kind == "bind" or (depth == 0 and kind != "use"):
            lines.append(rng.choice(("x = new(LINE)", "x, y = new(LINE), 0", "del x")))
        elif kind == "use":
            lines.append(rng.choice(("use(LINE, x)", "x = new(LINE, use(LINE, x))")))
        elif kind == "exit":
            jumps = ("break", "continue") if in_loop else ()
            leave = rng.choice((*jumps, "return", "raise ValueError"))
            lines.append(f"if c():\n    {leave}")
        elif kind == "if":
            lines.append(f"if c():\n{block()}\nelse:\n{block()}")
        elif kind == "loop":
            head = rng.choice(("while c():", "for _ in range(c() + c()):"))
            lines.append(f"{head}\n{block(True)}\nelse:\n{block()}")
        elif kind == "try":
            ends = rng.choice(
                ("except ValueError:\n{}", "finally:\n{}", "except NameError:\n{}\nfinally:\n{}")
            )
            while "{}" in ends:
                ends = ends.replace("{}", block(), 1)
            lines.append(f"try:\n{block()}\n{ends}")
        elif kind == "with":
            manager = rng.choice(("suppress(Exception)", "nullcontext()"))
            lines.append(f"with {manager}:\n{block()}")
        else:
            lines.append(f"match c():\n    case 1:\n{indent(block(), '    ')}")
    return "\n".join(lines)


@pytest.mark.parametrize("seed", range(150))
def test_every_value_that_a_run_uses_is_expected_there(seed: int) -> None:
    rng = random.Random(seed)
    body = indent(_program(rng, 3, in_loop=False), "    ")
    rows = f"def f():\n    x = new(LINE)\n{body}".splitlines()
    source = "\n".join(row.replace("LINE", str(at)) for at, row in enumerate(rows, 1))
    tree = ast.parse(source)
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    flow = ControlFlow(function)
    statements = {
        node.lineno: node
        for node in ast.walk(function)
        if isinstance(node, (ast.Assign, ast.Expr, ast.Delete))
    }
    expected = {
        line: {one.lineno for one in flow.with_value(node, "x")}
        for line, node in statements.items()
    }
    used: set[tuple[int, int]] = set()
    for _ in range(60):
        left = iter([rng.random() < 0.5 for _ in range(80)] + [False] * 10_000)

        def may(value: int | None) -> int | None:
            """Any call may raise."""
            if rng.random() < 0.1:
                raise ValueError
            return value

        names = {
            "c": lambda left=left: int(next(left)),
            "new": lambda line, _=None, may=may: may(line),
            "use": lambda line, value, may=may: used.add((value, line)) or may(None),
            "suppress": suppress,
            "nullcontext": nullcontext,
        }
        exec(compile(tree, "program", "exec"), names)
        with suppress(ValueError, NameError):
            names["f"]()  # type: ignore[operator]
    assert all(line in expected[value] for value, line in used), source


def _text(source: str) -> ProgramText:
    found = parsed("t.py", dedent(source).encode())
    assert isinstance(found, ProgramText)
    return found


TRAINING = """\
import torch

checkpoint = torch.load("last.pt")
model = build(checkpoint["settings"])
checkpoint = None
best = 1e9


def estimate():
    losses = []
    for x in batches:
        losses.append(model(x).mean())
    return torch.stack(losses).mean()


for x in batches:
    loss = estimate()
    if loss < best:
        best = loss
        checkpoint = {"settings": settings, "best": best}
        torch.save(checkpoint, "last.pt")
    loss = model(x).mean()
    loss.backward()
"""


def _result(source: str, edit: Detach | NoGrad) -> str:
    text = _text(source)
    done = apply(text, [edit])
    return done.reason.name if isinstance(done, Refused) else "made"


def test_a_name_that_is_assigned_twice_has_the_value_of_one_of_them() -> None:
    """The loss of an evaluation, and of training; the settings of a checkpoint, and a new one."""
    rows = TRAINING.splitlines()
    best = rows.index("        best = loss") + 1
    trained = rows.index("    loss = model(x).mean()") + 1
    assert _result(TRAINING, Detach(best)) == "made"
    assert _result(TRAINING, Detach(rows.index("    loss = estimate()") + 1)) == "made"
    assert _result(TRAINING, NoGrad(9, 9)) == "made"
    assert _result(TRAINING, Detach(trained)) == Refusal.NEEDED_BY_BACKWARD.name


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        ("loss = model(x).mean()\n    loss.backward()", "made"),
        ("loss = loss + model(x).mean()\n    loss.backward()", "NEEDED_BY_BACKWARD"),
        ("if good:\n        loss = model(x).mean()\n    loss.backward()", "NEEDED_BY_BACKWARD"),
        ("loss += model(x).mean()\n    loss.backward()", "NEEDED_BY_BACKWARD"),
        ("other = [loss]\n    loss = model(x)\n    sum(other).backward()", "NEEDED_BY_BACKWARD"),
        (
            "def later():\n        return loss.mean()\n    loss = model(x)\n    later().backward()",
            "NEEDED_BY_BACKWARD",  # inner code reads the variable, whatever value it has
        ),
    ],
)
def test_a_value_that_may_reach_the_backward_pass_keeps_its_graph(last: str, reason: str) -> None:
    source = TRAINING.replace("    loss = model(x).mean()\n    loss.backward()", f"    {last}")
    line = source.splitlines().index("    loss = estimate()") + 1
    assert _result(source, Detach(line)) == reason


def test_the_outputs_of_an_evaluation_and_of_training_have_one_name() -> None:
    source = """\
    import torch

    def run(model, batches):
        for epoch in range(2):
            for batch in batches:
                outputs = model(batch)
                outputs.loss.backward()
            for batch in batches:
                outputs = model(batch)
                print(outputs.loss)
    """
    assert _result(source, NoGrad(9, 9)) == "made"
    assert _result(source, NoGrad(8, 8)) == "made"
    assert _result(source, NoGrad(6, 6)) == Refusal.NEEDED_BY_BACKWARD.name
    after = source.replace("outputs = model(batch)\n                outputs.loss", "outputs.loss")
    assert _result(after, NoGrad(8, 8)) == Refusal.NEEDED_BY_BACKWARD.name

"""Edits of a program's source: what each changes, and what it refuses."""

from __future__ import annotations

import subprocess
from pathlib import Path
from textwrap import dedent

import pytest

from gpuprobe.remedies.edits import (
    AutogradGrad,
    CloneStored,
    DeleteAfterUse,
    Detach,
    Edit,
    ExpandInsteadOfRepeat,
    FreeGradients,
    InsertCall,
    LimitCache,
    LimitEntries,
    MapLocationCpu,
    NoGrad,
    ReleasePart,
    SetKeyword,
    ToCpu,
    Where,
    WithoutAllocatorOption,
    apply,
)
from gpuprobe.remedies.setting import AllocatorSetting
from gpuprobe.remedies.text import ProgramText, Refusal, Refused, parsed


def edited(source: str, *edits: Edit) -> str | Refused:
    """The source with the edits, or why they are refused."""
    text = parsed("train.py", dedent(source).encode())
    assert isinstance(text, ProgramText)
    found = apply(text, edits)
    return found if isinstance(found, Refused) else found.text


def line_of(source: str, part: str) -> int:
    """The number of the only line with ``part``."""
    (found,) = (n for n, row in enumerate(dedent(source).split("\n"), 1) if part in row)
    return found


def changed(source: str, *edits: Edit) -> list[str]:
    """The lines that the edits add and remove, with their sign."""
    import difflib

    after = edited(source, *edits)
    assert isinstance(after, str), after
    rows = difflib.ndiff(dedent(source).split("\n"), after.split("\n"))
    return [row for row in rows if row[0] in "+-"]


def refusal(source: str, *edits: Edit) -> Refusal:
    after = edited(source, *edits)
    assert isinstance(after, Refused), after
    return after.reason


STORED = [
    ("losses.append(loss)", "losses.append(loss.detach())"),
    ("total += loss", "total += loss.detach()"),
    ("total += loss * n", "total += (loss * n).detach()"),
    ("total = total + loss", "total = (total + loss).detach()"),
    ("d[k] = out", "d[k] = out.detach()"),
    ("self.x = out", "self.x = out.detach()"),
    ("self.x = model(x)[0]", "self.x = model(x)[0].detach()"),
    ("d.update(loss=loss)", "d.update(loss=loss.detach())"),
    ("h['val'].append((step, loss))", "h['val'].append((step, loss.detach()))"),
    ("h.append({'loss': loss, 'step': 3})", "h.append({'loss': loss.detach(), 'step': 3})"),
    ("h.append(Record(step, loss))", "h.append(Record(step, loss.detach()))"),
    ("x = loss if good else None", "x = loss.detach() if good else None"),
    ("kept = [f(x) + loss for x in xs]", "kept = [(f(x) + loss).detach() for x in xs]"),
    ("print(best := loss + 1)", "print(best := (loss + 1).detach())"),
    ("é = 'ü'; losses.append(loss)  # ö", "é = 'ü'; losses.append(loss.detach())  # ö"),
    (
        "m.register_forward_hook(lambda m, i, out: kept.append(out))",
        "m.register_forward_hook(lambda m, i, out: kept.append(out.detach()))",
    ),
    ("h.append(f'{step}'); d[k] = loss", "h.append(f'{step}'); d[k] = loss.detach()"),
    ("if step: losses.append(loss)", "if step: losses.append(loss.detach())"),
]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("outs.append((x, y))", "outs.append((x.detach(), y.detach()))"),
        (
            "for i, x in enumerate(xs):\n    n += 1\n    h.append((n, i, x, {'x': x}))",
            "for i, x in enumerate(xs):\n    n += 1\n    "
            "h.append((n, i, x.detach(), {'x': x.detach()}))",
        ),
        (
            "for k in range(9):\n    outs.append((k, f(x), x.item()))",
            "for k in range(9):\n    outs.append((k, f(x).detach(), x.item()))",
        ),
    ],
)
def test_all_values_that_a_line_stores_are_detached(before: str, after: str) -> None:
    line = before.count("\n") + 1
    assert edited(before, Detach(line, every=True)) == after


@pytest.mark.parametrize(("before", "after"), STORED)
def test_what_a_line_stores_is_detached(before: str, after: str) -> None:
    name = "out" if "out" in before else "model(x)" if "model" in before else "loss"
    assert edited(before, Detach(1, name)) == after


def test_a_returned_value_is_detached_unless_the_caller_needs_its_graph() -> None:
    source = """\
    def evaluate(model, x):
        loss = model(x).mean()
        return {"loss": loss}

    print(evaluate(model, x))
    """
    assert changed(source, Detach(3)) == [
        '-     return {"loss": loss}',
        '+     return {"loss": loss.detach()}',
    ]
    called = dedent(source) + 'evaluate(model, x)["loss"].backward()\n'
    assert refusal(called, Detach(3)) is Refusal.NEEDED_BY_BACKWARD
    later = dedent(source) + "out = evaluate(model, x)\nall = out['loss'] + 1\nall.backward()\n"
    assert refusal(later, Detach(3)) is Refusal.NEEDED_BY_BACKWARD


def test_a_line_of_several_lines() -> None:
    source = """\
    history.append(
        loss  # of this step
        + penalty
    )
    """
    for line in (1, 2, 3):
        assert edited(source, Detach(line)) == dedent(
            """\
            history.append(
                (loss  # of this step
                + penalty).detach()
            )
            """
        )


@pytest.mark.parametrize(
    ("source", "edit", "reason"),
    [
        ("losses.append(loss.item())", Detach(1), Refusal.NO_TENSOR),
        ("losses.append(float(loss))", Detach(1), Refusal.NO_TENSOR),
        ("losses.append(loss.detach().cpu())", Detach(1), Refusal.NO_TENSOR),
        ("losses.append((loss, out))", Detach(1), Refusal.AMBIGUOUS),
        ("losses.append(loss)", Detach(1, "out"), Refusal.NOTHING_STORED),
        ("print(loss)", Detach(1, "loss"), Refusal.NOTHING_STORED),
        ("losses.append(*loss)", Detach(1), Refusal.NOTHING_STORED),
        ("x = 1\n\n", Detach(2), Refusal.NO_STATEMENT),
        ("print(f'{(y := loss)}')", Detach(1, "loss"), Refusal.IN_A_STRING),
        ("total += loss\ntotal.backward()", Detach(1), Refusal.NEEDED_BY_BACKWARD),
        ("ls.append(loss)\nsum(ls).backward()", Detach(1), Refusal.NEEDED_BY_BACKWARD),
        ("ls.append(x)\nscaler.scale(torch.stack(ls)).backward()", Detach(1),
         Refusal.NEEDED_BY_BACKWARD),
        ("for l in ls:\n    l.backward()\nls.append(loss)", Detach(3), Refusal.NEEDED_BY_BACKWARD),
        ("ls.append(x)\n[l.sum().backward() for l in ls]", Detach(1), Refusal.NEEDED_BY_BACKWARD),
        ("self.kept = out\nloss = self.kept.sum()\nautograd.grad(loss, w)", Detach(1),
         Refusal.NEEDED_BY_BACKWARD),
        ("def training_step(x):\n    loss = f(x)\n    return loss", Detach(3),
         Refusal.NEEDED_BY_BACKWARD),
        ("out = model(x)\n(out * 2).sum().backward()", Detach(1), Refusal.NEEDED_BY_BACKWARD),
    ],
)  # fmt: skip
def test_what_cannot_be_detached(source: str, edit: Edit, reason: Refusal) -> None:
    assert refusal(source, edit) is reason


def test_a_variable_of_a_comprehension_is_its_own() -> None:
    source = """\
    def train(losses):
        loss = model(x)
        loss.backward()
        losses.append(loss)
        return [loss.item() for loss in losses]
    """
    assert len(changed(source, Detach(4))) == 2


def test_another_variable_of_the_same_name_is_no_obstacle() -> None:
    source = """\
    def train(loss):
        loss.backward()

    def watch(history, loss):
        history.append(loss)
        total = history[-1].item()
        total.backward()
    """
    assert len(changed(source, Detach(5))) == 2


def test_the_copy_on_the_cpu() -> None:
    assert edited("outs.append(out)", ToCpu(1)) == "outs.append(out.cpu())"
    assert edited("outs.append(out)", ToCpu(1, detach=True)) == "outs.append(out.detach().cpu())"
    assert edited("outs.append(out.detach())", ToCpu(1)) == "outs.append(out.detach().cpu())"
    bare = ToCpu(1, detach=True)
    assert edited("outs.append(out.detach())", bare) == "outs.append(out.detach().cpu())"
    assert edited("outs.append(out.data[0])", bare) == "outs.append(out.data[0].cpu())"
    for stored in ("out.detach().cpu()", "out.detach().shape", "out.argmax()", "out > 0"):
        assert refusal(f"outs.append({stored})", bare) is Refusal.NO_TENSOR
    assert refusal("outs.append(out.cpu())", ToCpu(1)) is Refusal.NO_TENSOR
    assert refusal("outs.append(out.item())", ToCpu(1)) is Refusal.NO_TENSOR


LOOP = """\
for step in range(4):
    logits = model(x)
    probs = logits.softmax(-1)
    loss = probs.mean()
    loss.backward()
    if step % 2:
        print(loss.item())
print("end")
"""


def test_a_variable_is_deleted_after_its_last_use() -> None:
    assert changed(LOOP, DeleteAfterUse(3, "logits")) == ["+     del logits"]
    assert "softmax(-1)\n    del logits\n" in str(edited(LOOP, DeleteAfterUse(3, "logits")))
    # In a branch, the value is deleted behind it: the other branch has it too.
    after = str(edited(LOOP, DeleteAfterUse(7, "loss")))
    assert "        print(loss.item())\n    del loss\nprint" in after
    both = str(edited(LOOP, DeleteAfterUse(3, "logits"), DeleteAfterUse(4, "probs")))
    assert both.count("del ") == 2
    assert refusal(LOOP, DeleteAfterUse(2, "logits")) is Refusal.USED_LATER
    assert refusal(LOOP, DeleteAfterUse(4, "loss")) is Refusal.USED_LATER


def test_a_part_of_a_result_is_released_where_other_parts_are_needed() -> None:
    source = "for x in data:\n    out = model(x)\n    out.loss.backward()\n"
    edit = ReleasePart(2, "out['logits']")
    released = source.replace("(x)\n", "(x)\n    out['logits'] = None\n")
    assert edited(source, edit) == released
    assert refusal(source, ReleasePart(1, "out.logits")) is Refusal.NO_STATEMENT
    assert refusal(source, ReleasePart(2, "out")) is Refusal.NOT_A_LOCAL
    returned = "def f(x):\n    return out.logits\n"
    assert refusal(returned, ReleasePart(2, "out.logits")) is Refusal.NOT_REACHED


def test_a_value_read_after_the_loop_is_released_before_the_next_one() -> None:
    source = f"{LOOP}print(loss)\n"
    assert edited(source, DeleteAfterUse(7, "loss")) == source.replace(
        "    loss = probs", "    loss = None\n    loss = probs"
    )
    twice = source.replace("    loss.backward()", "    loss = loss * 2\n    loss.backward()")
    assert edited(twice, DeleteAfterUse(8, "loss")) == twice.replace(
        "    loss = probs", "    loss = None\n    loss = probs"
    )
    carried = source.replace("loss = probs.mean()", "loss = probs.mean() + loss")
    assert refusal(carried, DeleteAfterUse(7, "loss")) is Refusal.USED_LATER


@pytest.mark.parametrize(
    ("source", "name", "after"),
    [
        ("x = f()\nif x: g(x); h()", "x", "x = f()\nif x: g(x); h()\ndel x"),
        ("x = f(); g(x)", "x", "x = f(); g(x); del x"),
        ("for i in y: x = f(i); g(x)", "x", "for i in y: x = f(i); g(x); del x"),
        ("if a:\n\tx = f()\nelif g(x):\n\tpass\nelse:\n\tpass", "x",
         "if a:\n\tx = f()\nelif g(x):\n\tpass\nelse:\n\tpass\nx = None"),
        ("with f() as x:\n    g(\n        x,\n    )\n", "x",
         "with f() as x:\n    g(\n        x,\n    )\n    del x\n"),
        ("def f(x):\n    y = g(x)\n    return y", "x",
         "def f(x):\n    y = g(x)\n    del x\n    return y"),
        ("for x in loader:\n    g(x)\n", "x", "for x in loader:\n    g(x)\n    del x\n"),
        ("if a:\n    x = f()\ng(x if a else 0)\n", "x",
         "if a:\n    x = f()\ng(x if a else 0)\nx = None\n"),
        ("x = f()\ny = [x + i for i in z]\n", "x", "x = f()\ny = [x + i for i in z]\ndel x\n"),
        ("x = f()\r\nwhile g(x):\r\n\tpass\r\n", "x",
         "x = f()\r\nwhile g(x):\r\n\tpass\r\ndel x\r\n"),
        ('x = f()\ns = f"""\n{x}\n"""\n', "x", 'x = f()\ns = f"""\n{x}\n"""\ndel x\n'),
        ("try:\n    x = f()\n    g(x)\nexcept E:\n    pass\n", "x",
         "try:\n    x = f()\n    g(x)\n    del x\nexcept E:\n    pass\n"),
        ("match y:\n    case 1:\n        x = f()\n        g(x)\n", "x",
         "match y:\n    case 1:\n        x = f()\n        g(x)\n        del x\n"),
    ],
)  # fmt: skip
def test_the_place_of_a_deletion(source: str, name: str, after: str) -> None:
    last = max(
        n
        for n, row in enumerate(source.split("\n"), 1)
        if f"{name}" in row.replace("else", "").replace("except", "")
    )
    assert edited(source, DeleteAfterUse(last, name)) == after


@pytest.mark.parametrize(
    ("source", "line", "reason"),
    [
        ("def f():\n    x = g()\n    return x.sum()", 3, Refusal.NOT_REACHED),
        ("x = f()\ng(x)\ndef h():\n    return x", 2, Refusal.VISIBLE_ELSEWHERE),
        ("def f():\n    global x\n    x = 1\n    g(x)", 4, Refusal.VISIBLE_ELSEWHERE),
        ("x = f()\ng(x)\nprint(locals())", 2, Refusal.VISIBLE_ELSEWHERE),
        ("x = f()\ng(x)\nk = lambda: x", 2, Refusal.VISIBLE_ELSEWHERE),
        ("x = f()\ny = (x for _ in z)\ng(y)", 2, Refusal.VISIBLE_ELSEWHERE),
        ("x = f()\ng(x)\n__all__ = ['x']", 2, Refusal.VISIBLE_ELSEWHERE),
        ("class A:\n    x = f()\n    g(x)", 3, Refusal.NOT_A_LOCAL),
        ("def f():\n    g(x)", 2, Refusal.NOT_A_LOCAL),
        ("x = f()\ng(x)\nif a:\n    h(x)", 2, Refusal.USED_LATER),
        ("x = f()\nfor i in y:\n    g(x)\n", 3, Refusal.USED_LATER),
        ("x = f()\nwhile h():\n    g(x)\n    if k(x): x = f()", 3, Refusal.USED_LATER),
        ("try:\n    x = f()\n    g(x)\n    h()\nexcept E:\n    k(x)", 3, Refusal.USED_LATER),
        ("x = f()\ng(x)\ndel x", 2, Refusal.USED_LATER),
        ("try:\n    x = f()\nexcept E as x:\n    g(x)", 4, Refusal.VISIBLE_ELSEWHERE),
        ("y = 1\nx = 2", 1, Refusal.NO_STATEMENT),
    ],
)
def test_what_cannot_be_deleted(source: str, line: int, reason: Refusal) -> None:
    assert refusal(source, DeleteAfterUse(line, "x")) is reason


EVALUATION = """\
import torch

def train(model, data):
    for x in data:
        loss = model(x).mean()
        loss.backward()

def evaluate(model, data):
    scores = []
    for x in data:
        loss = model(x).mean()
        text = \"\"\"
    of a score
\"\"\"

        scores.append((text,
  loss))
    return scores

train(model, data)
print(evaluate(model, data))
"""


def test_a_loop_without_graphs() -> None:
    line = line_of(EVALUATION, "scores = []") + 1
    assert edited(EVALUATION, NoGrad(line, line)) == EVALUATION.replace(
        """\
    for x in data:
        loss = model(x).mean()
        text = \"\"\"
    of a score
\"\"\"

        scores.append((text,
  loss))
""",
        """\
    with torch.no_grad():
        for x in data:
            loss = model(x).mean()
            text = \"\"\"
    of a score
\"\"\"

            scores.append((text,
      loss))
""",
    )


def test_a_function_and_a_call_without_graphs() -> None:
    line = line_of(EVALUATION, "def evaluate")
    assert changed(EVALUATION, NoGrad(line, line)) == ["+ @torch.no_grad()"]
    alias = EVALUATION.replace("import torch", "import torch as th")
    assert changed(alias, NoGrad(line, line)) == ["+ @th.no_grad()"]
    without = EVALUATION.replace(
        "import torch\n", '"""Doc."""\nfrom __future__ import annotations\n\n'
    )
    assert changed(without, NoGrad(line + 2, line + 2)) == ["+ import torch", "+ @torch.no_grad()"]
    last = line_of(EVALUATION, "print(")
    assert "with torch.no_grad():\n    print(evaluate" in str(
        edited(EVALUATION, NoGrad(last, last))
    )


@pytest.mark.parametrize(
    ("source", "lines", "reason"),
    [
        (EVALUATION, (3, 3), Refusal.NEEDED_BY_BACKWARD),
        (EVALUATION, (4, 4), Refusal.NEEDED_BY_BACKWARD),
        (EVALUATION, (5, 5), Refusal.NEEDED_BY_BACKWARD),
        (EVALUATION, (20, 20), Refusal.NEEDED_BY_BACKWARD),
        ("with torch.no_grad():\n    f(x)", (2, 2), Refusal.DONE_ALREADY),
        ("@torch.inference_mode()\ndef f():\n    g(x)", (3, 3), Refusal.DONE_ALREADY),
        ("@torch.no_grad()\ndef f():\n    g(x)", (2, 2), Refusal.DONE_ALREADY),
        ("def f():\n    yield g(x)", (2, 2), Refusal.NOT_MECHANICAL),
        ("async def f():\n    g(x)", (1, 1), Refusal.NOT_MECHANICAL),
        ("if a: g(x)", (1, 1), Refusal.ONE_LINE),
        ("if a:\n    f()\nelif b:\n    g(x)", (3, 3), Refusal.NOT_MECHANICAL),
        ("f(); g(x)", (1, 1), Refusal.ONE_LINE),
        ("x = 1", (1, 1), Refusal.NOT_MECHANICAL),
        ("import torch\nx = f()", (1, 2), Refusal.NOT_MECHANICAL),
        ("torch = 3\nf()", (2, 2), Refusal.NAME_TAKEN),
        ("def g(x):\n    return autograd.grad(x, y)\ndef f():\n    g(x)", (4, 4),
         Refusal.NEEDED_BY_BACKWARD),
        ("self.out = f()\nself.out.sum().backward()", (1, 1), Refusal.NEEDED_BY_BACKWARD),
        ("def train():\n    f(x).backward()\nrun(train)", (3, 3), Refusal.NEEDED_BY_BACKWARD),
    ],
)  # fmt: skip
def test_what_needs_its_graph(source: str, lines: tuple[int, int], reason: Refusal) -> None:
    assert refusal(source, NoGrad(*lines)) is reason


@pytest.mark.parametrize(
    ("before", "edit", "after"),
    [
        ("kept.append(hidden[:, 0])", CloneStored(1), "kept.append(hidden[:, 0].clone())"),
        ("m = mask[:, None].repeat(1, h, 1)", ExpandInsteadOfRepeat(1),
         "m = mask[:, None].expand(-1, h, -1)"),
        ("m = f(x.repeat(n, 1)).mean()", ExpandInsteadOfRepeat(1), "m = f(x.expand(n, -1)).mean()"),
        ("s('max_split_size_mb:128, expandable_segments:True')",
         WithoutAllocatorOption(1, "max_split_size_mb"), 's(" expandable_segments:True")'),
    ],
)  # fmt: skip
def test_smaller_memory(before: str, edit: Edit, after: str) -> None:
    assert edited(before, edit) == after


@pytest.mark.parametrize(
    ("source", "edit", "reason"),
    [
        ("m = x.repeat(*sizes)", ExpandInsteadOfRepeat(1), Refusal.STAR_ARGUMENTS),
        ("m = x.repeat((2, 1))", ExpandInsteadOfRepeat(1), Refusal.STAR_ARGUMENTS),
        ("m = repeat(x, 2)", ExpandInsteadOfRepeat(1), Refusal.NOT_MECHANICAL),
        ("s(f'max_split_size_mb:{n}')", WithoutAllocatorOption(1, "max_split_size_mb"),
         Refusal.IN_A_STRING),
        ("s('garbage:1')", WithoutAllocatorOption(1, "max_split_size_mb"), Refusal.NO_STATEMENT),
    ],
)  # fmt: skip
def test_what_cannot_be_made_smaller(source: str, edit: Edit, reason: Refusal) -> None:
    assert refusal(source, edit) is reason


@pytest.mark.parametrize(
    ("before", "edit", "after"),
    [
        ("x = torch.load(path)", MapLocationCpu(1), 'x = torch.load(path, map_location="cpu")'),
        ("x = torch.load(path, 'cuda')", MapLocationCpu(1), 'x = torch.load(path, "cpu")'),
        ("x = torch.load(path, map_location=(dev))", MapLocationCpu(1),
         'x = torch.load(path, map_location=("cpu"))'),
        ("import torch as t\nx = t.load(\n    path,  # here\n)", MapLocationCpu(2),
         'import torch as t\nx = t.load(\n    path, map_location="cpu"  # here\n)'),
        ("from torch import load as get\nx = get(path)", MapLocationCpu(2),
         'from torch import load as get\nx = get(path, map_location="cpu")'),
        ("x = DDP((model))", SetKeyword(1, "DDP", "a", "False"), "x = DDP((model), a=False)"),
        ("o.zero_grad()", SetKeyword(1, "zero_grad", "set_to_none", "True"),
         "o.zero_grad(set_to_none=True)"),
        ("o.zero_grad(set_to_none=False)", SetKeyword(1, "zero_grad", "set_to_none", None),
         "o.zero_grad()"),
        ("f(a, b=(False), c=1)", SetKeyword(1, "f", "b", None), "f(a, c=1)"),
        ("f(b=(False), c=1)", SetKeyword(1, "f", "b", None), "f(c=1)"),
        ("f(b=(False),)", SetKeyword(1, "f", "b", None), "f()"),
        ("f(a,\n  b=False,\n)", SetKeyword(1, "f", "b", None), "f(a,\n)"),
        ("f(g(x), a).g(b)", SetKeyword(1, "f", "c", "2"), "f(g(x), a, c=2).g(b)"),
        ("loss.backward(create_graph=True)", SetKeyword(1, "backward", "create_graph", "False"),
         "loss.backward(create_graph=False)"),
        ("from torch.nn.parallel import DistributedDataParallel as D\nD(m, unused=True)",
         SetKeyword(2, "DistributedDataParallel", "unused", "False"),
         "from torch.nn.parallel import DistributedDataParallel as D\nD(m, unused=False)"),
    ],
)  # fmt: skip
def test_keywords(before: str, edit: Edit, after: str) -> None:
    assert edited(before, edit) == after


@pytest.mark.parametrize(
    ("source", "edit", "reason"),
    [
        ("f(**k)", SetKeyword(1, "f", "a", "1"), Refusal.STAR_ARGUMENTS),
        ("f(*k)", SetKeyword(1, "f", "a", "1", 0), Refusal.STAR_ARGUMENTS),
        ("f(a=1)", SetKeyword(1, "f", "a", "1"), Refusal.DONE_ALREADY),
        ("f()", SetKeyword(1, "f", "a", None), Refusal.DONE_ALREADY),
        ("f() + f()", SetKeyword(1, "f", "a", "1"), Refusal.AMBIGUOUS),
        ("g()", SetKeyword(1, "f", "a", "1"), Refusal.NO_STATEMENT),
        ("if a:\n    f()", SetKeyword(1, "f", "a", "1"), Refusal.NO_STATEMENT),
        ("f(x for x in y)", SetKeyword(1, "f", "a", "1"), Refusal.NOT_MECHANICAL),
        ("f(a,  # first\n  b=1)", SetKeyword(1, "f", "b", None), Refusal.COMMENT),
        ("f()", SetKeyword(1, "f", "a", "1 +"), Refusal.INVALID),
        ("print(f'{f()}')", SetKeyword(1, "f", "a", "1"), Refusal.IN_A_STRING),
        ("f(1)", SetKeyword(1, "f", "a", None, 0), Refusal.NOT_MECHANICAL),
    ],
)
def test_keywords_that_are_refused(source: str, edit: Edit, reason: Refusal) -> None:
    assert refusal(source, edit) is reason


def test_calls_are_inserted_with_their_import() -> None:
    source = "# A loop.\nimport torch as th\n\nfor i in x:\n    f(i)\nprint(i)\n"
    end = edited(source, InsertCall(5, "gc.collect()", Where.END_OF_LOOP))
    assert end == (
        "# A loop.\nimport gc\nimport torch as th\n\n"
        "for i in x:\n    f(i)\n    gc.collect()\nprint(i)\n"
    )
    before = edited(source, InsertCall(5, "torch.cuda.empty_cache()"))
    assert before == source.replace("    f(i)", "    th.cuda.empty_cache()\n    f(i)")
    after = edited(source, InsertCall(4, "reset()", Where.AFTER_LOOP))
    assert after == source.replace("print", "reset()\nprint")
    twice = edited(source, InsertCall(5, "gc.collect()"), InsertCall(6, "gc.collect()"))
    assert str(twice).count("import gc") == 1
    assert refusal("gc = 1\nf()", InsertCall(2, "gc.collect()")) is Refusal.NAME_TAKEN
    assert edited("h = []\nf(h)", InsertCall(2, "h.clear()")) == "h = []\nh.clear()\nf(h)"
    assert refusal("f()", InsertCall(1, "gc.collect")) is Refusal.INVALID
    assert refusal("f()", InsertCall(1, "g()", Where.END_OF_LOOP)) is Refusal.NO_STATEMENT
    leaving = "for i in x:\n    break"
    assert refusal(leaving, InsertCall(1, "g()", Where.END_OF_LOOP)) is Refusal.NOT_REACHED


def test_entries_of_a_dictionary_are_limited() -> None:
    source = "def f(k, x):\n    cache[k] = g(x)\n    return cache[k]\n"
    added = ["+     while len(cache) > 3:", "+         cache.pop(next(iter(cache)))"]
    assert changed(source, LimitEntries(2, "cache", 3)) == added
    assert refusal(source, LimitEntries(3, "cache", 3)) is Refusal.NOTHING_STORED
    assert refusal("a = 1; cache[0] = a\n", LimitEntries(1, "cache", 3)) is Refusal.ONE_LINE


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("@functools.lru_cache(maxsize=None)", "@functools.lru_cache(maxsize=1)"),
        ("@functools.lru_cache(None, typed=True)", "@functools.lru_cache(1, typed=True)"),
        ("@functools.lru_cache()", "@functools.lru_cache(maxsize=1)"),
        ("@functools.lru_cache", "@functools.lru_cache(maxsize=1)"),
        ("@functools.cache", "@functools.lru_cache(maxsize=1)"),
        ("@staticmethod\n@functools.cache", "@staticmethod\n@functools.lru_cache(maxsize=1)"),
    ],
)
def test_a_cache_is_limited(before: str, after: str) -> None:
    source = f"import functools\n{before}\ndef f(x):\n    return x\n"
    for line in (2, before.count("\n") + 3):
        assert edited(source, LimitCache(line)) == source.replace(before, after)


def test_where_no_cache_is_limited() -> None:
    source = "from functools import cache\n@cache\ndef f(x):\n    return x\n"
    assert edited(source, LimitCache(2)) == (
        "import functools\n" + source.replace("@cache", "@functools.lru_cache(maxsize=1)")
    )
    assert refusal(source.replace("@cache\n", ""), LimitCache(2)) is Refusal.NO_STATEMENT
    limited = "import functools\n@functools.lru_cache(1)\ndef f(x):\n    return x\n"
    assert refusal(limited, LimitCache(3)) is Refusal.DONE_ALREADY
    taken = source.replace("return x", "functools = x")
    assert refusal(taken, LimitCache(2)) is Refusal.NAME_TAKEN
    assert refusal(source, LimitCache(4)) is Refusal.NO_STATEMENT


PENALTY = """\
import torch
params = list(net.parameters())
optimizer = torch.optim.SGD(params, lr=0.1)

def penalty(loss):
    loss.backward(create_graph=True)
    grads = [p.grad for p in params]
    return sum(g.pow(2).sum() for g in grads)
"""


def test_gradients_without_a_cycle() -> None:
    after = str(edited(PENALTY, AutogradGrad(6)))
    assert "    grads = torch.autograd.grad(loss, params, create_graph=True)\n" in after
    assert "backward" not in after
    for wrong, into in (
        ("params, lr", "others, lr"),
        ("    return", "    print(w.grad)\n    return"),
        ("[p.grad for p in params]", "[p.grad for p in params if p]"),
        ("loss.backward(create_graph=True)", "loss.backward(g, create_graph=True)"),
        ("    grads =", "    print()\n    grads ="),
    ):
        line = 6
        assert refusal(PENALTY.replace(wrong, into), AutogradGrad(line)) is Refusal.NOT_MECHANICAL
    of_module = PENALTY.replace("in params]", "in net.parameters()]")
    refused = refusal(of_module, AutogradGrad(6))
    assert refused is Refusal.NOT_MECHANICAL  # the optimizer has others, as far as can be told
    of_module = of_module.replace("SGD(params,", "SGD(net.parameters(),")
    after = str(edited(of_module, AutogradGrad(6)))
    assert "autograd.grad(loss, list(net.parameters()), create_graph=True)\n" in after
    assert "in zip(net.parameters(), grads):\n" in after
    once = PENALTY.replace("list(net.parameters())", "net.parameters()")
    assert refusal(once, AutogradGrad(6)) is Refusal.NOT_MECHANICAL
    plain = PENALTY.replace("create_graph=True", "")
    assert refusal(plain, AutogradGrad(6)) is Refusal.DONE_ALREADY


def test_settings_are_added_to_those_of_the_environment() -> None:
    expandable = AllocatorSetting("expandable_segments:True")
    assert expandable.environment({}) == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    current = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64, expandable_segments:False"}
    assert expandable.environment(current) == {
        "PYTORCH_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"
    }
    again = expandable.environment({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:true"})
    assert isinstance(again, Refused)
    assert again.reason is Refusal.DONE_ALREADY
    for conf in ("expandable_segments:yes", "expandable_segments=True", "unknown:1"):
        wrong = AllocatorSetting(conf).environment({})
        assert isinstance(wrong, Refused)
        assert wrong.reason is Refusal.INVALID


def test_edits_of_one_text_conflict() -> None:
    edits = SetKeyword(1, "f", "a", "1"), SetKeyword(1, "f", "a", "2")
    assert refusal("f(a=3)", *edits) is Refusal.OVERLAP


@pytest.mark.parametrize(
    "data",
    [
        "\ufefflosses.append(loss)\n".encode(),
        "# -*- coding: latin-1 -*-\n# é\nlosses.append(loss)  # ü\n".encode("latin-1"),
        b"losses.append(loss)\r\nx = 1\r\n",
        b"x = 1\rlosses.append(loss)\rx = 2",
        b"\x0closses.append(loss)",
        "x = '\u2028'\nlosses.append(loss)\n".encode(),
        "x = 'é'; losses.append(loss)".encode(),
    ],
)
def test_bytes_of_other_lines_stay(data: bytes, tmp_path: Path) -> None:
    text = parsed("a file.py", data)
    assert isinstance(text, ProgramText)
    (line,) = {n for n in range(1, len(text.starts) + 1) if "losses" in text.line(n)}
    found = apply(text, [Detach(line, "loss")])
    assert isinstance(found, ProgramText)
    assert found.data == data.replace(b"(loss)", b"(loss.detach())")
    applied_by_git(text, found, tmp_path)


def applied_by_git(before: ProgramText, after: ProgramText, folder: Path) -> None:
    """The patch makes the one file the other."""
    path = folder / before.name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(before.data)
    subprocess.run(
        ["git", "apply", "--whitespace=nowarn", "-"],
        input=before.patch(after),
        cwd=folder,
        check=True,
    )
    assert path.read_bytes() == after.data


@pytest.mark.parametrize("name", ["train.py", "a b/c d.py", "ä/ö.py", 'q"uote.py', "tab\there.py"])
def test_names_of_files_in_patches(name: str, tmp_path: Path) -> None:
    text = parsed(name, b"losses.append(loss)")
    assert isinstance(text, ProgramText)
    found = apply(text, [Detach(1)])
    assert isinstance(found, ProgramText)
    applied_by_git(text, found, tmp_path)


def test_what_is_not_python_is_refused() -> None:
    for data in (b"print 1", b"# coding: nonsense\n", b"\xff = 1", b"x = 1\0", b"x = '''"):
        found = parsed("train.py", data)
        assert isinstance(found, Refused)
        assert found.reason is Refusal.NOT_PYTHON


def test_gradients_are_freed_after_the_step_of_their_optimizer() -> None:
    source = """\
        for x in data:
            opt.zero_grad()
            net(x).sum().backward()
            {step}
            schedule.step()
        """
    for step in ("opt.step()", "scaler.step(opt)", "opt.step(closure)"):
        program = source.format(step=step)
        added = "+     opt.zero_grad(set_to_none=True)"
        assert changed(program, FreeGradients(4)) == [added]
        # A scheduler has none.
        assert refusal(program, FreeGradients(5)) is Refusal.NO_STATEMENT


def test_weights_are_stored_as_copies_on_the_cpu() -> None:
    one = '{name: value.to("cpu", copy=True) for name, value in net.state_dict().items()}'
    for stored in ("net.state_dict()", "copy.deepcopy(net.state_dict())"):
        assert edited(f"best = {stored}\n", ToCpu(1, detach=True)) == f"best = {one}\n"
        assert edited(f"kept.append({stored})\n", ToCpu(1)) == f"kept.append({one})\n"


def test_values_of_a_dictionary_that_a_call_returns_are_copied() -> None:
    values = ToCpu(1, detach=True, values=True)
    each = "{name: value.detach().cpu() for name, value in net(batch).items()}"
    assert edited("outs.append(net(batch))", values) == f"outs.append({each})"
    shown = 'outs.append({"x": x.detach().cpu(), "y": net(x).detach().cpu()})'
    every = ToCpu(1, detach=True, every=True)
    assert edited('outs.append({"x": x, "y": net(x)})', every) == shown

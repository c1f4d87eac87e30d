"""The change of the source that a finding prints ends the race, on whatever stream the step runs.

`benchmarks/hazard_corpus.py` applies every printed fix of both corpora; here are some of each kind.
"""

from __future__ import annotations

import linecache
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hazard_case import Case
from hazard_corpus import CASES
from judging import judge
from native_commands import gpuprobe
from upstream_corpus import BUGS

from gpuprobe.hazards.accesses import Access, Race, RaceContext, Scope
from gpuprobe.hazards.engine import Engine
from gpuprobe.hazards.events import HOST
from gpuprobe.hazards.findings.code import (
    applied,
    free_name,
    patch_of,
    statement,
    unified_diff,
)
from gpuprobe.hazards.findings.explain import stream_name
from gpuprobe.hazards.findings.repairs import KeepAlive, LocatedRace
from gpuprobe.hazards.footprint import Footprint
from gpuprobe.hazards.rules import GRAPH_FREED
from gpuprobe.model.findings import Finding, Fix, Insertion, Level
from gpuprobe.model.place import Place

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

# Ways to mend a race: each of these programs is mended in another one.
_WAYS = {
    "rocm_consumer_reads_before_the_transfer": ".wait_stream(transfer_stream)",
    "stable_audio_engine_on_a_private_stream": "self.stream.wait_stream(",
    "pytorch_to_cpu_works_weird": ".synchronize()",
    "pytorch_tensor_reused_under_a_side_stream": "a.record_stream(",
    "opennmt_division_while_the_reduction_runs": "work.wait()",
    "functional_collective_without_wait_tensor": "wait_tensor(total)",
    "collective_on_a_third_stream_outlives_its_tensor": "a.record_stream(",
    "prime_rl_event_of_an_earlier_chunk_overwritten": "wait_",
}
_OTHERS = (
    "graph_input_dropped_after_capture",
    "two_writers",
    "refilled_too_early",
    "positional_arguments_unpacked",
)


def programs() -> Iterator[tuple[str, str]]:
    yield from ((bug.name, bug.buggy) for bug in BUGS if bug.name in _WAYS)
    yield from ((case.name, case.text) for case in CASES if case.name in _OTHERS)


def on_a_side_stream(text: str) -> str:
    """The whole step within a ``with`` of another stream."""
    return (
        "step_stream = cuda.Stream()\n"
        "step_stream.wait_stream(cuda.current_stream())\n"
        "with cuda.stream(step_stream):\n" + textwrap.indent(text, "    ")
    )


def races(name: str, text: str) -> list[Any]:
    found: list[Any] = judge(Case(name, "", (), text), text).races
    return found


def test_a_read_in_a_comprehension_waits_for_its_stream_only() -> None:
    """The names of both streams are those of the frame around it; a wait for the device would seem
    to order what follows, too.
    """
    text = textwrap.dedent("""\
        weights = [torch.randn(64, 64, device="cuda") for _ in range(2)]
        side = cuda.Stream()
        with cuda.stream(side):
            norms = [p.norm() for p in weights]
        total = torch.stack(norms).sum()
        cuda.synchronize()
    """)
    first, second = races("norms_on_a_side_stream", text)
    assert "side.wait_stream(" in first.fix.code
    assert "cuda.current_stream().wait_stream(side)" in second.fix.code
    insertions = [*first.fix.insertions, *second.fix.insertions]
    mended = "".join(applied(text.splitlines(keepends=True), insertions))
    assert not races("norms_on_a_side_stream", mended)


_FED = """
hidden = [torch.cuda.Stream() for _ in range(3)]
inputs = [torch.ones(64, device="cuda") for _ in range(3)]
cuda.synchronize()

class Feeder:
    def __init__(self, streams):
        self.take = streams.__getitem__

    def feed(self, at, x):
        with cuda.stream(self.take(at)):
            x.mul_(2)
        return x

feeder = Feeder(hidden)
del hidden
"""


def test_a_wait_before_a_comprehension_ends_no_race_within_it() -> None:
    """It runs once, before the first element: the same wait is a fix of what ran before."""
    text = f"{_FED}y = [feeder.feed(at, x) + 1 for at, x in enumerate(inputs)]\n"
    (race,) = races("fed within", text)
    before = "".join(applied(text.splitlines(keepends=True), race.fix.insertions))
    proven = dict(race.evidence)["fix verified"].startswith("yes")
    assert not (race.fix.insertions and proven) or races("fed within", before) == []
    loop = "for at, x in enumerate(inputs):\n    feeder.feed(at, x)\n"
    text = f"{_FED}{loop}y = [x + 1 for x in inputs]\n"
    (race,) = races("fed before", text)
    mended = "".join(applied(text.splitlines(keepends=True), race.fix.insertions))
    assert races("fed before", mended) == []


@pytest.mark.parametrize(("name", "text"), list(programs()), ids=lambda value: value[:60])
def test_the_printed_change_ends_the_race(name: str, text: str) -> None:
    found = races(name, text)
    assert found
    for race in found:
        assert race.fix.insertions
        assert race.fix.diff.count("@@") >= 2
        assert dict(race.evidence)["fix verified"].startswith("yes")
        assert "default_stream" not in race.fix.code
    assert any(_WAYS.get(name, "") in race.fix.diff for race in found)
    insertions = [one for race in found for one in race.fix.insertions]
    mended = "".join(applied(text.splitlines(keepends=True), insertions))
    assert [race.message for race in races(name, mended)] == []
    assert [race.message for race in races(name, on_a_side_stream(mended))] == []


_PINNED = """
buffer = torch.zeros((), pin_memory=True)
x = torch.ones(64, device="cuda")
"""
_DIST = """
import torch.distributed as dist
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(64, device="cuda")
"""
_COPY = "buffer.copy_(x.sum(), non_blocking=True)"
# A statement that copies and uses the copy, and a line of what it is split into.
_STATEMENTS = {
    "argument": (_PINNED, f"total = float({_COPY})", "total = float(copied)"),
    "test": (_PINNED, f"if {_COPY} > 3: pass", "if copied > 3: pass"),
    "assertion": (_PINNED, f'assert {_COPY} > 0, "ö"', 'assert copied > 0, "ö"'),
    "element": (_PINNED, f"a, b = {_COPY}, float(buffer)", "a, b = copied, float(buffer)"),
    "two statements": (_PINNED, f"{_COPY}; y = float(buffer)", "y = float(buffer)"),
    "block": (
        _PINNED,
        'cuda.synchronize()\nwith cuda.stream(s):\n    y = x.to("cpu", non_blocking=True).sum()',
        "    y = copied.sum()",
    ),
    "handle": (_DIST, "y = dist.all_reduce(x, async_op=True), x * 2", "y = work, x * 2"),
    "handle of its own": (_DIST, "dist.all_reduce(x, async_op=True); y = x * 2", "work.wait()"),
    # What is evaluated before the copy has effects, or the copy is made again and again.
    "after": (_PINNED, f"y = x.mean() + float({_COPY})", "non_blocking=False))"),
    "loop": (_PINNED, f"while float({_COPY}) > 64: pass", "non_blocking=False)) > 64: pass"),
    "comprehension": (
        _PINNED,
        "y = [float(buffer.copy_(one, non_blocking=True)) for one in x[:2]]",
        "non_blocking=False)) for one in x[:2]]",
    ),
    "elif": (
        _PINNED,
        f"if x is None:\n    pass\nelif float({_COPY}) > 3:\n    pass",
        "non_blocking=False)) > 3:",
    ),
}
if sys.version_info >= (3, 11):  # instructions have columns
    _STATEMENTS["several lines"] = (
        _PINNED,
        "y = float(  # ö\n    buffer\n    .copy_(\n        x.sum(), non_blocking=True)\n)",
        "    copied",
    )
    _STATEMENTS["functional"] = (
        _DIST,
        'y = torch.ops._c10d_functional.all_reduce(x, "sum", dist.group.WORLD.group_name) + 1',
        "wait_tensor(torch.ops._c10d_functional",
    )


@pytest.mark.parametrize("name", list(_STATEMENTS))
def test_a_statement_that_races_with_itself_is_split(name: str) -> None:
    before, statement_text, expected = _STATEMENTS[name]
    text = f"{before}{statement_text}\n"
    (race,) = races(name, text)
    assert dict(race.evidence)["fix verified"].startswith("yes")
    mended = "".join(applied(text.splitlines(keepends=True), race.fix.insertions))
    assert expected in mended
    assert [race.message for race in races(name, mended)] == []
    assert [race.message for race in races(name, on_a_side_stream(mended))] == []


def test_streams_in_containers_have_their_expression() -> None:
    text = """
streams = {"copies": [cuda.Stream(), cuda.Stream()]}
x = torch.ones(64, device="cuda")
def step(i):
    with cuda.stream(streams["copies"][i % 2]):
        return x * 2
kept = [step(i) for i in range(2)]
"""
    (race,) = races("containers", text)
    expected = 'streams["copies"][i % 2].wait_stream(torch.cuda.current_stream())'
    assert expected.replace('"', "'") in race.fix.code
    mended = "".join(applied(text.splitlines(keepends=True), race.fix.insertions))
    assert [race.message for race in races("containers", mended)] == []


_ENTERED = """
import contextlib
side = cuda.Stream()
x = torch.ones(64, device="cuda")

@contextlib.contextmanager
def halved():
    x.mul_(0.5)
    yield

with cuda.stream(side), halved():
    pass
"""


def test_a_stream_without_a_name_is_the_current_one_before_the_block() -> None:
    (race,) = races("entered", _ENTERED)
    assert "+side.wait_stream(torch.cuda.current_stream())" in race.fix.diff
    mended = "".join(applied(_ENTERED.splitlines(keepends=True), race.fix.insertions))
    assert races("entered", mended) == []


_MAY_NOT_RUN = """
side = cuda.Stream()
buffer = torch.zeros(64, pin_memory=True)
x = torch.ones(64, device="cuda")
cuda.synchronize()
if x.numel() > 3:
    with cuda.stream(side):
        buffer.copy_(x, non_blocking=True)
y = float(buffer[0])
"""


def test_the_host_waits_for_the_stream_of_a_copy_that_may_not_run() -> None:
    (race,) = races("may not run", _MAY_NOT_RUN)
    assert [one.text for one in race.fix.insertions] == ["side.synchronize()\n"]
    mended = "".join(applied(_MAY_NOT_RUN.splitlines(keepends=True), race.fix.insertions))
    assert races("may not run", mended) == []


def test_a_handle_gets_a_name_in_its_own_line() -> None:
    text = f"{_DIST}dist.all_reduce(x, async_op=True)\ny = x * 2\n"
    (race,) = races("handle", text)
    mended = "".join(applied(text.splitlines(keepends=True), race.fix.insertions))
    expected = "work = dist.all_reduce(x, async_op=True)\nwork.wait()\ny = x * 2\n"
    assert mended == _DIST + expected
    assert races("handle", mended) == []


def test_the_diff_applies_with_patch(tmp_path: Path) -> None:
    last = '    y = x  # "no newline at the end"'
    text = f"import torch\nif True:\n    x = 1\n{last}"
    (tmp_path / "step.py").write_text(text, encoding="utf-8")
    lines = (Insertion("step.py", 4, "    z = 2\n"), Insertion("step.py", 3, "    x = 3\n", 1))
    linecache.cache["step.py"] = (len(text), None, text.splitlines(keepends=True), "step.py")
    diff = unified_diff(lines)
    done = subprocess.run(
        ["git", "apply", "--unidiff-zero", "-p1", "-"],
        input=diff,
        text=True,
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, (diff, done.stderr)
    changed = (tmp_path / "step.py").read_text(encoding="utf-8").splitlines()
    assert changed[1:5] == [
        "if True:",
        "    x = 3",
        "    z = 2",
        '    y = x  # "no newline at the end"',
    ]


_SOURCE = """
def step(x):
    if x:
        y = 1
    elif x > 2: y = 2
    with stream(s): z = x * 2
    with a, torch.cuda.stream(self.side):
        call(
            x,
        )
    return x
"""


def test_lines_go_before_whole_statements() -> None:
    name = "<statements>.py"
    linecache.cache[name] = (len(_SOURCE), None, _SOURCE.splitlines(keepends=True), name)

    def before(line: int) -> tuple[int, str]:
        found = statement(name, line)
        assert found is not None
        one = found.before("new")
        return one.line, one.text

    assert before(4) == (4, "        new\n")
    assert before(5) == (3, "    new\n")  # not between an if and its elif
    assert before(6) == (6, "    new\n")
    assert before(9) == (8, "        new\n")
    found = statement(name, 9)
    assert found is not None
    assert [block.stream for block in found.blocks] == ["self.side", "a"]
    assert found.after("new").line == 11
    inner = statement(name, 6)
    assert inner is not None
    assert [block.stream for block in inner.inner_blocks] == ["s"]
    leaving = statement(name, 11)
    assert leaving is not None
    assert leaving.leaves
    assert statement("<nowhere>.py", 1) is None


def test_what_is_kept_alive_goes_by_its_first_name(tmp_path: Path) -> None:
    source = tmp_path / "model.py"
    source.write_text("def step(net):\n    x = net.buffer\n    del x\n")
    engine = Engine()
    main = engine.stream(0, 0)
    freed = Access(HOST, 0, Footprint(0, 8), True, "free", "del x")
    replayed = Access(main, 1, Footprint(0, 8), False, "replay", "replay")
    race = Race(GRAPH_FREED, freed, replayed, 0, -1, ())

    def repairs(*names: str) -> list[list[str]]:
        engine.tensor_names["del x"] = names
        located = LocatedRace.locate(engine, race, lambda site: Place(str(source), 3, "step"))
        found = KeepAlive.in_source(located)
        return [[one.text.strip() for one in repair.insertions] for repair in found]

    assert repairs("not a name", "net.buffer", "x") == [["static_buffer = net.buffer"]]
    assert repairs("not a name") == []


@pytest.mark.parametrize("script", ["train.py", ""])
def test_a_diff_outside_the_folder_at_hand_has_a_path_that_patch_takes(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, elsewhere = tmp_path / "code" / "train.py", tmp_path / "elsewhere"
    program.parent.mkdir()
    elsewhere.mkdir()
    program.write_text("a = 1\nb = 2\n")
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(sys, "argv", [str(program.parent / script) if script else "-c"])
    diff = unified_diff([Insertion(str(program), 2, "c = 3\n")])
    folder = program.parent if script else Path(program.anchor)
    assert f"--- a/{program.relative_to(folder)}" in diff
    subprocess.run(["patch", "-p1"], input=diff, text=True, check=True, cwd=folder)
    assert program.read_text() == "a = 1\nc = 3\nb = 2\n"


def test_a_stream_as_code() -> None:
    engine = Engine()
    default, named, current, other = (engine.stream(0, number) for number in (0, 11, 12, 13))
    scope = Scope("step.py", 3, races.__code__, streams={named: ("self.side", "side")}, tensors=())
    access = Access(named, 1, Footprint(0, 8), True, "write", "x")
    race = Race(
        GRAPH_FREED, access, access, 0, -1, (), context=RaceContext((scope,), (current,), ())
    )
    located = LocatedRace(engine, race, lambda site: None, None, None)
    assert [located.expression(actor, "else") for actor in (named, current, other, default)] == [
        "self.side",
        "torch.cuda.current_stream()",
        "else",
        "torch.cuda.current_stream()",
    ]


def test_statements_of_other_files_have_no_order(tmp_path: Path) -> None:
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    for path in (one, other):
        path.write_text("x = 1\ny = x\n")
    access = Access(HOST, 1, Footprint(0, 8), True, "write", "x")
    race = Race(GRAPH_FREED, access, access, 0, -1, ())
    first, second = statement(str(one), 1), statement(str(other), 2)
    for pair in ((first, second), (first, None), (None, second)):
        assert not LocatedRace(Engine(), race, lambda site: None, *pair).first_always_runs_before


def test_a_statement_is_in_no_branch_outside_of_its_function(tmp_path: Path) -> None:
    file = tmp_path / "nested.py"
    file.write_text("for step in range(2):\n    def work():\n        if step:\n            a = 1\n")
    inner = statement(str(file), 4)
    assert inner is not None
    assert [node.lineno for node in inner.branches] == [3]


def test_a_name_that_a_file_uses_gets_a_number(tmp_path: Path) -> None:
    file = tmp_path / "names.py"
    file.write_text("handle = 1\nhandle_2 = 2\nother = handle\n")
    found = statement(str(file), 3)
    assert found is not None
    assert [free_name(found, name) for name in ("done", "other", "handle")] == [
        "done",
        "other_2",
        "handle_3",
    ]


def test_a_stream_is_called_by_its_label() -> None:
    engine = Engine()
    actor = engine.stream(0, 0x7F00DEADBEEF)
    engine.labels[0, 0x7F00DEADBEEF] = 3
    assert stream_name(engine, actor) == "stream 3"
    assert stream_name(engine, engine.stream(1, 4)) == "stream 4 of cuda:1"


TWO_RACES = """\
import torch
side = torch.cuda.Stream()
a = torch.ones(1 << 20, device="cuda")
with torch.cuda.stream(side):
    b = a * 2
c = b + 1
print("done", c[0].item())
"""


@pytest.mark.parametrize("outside", [False, True])
def test_all_changes_are_one_patch_that_git_applies(tmp_path: Path, outside: bool) -> None:
    """Its folder is the working directory, or if the program is elsewhere the program's."""
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    project.mkdir()
    elsewhere.mkdir()
    path = project / "race.py"
    path.write_text(TWO_RACES, encoding="utf-8")
    command = ("run", "--gpu", "t4", "--force", "-o", "run")

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        folder = elsewhere if outside else project
        return gpuprobe(*command, *options, path, cwd=folder)

    done = run("--hazards-patch", "fixes.patch")
    assert done.returncode == 1
    assert "2 stream hazards" in done.stderr
    assert "race.py:7  item" in done.stderr  # the host waits there: nothing for the patch
    assert "not in the patch" not in done.stderr
    assert "\n--- a/" in done.stderr  # a diff in the text begins its lines
    (note,) = (line for line in done.stderr.splitlines() if "git apply " in line)
    shell = note.partition("   (")[2].removesuffix(")")
    where = elsewhere if outside else project
    assert shell == (
        f"cd {project} && git apply {where / 'fixes.patch'}" if outside else "git apply fixes.patch"
    )
    subprocess.run(shell, shell=True, cwd=where, check=True)
    added = path.read_text(encoding="utf-8").count(".wait_stream(")
    assert added == 2
    done = run("--hazards")
    assert done.returncode == 0, done.stderr


def test_a_patch_leaves_out_what_it_cannot_combine(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("one = 1\ntwo = 2\n", encoding="utf-8")
    place = Place(str(path), 1)

    def finding(text: str, verified: str = "yes", place: Place = place) -> Finding:
        diff = unified_diff([Insertion(str(path), 1, text, replaces=1)])
        evidence = (("fix verified", verified),)
        fix = Fix("do.", text, diff)
        return Finding("GP201", "race", Level.ERROR, text, evidence, place, fix=fix)

    other = Place(str(tmp_path / "b.py"), 1)
    findings = [
        finding("first = 1\n"),
        finding("first = 1\n"),  # the same change
        finding("second = 1\n"),  # of the same line
        finding("third = 1\n", "no"),
        finding("fourth = 1\n", place=other),
        Finding("GP201", "race", Level.ERROR, "no fix"),
    ]
    found = patch_of(findings, tmp_path)
    assert (found.folder, found.left_out) == (tmp_path, 4)
    assert found.text == (
        "--- a/a.py\n+++ b/a.py\n@@ -1,2 +1,2 @@\n-one = 1\n+first = 1\n two = 2\n"
    )
    assert patch_of(findings[-1:], tmp_path) == ("", tmp_path, 1)

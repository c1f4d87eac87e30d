"""What torch's compiler did becomes notes of a recording, without a simulated GPU too."""

from __future__ import annotations

import gc
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
from torch import nn

import gpuprobe
from gpuprobe.api.recordings import load
from gpuprobe.api.views import write_report
from gpuprobe.model.report import ShareTable
from gpuprobe.model.trace import parse_tag
from gpuprobe.recording.summary import summarize
from gpuprobe.reporters.json import report as report_json
from gpuprobe.reporters.json.schemas import schema
from gpuprobe.reporters.sections.report import report_sections
from gpuprobe.reporters.text import draw
from gpuprobe.sampler.hooks.discover import compile_in_use
from gpuprobe.torch_support import compile_notes, compile_watch, compiled_code

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, as it imports its compiler

SOURCE = Path(__file__).read_text().splitlines()
BREAK = SOURCE.index("        torch._dynamo.graph_break()") + 1
PRODUCT = SOURCE.index("        return self.inner(x @ self.weight)") + 1


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        torch._dynamo.graph_break()
        return x.sin()


class Product(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x @ self.weight)


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    yield
    torch._dynamo.reset()


def record(path: Path, code: Any, *rows: int) -> None:
    with gpuprobe.record(path) as recorder:
        for count in rows:
            with recorder.step():
                code(torch.ones(count, 8)).sum().backward()


def test_graph_breaks_and_recompilations_of_a_run_on_the_cpu_are_in_its_report(
    tmp_path: Path,
) -> None:
    record(tmp_path / "run", torch.compile(Broken(), backend="aot_eager"), 4, 6)
    report = summarize(load(tmp_path / "run"))
    name = Path(__file__).name
    breaks = [text for text in report.compiled if text.startswith("graph break at ")]
    assert any(f"{name}:{BREAK}: " in text for text in breaks)
    assert any("compiled again: " in text and name in text for text in report.compiled)
    document = json.loads(json.dumps(report_json.to_document(report)))
    jsonschema.validate(document, schema("report-2"))
    assert document["compiled"] == list(report.compiled)
    text = io.StringIO()
    draw.write(report_sections(report), text)
    (page,) = write_report(load(tmp_path / "run"), tmp_path / "run.html")
    for view in (text.getvalue(), page.read_text()):
        assert f"{name}:{BREAK}" in view


def test_hooks_are_not_compiled_where_a_program_calls_them_after_a_graph_break(
    tmp_path: Path,
) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:

        @torch.compile(backend="eager", dynamic=False)
        def total(x: torch.Tensor) -> torch.Tensor:
            work = dist.all_reduce(x, async_op=True)  # no graph has it
            assert work is not None
            work.wait()
            return x + 1

        with gpuprobe.record(tmp_path / "run") as recorder:
            for count in (2, 3, 4):
                with recorder.step():
                    total(torch.ones(count))
    finally:
        dist.destroy_process_group()
    recording = load(tmp_path / "run")
    calls = [step.collectives for step in recording.ranks[0].steps]
    once = [("all_reduce", 1), ("wait", 1)]
    assert [[(call.op, call.count) for call in step] for step in calls] == [once] * 3
    compiled = summarize(recording).compiled
    assert any("compiled again" in text for text in compiled)
    hooks = Path(gpuprobe.__file__).parent.name + "/sampler"
    assert not any(hooks in text for text in compiled)


def test_what_was_compiled_before_the_recording_is_not_in_it(tmp_path: Path) -> None:
    code = torch.compile(Broken(), backend="aot_eager")
    record(tmp_path / "first", code, 4)
    record(tmp_path / "second", code, 4)
    assert summarize(load(tmp_path / "second")).compiled == ()


def test_a_torch_whose_compiler_cannot_be_followed_is_a_note(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch._inductor.graph

    monkeypatch.delattr(torch._inductor.graph.GraphLowering, "_compile_to_module")
    record(tmp_path / "run", torch.compile(Broken(), backend="aot_eager"), 4)
    notes = summarize(load(tmp_path / "run")).compiled
    assert any("cannot be followed in torch._inductor.graph" in text for text in notes)
    assert any(text.startswith("graph break at ") for text in notes)


def test_nothing_is_imported_for_a_program_that_does_not_compile(tmp_path: Path) -> None:
    program = (
        "import sys, gpuprobe, torch\n"
        f"with gpuprobe.record({str(tmp_path / 'run')!r}) as recorder:\n"
        "    with recorder.step(): torch.ones(3)\n"
        "print([name for name in sys.modules if name.startswith('torch._inductor')])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


def test_hooks_of_the_compiler_are_gone_with_their_last_user() -> None:
    import torch._dynamo.symbolic_convert
    import torch._inductor.graph

    kind = torch._inductor.graph.GraphLowering
    kept = list(torch.fx.proxy._COPY_META_FIELDS)
    original = kind._compile_to_module
    first, second = compile_watch.start(), compile_watch.start()
    assert kind._compile_to_module is not original
    first()
    first()
    assert kind._compile_to_module is not original
    second()
    assert kind._compile_to_module is original
    assert kept == torch.fx.proxy._COPY_META_FIELDS


def test_frames_of_generated_code_become_the_programs_lines_and_modules() -> None:
    """As in a snapshot of a real GPU: frames of the file that Inductor wrote."""
    model = nn.Sequential(Product(nn.Identity()), Product(nn.Identity()))
    end_search = compiled_code.search_with(
        lambda: [(f"Sequential.{at}" if at else "Sequential", part)
                 for at, part in [("", model), *model.named_children()]]
    )  # fmt: skip
    before = set(compiled_code._files)
    counted = compile_notes.counts()
    stop = compile_watch.start()
    try:
        with torch._inductor.config.patch(force_disable_caches=True):
            torch.compile(model)(torch.ones(4, 8))
        notes = compile_notes.since(counted)
    finally:
        stop()
        end_search()
    assert any(text.startswith("forward graph: ") for text in notes)
    (file,) = set(compiled_code._files) - before
    text = Path(file).read_text().splitlines()
    lines = [at for at, line in enumerate(text, 1) if "extern_kernels.mm(" in line]
    assert len(lines) == 2
    other = {"filename": __file__, "line": 1, "name": "train"}
    events = [
        {"action": "alloc", "frames": [{"filename": file, "line": at, "name": "call"}, other]}
        for at in lines
    ]
    eager = {"action": "alloc", "frames": [other], "user_metadata": "mine"}
    snapshot = {"device_traces": [[*events, eager]], "segments": [{"blocks": [dict(events[0])]}]}
    compiled_code.in_program_lines(snapshot)
    for at, event in enumerate(events):
        frames = event["frames"]
        assert (frames[0]["filename"], frames[0]["line"]) == (__file__, PRODUCT)
        assert frames[-1] is other
        assert parse_tag(event["user_metadata"])[1] == f"Sequential.{at}"
    assert eager == {"action": "alloc", "frames": [other], "user_metadata": "mine"}
    (block,) = snapshot["segments"][0]["blocks"]
    assert block["frames"][0]["line"] == PRODUCT


def test_code_from_torchs_cache_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    for name, compiled in (("first", True), ("second", False)):
        torch._dynamo.reset()
        model = Product(nn.Identity())
        record(tmp_path / name, torch.compile(model), 4)
        notes = summarize(load(tmp_path / name)).compiled
        assert any("graph: " in text for text in notes) == compiled
        assert any("came from torch's cache" in text for text in notes) != compiled


def test_eager_code_after_compiled_code_that_is_gone_has_modules(tmp_path: Path) -> None:
    def named(folder: Path) -> set[str]:
        model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8))
        with gpuprobe.record(folder, level="trace", trace_steps="all") as recorder:
            for _ in range(2):
                with recorder.step():
                    kept = model(torch.ones(1 << 12, 8))
        del kept
        table = summarize(load(folder), top=100).top_modules
        assert isinstance(table, ShareTable)
        return {str(row.key) for row in table.rows}

    expected = named(tmp_path / "before")
    assert "Sequential.0" in expected
    code = torch.compile(Broken(), backend="aot_eager")
    record(tmp_path / "compiled", code, 4)
    assert compile_in_use()
    del code
    gc.collect()
    assert not compile_in_use()
    assert named(tmp_path / "after") == expected


def test_a_function_that_is_compiled_many_times_is_one_note() -> None:
    again = compile_notes.AGAIN
    counted = {
        "graph break at a.py:1: print": 2,
        f"f at a.py:3{again}size": 1,
        f"g at a.py:9{again}no guard is known": 4,
        f"f at a.py:3{again}type": 2,
    }
    assert compile_notes._worded(counted) == (
        "graph break at a.py:1: print (2 times)",
        "f at a.py:3 compiled again 3 times: size; type",
        "g at a.py:9 compiled again: no guard is known (4 times)",
    )
    reasons = {f"f at a.py:3{again}reason {index}": 1 for index in range(3)}
    assert compile_notes._worded(reasons) == (
        "f at a.py:3 compiled again 3 times: reason 0; reason 1; reason 2",
    )
    reasons |= {f"f at a.py:3{again}reason 3": 1}
    assert compile_notes._worded(reasons) == (
        "f at a.py:3 compiled again 4 times: reason 0; reason 1; 2 more reasons",
    )


def test_a_package_that_wraps_functions_compiles_nothing_before_a_call() -> None:
    """bitsandbytes does so as it is imported, which peft does."""
    names: dict[str, Any] = {}
    source = compile("def double(x):\n    return 2 * x\n", "/lib/site-packages/p/ops.py", "exec")
    exec(source, names)
    double = torch.compile(names["double"], backend="eager")
    assert not compile_in_use()
    double(torch.ones(2))
    assert compile_in_use()
    torch._dynamo.reset()

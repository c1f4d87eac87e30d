"""Results in notebooks: an executed notebook, the HTML of every result, and the cell magic."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest
import torch

import gpuprobe
from gpuprobe.api.check import recorded
from gpuprobe.api.devices import inventory
from gpuprobe.api.views import html_of
from gpuprobe.errors import UsageError
from gpuprobe.integrations import notebook
from gpuprobe.model import values
from gpuprobe.model.findings import Finding, Level
from gpuprobe.model.place import Place

pytestmark = pytest.mark.xdist_group("notebook")  # so that one process shares the fixtures

PAGE = Path(__file__).parents[2] / "docs/how-to/use-in-a-notebook.md"
CELLS = [
    *re.findall(r"^```ipython\n(.*?)\n```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL),
    "%%gpuprobe estimate --gpu none-such\npass",
    "%%gpuprobe --levl=trace\npass",
    """%%gpuprobe estimate
net = torch.nn.Linear(64, 64).cuda()
adam = torch.optim.Adam(net.parameters())
for _ in range(3):
    net(torch.randn(8, 64, device="cuda")).sum().backward()
    adam.step()
    adam.zero_grad()""",
    "%%gpuprobe estimate\ntorch.ones(8, 8)",
    """%%gpuprobe record --gpu a100-40gb
kept = []
for _ in range(99):
    with rec.step():
        kept.append(torch.empty(2 << 30, dtype=torch.uint8, device="cuda"))""",
]


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> list[nbformat.NotebookNode]:
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in CELLS])
    where = {"metadata": {"path": str(tmp_path_factory.mktemp("notebook"))}}
    client = nbclient.NotebookClient(book, timeout=120, allow_errors=True, resources=where)
    client.execute()
    return list(book.cells)


def shown(cell: nbformat.NotebookNode, kind: str = "text/html") -> str:
    (found,) = (output for output in cell.outputs if output.output_type == "execute_result")
    return str(found.data[kind])


def test_a_cell_is_recorded_and_its_lines_are_named_by_its_number(
    executed: list[nbformat.NotebookNode],
) -> None:
    page = shown(executed[1])
    assert "<b>In [2]:6</b>" in page  # the forward pass, counted from the magic's line
    assert "ipykernel" not in page
    assert "<polygon" in page
    assert re.fullmatch(r"<recording .*, 3 steps>", shown(executed[1], "text/plain"))


def test_an_estimate_names_lines_of_other_cells_too(
    executed: list[nbformat.NotebookNode],
) -> None:
    page = shown(executed[3])
    assert "a100-40gb: fits" in page
    assert "<b>In [4]:2</b>" in page
    assert shown(executed[3], "text/plain").startswith("<estimate for a100-40gb: fits, ")


def test_an_estimate_counts_the_steps_in_the_cell(executed: list[nbformat.NotebookNode]) -> None:
    assert "3 training steps, torch " in shown(executed[9])


def test_a_race_is_shown_with_the_source_of_its_cell_and_a_fix(
    executed: list[nbformat.NotebookNode],
) -> None:
    page = shown(executed[4])
    assert "GP201 read-after-write" in page
    assert "total = torch.sum(A)" in page
    assert "+++ b/In [5]\t\n" in page  # lines of the diff are lines
    assert "\\x0a" not in page


def test_names_stay_defined_unless_the_gpu_is_simulated(
    executed: list[nbformat.NotebookNode],
) -> None:
    (output,) = executed[5].outputs
    assert output.text == "torch.Size([512, 256]) False False\n"


def test_a_report_is_a_page_and_a_bad_gpu_an_error(
    executed: list[nbformat.NotebookNode],
) -> None:
    assert shown(executed[6], "text/plain").startswith("<report of run.gpuprobe: peak ")
    assert "Largest parts" in shown(executed[6])
    assert one_line(executed[7]).startswith("UsageError: unknown GPU 'none-such'\n  hint: ")


def one_line(cell: nbformat.NotebookNode) -> str:
    """What a failed cell shows, without a traceback."""
    (found,) = (output for output in cell.outputs if output.output_type != "error")
    assert found.name == "stderr"
    return str(found.text)


def test_a_cell_that_leaves_the_gpu_unused_says_what_to_do(
    executed: list[nbformat.NotebookNode],
) -> None:
    text = "UsageError: nothing was allocated on the GPU\n  hint: what earlier cells made is on the"
    assert one_line(executed[10]).startswith(text)


def test_a_cell_that_runs_out_of_memory_says_why(executed: list[nbformat.NotebookNode]) -> None:
    cell = executed[11]
    printed = "".join(one.text for one in cell.outputs if one.get("name") == "stdout")
    assert "gpuprobe: Out of memory" in printed
    assert "In [12]:5" in printed
    assert "gpuprobe: cause: " in printed
    assert [one.ename for one in cell.outputs if one.output_type == "error"] == ["OutOfMemoryError"]


def test_a_wrong_option_is_one_line(executed: list[nbformat.NotebookNode]) -> None:
    assert one_line(executed[8]).startswith(
        "UsageError: %%gpuprobe: unrecognized arguments: --levl=trace\n  hint: usage: %%gpuprobe"
    )


def record(path: Path) -> None:
    with gpuprobe.virtual_gpu():
        model = torch.nn.Linear(64, 64).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gpuprobe.record(path, model, optimizer) as rec:
            for _ in range(4):
                with rec.step():
                    model(torch.randn(8, 64, device="cuda")).sum().backward()
                    optimizer.step()


@pytest.mark.simulated
def test_every_result_has_a_short_repr_and_a_page(tmp_path: Path) -> None:
    recording = tmp_path / "run.gpuprobe"
    record(recording)

    def step() -> None:
        torch.nn.Linear(8, 8).cuda()(torch.randn(2, 8, device="cuda")).sum().backward()

    fleet = inventory(demo="8xh100")
    found = gpuprobe.load(recording)
    finding = Finding("GP1", "odd", Level.NOTE, "<script>x</script>", location=Place("a.py", 3))
    results = {
        "recording": found,
        "report": gpuprobe.report(recording),
        "summary": gpuprobe.report(recording).summary,
        "diff": gpuprobe.diff(recording, recording),
        "check": gpuprobe.check(recording, recorded(recording)),
        "estimate": gpuprobe.estimate(step, steps=1),
        "inventory": fleet,
        "device": fleet.devices[0],
        "finding": finding,
    }
    for name, result in results.items():
        page = result._repr_html_()
        assert page.startswith('<div class="gpuprobe">'), name
        assert "<script" not in page, name
        assert repr(result).startswith("<"), name
        assert "\n" not in repr(result), name
        assert len(repr(result)) < 1_000, name

    report = gpuprobe.report(recording)  # still a plain document
    assert dict(report) == gpuprobe.report(gpuprobe.load(recording))
    assert report["schema"] == "gpuprobe.report"

    found.ranks = ()  # cannot be read
    assert "DataError" in found._repr_html_()


_IN_A_TERMINAL = """
from IPython.terminal.interactiveshell import TerminalInteractiveShell
shell = TerminalInteractiveShell.instance(colors="nocolor")
for cell in (
    "%load_ext gpuprobe",
    "%%gpuprobe hazards --gpu t4\\nimport torch\\nside = torch.cuda.Stream()\\n"
    "weight = torch.randn(64, 64, device='cuda')\\n"
    "with torch.cuda.stream(side):\\n    total = weight.sum()",
    "%%gpuprobe record --gpu t4\\nfor _ in range(3):\\n    with rec.step():\\n"
    "        kept = torch.zeros(1 << 20, device='cuda')",
    "import gpuprobe\\ngpuprobe.report(_3)",
    "[_2]",
):
    shell.run_cell(cell, store_history=True)
"""


def test_ipython_in_a_terminal_shows_text() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _IN_A_TERMINAL], capture_output=True, text=True, check=True
    )
    hazards, recording, report, inside = re.split(r"Out\[\d\]: ", done.stdout)[1:]
    assert "GP201 read-after-write  In [2]:6" in hazards
    assert "side.wait_stream(torch.cuda.current_stream())" in hazards
    for text in (recording, report):
        assert "verdict complete. Peak 8.0 MiB on cuda:0" in text
        assert "Lines at the peak" in text
    assert inside.startswith("[<hazards: 1 race")


def test_without_a_drawing_function_there_is_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "_draw", None)
    assert Finding("GP1", "odd", Level.NOTE, "m")._repr_html_() is None


def test_what_is_no_result_is_refused() -> None:
    with pytest.raises(TypeError, match="int has no HTML form"):
        html_of(3)


class Shell:
    """The part of IPython's that a cell needs."""

    def __init__(self, **names: object) -> None:
        self.user_ns: dict[str, object] = {"torch": torch, **names}
        self.compile = self
        self.execution_count = 1

    def cache(self, text: str, number: int, raw_code: str) -> str:
        return f"In [{number}]"

    def transform_cell(self, text: str) -> str:
        return text


def test_names_that_need_no_simulated_gpu_stay_defined(capsys: pytest.CaptureFixture[str]) -> None:
    """A graph of autograd stands for what is on the GPU: whether it is cannot be seen."""
    shell = Shell(old=1, loss=2)
    text = (
        "width = old + 1\n"
        "data = torch.ones(width)\n"
        "def double(): return 2 * width\n"
        "weight = torch.ones(2, requires_grad=True)\n"
        "kept = [{'of': (weight * 2,)}]\n"
        "loss = (weight * 3).sum()\n"
        "old = [name for name in ('rec',) if rec]\n"
    )
    notebook._Cell(shell, text)(simulated=True, rec=1)
    names = shell.user_ns
    assert (names["width"], names["old"], names["loss"]) == (2, ["rec"], 2)
    assert names["double"]() == 4  # type: ignore[operator]
    assert names["data"].tolist() == [1, 1]  # type: ignore[attr-defined]
    assert not {"kept", "rec"} & names.keys()
    shown = capsys.readouterr().out
    assert shown == "gpuprobe: not kept, as the simulated GPU has ended: kept, loss\n"


def test_a_cell_that_fails_keeps_names_too() -> None:
    shell = Shell()
    with pytest.raises(ZeroDivisionError):
        notebook._Cell(shell, "width = 2\n1 / 0")(simulated=True)
    assert shell.user_ns["width"] == 2


def test_help_of_the_magic(capsys: pytest.CaptureFixture[str]) -> None:
    assert notebook.run_cell(Shell(), "--help", "1 / 0") is None
    assert "--level {counters,trace}" in capsys.readouterr().out


def test_a_bad_line_of_the_magic_is_refused() -> None:
    with pytest.raises(UsageError, match="invalid choice: 'bogus'"):
        notebook.run_cell(None, "bogus", "pass")

"""The HTML pages: what they say is what the documents say, and nothing recorded becomes code."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from html_pages import Page
from hypothesis import given
from hypothesis import strategies as st
from report_builders import MIB, recording, session, step, trace

from gpuprobe.analysis.compare.diff import Diff, DiffRow, PeakDiff
from gpuprobe.api import views
from gpuprobe.api.recordings import diff, report
from gpuprobe.cli import main
from gpuprobe.errors import UsageError
from gpuprobe.model.memory import Category
from gpuprobe.model.place import Place
from gpuprobe.model.text import visible
from gpuprobe.model.values import Peak
from gpuprobe.reporters.html import report as html_report
from gpuprobe.reporters.html.data import pack, unpack
from gpuprobe.reporters.html.draw import Drawing, excerpt
from gpuprobe.reporters.html.markup import el, script_json
from gpuprobe.reporters.json import diff as diff_json
from gpuprobe.reporters.sections.diff import peak_sections

HOSTILE = (
    "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;\u202egnp\x1b[31m\0"
)

# What a page says of code with such a name, with the marks that nobody sees made visible.
SHOWN = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;\\u202egnp"


def made(name: str = "model.py", **changes: Any) -> Any:
    """A recording with traces, with ``name`` wherever a program can put one."""
    blocks = [
        (f"/home/u/project/{name}:1", 40 * MIB, Category.ACTIVATION),
        (f"/home/u/project/{name}:2", 20 * MIB, Category.GRADIENT),
        ("/elsewhere/lib.py:7", 4 * MIB, Category.OPTIMIZER_STATE),
    ]
    return recording(
        [step(0, {"forward": 30 * MIB, "backward": 66 * MIB}), step(1, {"backward": 65 * MIB})],
        [trace(blocks, step=0, module=f"Net.{name}", before=2 * MIB)],
        session=session(argv=(name,), cwd="/home/u/project"),
        **changes,
    )


def page_of(recorded_: Any, tmp_path: Path, **more: Any) -> Page:
    views.write_report(recorded_, tmp_path / "page.html", force=True, **more)
    return Page((tmp_path / "page.html").read_text("utf-8"))


def test_the_page_holds_the_report_and_says_its_numbers(tmp_path: Path) -> None:
    page = page_of(made(), tmp_path)
    document = report(made(), top=html_report.ROWS)
    data = page.data
    steps = document["steps"]
    assert data["report"] == {**document, "steps": {"highlights": steps["highlights"]}}
    assert len(set(page.ids())) == len(page.ids())
    for said in ("66.0 MiB", "model.py:1", "phase backward, step 0", "40.0 MiB", "60.6%"):
        assert said in page.text
    columns = data["steps"][0]["columns"]
    assert unpack(columns["at_least"]) == [66 * MIB, 65 * MIB]
    track = data["tracks"][0]
    assert track["peak"]["bytes"] == 66 * MIB
    allocated = unpack(track["columns"]["allocated"])
    bands = [unpack(column) for column in track["bands"].values()]
    assert [sum(values) for values in zip(*bands, strict=True)] == allocated
    for name in ("category", "module", "stacks"):
        assert data["trees"][name]["bytes"][0] == 66 * MIB


def test_only_the_pages_own_code_may_run(tmp_path: Path) -> None:
    page = page_of(made(HOSTILE), tmp_path)
    (policy,) = [
        attrs["content"]
        for tag, attrs in page.elements
        if tag == "meta" and attrs.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    for source in (page.raw["script"], page.raw["style"]):
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert [tag for tag, _ in page.elements].count("script") == 2  # the data, and the code
    assert "://" not in page.raw["script"].replace("http://www.w3.org/2000/svg", "")
    assert "url(" not in page.raw["style"]
    assert "@import" not in page.raw["style"]
    assert SHOWN in page.text


@pytest.mark.parametrize("name", ["a" * 5000 + ".py", "üñ☃.py", " ", "a\nb.py", "%s{}$x.py"])
def test_any_name_fits_into_a_page(name: str, tmp_path: Path) -> None:
    page = page_of(made(name), tmp_path)
    assert page.data["report"]["session"]["argv"] == [name]


@given(st.text(max_size=40))
def test_text_stays_text(value: str) -> None:
    page = Page(el("p", value, title=value, hidden=False))
    ((tag, attributes),) = page.elements
    assert tag == "p"
    assert list(attributes) == ["title"]
    assert attributes["title"] == visible(value)
    assert page.text == " ".join(visible(value).split())


@given(st.recursive(st.text() | st.integers() | st.none(), lambda inner: st.lists(inner)))
def test_data_stays_data(value: Any) -> None:
    packed = script_json(value)
    assert packed.isascii()
    assert not set("<>&") & set(packed)
    assert json.loads(packed) == value


@given(st.lists(st.integers(-(2**52), 2**52), max_size=60))
def test_columns_survive(values: list[int]) -> None:
    assert unpack(pack(values)) == values


def test_a_recording_without_traces_has_a_page(tmp_path: Path) -> None:
    page = page_of(recording([step(0, {"forward": 3 * MIB})]), tmp_path)
    assert "3.0 MiB" in page.text
    assert page.data["tracks"] == []
    assert "unknown: " in page.text  # the lines


@pytest.mark.parametrize("size", [1 << 62, 1 << 64, 10**30])
def test_sizes_that_no_machine_has_are_no_crash(size: int, tmp_path: Path) -> None:
    page = page_of(recording([step(0, {"forward": size}, end=-size)]), tmp_path)
    (table,) = page.data["steps"]
    assert unpack(table["columns"]["at_most"]) == [1 << 52]
    assert unpack(table["columns"]["end"]) == [-1]


def test_what_stands_beside_a_peak_is_of_its_rank(tmp_path: Path) -> None:
    one = recording([step(0, {"forward": 30 * MIB}, end=5 * MIB)])
    two = recording([step(0, {"forward": 40 * MIB}, end=7 * MIB)])
    ranks = tuple(
        replace(made.ranks[0], session=replace(made.ranks[0].session, rank=rank, world_size=2))
        for rank, made in enumerate((one, two))
    )
    page = page_of(replace(one, ranks=ranks), tmp_path)
    assert "in rank 1" in page.text
    tiles = page.text.partition("allocated at the end")[2].split()
    assert tiles[:2] == ["7.0", "MiB"]


def test_the_steps_of_each_rank_are_of_its_own_gpu(tmp_path: Path) -> None:
    ranks = []
    for rank, peak in enumerate((30 * MIB, 40 * MIB)):
        made_ = recording([step(0, {"forward": peak}, device=f"cuda:{rank}")]).ranks[0]
        ranks.append(replace(made_, session=replace(made_.session, rank=rank, world_size=2)))
    page = page_of(replace(recording([]), ranks=tuple(ranks)), tmp_path)
    table = page.text.partition("longest phase")[2].split("Processes")[0]
    assert "0 0 cuda:0 10 ns 30.0 MiB" in " ".join(table.split())
    assert "0 1 cuda:1 10 ns 40.0 MiB" in " ".join(table.split())
    assert "500.0 MiB" not in table  # what is resident on the host


def test_places_and_times_are_for_people(tmp_path: Path) -> None:
    page = page_of(made(), tmp_path)
    tried = page.text.partition("What to try first")[2].partition("Lines at the peak")[0]
    assert "model.py:1" in tried
    assert "/home/u/project" not in tried
    assert "1970-01-01 00:00:01 UTC" in page.text
    for damaged in (1e300, -1e300):
        session_ = session(started_at=damaged)
        assert "Started at" in page_of(recording([], session=session_), tmp_path).text


def test_source_is_shown_from_below_the_project_only(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    inside, outside = tmp_path / "project" / "train.py", tmp_path / "secret.py"
    for file in (inside, outside):
        file.write_text("one\n<two>\nthree\nfour\nfive\nsix\n")
    root = tmp_path / "project"
    shown = excerpt(Place(str(inside), 2), root)
    assert shown is not None
    assert "&lt;two&gt;" in shown
    assert "<mark>" in shown
    assert "five" not in shown
    for file, line in (
        (str(outside), 2),
        (str(root / ".." / "secret.py"), 2),
        (str(inside), 99),
        (str(root / "none.py"), 1),
        (str(root / "pyproject.toml"), 1),
        ("train.py\0.py", 1),
    ):
        assert excerpt(Place(file, line), root) is None


def test_a_diff_is_the_document(tmp_path: Path) -> None:
    before = made()
    grown = trace(
        [("/home/u/project/model.py:1", 90 * MIB, Category.ACTIVATION)], step=0, before=2 * MIB
    )
    after = recording([step(0, {"backward": 92 * MIB})], [grown])
    views.write_diff(before, after, tmp_path / "diff.html")
    page = Page((tmp_path / "diff.html").read_text("utf-8"))
    document = diff_json.document(diff(before, after))
    assert page.data["diff"] == document
    assert [track["title"] for track in page.data["tracks"]] == ["before", "after"]
    for said in (
        "+26.0 MiB",
        "66.0 MiB → 92.0 MiB",
        "in backward both times",
        "+50.0 MiB",
        "removed",
    ):
        assert said in page.text
    assert len(set(page.ids())) == len(page.ids())
    with pytest.raises(UsageError, match="exists"):
        views.write_diff(before, after, tmp_path / "diff.html")


def test_bars_of_a_diff_are_drawn() -> None:
    """A browser takes an SVG element for closed only where a slash says so."""
    rows = [
        DiffRow("a.py:1", 0, 100, 0, 1, "added", ""),
        DiffRow("b.py:2", 50, 0, 1, 0, "removed", ""),
    ]
    peak = PeakDiff(
        0, "cuda:0", Peak.exactly(50), Peak.exactly(100), "", "", {"line": tuple(rows)}
    )  # fmt: skip
    sections = peak_sections(Diff("a", "b", (peak,)), ("line",))
    shown = "".join(map(Drawing().section, sections))
    page = Page(shown)
    assert [tag for tag, _ in page.elements].count("rect") == 2


def test_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gpuprobe.recording.writer import RecordingWriter

    monkeypatch.chdir(tmp_path)
    rank = made().ranks[0]
    writer = RecordingWriter.create(Path("a.gpuprobe"), rank=0, world_size=1)
    writer.session(rank.session, rank.environment)
    writer.step(rank.steps[1])
    writer.close()
    assert main(["report", "a.gpuprobe", "--html", "a.html"]) == 0
    assert main(["diff", "a.gpuprobe", "a.gpuprobe", "--html", "d.html"]) == 0
    assert "What changed" in Page(Path("d.html").read_text("utf-8")).text
    assert capsys.readouterr().out == ""
    assert main(["diff", "a.gpuprobe", "a.gpuprobe", "--html", "d.html"]) == 2
    assert main(["diff", "a.gpuprobe", "a.gpuprobe", "--html", "d.html", "--force"]) == 0


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no Chromium")
@pytest.mark.parametrize("width", [400, 1280])
def test_a_browser_draws_it_without_complaint(width: int, tmp_path: Path) -> None:
    views.write_report(made(HOSTILE), tmp_path / "page.html")
    done = subprocess.run(
        ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900",
         "--virtual-time-budget=5000", "--dump-dom", (tmp_path / "page.html").as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr, done.stderr
    assert done.stdout.count("<canvas") >= 2  # the curve, and the steps
    assert "<script>alert" not in done.stdout


# What a person would do: single blocks, a click on the largest, the treemap's leaf.
_CLICKS = """
ready.then(async () => {
  const chart = [...drawn.values()][0];
  await chart.toggleBlocks();
  chart.toPeak();
  redrawNow();
  const box = chart.canvas.getBoundingClientRect(), { top, bottom, base, most } = chart.view;
  const px = chart.picks.findIndex((at) => at === chart.model.peak);
  const y = (bytes) => box.top + bottom - ((bytes - base) / (most - base)) * (bottom - top);
  const clientX = box.left + chart.left + px;
  const click = (bytes) => chart.clicked({ clientX, clientY: y(bytes) });
  const found = [];
  for (const bytes of [1 << 20, 10 << 20, 50 << 20, 65 << 20, 80 << 20]) {
    click(bytes);
    found.push(chart.block.textContent);
  }
  chart.choose(-1);
  chart.step(1);
  found.push(chart.block.textContent);
  const boxes = () => [...document.querySelectorAll(".treemap .boxes button")];
  boxes().find((b) => b.textContent.startsWith("a.py:1")).click();
  found.push(boxes().map((b) => b.textContent).join("|"));
  document.body.append(make("pre", { id: "found" }, JSON.stringify(found)));
}).catch((error) => document.body.append(make("pre", { id: "found" }, String(error.stack))));
"""


def browser_result(page: Path, script: str, folder: Path) -> Any:
    """What the script leaves in the element ``found`` of a copy of the page that may run it."""
    text = re.sub(r"<meta http-equiv=[^>]*>", "", page.read_text("utf-8"), count=1)
    copy = folder / "copy.html"
    copy.write_text(text.replace("</body>", f"<script>{script}</script></body>"), "utf-8")
    done = subprocess.run(
        ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,900",
         f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=5000", "--dump-dom",
         copy.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    match = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert match, done.stdout[-2000:]
    return json.loads(html.unescape(match.group(1)))


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no Chromium")
def test_a_click_on_a_block_shows_its_stack_size_and_life(tmp_path: Path) -> None:
    blocks = [
        ("/p/a.py:1", 40 * MIB, Category.ACTIVATION),
        ("/p/a.py:2", 20 * MIB, Category.GRADIENT),
        ("/p/a.py:3", 4 * MIB, Category.OPTIMIZER_STATE),
    ]
    made_ = recording([step(0, {"backward": 66 * MIB})], [trace(blocks, before=2 * MIB)])
    views.write_report(made_, tmp_path / "page.html")
    found = browser_result(tmp_path / "page.html", _CLICKS, tmp_path)
    before, first, second, third, nothing, keys, leaf = found
    assert "2.0 MiB · parameter" in before
    assert "allocated before the trace, not freed in this trace" in before
    assert "no stack was recorded" in before
    assert "40.0 MiB · activation · Net.fc · phase backward" in first
    assert "allocated at event 1 of step 0, freed at event 4 of step 0: 3 events" in first
    assert "/p/a.py:1 in forward" in first
    assert "20.0 MiB · gradient" in second
    assert "4.0 MiB · optimizer state" in third
    assert nothing.startswith("Click a block")
    assert "40.0 MiB" in keys  # the largest at the cursor
    assert leaf == "blocks of 40.0 MiB40.0 MiB"


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no Chromium")
def test_a_diff_overlays_before_and_after(tmp_path: Path) -> None:
    sides = []
    for size in (10, 14):
        blocks = [("/p/a.py:1", size * MIB, Category.ACTIVATION)] * 3
        sides.append(recording([step(0, {"backward": 3 * size * MIB})], [trace(blocks)]))
    views.write_diff(*sides, tmp_path / "d.html")
    script = """
      ready.then(() => {
        const { model } = [...drawn.values()][0];
        const found = model.lines.map((line) => [line.name, [...line.values]]);
        document.body.append(make("pre", { id: "found" }, JSON.stringify(found)));
      });
    """
    lines = dict(browser_result(tmp_path / "d.html", script, tmp_path))
    shown, other = lines["after"], lines["before"]  # the one with the higher peak comes first
    assert [value // MIB for value in shown] == [0, 14, 28, 42, 28, 14, 0]
    assert [value // MIB for value in other] == [0, 10, 20, 30, 20, 10, 0]

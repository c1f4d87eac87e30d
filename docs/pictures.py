"""The pictures of the documentation: terminals as SVG that load no font or file, and the report
page as a browser shows it.

    make docs-images                         make those again that are out of date
    python docs/pictures.py                  the same, apart from the estimate
    python docs/pictures.py --native PYTHON  the estimate too, by a build of torch with CUDA

`tests/docs/test_pictures.py` fails when a picture is out of date. How that is known:

* ``explain.svg``, ``view.svg`` and ``top.svg`` are compared with what the commands print now: every
  word, but no figure, as figures differ between machines.
* ``estimate.svg``, at the top of the README, is drawn from ``estimate.txt``: the command and what
  it printed with a build of torch with CUDA. Its figures are checked against an estimate made here.
* ``serving.svg`` is drawn from ``serving.txt``: the command and what it printed with vLLM, copied
  without its assumptions.
* ``page-light.png`` holds a fingerprint of the page that it shows: pixels differ between browsers.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from xml.etree import ElementTree
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).resolve().parent))

import blocks

IMAGES = blocks.DOCS / "images"
ESTIMATE = IMAGES / "estimate.svg"
ESTIMATE_TEXT = IMAGES / "estimate.txt"
SERVING = IMAGES / "serving.svg"
SERVING_TEXT = IMAGES / "serving.txt"
EXPLAIN = IMAGES / "explain.svg"
VIEW = IMAGES / "view.svg"
TOP = IMAGES / "top.svg"
PAGE = IMAGES / "page-light.png"

# The question that the README answers first.
QUESTION = "gpuprobe estimate --model llama-3.1-8b --method lora --checkpointing --gpu rtx-4090"

# Sections of the answer that the picture leaves out.
QUESTION_WITHOUT = ("Lines at the peak",)

# The theme of the page's picture, and its window in pixels.
THEME, WIDTH, HEIGHT = "light", 1280, 900
BROWSERS = ("chromium", "google-chrome", "chrome")

# What the picture of an explanation shows, to the tables below it.
COMMAND = "gpuprobe explain --gpu t4 examples/memory_leak.py --steps 100"
UNTIL = "What it is needed for"

# The recording that the other pictures show.
BEFORE = "gpuprobe run --gpu t4 --level trace --output gpt.gpuprobe examples/train_gpt.py --steps 8"
# The run that the page shows.
ON_CPU = BEFORE.replace("--gpu t4 ", "")

# Pixels of a character cell: the usual 0.6 em of a monospace font, and room between lines.
_FONT_SIZE, _CELL, _LINE = 14, 8.4, 19
_MARGIN, _TITLE = 18, 34


def answer(runner: blocks.Runner, scratch: str = "question") -> list[str]:
    """What the README's question prints in a terminal of 80 columns, without the prompt."""
    result = runner.shell(f"COLUMNS=80 {QUESTION} 2>/dev/null", runner.scratch(scratch))
    if result.code != 0:
        raise RuntimeError(f"{QUESTION}: exit code {result.code}\n{result.output}")
    sections = "\n".join(result.lines()).split("\n\n")
    kept = [text for text in sections if text.partition("\n")[0] not in QUESTION_WITHOUT]
    return "\n\n".join(kept).splitlines()


def question_svg(text: str) -> str:
    """The picture of ``estimate.txt`` or ``serving.txt``: the command, wrapped as in a shell, and
    its output.
    """
    return svg(text.rstrip("\n").splitlines(), "gpuprobe estimate")


def question_text(lines: list[str]) -> str:
    """``estimate.txt`` for this output."""
    options, _, program = QUESTION.partition(" -- ")
    prompt = [f"$ {options} \\", f"    -- {program}"] if program else [f"$ {QUESTION}"]
    return "\n".join([*prompt, *lines]).rstrip("\n") + "\n"


def parts_of(text: str) -> tuple[str, list[str]]:
    """The command of ``estimate.txt``, in one line, and the lines of its output."""
    lines = text.splitlines()
    end = 1 + next(i for i, line in enumerate(lines) if not line.endswith("\\"))
    command = " ".join(line.rstrip("\\").strip() for line in lines[:end])
    return command.removeprefix("$ "), lines[end:]


def explain_lines(runner: blocks.Runner, scratch: str = "picture") -> list[str]:
    """The terminal that the picture shows: the prompt, and what the command prints."""
    result = runner.shell(f"COLUMNS=80 {COMMAND} 2>/dev/null", runner.scratch(scratch))
    if result.code != 1:  # there is memory that is not needed
        raise RuntimeError(f"{COMMAND}: exit code {result.code}\n{result.output}")
    lines = result.lines()
    return [f"$ {COMMAND}", *lines[: lines.index(UNTIL)]]


def svg(lines: list[str], title: str) -> str:
    """A terminal window with these lines in it. ``textLength`` holds every font to the grid."""
    width = round(2 * _MARGIN + _CELL * max(map(len, lines)))
    height = _TITLE + _LINE * len(lines) + _MARGIN // 2
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">',
        f"<title>{escape(title)}</title>",
        "<style>text { font: 14px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace; "
        "fill: #d8dee9; white-space: pre } .head { font-weight: bold; fill: #a3d4ff }</style>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#1b1f27"/>',
    ]
    for x, color in ((20, "#ff5f57"), (38, "#febc2e"), (56, "#28c840")):
        out.append(f'<circle cx="{x}" cy="17" r="5.5" fill="{color}"/>')
    for number, line in enumerate(lines):
        if not line:
            continue
        indent = len(line) - len(line.lstrip())
        text = line.strip()
        head = ' class="head"' if _is_head(line) else ""
        out.append(
            f'<text data-row="{number}" data-indent="{indent}" xml:space="preserve"{head} '
            f'x="{_MARGIN + _CELL * indent:.1f}" y="{_TITLE + _LINE * number + _FONT_SIZE}" '
            f'textLength="{_CELL * len(text):.1f}" lengthAdjust="spacingAndGlyphs">'
            f"{escape(text)}</text>"
        )
    return "\n".join([*out, "</svg>"]) + "\n"


def _is_head(line: str) -> bool:
    return line.startswith("$ ") or re.match(r"\S", line) is not None


def text_of(picture: str) -> list[str]:
    """The lines of text in an SVG made here, without the empty ones."""
    root = ElementTree.fromstring(picture)
    found = root.iter("{http://www.w3.org/2000/svg}text")
    return [" " * int(e.attrib["data-indent"]) + "".join(e.itertext()) for e in found]


def current(lines: list[str], picture: str) -> bool:
    """Does the picture show these lines, up to what differs between two good runs?"""
    return blocks.same_shape(text_of(picture), [line for line in lines if line])


# Opens the screen without a terminal, at the trace of the step with the peak, and saves what it
# shows.
_SCREEN = """
import asyncio
import os
from pathlib import Path

del os.environ["NO_COLOR"]  # set for the other commands of a page

from gpuprobe.recording.load import Followed
from gpuprobe.tui.viewer.app import ViewApp
from gpuprobe.tui.viewer.trace import TracePane


async def main():
    followed = Followed("gpt.gpuprobe")
    followed.poll()
    app = ViewApp(followed, interval=3600)
    async with app.run_test(size=(120, 34)) as pilot:
        while app.screen.run_model is None:
            await pilot.pause(0.05)
        await pilot.press("p", "t")
        while not app.screen.query_one(TracePane).ready:
            await pilot.pause(0.05)
        picture = app.export_screenshot(title="gpuprobe view gpt.gpuprobe")
        Path("view.svg").write_text(picture, encoding="utf-8")


asyncio.run(main())
"""

# The dashboard of the simulated fleet after a minute and a half.
_DASHBOARD = """
import asyncio
import os
from contextlib import contextmanager
from pathlib import Path

del os.environ["NO_COLOR"]

from gpuprobe.probes.monitor import Monitor
from gpuprobe.tui.monitor.app import TopApp


class Last:
    def __init__(self, moment):
        self.moment = moment

    def read(self):
        return self.moment


async def main():
    with Monitor("8xh100", moving=True) as monitor:
        moments = [monitor.read() for _ in range(90)]

    @contextmanager
    def source():
        yield Last(moments[-1])

    app = TopApp("8xh100", source=source)
    for moment in moments[:-1]:
        app.model.add(moment)
    async with app.run_test(size=(132, 44)) as pilot:
        while app.first_paint is None:
            await pilot.pause(0.05)
        await pilot.pause(0.2)
        picture = app.export_screenshot(title="gpuprobe top --demo")
        Path("top.svg").write_text(picture, encoding="utf-8")


asyncio.run(main())
"""

# Textual's pictures load a font from a CDN, and carry an id that is new every time.
_FONT_FACE = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)
_COMMENT = re.compile(r"\s*<!--.*?-->", re.DOTALL)
_ID = re.compile(r"terminal-\d+")


def view(runner: blocks.Runner, scratch: str = "screen") -> str:
    """What ``gpuprobe view`` shows of the same recording, as SVG."""
    cwd = runner.scratch(scratch)
    for result in (runner.shell(BEFORE, cwd), runner.python(_SCREEN, cwd)):
        if result.code != 0:
            raise RuntimeError(result.output)
    return _portable((cwd / "view.svg").read_text(encoding="utf-8"))


def top(runner: blocks.Runner, scratch: str = "dashboard") -> str:
    """What ``gpuprobe top --demo`` shows, as SVG."""
    cwd = runner.scratch(scratch)
    result = runner.python(_DASHBOARD, cwd)
    if result.code != 0:
        raise RuntimeError(result.output)
    return _portable((cwd / "top.svg").read_text(encoding="utf-8"))


def _portable(picture: str) -> str:
    """A picture of Textual without what it loads from afar, and without its random names."""
    picture = _COMMENT.sub("", _FONT_FACE.sub("", picture))
    picture = picture.replace("Fira Code", "ui-monospace, Menlo, Consolas")
    picture = _ID.sub("terminal", picture)
    return "\n".join(line.rstrip() for line in picture.splitlines()) + "\n"


def words(picture: str) -> set[str]:
    """The words in a picture: what is left of it when every figure may differ."""
    found = ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")
    text = " ".join("".join(element.itertext()) for element in found)
    return set(re.findall(r"[a-z_]{3,}", text, re.IGNORECASE))


def page(runner: blocks.Runner, scratch: str = "page") -> str:
    """The report page of a run on the CPU, as HTML, in the picture's theme."""
    cwd = runner.scratch(scratch)
    for command in (ON_CPU, "gpuprobe report gpt.gpuprobe --html report.html"):
        result = runner.shell(command, cwd)
        if result.code != 0:
            raise RuntimeError(result.output)
    html = (cwd / "report.html").read_text(encoding="utf-8")
    # The recording may be from the scratch directory of another page.
    html = re.sub(rf"{re.escape(str(runner.base))}/[\w-]+", blocks.PROJECT, html)
    return html.replace("<html ", f'<html data-theme="{THEME}" ', 1)


_CODE = re.compile(r"<(style|script)>(.*?)</\1>", re.DOTALL)
_DATA = re.compile(r"<(style|script)\b.*?</\1>", re.DOTALL)
_TAG = re.compile(r"<[^>]*>")
_BUILD = re.compile(r"(?<=\d)\+\w+")
_END = '<section id="live"'  # the window ends within the section before it


def fingerprint(html: str) -> str:
    """A digest of what a picture of this page is made from: its styles, its scripts, the window,
    and the words above its end. Figures are left out: times and the process's memory differ from
    run to run; and torch's builds: 2.13.0+cpu on one machine, +cu130 on another. Raises ValueError
    if the page has no section at which the window can end.
    """
    code = "".join(match[2] for match in _CODE.finditer(html))
    above, end, _ = html.partition(_END)
    if not end:
        raise ValueError(f"a page without {_END}")
    text = _BUILD.sub("", _TAG.sub(" ", _DATA.sub(" ", above)))
    shown = " ".join(re.findall(r"[A-Za-z_]{3,}", text))
    return hashlib.sha256(f"{WIDTH}x{HEIGHT}\n{code}\n{shown}".encode()).hexdigest()


_PNG = b"\x89PNG\r\n\x1a\n"
_SOURCE = b"Source\0"  # the keyword that the PNG specification has for where a picture is from


def with_fingerprint(png: bytes, digest: str) -> bytes:
    """The PNG with this digest in a text chunk, behind its header chunk."""
    body = b"tEXt" + _SOURCE + digest.encode()
    chunk = (len(body) - 4).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")
    header_end = len(_PNG) + 4 + 4 + 13 + 4
    return png[:header_end] + chunk + png[header_end:]


def fingerprint_of(png: bytes) -> str:
    """The digest in a PNG that `with_fingerprint` made, or an empty string."""
    at = len(_PNG)
    while at < len(png):
        length = int.from_bytes(png[at : at + 4], "big")
        kind, body = png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        if kind == b"tEXt" and body.startswith(_SOURCE):
            return body.removeprefix(_SOURCE).decode()
        at += 4 + 4 + length + 4
    return ""


def shoot(browser: str, cwd: Path, html: str) -> bytes:
    """A page as this browser shows it, as PNG."""
    file, picture = cwd / "page.html", cwd / "page.png"
    file.write_text(html, "utf-8")
    subprocess.run(
        [
            browser,
            *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *("--no-first-run", f"--user-data-dir={cwd / 'browser'}"),
            "--virtual-time-budget=8000",  # the curves are unpacked first
            f"--window-size={WIDTH},{HEIGHT}",
            f"--screenshot={picture}",
            file.as_uri(),
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )
    return picture.read_bytes()


def _write(path: Path, content: str | bytes) -> None:
    data = content.encode() if isinstance(content, str) else content
    if not path.exists() or path.read_bytes() != data:
        path.write_bytes(data)
        sys.stdout.write(f"written: {path.relative_to(blocks.ROOT)}\n")


def write(runner: blocks.Runner) -> list[str]:
    """Make the pictures again that are out of date. Returns a line for each that this environment
    cannot make.
    """
    missing = []
    question = question_text(answer(runner))
    _write(ESTIMATE_TEXT, question)
    _write(ESTIMATE, question_svg(question))
    _write(SERVING, question_svg(SERVING_TEXT.read_text(encoding="utf-8")))
    lines = explain_lines(runner)
    if not EXPLAIN.exists() or not current(lines, EXPLAIN.read_text(encoding="utf-8")):
        _write(EXPLAIN, svg(lines, "gpuprobe explain"))
    for path, make in ((VIEW, view), (TOP, top)):
        picture = make(runner)
        if not path.exists() or words(picture) != words(path.read_text(encoding="utf-8")):
            _write(path, picture)
    html = page(runner)
    digest = fingerprint(html)
    if not PAGE.exists() or fingerprint_of(PAGE.read_bytes()) != digest:
        browser = next(filter(None, map(shutil.which, BROWSERS)), None)
        if browser is None:
            missing.append(f"{PAGE.name}: it needs a browser ({', '.join(BROWSERS)})")
        else:
            _write(PAGE, with_fingerprint(shoot(browser, runner.scratch("browser"), html), digest))
    return missing


def main(argv: list[str] | None = None) -> int:
    argparse.ArgumentParser(description="Make the pictures that are out of date.").parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        missing = write(blocks.Runner(Path(scratch)))
    for line in missing:
        sys.stderr.write(f"not made: {line}\n")
    return 1 if missing else 0


if __name__ == "__main__":
    raise SystemExit(main())

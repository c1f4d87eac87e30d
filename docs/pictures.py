"""The pictures of the documentation: a terminal as SVG that needs no font or file from afar, and
the report page as a browser shows it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import blocks

REPORT = blocks.DOCS / "images" / "report.svg"
VIEW = blocks.DOCS / "images" / "view.svg"
TOP = blocks.DOCS / "images" / "top.svg"

# Pictures of the page, by file: the theme, and the window in pixels.
PAGES = {
    "page-light.png": ("light", 1280, 900),
    "page-dark.png": ("dark", 1280, 900),
    "page-narrow.png": ("light", 400, 900),
}
BROWSERS = ("chromium", "google-chrome", "chrome")

# What the picture shows, and what has to run before it.
BEFORE = "gpuprobe run --level trace --output gpt.gpuprobe examples/train_gpt.py --steps 8"
COMMAND = "gpuprobe report gpt.gpuprobe --top 4"

# The tables are what a picture is good for; the text below them would double its height.
UNTIL = "Blind spots"

# Pixels of a character cell: the usual 0.6 em of a monospace font, and room between lines.
_FONT_SIZE, _CELL, _LINE = 14, 8.4, 19
_MARGIN, _TITLE = 18, 34


def report_lines(runner: blocks.Runner, scratch: str = "picture") -> list[str]:
    """The terminal that the picture shows: the prompt, and what the command prints."""
    cwd = runner.scratch(scratch)
    for command in (BEFORE, COMMAND):
        result = runner.shell(command, cwd)
        if result.code != 0:
            raise RuntimeError(f"{command}: exit code {result.code}\n{result.output}")
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

from gpuprobe.api.live import Followed
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

from gpuprobe.api.monitor import Monitor
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


def pages(runner: blocks.Runner, scratch: str = "page") -> None:
    """The report page, light, dark and on a narrow screen, as PNG. Needs a browser: without one the
    pictures stay as they are.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        return
    cwd = runner.scratch(scratch)
    for command in (BEFORE, "gpuprobe report gpt.gpuprobe --html report.html"):
        result = runner.shell(command, cwd)
        if result.code != 0:
            raise RuntimeError(result.output)
    page = (cwd / "report.html").read_text(encoding="utf-8")
    for name, (theme, width, height) in PAGES.items():
        themed = page.replace("<html ", f'<html data-theme="{theme}" ', 1)
        _shoot(browser, cwd, themed, name, width, height)


# Enough of a style sheet that the README looks as it does where it is read.
_README_STYLE = """
body { max-width: 860px; margin: 28px auto; font: 16px/1.5 system-ui, sans-serif; color: #1f2328; }
img { max-width: 100%; } a { color: #0969da; text-decoration: none; }
h1, h2 { border-bottom: 1px solid #d1d9e0; padding-bottom: 6px; }
pre { background: #f6f8fa; padding: 14px; border-radius: 6px; overflow: auto; }
pre code { padding: 0 !important; }
code { font: 13.5px ui-monospace, monospace; background: #f6f8fa; padding: 2px 4px; }
table { border-collapse: collapse; font-size: 14.5px; }
th, td { border: 1px solid #d1d9e0; padding: 5px 11px; }
"""


def readme(runner: blocks.Runner, scratch: str = "readme") -> None:
    """The beginning of the README as a browser shows it. Needs a browser, as `pages`."""
    from markdown_it import MarkdownIt  # Textual brings it

    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        return
    text = (blocks.ROOT / "README.md").read_text(encoding="utf-8")
    body = MarkdownIt().enable("table").render(text)
    page = f'<base href="{blocks.ROOT.as_uri()}/"><style>{_README_STYLE}</style>{body}'
    _shoot(
        browser, runner.scratch(scratch), f'<meta charset="utf-8">{page}', "readme.png", 960, 1500
    )


def _shoot(browser: str, cwd: Path, page: str, name: str, width: int, height: int) -> None:
    """A picture of a page, in ``docs/images``."""
    file = cwd / f"{name}.html"
    file.write_text(page, "utf-8")
    subprocess.run(
        [
            browser,
            *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *("--no-first-run", f"--user-data-dir={cwd / 'browser'}"),
            "--virtual-time-budget=8000",  # the curves are unpacked first
            f"--window-size={width},{height}",
            f"--screenshot={blocks.DOCS / 'images' / name}",
            file.as_uri(),
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )


def write(runner: blocks.Runner) -> None:
    """Make the pictures again whose content has changed."""
    lines = report_lines(runner)
    if not REPORT.exists() or not current(lines, REPORT.read_text(encoding="utf-8")):
        REPORT.write_text(svg(lines, "gpuprobe report"), encoding="utf-8")
    screen = view(runner)
    if not VIEW.exists() or words(screen) != words(VIEW.read_text(encoding="utf-8")):
        VIEW.write_text(screen, encoding="utf-8")
    dashboard = top(runner)
    if not TOP.exists() or words(dashboard) != words(TOP.read_text(encoding="utf-8")):
        TOP.write_text(dashboard, encoding="utf-8")
    pages(runner)
    readme(runner)

"""What each kind of output must not contain, whoever chose the names in it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from html_pages import Page
from markdown_it import MarkdownIt

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_COMMAND = re.compile(r"^\s*::[\w-]+[^:]*::|##(vso)?\[", re.MULTILINE)


def harmless_text(text: str) -> None:
    """Nothing that a terminal or a CI service's log executes, no line that a name began."""
    assert not _CONTROL.search(text), _CONTROL.search(text)
    assert not _COMMAND.search(text), _COMMAND.search(text)
    assert "\ngpuprobe: error: Zq9" not in text
    assert "\ngpuprobe_owned" not in text


def harmless_markdown(text: str) -> None:
    """As GitHub renders it: no element, link, picture or mention that a name made."""
    harmless_text(text)
    for token in MarkdownIt("commonmark", {"html": True}).enable("table").parse(text):
        assert token.type != "html_block", token.content
        if token.type == "heading_open":
            assert token.tag in ("h3", "h4"), token
        for inner in token.children or ():
            assert inner.type not in ("link_open", "image"), inner
            if inner.type == "html_inline":
                assert inner.content == "<!-- -->"
            if inner.type == "text":
                assert not re.search(r"[@#!]\w|https?://|www\.", inner.content), inner.content


def harmless_prometheus(text: str) -> None:
    """Lines of the exposition format, and samples of gpuprobe's own metrics only."""
    label = r'[a-zA-Z_]\w*="(?:[^"\\\n]|\\[\\"n])*"'
    sample = re.compile(rf"[a-zA-Z_:][\w:]*(?:\{{{label}(?:,{label})*\}})? \S+")
    for line in text.split("\n"):
        assert not line or line.startswith("# ") or sample.fullmatch(line), line
        assert not line.startswith("gpuprobe_owned")


def harmless_sarif(text: str) -> None:
    for result in json.loads(text)["runs"][0]["results"]:
        message = result["message"]["text"]
        assert not re.search(r"(?<!\\)\[[^\]]*\]\(", message), message
        for place in (*result.get("locations", ()), *result.get("relatedLocations", ())):
            uri = place["physicalLocation"]["artifactLocation"]["uri"]
            assert re.fullmatch(r"(file:///)?[\w./%~()!*',;&=+$@-]*", uri), uri
            assert not re.match(r"(?!file:)\w+:", uri), uri


_DATA = re.compile(r'<script type="application/json"[^>]*>(.*?)</script>', re.DOTALL)
_HALF = re.compile("[\ud800-\udfff]")  # a whole pair is one character of a str


def in_browser(page: Path, folder: Path) -> str:
    """The DOM of a page after its scripts have run, in a real browser."""
    assert CHROMIUM is not None
    given = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        f"--user-data-dir={folder}", "--virtual-time-budget=2000", "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    return subprocess.run(given, capture_output=True, text=True, check=True, timeout=120).stdout


def harmless_json(text: str) -> None:
    """A file: ASCII, in which nothing is raw that a terminal executes."""
    assert text.isascii()
    assert not _CONTROL.search(text), _CONTROL.search(text)
    json.loads(text)


def harmless_printed_json(text: str) -> None:
    harmless_json(text)
    harmless_text(text)


def harmless_xml(text: str) -> None:
    """Well-formed, without a document type of its own, and nothing raw that a terminal executes."""
    assert "<!DOCTYPE" not in text
    assert "<!ENTITY" not in text
    ElementTree.fromstring(text)
    assert not _CONTROL.search(text), _CONTROL.search(text)


def harmless_html(text: str) -> None:
    """No element, handler or link that a name made; no data that ends its script, and none that
    ends Chromium: half of a surrogate pair in a label does.
    """
    for data in _DATA.findall(text):
        assert not _HALF.search(json.dumps(json.loads(data), ensure_ascii=False))
    Page(text)


def harmless_commands(text: str) -> None:
    """Workflow commands of GitHub: each line is one of gpuprobe's own."""
    assert not _CONTROL.search(text), _CONTROL.search(text)
    for line in text.splitlines():
        assert re.fullmatch(r"::(error|warning|notice) [^:]*::.*", line), line
        properties = line[2 : line.index("::", 2)]
        names = [part.partition("=")[0] for part in properties.split(" ", 1)[1].split(",")]
        assert len(set(names)) == len(names), line
        assert set(names) <= {"file", "line", "endLine", "col", "title"}, line


def harmless_screen(app: Any) -> None:
    """What is on the screen: no control character, no link or action that a name made."""
    for strip in app.screen._compositor.render_strips():
        for segment in strip:
            assert not _CONTROL.search(segment.text), segment
            assert segment.control is None, segment
            if segment.style is not None:
                assert segment.style.link is None, segment
                assert "app.quit" not in str(segment.style.meta), segment
    picture = app.export_screenshot()
    assert "Zq9</a>" not in picture
    ElementTree.fromstring(picture)

"""Names that would be executed by what shows them: by no output, whoever chose them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import hostile_commands as commands
import injections
import pytest
from html_pages import Page
from injections import INJECTIONS, MARK
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


def in_browser(page: Path, folder: Path) -> str:
    """The DOM of a page after its scripts have run, in a real browser."""
    assert CHROMIUM is not None
    given = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        f"--user-data-dir={folder}", "--virtual-time-budget=2000", "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    return subprocess.run(given, capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.mark.parametrize("text", INJECTIONS, ids=range(len(INJECTIONS)))
def test_no_name_is_executed(text: str, tmp_path: Path) -> None:
    target = tmp_path / f"{injections.file_name(text)}.gpuprobe"
    target.mkdir()
    injections.recording(target, [text])
    before = tmp_path / f"{injections.file_name(text)}.json"
    injections.baseline(before, [text])

    for argv in (["report", str(target), "-v"], ["diff", str(commands.GOOD), str(target)]):
        ended = commands.run(argv)
        assert ended.code == 0, ended.talk
        assert commands.problem(argv, ended) == ""
        harmless_text(ended.out + ended.talk)
    assert MARK in ended.out
    page = tmp_path / "r.html"
    assert commands.run(["report", str(target), "--html", str(page)]).code == 0
    assert MARK in Page(page.read_text("utf-8")).text

    argv = ["check", str(target), "--baseline", str(before), "--markdown"]
    argv += ["--sarif", str(tmp_path / "s"), "--junit", str(tmp_path / "j")]
    ended = commands.run([*argv, "--html", str(page)])
    assert ended.code in (1, 2), ended.talk
    harmless_markdown(ended.out)
    harmless_text(ended.talk)
    harmless_sarif((tmp_path / "s").read_text())
    ElementTree.fromstring((tmp_path / "j").read_text())
    Page(page.read_text("utf-8"))

    ended = commands.run(
        ["export", "--prometheus", "--once", "--runs", str(target), "--no-discovery"]
    )
    harmless_prometheus(ended.out)
    harmless_text(ended.talk)


def test_no_name_of_a_machine_is_executed(tmp_path: Path) -> None:
    for text in INJECTIONS:
        path = tmp_path / f"{injections.file_name(text)}.jsonl"
        injections.log(path, [text])
        ended = commands.run(["top", "--replay", str(path), "--once"])
        assert ended.code == 0, ended.talk
        harmless_text(ended.out + ended.talk)
        path.unlink()


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_in_a_browser(tmp_path: Path) -> None:
    """All of them in each page, among its rows."""
    target = tmp_path / "x.gpuprobe"
    target.mkdir()
    injections.recording(target, list(INJECTIONS))
    page = tmp_path / "r.html"
    assert commands.run(["report", str(target), "--html", str(page)]).code == 0
    dom = in_browser(page, tmp_path / "profile")
    assert MARK in dom
    assert "data-owned" not in dom.replace("'data-owned'", "")


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_the_browser_would_show_what_ran(tmp_path: Path) -> None:
    page = tmp_path / "x.html"
    page.write_text(f"<html><body>{INJECTIONS[19]}</body></html>")
    dom = in_browser(page, tmp_path / "profile")
    assert 'data-owned="Zq9"' in dom

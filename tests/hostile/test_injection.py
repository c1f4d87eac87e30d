"""Names that would be executed by what shows them: by no output, whoever chose them.

``benchmarks/injected_names.py`` puts each of the fifty into each name of each output.
"""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path

import harmless
import injected_outputs as outputs
import pytest
from harmless import CHROMIUM, in_browser
from injections import INJECTIONS, MARK

OUTPUTS = [name for name in outputs.OUTPUTS if name not in outputs.SLOW]


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("turn", range(3))
def test_no_name_is_executed(
    name: str, turn: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All fifty, among the names; in another turn each name has others."""
    monkeypatch.chdir(tmp_path)
    texts = deque(INJECTIONS)
    texts.rotate(17 * turn)
    shown = outputs.OUTPUTS[name](list(texts), tmp_path)
    assert shown > 0 or name in outputs.NAMELESS, "some of them are shown"


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_in_a_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them in one page, among its rows."""
    monkeypatch.chdir(tmp_path)
    outputs.OUTPUTS["report --html"](list(INJECTIONS), tmp_path)
    dom = in_browser(tmp_path / "r.html", tmp_path / "profile")
    assert MARK in dom
    assert "data-owned" not in dom.replace("'data-owned'", "")


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_the_browser_would_show_what_ran(tmp_path: Path) -> None:
    page = tmp_path / "x.html"
    page.write_text(f"<html><body>{INJECTIONS[19]}</body></html>")
    dom = in_browser(page, tmp_path / "profile")
    assert 'data-owned="Zq9"' in dom


def test_what_is_checked_would_be_seen() -> None:
    """A check that cannot fail checks nothing."""
    wrong = {
        harmless.harmless_text: [
            "a\x1b[2Jb",
            "  ::error::x",
            "a ##[group]",
            "a ##vso[x]",
            "\u202e",
        ],
        harmless.harmless_json: ["é", "\x1b", "{"],
        harmless.harmless_printed_json: ['{"a": "##[x]"}'],
        harmless.harmless_xml: ["<a>\x1b</a>", "<a>", '<!DOCTYPE a [<!ENTITY b "c">]><a/>'],
        harmless.harmless_html: ["<p onclick='x'></p>", "<b>", "<a href='https://x'></a>"],
        harmless.harmless_markdown: ["[a](https://x)", "<b>a</b>", "# a", "@a"],
        harmless.harmless_prometheus: ['a{b="c"} 1\ngpuprobe_owned 1', 'a{b="c""} 1'],
        harmless.harmless_commands: ["::error file=a::b\nc", "::set-env name=a::b"],
        harmless.harmless_sarif: [
            json.dumps({"runs": [{"results": [{"message": {"text": "[a](https://x)"}}]}]})
        ],
    }
    for check, texts in wrong.items():
        for text in texts:
            with pytest.raises((AssertionError, ValueError, SyntaxError)):
                check(text)

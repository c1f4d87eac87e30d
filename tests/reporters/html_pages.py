"""Reading an HTML page as a browser does, strictly: for tests of the pages."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

VOID = {"input", "meta", "br", "col"}


class Page(HTMLParser):
    """The elements of a page, with their attributes and their text. Raises AssertionError where
    elements do not nest, or an attribute could run or load anything.
    """

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.raw: dict[str, str] = {}  # of script and style, by id or by kind
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names), (tag, attrs)
        for name, value in attrs:
            assert not name.startswith("on"), (tag, name)
            assert name != "style", (tag, value)
            assert name not in ("src", "srcset", "action", "background"), (tag, name)
            if name == "href":
                assert (value or "").startswith("#"), (tag, value)
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert "svg" in self.open, tag  # elsewhere the slash means nothing
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("script", "style"):
            attributes = self.elements[-1][1]
            name = attributes.get("id") or self.open[-1]
            self.raw[name] = self.raw.get(name, "") + data
        elif data.strip():
            self.words.append(" ".join(data.split()))

    @property
    def text(self) -> str:
        return " ".join(self.words)

    @property
    def data(self) -> Any:
        return json.loads(self.raw["data"])

    def ids(self) -> list[str]:
        return [name for _, attrs in self.elements if (name := attrs.get("id"))]

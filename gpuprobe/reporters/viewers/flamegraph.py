"""The high water mark as a flame graph: one HTML file that needs nothing else.

Names (paths, functions) are in the page as JSON with escaped ``<``, ``>`` and ``&``, and shown as
text nodes, never as markup. A content security policy in the page forbids all requests.
"""

from __future__ import annotations

from importlib.resources import files
from typing import IO, Any

from gpuprobe.analysis.peak.flame import FlameNode
from gpuprobe.model.text import human_bytes
from gpuprobe.reporters.html.markup import script_json, text


def to_data(tree: FlameNode, *, title: str, subtitle: str) -> dict[str, Any]:
    """The tree in flat form: parents before children, ``parents[0]`` is -1.

    Flat, because JSON writers and browsers limit the depth of nested objects, and a recursive
    program's stack is deeper.
    """
    names: dict[str, int] = {}
    data: dict[str, object] = {"title": title, "subtitle": subtitle}
    columns: dict[str, list[int]] = {
        key: [] for key in ("name", "bytes", "blocks", "own", "parents")
    }
    pending = [(tree, -1)]
    while pending:
        node, parent = pending.pop()
        index = len(columns["name"])
        columns["name"].append(names.setdefault(node.name, len(names)))
        columns["bytes"].append(node.bytes)
        columns["blocks"].append(node.blocks)
        columns["own"].append(node.own)
        columns["parents"].append(parent)
        pending.extend((child, index) for child in reversed(node.children))
    return {**data, "names": list(names), **columns}


def write(
    tree: FlameNode,
    stream: IO[str],
    *,
    title: str,
    subtitle: str,
    whole: FlameNode | None = None,
) -> None:
    """Write the page to a text stream (UTF-8). ``whole`` is the same memory with all frames, which
    a button shows.
    """
    data = script_json(to_data(tree, title=title, subtitle=subtitle))
    other = "null" if whole is None else script_json(to_data(whole, title=title, subtitle=subtitle))
    page = files("gpuprobe.reporters.viewers").joinpath("flamegraph.html").read_text("utf-8")
    # One pass: inserted text is not searched again.
    pieces = page.split("@@")
    values = {
        "TITLE": text(title),
        "SUBTITLE": text(subtitle),
        "TOTAL": text(f"{human_bytes(tree.bytes)} in {tree.blocks} blocks"),
        "DATA": data,
        "WHOLE": other,
    }
    stream.write("".join(values.get(piece, piece) for piece in pieces))

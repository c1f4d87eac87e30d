"""Bring the generated parts of the documentation up to date.

    python docs/generate.py            the reference, from the code
    python docs/generate.py --pages    also the outputs shown in console blocks
    python docs/generate.py --check    change nothing; exit 1 if the reference is out of date
    python docs/generate.py [--pages] docs/how-to/read-a-report.md    only these pages

A page holds generated text between ``<!-- generated: name -->`` and ``<!-- end -->``; the rest
of it is written by hand. ``--pages`` runs every command of every page, and leaves alone the
blocks that are skipped, that shorten their output with a line ``...``, or whose output still
has the shape it should (see ``blocks.same_shape``).
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import blocks
from sections import SECTIONS, WITH_ARGUMENT

_SECTION = re.compile(r"(<!-- generated: ([\w./:-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def generated(text: str) -> str:
    """A page with its generated sections up to date. Raises KeyError for an unknown section."""

    def fill(match: re.Match[str]) -> str:
        name, _, argument = match[2].partition(":")
        body = WITH_ARGUMENT[name](argument) if argument else SECTIONS[name]()
        return f"{match[1]}{body}\n{match[3]}"

    return _SECTION.sub(fill, text)


def stale(pages: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """Pages whose generated sections are out of date, with the text they should have."""
    for page in pages:
        text = page.read_text(encoding="utf-8")
        expected = generated(text)
        if expected != text:
            yield page, expected


def refresh_outputs(page: Path, runner: blocks.Runner) -> bool:
    """Run a page and rewrite the outputs that have another shape now. True if it changed.

    Raises RuntimeError where a command ends with the wrong exit code; then nothing is written.
    """
    lines = page.read_text(encoding="utf-8").splitlines()
    outcomes = list(blocks.run_page(page, runner))
    for outcome in outcomes:
        if outcome.result.code not in outcome.codes:
            raise RuntimeError(outcome.problem)
    fresh: dict[int, list[str]] = {}
    changed = False
    for outcome in outcomes:
        block, shown = outcome.block, outcome.command.shown
        if block.language != "console":
            continue
        keep = not any(line.strip() for line in shown) or "..." in shown
        keep = keep or "output" in block.directives
        keep = keep or blocks.same_shape(shown, outcome.result.lines())
        body = fresh.setdefault(block.start, [])
        body += outcome.command.source + (shown if keep else outcome.result.lines())
        changed = changed or not keep
    for block in reversed(blocks.blocks(page)):
        if block.start in fresh:
            lines[block.start + 1 : block.end] = fresh[block.start]
    if changed:
        page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return changed


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, add_help=True)
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if out of date")
    parser.add_argument("--pages", action="store_true", help="also outputs")
    parser.add_argument("page", nargs="*", type=Path, help="only these (default: all)")
    args = parser.parse_args(argv)
    pages = [page.resolve() for page in args.page] or blocks.pages()
    found = list(stale(pages))
    for page, text in found:
        sys.stdout.write(f"{'out of date' if args.check else 'written'}: {page}\n")
        if not args.check:
            page.write_text(text, encoding="utf-8")
    if args.check:
        return 1 if found else 0
    if args.pages:
        with tempfile.TemporaryDirectory() as scratch:
            runner = blocks.Runner(Path(scratch))
            for page in pages:
                if refresh_outputs(page, runner):
                    sys.stdout.write(f"outputs written: {page}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

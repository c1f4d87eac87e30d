"""Fifty names that something would execute, in every name of every output: none gets through.

    python benchmarks/injected_names.py [--turns 50] [--browser] [--only WORDS]

In each turn every place that has a name in an output (of files, functions, modules, phases, hosts,
processes, users, GPUs, tests, findings, errors, …) gets another of the fifty: after fifty turns
each has had all. Every output is checked for what its reader would execute: control characters in
text, commands of CI services, elements and links in Markdown, handlers and scripts in HTML,
addresses in SARIF, labels in Prometheus, markup and links on the screens. ``--browser`` opens each
page in Chromium, too, and checks its DOM after the scripts have run. Prints a row for each
output; the exit code is 1 if anything got through.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import deque
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (".", "tests/support", "tests/hostile", "tests/reporters", "tests/tui")
sys.path[:0] = [str(ROOT / folder) for folder in FOLDERS]

import injected_outputs as outputs  # noqa: E402
from harmless import CHROMIUM, in_browser  # noqa: E402
from injections import INJECTIONS, MARK  # noqa: E402


def run(name: str, turns: int, browser: bool) -> tuple[int, int, list[str]]:
    """How often names were found in an output, how many pages a browser opened, and what is
    wrong."""
    texts: deque[str] = deque(INJECTIONS)
    found = pages = 0
    wrong = []
    for turn in range(turns):
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            os.chdir(folder)
            try:
                found += outputs.OUTPUTS[name](list(texts), folder)
                if browser and name in outputs.PAGES:
                    dom = in_browser(folder / outputs.PAGES[name], folder / "profile")
                    pages += 1
                    assert MARK in dom
                    assert "data-owned" not in dom.replace("'data-owned'", ""), "a script ran"
            except AssertionError as error:
                wrong.append(f"turn {turn}: {str(error)[:500]}")
            os.chdir(ROOT)
        texts.rotate(-1)
    return found, pages, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--turns", type=int, default=len(INJECTIONS))
    parser.add_argument("--browser", action="store_true", help="also open the pages in Chromium")
    parser.add_argument("--only", default="", help="outputs whose name contains this")
    args = parser.parse_args()
    if args.browser and CHROMIUM is None:
        parser.error("there is no Chromium")
    print(f"{'output':<36} {'turns':>5} {'names found':>12} {'in a browser':>12} {'wrong':>6}")
    total = [0, 0, 0, 0]
    for name in outputs.OUTPUTS:
        if args.only not in name:
            continue
        found, pages, wrong = run(name, args.turns, args.browser)
        print(f"{name:<36} {args.turns:>5} {found:>12} {pages:>12} {len(wrong):>6}", flush=True)
        for problem in wrong[:3]:
            print(f"  {problem}", flush=True)
        total = [a + b for a, b in zip(total, (1, found, pages, len(wrong)), strict=True)]
    print(
        f"{len(INJECTIONS)} names, {total[0]} outputs: {total[1]} names found, {total[2]} pages "
        f"opened in a browser, {total[3]} wrong"
    )
    raise SystemExit(1 if total[3] else 0)


if __name__ == "__main__":
    main()

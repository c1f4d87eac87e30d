"""``attention.py gao`` with the benchmark as it was first committed, whose attention also returns
its weights: the later one, compiled, calls ``backward(retain_graph=True)`` on what torch 2.6 frees.
"""

from __future__ import annotations

import subprocess
import sys

import attention
import figures

NAME = "GAOYUEtianc+Stanford-CS336-assignments"
COMMIT = "de247163b57bef628e2cc63d77a8d7e2a31e2866"
PATH = "assignment2-systems/benchmark_attention.py"


def main(how: str) -> None:
    folder = figures.source(NAME)
    words = ["git", "-C", str(folder), "show", f"{COMMIT}:{PATH}"]
    text = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    inner = folder / "earlier" / "assignment2-systems"
    inner.mkdir(parents=True, exist_ok=True)
    (inner / "benchmark_attention.py").write_text(text, encoding="utf-8")
    if not (folder / "earlier" / "assignment1").exists():
        (folder / "earlier" / "assignment1").symlink_to(folder / "assignment1")
    attention.source = lambda name: folder / "earlier"  # type: ignore[assignment]
    attention.gao(how)


if __name__ == "__main__":
    main(*sys.argv[1:])

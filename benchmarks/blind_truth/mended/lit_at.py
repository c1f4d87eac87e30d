"""``lit.py`` with Lit-GPT as of another commit: lit_at.py COMMIT finetune|generate ..."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import figures
import lit

NAME = "Lightning-AI+litgpt"


def main(commit: str, what: str, *words: str) -> None:
    folder = Path(os.environ["BLIND_SOURCES"]) / NAME
    other = folder.with_name(f"{NAME}@{commit}")
    if not other.exists():
        add = ["git", "-C", str(folder), "worktree", "add", "-q", "--detach", str(other), commit]
        subprocess.run(add, check=True)
    figures.source(other.name, ".")
    {"finetune": lit.finetune, "generate": lit.generate}[what](*words)


if __name__ == "__main__":
    main(*sys.argv[1:])

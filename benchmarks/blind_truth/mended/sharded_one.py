"""``sharded.py`` with one configuration: the source starts new processes for each."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import sharded
from figures import source


def main(length: str, shards: str) -> None:
    path = source("damek+cs336-assignment2-systems") / sharded.SCRIPT
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"seq_lens = \[.*?\]", f"seq_lens = [{length}]", text)
    text = text.replace("for sharded in [True, False]", f"for sharded in [{shards}]")
    text = text.replace("nb_iters = 10", "nb_iters = 2").replace("warmup=10\n", "warmup=2\n")
    copy = path.with_name(f"one_{length}_{shards}.py")
    copy.write_text(text, encoding="utf-8")
    sharded.SCRIPT = str(Path(sharded.SCRIPT).with_name(copy.name))
    sharded.main()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Which files audit events are about to change."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """\
import os, shutil, sys
from gpuprobe.file_changes import changes_of

top = os.getcwd()
found = []

def hook(event, arguments):
    try:
        for path, _ in changes_of(event, arguments):
            found.append(f"{event} {os.fsdecode(path)}".replace(top, "TOP"))
    except (TypeError, ValueError):
        pass

os.makedirs("a/b")
folder = os.open("a", os.O_RDONLY)
os.mkdir("elsewhere")
os.chdir("elsewhere")
sys.addaudithook(hook)
os.mkdir("c", dir_fd=folder)
os.rename("c", "d", src_dir_fd=folder, dst_dir_fd=folder)
os.rmdir("d", dir_fd=folder)
open(f"{top}/a/f", "w").close()
open(f"{top}/a/f").close()
os.link("f", "g", src_dir_fd=folder, dst_dir_fd=folder)
os.symlink("f", "h", dir_fd=folder)
os.utime("f", dir_fd=folder)
os.remove("g", dir_fd=folder)
os.mkdir("own")
os.rename("own", "other")
shutil.rmtree(f"{top}/a/b")
print("\\n".join(found))
"""


def test_paths_relative_to_a_descriptor_are_in_its_folder(tmp_path: Path) -> None:
    words = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "os.mkdir TOP/a/c",
        "os.rename TOP/a",
        "os.rename TOP/a",
        "os.rmdir TOP/a",
        "open TOP/a/f",
        "os.link TOP/a",
        "os.symlink TOP/a",
        "os.utime TOP/a/f",
        "os.remove TOP/a",
        "os.mkdir own",
        "os.rename TOP/elsewhere",
        "os.rename TOP/elsewhere",
        "shutil.rmtree TOP/a/b",
        "os.rmdir TOP/a",
    ], done.stderr

"""The script of a process that reads a hostile file, which is its standard input.

Its arguments are those of `gpuprobe.recording.snapshot.child.command_of`: the bytes that are stored
in the file, and the import path, since Python starts it without site packages.
"""

import sys


def main(size: str, *path: str) -> None:
    sys.path[:] = path
    from gpuprobe.recording.snapshot.worker import read_stdin

    read_stdin(int(size))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The script of a process that reads a hostile file, which is its standard input.

Its arguments are those of `gpuprobe.recording.snapshot.child.command_of`: what it reads, the bytes
that are stored in the file, and the import path, since Python starts it without site packages.
"""

import sys


def main(kind: str, size: str, *path: str) -> None:
    sys.path[:] = path
    from gpuprobe.recording.snapshot.child import DUMP

    if kind == DUMP:
        from gpuprobe.recording.many.flight import read_stdin
    else:
        from gpuprobe.recording.snapshot.worker import read_stdin
    read_stdin(int(size))


if __name__ == "__main__":
    main(*sys.argv[1:])

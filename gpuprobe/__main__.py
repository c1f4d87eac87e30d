"""``python -m gpuprobe`` is the ``gpuprobe`` command."""

from gpuprobe.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

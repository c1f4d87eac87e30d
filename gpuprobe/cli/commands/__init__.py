"""One file per command; imported only when that command runs.

A command module has two functions:

* ``add_arguments(parser)`` adds its arguments to an ``argparse.ArgumentParser``;
* ``run(args) -> int`` calls one function of ``gpuprobe.api``, renders the result
  (`gpuprobe.api.render`) on ``sys.stdout``, and returns the exit code. It computes nothing and
  does not catch `gpuprobe.errors.GpuprobeError`: ``gpuprobe.cli`` prints it and chooses the exit
  code.
"""

# The name of each module, and its line in ``gpuprobe --help``, in the order listed there.
COMMANDS: dict[str, str] = {
    "info": "list the GPUs with their state and processes",
    "doctor": "diagnose this machine's GPUs, driver, torch and settings",
    "top": "live dashboard of GPUs, processes and runs",
    "export": "export metrics, for Prometheus",
    "run": "run a training script and record its memory",
    "report": "show where the memory of a recording went",
    "pack": "pack a recording into one Parquet file",
    "view": "browse a recording in the terminal",
    "diff": "compare the peaks of two recordings",
    "scale": "compare a program's speed on different numbers of ranks",
    "hang": "show why a distributed job hangs, from its ranks' dumps",
    "check": "compare a run's memory with a baseline, for CI",
    "baseline": "write the baseline of a run",
    "estimate": "estimate whether a script fits on a GPU",
    "fit": "find the largest batch size that fits on a GPU",
    "replay": "replay an allocation trace; try allocator settings",
    "mcp": "serve gpuprobe's tools to agents (Model Context Protocol)",
    "native": "install what --engine native runs, where torch has no CUDA",
    "completion": "print a completion script for a shell",
}

"""One file per command; imported only when that command runs.

A command module has:

* ``EXAMPLES``: three commands, each with what it does; they end the command's help;
* ``add_arguments(parser)`` adds its arguments to an ``argparse.ArgumentParser``;
* ``run(args) -> int`` calls one function of ``gpuprobe.api``, renders the result
  (`gpuprobe.api.render`) on ``sys.stdout``, and returns the exit code. It computes nothing and
  does not catch `gpuprobe.errors.GpuprobeError`: ``gpuprobe.cli`` prints it and chooses the exit
  code.
"""

GROUPS: dict[str, dict[str, str]] = {
    "look at a machine": {
        "info": "list the GPUs with their state and processes",
        "doctor": "diagnose this machine's GPUs, driver, torch and settings",
        "top": "live dashboard of GPUs, processes and runs",
        "export": "export metrics, for Prometheus",
    },
    "record a program": {
        "run": "run a training script and record its memory",
        "explain": "explain a program's memory: cause, holder, fix, and what it saves",
    },
    "understand a recording": {
        "report": "show where the memory of a recording went",
        "view": "browse a recording in the terminal",
        "diff": "compare the peaks of two recordings",
        "replay": "replay an allocation trace; try allocator settings",
        "scale": "compare a program's speed on different numbers of ranks",
    },
    "guard memory in CI": {
        "check": "compare a run's memory with a baseline, for CI",
        "baseline": "write the baseline of a run",
    },
    "plan without a GPU": {
        "estimate": "estimate whether a script fits on a GPU",
        "fit": "find the largest batch size that fits on a GPU",
        "cuda-torch": "install the torch that simulated GPUs run, next to a CPU build",
    },
    "set up": {
        "mcp": "serve gpuprobe's tools to agents (Model Context Protocol)",
        "completion": "print a completion script for a shell",
    },
}
"""The commands as ``gpuprobe --help`` lists them: by group, the module's name and its line."""

COMMANDS: dict[str, str] = {
    name: text for commands in GROUPS.values() for name, text in commands.items()
}
"""The line of each command."""

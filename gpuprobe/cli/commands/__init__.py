"""One file per command; imported only when that command runs.

A command module has two functions:

* ``add_arguments(parser)`` adds its arguments to an ``argparse.ArgumentParser``;
* ``run(args) -> int`` calls one function of ``gpuprobe.api``, hands the result to a reporter
  with ``sys.stdout``, and returns the exit code. It computes nothing and lets
  `gpuprobe.errors.GpuprobeError` pass: ``gpuprobe.cli`` prints it and picks the exit code.
"""

# name -> (module below this package, one line for ``gpuprobe --help``), in their listed order.
COMMANDS: dict[str, tuple[str, str]] = {
    "info": ("machine.info", "list the GPUs with their state and processes"),
    "doctor": ("machine.doctor", "diagnose this machine's GPUs, driver, torch and settings"),
    "top": ("machine.top", "live dashboard of GPUs, processes and runs"),
    "export": ("machine.export", "export metrics, for Prometheus"),
    "run": ("recordings.run", "run a training script and record its memory"),
    "report": ("recordings.report", "show where the memory of a recording went"),
    "pack": ("recordings.pack", "pack a recording into one Parquet file"),
    "view": ("recordings.view", "browse a recording in the terminal"),
    "diff": ("recordings.diff", "compare the peaks of two recordings"),
    "scale": ("recordings.scale", "compare a program's speed on different numbers of ranks"),
    "hang": ("recordings.hang", "show why a distributed job hangs, from its ranks' dumps"),
    "check": ("gate.check", "compare a run's memory with a baseline, for CI"),
    "baseline": ("gate.baseline", "write the baseline of a run"),
    "estimate": ("planning.estimate", "estimate whether a script fits on a GPU"),
    "fit": ("planning.fit", "find the largest batch size that fits on a GPU"),
    "replay": ("recordings.replay", "replay an allocation trace; try allocator settings"),
    "native": ("machine.native", "install what --engine native runs, where torch has no CUDA"),
    "completion": ("machine.completion", "print a completion script for a shell"),
}

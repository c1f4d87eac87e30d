"""One file per command; imported only when that command runs.

A command module has two functions:

* ``add_arguments(parser)`` adds its arguments to an ``argparse.ArgumentParser``;
* ``run(args) -> int`` calls one function of ``gpuprobe.api``, hands the result to a reporter
  with ``sys.stdout``, and returns the exit code. It computes nothing and lets
  `gpuprobe.errors.GpuprobeError` pass: ``gpuprobe.cli`` prints it and picks the exit code.
"""

# name -> (module, one line for ``gpuprobe --help``), in the order they are listed.
COMMANDS: dict[str, tuple[str, str]] = {
    "info": ("gpuprobe.cli.commands.info", "list the GPUs and what is known of each"),
    "doctor": ("gpuprobe.cli.commands.doctor", "say what is wrong here, and how to fix it"),
    "top": ("gpuprobe.cli.commands.top", "live screen of devices"),
    "export": ("gpuprobe.cli.commands.export", "export metrics, for Prometheus"),
    "run": ("gpuprobe.cli.commands.run", "run a training script and record its memory"),
    "report": ("gpuprobe.cli.commands.report", "say where the memory of a recording went"),
    "view": ("gpuprobe.cli.commands.view", "open a recording on the screen"),
    "diff": ("gpuprobe.cli.commands.diff", "compare the peaks of two recordings"),
    "check": ("gpuprobe.cli.commands.check", "compare a run's memory with a baseline, for CI"),
    "baseline": ("gpuprobe.cli.commands.baseline", "write the baseline of a run"),
    "estimate": ("gpuprobe.cli.commands.estimate", "say whether a script would fit on a GPU"),
    "fit": ("gpuprobe.cli.commands.fit", "find the largest batch size that fits on a GPU"),
    "replay": ("gpuprobe.cli.commands.replay", "check a trace exactly; try other settings"),
}

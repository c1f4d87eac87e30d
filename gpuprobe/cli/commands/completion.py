"""Print a script that completes gpuprobe's commands, options and GPU names in a shell.

For bash, in this shell: eval "$(gpuprobe completion bash)". In every shell: append it to
~/.bash_completion. For zsh: write it to _gpuprobe in a folder of $fpath. For fish: write it to
~/.config/fish/completions/gpuprobe.fish.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from gpuprobe.cli import exit_codes
from gpuprobe.errors import MissingExtra, UsageError

SHELLS = ("bash", "zsh", "fish")
_GPUS = {"bash": "_gpuprobe_gpus", "zsh": "_gpuprobe_gpus", "fish": "(_gpuprobe_gpus)"}

EXAMPLES = {
    "gpuprobe completion bash": "for bash: append it to ~/.bash_completion",
    "gpuprobe completion zsh": "for zsh: _gpuprobe in a folder of $fpath",
    "gpuprobe completion fish": "for fish: ~/.config/fish/completions/gpuprobe.fish",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS)


def run(args: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError:
        raise MissingExtra("shtab", "completion", why="it generates the script") from None
    if args.shell not in shtab.SUPPORTED_SHELLS:
        raise UsageError(
            f"this version of shtab does not complete in {args.shell}",
            hint="pip install 'shtab>=1.10'",
        )
    from gpuprobe.catalogue.file import all_models

    names = " ".join(["list", *(gpu.name for gpu in all_models())])
    preamble = {
        "bash": f'_gpuprobe_gpus() {{ compgen -W "{names}" -- "$1"; }}',
        "zsh": f"_gpuprobe_gpus() {{ compadd {names} }}",
        "fish": f'function _gpuprobe_gpus\n    printf "%s\\n" {names}\nend',
    }
    script = shtab.complete(_whole_parser(shtab), args.shell, preamble=preamble[args.shell])
    sys.stdout.write(script.rstrip("\n") + "\n")
    return exit_codes.OK


def _whole_parser(shtab: Any) -> argparse.ArgumentParser:
    """One parser of all commands, whose modules are all imported."""
    from gpuprobe.cli.commands import COMMANDS
    from gpuprobe.cli.parser import command_parser

    whole = argparse.ArgumentParser(prog="gpuprobe")
    whole.add_argument("-V", "--version", action="store_true", help="print the version")
    commands = whole.add_subparsers()
    for name, text in COMMANDS.items():
        _, parser = command_parser(name)
        commands.add_parser(name, help=text, parents=[parser], add_help=False)
        for action in parser._actions:
            if action.metavar == "GPU":
                action.complete = _GPUS  # type: ignore[attr-defined]
            elif not action.option_strings and not action.choices:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    return whole

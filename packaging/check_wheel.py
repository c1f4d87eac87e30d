"""Install a wheel in an empty environment, and run the main commands where there is no compiler.

    python packaging/check_wheel.py dist/gpuprobe-*.whl
    python packaging/check_wheel.py --python PYTHON      # gpuprobe and torch are installed there

Downloads torch, without NVIDIA's packages (0.5 GB). Needs Linux.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ("train_gpt.py", "--steps", "3")
COMMANDS: tuple[tuple[tuple[str, ...], frozenset[int], str], ...] = (
    # Arguments, exit codes, and a text that is in what the command prints. Without a driver, `info`
    # and `doctor` exit with 3.
    (("--version",), frozenset({0}), "gpuprobe "),
    (("info",), frozenset({0, 3}), "GPU"),
    (("doctor",), frozenset({0, 1, 3}), "GP1"),
    (("estimate", "--gpu", "t4", *SCRIPT), frozenset({0}), "t4: fits"),
    (
        ("run", "--gpu", "t4", "--level", "trace", "--output", "gpt.gpuprobe", *SCRIPT),
        frozenset({0}),
        "peak: ",
    ),
    (("report", "gpt.gpuprobe"), frozenset({0}), "activation"),
    (
        ("baseline", "update", "--baseline", "memory.json", "--gpu", "t4", *SCRIPT),
        frozenset({0}),
        "memory.json",
    ),
    (
        ("check", "--baseline", "memory.json", *SCRIPT),
        frozenset({0}),
        "memory is within the baseline",
    ),
)


def installed(wheel: Path, folder: Path) -> Path:
    """The Python of a new environment with torch and the wheel."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    torch = Path(__file__).with_name("install_torch.py")
    subprocess.run([str(python), str(torch), "--quiet"], check=True)
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", str(wheel)], check=True)
    return python


def run_commands(python: Path, folder: Path) -> None:
    """Run `COMMANDS` with nothing on the path, and caches in ``folder``.

    Raises RuntimeError for one that exits with another code or does not print its text, and if the
    simulated GPU's runtime was compiled although the wheel has it.
    """
    shutil.copy(ROOT / "examples" / SCRIPT[0], folder)
    shutil.copytree(ROOT / "examples" / "data", folder / "data")
    nothing = folder / "nothing"
    nothing.mkdir()
    environment = {
        "PATH": str(nothing),
        "HOME": str(folder),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "LANG": "C.UTF-8",
    }
    for arguments, codes, text in COMMANDS:
        sys.stdout.write(f"$ gpuprobe {' '.join(arguments)}\n")
        sys.stdout.flush()
        done = subprocess.run(
            [str(python), "-m", "gpuprobe", *arguments],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode not in codes or text not in done.stdout:
            raise RuntimeError(
                f"gpuprobe {' '.join(arguments)}: exit code {done.returncode}, expected {text!r} "
                f"in:\n{done.stdout}"
            )
    compiled = list((folder / "cache").rglob("runtime-*"))
    if compiled:
        raise RuntimeError(f"the runtime was compiled: {compiled[0]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("wheel", nargs="?", type=Path)
    parser.add_argument("--python", type=Path, help="of an environment with gpuprobe and torch")
    given = parser.parse_args()
    if (given.wheel is None) == (given.python is None):
        parser.error("name a wheel, or --python")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = given.python or installed(given.wheel.resolve(), folder / "venv")
        # Not resolved: the link's place is what makes it the Python of an environment.
        run_commands(Path.cwd() / python, folder)


if __name__ == "__main__":
    main()

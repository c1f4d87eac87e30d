"""Install torch's build with CUDA, without NVIDIA's packages, in the environment of this Python.

    python packaging/install_torch.py [PIP OPTION ...]

That build is 0.5 GB; the packages, which a simulated GPU takes the place of, are 2.5 GB more. The
version is the one that the extra `demo` of pyproject.toml pins.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import files, requires
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
_NVIDIA = re.compile(r"(nvidia|cuda)-")


def pinned() -> str:
    """The requirement, such as ``torch==2.13.0,!=2.13.0+cpu``."""
    match = re.search(r'^demo = \["(torch==[^"]+)"', PYPROJECT.read_text("utf-8"), re.MULTILINE)
    if match is None:
        raise ValueError("pyproject.toml: the extra demo does not begin with a pinned torch")
    return match[1]


def others(requirements: list[str]) -> list[str]:
    """Of the requirements in torch's metadata, those that are not NVIDIA's."""
    return [requirement for requirement in requirements if not _NVIDIA.match(requirement)]


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", *arguments], check=True)


def optional(metadata: str) -> str:
    """torch's metadata with NVIDIA's packages as its extra ``nvidia``: without this, pip would
    install them with the next package that requires torch. Their versions stay readable, which are
    those that the simulated GPU reports.
    """
    head, blank, body = metadata.partition("\n\n")
    lines = []
    for line in head.splitlines():
        name, _, value = line.partition(": ")
        if name == "Requires-Dist" and _NVIDIA.match(value) and "extra ==" not in value:
            requirement, _, marker = value.partition(";")
            condition = f"({marker.strip()}) and " if marker else ""
            line = f'{name}: {requirement.strip()} ; {condition}extra == "nvidia"'
        lines.append(line)
    if "Provides-Extra: nvidia" not in lines:
        lines.append("Provides-Extra: nvidia")
    return "\n".join(lines) + blank + body


def main(options: list[str]) -> None:
    pip(*options, "--no-deps", pinned())
    requirements = requires("torch") or []
    file = next(file for file in files("torch") or [] if file.name == "METADATA").locate()
    path = Path(str(file))
    path.write_text(optional(path.read_text("utf-8")), "utf-8")
    # pip evaluates their markers: those of torch's own extras do not apply. NumPy only spares torch
    # a warning at its start.
    pip(*options, *others(requirements), "numpy")


if __name__ == "__main__":
    main(sys.argv[1:])

"""How many small faults in the rooms that must not be wrong are noticed by their tests.

    make mutants                                     a sample of every room
    python benchmarks/mutation_score.py --room hazards --count 60 --seed 3

Cosmic Ray makes the faults (a comparison turned round, a number off by one, a condition negated)
in a copy of this tree, one at a time, and the room's tests run on each. At most one fault is drawn
for a line, so that long conditions do not count more than short ones. Faults in annotations, in
decorators of classes and in ``__all__`` change nothing at run time and are not drawn.

A fault that no test notices survives: it is printed as a diff. Some survivors change nothing that
can be noticed (an unreachable bound, a mere speed-up); the score is a floor, not a grade.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent

# Tests with the mark `simulated` of a folder, which run in a process with a simulated GPU.
SIMULATED = "tests/native/test_marked_gpu.py::test_files[simulated-{}]"


def _on_gpus(folder: str) -> tuple[str, ...]:
    """The tests of a folder with the mark `gpu`, each file in a process with simulated GPUs."""
    found = sorted((ROOT / "tests" / folder).glob("test_*.py"))
    names = [path.name for path in found if "pytest.mark.gpu" in path.read_text("utf-8")]
    return tuple(f"tests/native/test_marked_gpu.py::test_files[gpu-{folder}/{n}]" for n in names)


# room -> (folder, tests, fastest first)
ROOMS = {
    "hazards": (
        "gpuprobe/hazards",
        ("tests/hazards", SIMULATED.format("hazards"), *_on_gpus("hazards")),
    ),
    "causes": (
        "gpuprobe/causes",
        (
            "tests/analysis",
            SIMULATED.format("sampler"),
            "tests/native/test_larger_memory_causes.py",
            "tests/native/test_explain.py",
        ),
    ),
    "allocator": ("gpuprobe/allocator", ("tests/allocator", "tests/snapshot")),
    "analysis": (
        "gpuprobe/analysis",
        ("tests/analysis", "tests/recording", "tests/reporters", "tests/tui", "tests/check"),
    ),
    "doctor rules": ("gpuprobe/probes/health", ("tests/doctor",)),
}

# Cosmic Ray has some 150 operators, most of them variants of one another.
OPERATORS = (
    "core/ReplaceComparisonOperator_",
    "core/ReplaceBinaryOperator_Add_Sub",
    "core/ReplaceBinaryOperator_Sub_Add",
    "core/ReplaceBinaryOperator_Mul_FloorDiv",
    "core/ReplaceBinaryOperator_FloorDiv_Mul",
    "core/ReplaceUnaryOperator_Delete_Not",
    "core/ReplaceUnaryOperator_USub_UAdd",
    "core/ReplaceAndWithOr",
    "core/ReplaceOrWithAnd",
    "core/ReplaceTrueWithFalse",
    "core/ReplaceFalseWithTrue",
    "core/ReplaceBreakWithContinue",
    "core/ReplaceContinueWithBreak",
    "core/AddNot",
    "core/NumberReplacer",
    "core/ZeroIterationForLoop",
)


class Fault(NamedTuple):
    room: str
    spec: Any


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--room", action="append", choices=sorted(ROOMS), help="only this room")
    parser.add_argument("--count", type=int, default=40, help="faults of each room (40)")
    parser.add_argument("--seed", type=int, default=1, help="of the sample (1)")
    parser.add_argument(
        "--seconds", type=float, help="that the tests take without a fault (default: run them)"
    )
    parser.add_argument("--tree", type=Path, default=ROOT, help="another checkout to mutate")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder) / "tree"
        skip = shutil.ignore_patterns(".*", "__pycache__", "*.gpuprobe")
        shutil.copytree(args.tree, tree, ignore=skip)
        os.chdir(tree)
        shared = args.tree.resolve().parent / "shared" / "data" / "snapshots"
        os.environ.setdefault("GPUPROBE_SNAPSHOTS", str(shared))
        # For a change of the same length within the same second, the old bytecode would be valid.
        os.environ.update(PYTHONPATH=str(tree), PYTHONDONTWRITEBYTECODE="1")
        sys.dont_write_bytecode = True
        sys.path[0] = str(tree)  # the tests run in forks
        return _score(args.room or list(ROOMS), args.count, args.seed, args.seconds)


def _score(rooms: list[str], count: int, seed: int, seconds: float | None) -> int:
    import torch  # noqa: F401 - imported once for all forks

    table = []
    for room in rooms:
        folder, tests = ROOMS[room]
        limit = 60 + 3 * (_time(tests) if seconds is None else seconds)
        faults = sorted(_faults(Path(folder)), key=lambda s: (str(s.module_path), s.start_pos))
        drawn = random.Random(seed).sample(faults, min(count, len(faults)))
        killed = 0
        for number, spec in enumerate(drawn, 1):
            diff = _survivor(spec, _files(tests, spec.module_path), limit)
            killed += not diff
            if diff:
                print(f"survived: {spec.operator_name}\n{diff}\n", flush=True)
            print(f"{room}: {killed} of {number} killed", file=sys.stderr, flush=True)
        table.append((room, len(faults), len(drawn), killed))
    print(f"{'room':<14}{'faults':>8}{'drawn':>8}{'killed':>8}{'score':>8}")
    for room, total, drawn_count, killed in table:
        score = killed / max(1, drawn_count)
        print(f"{room:<14}{total:>8}{drawn_count:>8}{killed:>8}{score:>8.0%}")
    return 0


def _survivor(spec: Any, files: list[str], limit: float) -> str:
    """The change that a fault makes, as a diff, if the tests pass with it; else ""."""
    from cosmic_ray.mutating import use_mutation
    from cosmic_ray.plugins import get_operator

    operator = get_operator(spec.operator_name)(**(spec.operator_args or {}))
    with use_mutation(spec.module_path, operator, spec.occurrence) as (before, after):
        if not _passed(files, limit):
            return ""
    sides = (text.splitlines() for text in (before, after))
    return "\n".join(difflib.unified_diff(*sides, str(spec.module_path), lineterm=""))


def _time(tests: tuple[str, ...]) -> float:
    """The seconds that a room's tests take without a fault."""
    start = time.monotonic()
    if not _passed(_files(tests), math.inf, quiet=False):
        raise SystemExit("the tests fail without a fault")
    return time.monotonic() - start


def _passed(files: list[str], limit: float, *, quiet: bool = True) -> bool:
    """Run tests in a fork. False if one fails, or after ``limit`` seconds."""
    import pytest

    until = time.monotonic() + limit
    child = os.fork()
    if not child:
        code = 70
        try:
            os.setsid()
            if quiet:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                os.dup2(1, 2)
            code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *files]))
        finally:
            os._exit(code)
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def _files(tests: tuple[str, ...], module: Path | None = None) -> list[str]:
    """All of a room's tests: first the files that name the module, as one of those probably
    fails.
    """
    files = [
        file
        for path in map(Path, tests)
        for file in (sorted(path.rglob("test_*.py")) if path.is_dir() else [path])
    ]
    if module is not None:
        name = ".".join(module.with_suffix("").parts).removesuffix(".__init__")
        package = name.rpartition(".")[0]
        texts = {file: file.read_text("utf-8") if file.is_file() else "" for file in files}
        files.sort(key=lambda file: (name not in texts[file], package not in texts[file]))
    return [str(file) for file in files]


def _faults(folder: Path) -> Iterator[Any]:
    """One fault a line, drawn of those that Cosmic Ray can make there; the same in every run."""
    from cosmic_ray.commands.init import init
    from cosmic_ray.work_db import use_db

    with tempfile.TemporaryDirectory() as scratch, use_db(f"{scratch}/faults.sqlite") as database:
        init(sorted(folder.rglob("*.py")), database, {})
        specs = [spec for item in database.work_items for spec in item.mutations]
    lines: dict[tuple[str, int], list[Any]] = {}
    static = {path: _static_lines(path) for path in folder.rglob("*.py")}
    for spec in specs:
        line = spec.start_pos[0]
        if spec.operator_name.startswith(OPERATORS) and line not in static[Path(spec.module_path)]:
            lines.setdefault((str(spec.module_path), line), []).append(spec)
    for (path, line), found in sorted(lines.items()):
        found.sort(key=lambda spec: (spec.start_pos, spec.operator_name, spec.occurrence))
        yield random.Random(f"{Path(path).name}:{line}").choice(found)


def _static_lines(path: Path) -> set[int]:
    """Lines of annotations and of decorators of classes: they change nothing at run time."""
    found: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.AnnAssign) and node.value is None:
            found.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, ast.ClassDef):  # what a dataclass may do is for mypy
            found.update(line for one in node.decorator_list for line in _lines(one))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.update(range(node.lineno, node.body[0].lineno))
    return found


def _lines(node: ast.expr) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


if __name__ == "__main__":
    raise SystemExit(main())

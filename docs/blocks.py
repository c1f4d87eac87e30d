"""The code blocks of the documentation: find them, run them, compare what they print.

A page is Markdown. Its ``console`` blocks hold commands, on lines that begin with ``$ ``, each
followed by the output it prints, or by nothing where the output does not matter; ``python``
blocks are whole programs. A page's commands run in order in one scratch directory that holds a
copy of ``examples/``.

An HTML comment just before a block changes how it is treated:

* ``<!-- exit: 3 -->``, ``<!-- exit: 0 or 3 -->``: the exit code of its last command;
* ``<!-- skip: reason -->``: it is not run (``tests/docs`` lists every such block);
* ``<!-- needs: snapshot -->``: it works on ``step.pickle``, a torch memory snapshot from a
  GPU, and is run if one is available: see `snapshot`;
* ``<!-- output: reason -->``: it is run, but its output differs between machines;
* ``<!-- file: path -->``: it is what the reader adds to that file; it is appended to it.

A page with ``<!-- project: path -->`` works in a copy of that folder of the repository, under
git, without its memory gate: the page adds one.

A line of output that is just ``...`` matches any lines. Numbers, sizes, durations and bars
are not compared: a page promises the shape and the words. Rows of a table that begin
with a number and a time are not compared at all: which step is the slowest differs.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpuprobe._version import __version__

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
PROJECT = "/home/me/project"  # what the pages call the scratch directory
HOST = "myhost"

_FENCE = re.compile(r"^(`{3,})(\w*)\s*$")
_ABOUT_DEVICES = re.compile(r"(CUDA_\w+=\S+ )*gpuprobe (info|doctor|top)\b")
_ADDS_FILES = re.compile(r"gpuprobe (run|estimate) ")
_DIRECTIVE = re.compile(r"^<!-- (exit|skip|needs|output|file): (.+?) -->$")
_SAMPLE = re.compile(r"^<!-- project: (\S+) -->$", re.MULTILINE)
_GATE = re.compile(
    r"^\[tool\.gpuprobe\b.*?(?=^\[(?!tool\.gpuprobe\b)|\Z)", re.MULTILINE | re.DOTALL
)


@dataclass
class Command:
    """One command of a console block, and the lines of output shown below it."""

    text: str
    source: list[str]  # as written, with the prompt and continuation lines
    shown: list[str] = field(default_factory=list)


@dataclass
class Block:
    """One fenced block. ``start`` and ``end`` are the indices of its fence lines."""

    page: Path
    language: str
    start: int
    end: int
    lines: list[str]
    directives: dict[str, str]

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.start + 1}"

    @property
    def exit_codes(self) -> tuple[int, ...]:
        """The exit codes that are right for the block's last command."""
        return tuple(int(text) for text in self.directives.get("exit", "0").split(" or "))

    def commands(self) -> list[Command]:
        """The commands of a console block, in order."""
        found: list[Command] = []
        open_ended = False
        for line in self.lines:
            if open_ended:
                found[-1].text += "\n" + line.removeprefix("> ")
                found[-1].source.append(line)
            elif line.startswith("$ "):
                found.append(Command(line[2:], [line]))
            elif found:
                found[-1].shown.append(line)
                continue
            else:
                raise ValueError(f"{self.where}: output before the first command: {line!r}")
            open_ended = line.endswith("\\")
        return found


def pages() -> list[Path]:
    """README.md, CONTRIBUTING.md and every page under docs/, in a stable order."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """Every fenced block of a page. Raises ValueError for one that is not closed."""
    lines = page.read_text(encoding="utf-8").splitlines()
    found: list[Block] = []
    directives: dict[str, str] = {}
    index = 0
    while index < len(lines):
        line = lines[index]
        if directive := _DIRECTIVE.match(line):
            directives[directive[1]] = directive[2]
        elif fence := _FENCE.match(line):
            try:
                end = lines.index(fence[1], index + 1)
            except ValueError:
                raise ValueError(f"{page}:{index + 1}: a block that is not closed") from None
            body = lines[index + 1 : end]
            found.append(Block(page, fence[2], index, end, body, directives))
            directives = {}
            index = end
        elif line.strip() and directives:
            raise ValueError(f"{page}:{index + 1}: a directive without a block")
        index += 1
    if directives:
        raise ValueError(f"{page}: a directive without a block at the end")
    return found


def snapshot() -> Path | None:
    """A real snapshot, if this checkout has some next to it: they are not part of the repository.
    ``GPUPROBE_SNAPSHOTS`` names the folder, as it does for the tests.
    """
    folder = os.environ.get("GPUPROBE_SNAPSHOTS")
    where = Path(folder) if folder else ROOT.parent / "shared" / "data" / "snapshots"
    found = where / "lm_ctx128_train_step.pickle"
    return found if found.is_file() else None


def lacks(need: str) -> str:
    """Why a block that needs this cannot be run here, or an empty string.

    Raises ValueError if pages cannot need it.
    """
    if need != "snapshot":
        raise ValueError(f"not known: needs: {need}")
    return "" if snapshot() is not None else "no snapshot from a GPU next to this checkout"


@dataclass(frozen=True)
class Result:
    """What a command did: its exit code, and stdout and stderr as a terminal shows them."""

    code: int
    output: str

    def lines(self) -> list[str]:
        """The output, without blank lines at its ends or blanks at the ends of lines."""
        return [line.rstrip() for line in self.output.strip("\n").splitlines()]


_LOADS_GPU = re.compile(r"gpuprobe\.(?:virtual_gpu|estimate|detect_hazards)\(")
"""Calls that load a simulated GPU into the process, before torch."""


class Runner:
    """Runs commands in scratch directories under ``base``; remembers expensive ones.

    Many pages begin with the same ``gpuprobe run``, and some have the same ``gpuprobe estimate``.
    These only add files, so each is run once and its files are copied into the directory of the
    next page that runs it.
    """

    def __init__(
        self,
        base: Path,
        commands: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """``commands``: the folder of ``python`` and ``gpuprobe``, of this interpreter if None.
        ``environment``: added to that of the commands.
        """
        self.base = base
        self.commands = Path(sys.executable).parent if commands is None else commands
        self._environment = dict(environment or {})
        self._made: dict[str, tuple[Result, Path]] = {}

    def scratch(self, name: str) -> Path:
        """A fresh directory with the examples in it, and a snapshot if there is one."""
        where = self.base / name
        shutil.copytree(
            ROOT / "examples", where / "examples", ignore=shutil.ignore_patterns("__pycache__")
        )
        real = snapshot()
        if real is not None:
            (where / "step.pickle").symlink_to(real)
        return where

    def project(self, name: str, path: str) -> Path:
        """A fresh copy of a project of the repository, under git and without its gate."""
        where = self.base / name
        ignored = shutil.ignore_patterns("__pycache__", "*.gpuprobe", "memory.json")
        shutil.copytree(ROOT / path, where, ignore=ignored)
        settings = where / "pyproject.toml"
        text = settings.read_text(encoding="utf-8")
        settings.write_text(_GATE.sub("", text).rstrip() + "\n", encoding="utf-8")
        for command in (
            "git init --quiet --initial-branch=main",
            "git config user.name Me && git config user.email me@example.com",
            "git add . && git commit --quiet -m 'The project'",
        ):
            done = self._call(["bash", "-c", command], where)
            if done.code:
                raise RuntimeError(f"{command}: {done.output}")
        return where

    def shell(self, command: str, cwd: Path) -> Result:
        """Run a command line as a user's shell would."""
        if not _ADDS_FILES.match(command) or re.search(r"[|<>;&]", command):
            return self._call(["bash", "-c", command], cwd)
        if command not in self._made:
            before = set(cwd.iterdir())
            result = self._call(["bash", "-c", command], cwd)
            kept = self.base / f"made-{len(self._made)}"
            kept.mkdir()
            for made in set(cwd.iterdir()) - before:
                copy = shutil.copytree if made.is_dir() else shutil.copy2
                copy(made, kept / made.name)
            self._made[command] = (result, kept)
            return result
        result, kept = self._made[command]
        shutil.copytree(kept, cwd, dirs_exist_ok=True)
        return result

    def python(self, source: str, cwd: Path) -> Result:
        """Run a Python block as a script."""
        (cwd / "block.py").write_text(source, encoding="utf-8")
        # Whether it imports torch too early is only seen in an interpreter without it.
        python = sys.executable if _LOADS_GPU.search(source) else str(self.commands / "python")
        return self._call([python, "block.py"], cwd)

    def _call(self, argv: list[str], cwd: Path) -> Result:
        env = {
            # What a test runner sets for itself must not reach the programs that pages run.
            **{
                k: v for k, v in os.environ.items() if not k.startswith(("COV_", "PYTEST_", "GIT_"))
            },
            "PATH": os.pathsep.join(
                [str(self.commands), str(Path(sys.executable).parent), os.environ["PATH"]]
            ),
            "COLUMNS": "100",
            "NO_COLOR": "1",
            "PYTHONWARNINGS": "ignore:Failed to initialize NumPy",
            "PYTHONDONTWRITEBYTECODE": "1",
            "CUDA_VISIBLE_DEVICES": "",  # the pages show what every machine can run
            "OMP_NUM_THREADS": "1",  # small models: threads only wait for one another
            # No personal settings, such as signed commits.
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
            **self._environment,
        }
        if _ABOUT_DEVICES.match(argv[-1]):
            del env["CUDA_VISIBLE_DEVICES"]  # here it is what the page is about
        done = subprocess.run(
            argv,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            timeout=300,
            check=False,
        )
        return Result(done.returncode, presentable(done.stdout, cwd))


def presentable(output: str, cwd: Path) -> str:
    """The output as a page shows it: nothing of the machine it was made on."""
    for real, shown in (
        (str(cwd.resolve()), PROJECT),
        (str(cwd), PROJECT),
        (str(ROOT), PROJECT),
        (socket.gethostname(), HOST),
    ):
        output = re.sub(rf"(?<![\w.-]){re.escape(real)}(?![\w-])", shown, output)
    return re.sub(r"[^\s\"']*/site-packages", "site-packages", output)


_UNCOMPARED = (
    (re.compile(r"[▁▂▃▄▅▆▇█▉▊▋▌▍▎▏░▒▓⣀-⣿]+"), " ▇ "),
    (re.compile(r"[─━-]{3,}"), "───"),
    (re.compile(r"0x[0-9a-f]+|(?<=GPU-)[0-9a-f]{8}(?:-[0-9a-f]+)*"), "#"),
    (re.compile(r"(?<=torch )[\w.+]+"), "#"),  # 2.13.0+cpu on one machine, +cu130 on another
    (re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)*(?:[eE][-+]?\d+)?"), "#"),
    (re.compile(r"# ?(?:[KMGT]i)?B\b"), "# B"),
    (re.compile(r"# ?(?:ns|µs|ms|s)\b"), "# s"),
    (re.compile(r"[ \t]+"), " "),
)


_TIMED_ROW = re.compile(r"\s+\d+\s+[\d.]+ (?:ns|µs|ms|s)\b")


def shape(line: str) -> str:
    """The line without what differs between two good runs: numbers, units' scale, bars. gpuprobe's
    version is compared."""
    line = line.replace(__version__, "(version)")
    for pattern, replacement in _UNCOMPARED:
        line = pattern.sub(replacement, line)
    return line.strip()


def same_shape(shown: list[str], actual: list[str]) -> bool:
    """Does the output a page shows have the shape of the actual output?"""
    expected, got = _shapes(shown), _shapes(actual)

    def match(i: int, j: int) -> bool:
        while i < len(expected) and expected[i] != "...":
            if j >= len(got) or expected[i] != got[j]:
                return False
            i, j = i + 1, j + 1
        if i == len(expected):
            return j == len(got)
        return any(match(i + 1, k) for k in range(j, len(got) + 1))

    return match(0, 0)


def _shapes(lines: list[str]) -> list[str]:
    shapes = [shape(line) for line in lines if not _TIMED_ROW.match(line)]
    text = "\n".join(shapes).strip("\n")  # blank lines at the ends do not matter
    return text.split("\n") if text else []


@dataclass(frozen=True)
class Outcome:
    """One command of a page, and what it did."""

    block: Block
    command: Command
    result: Result
    codes: tuple[int, ...]  # the right ones

    @property
    def problem(self) -> str:
        """What is wrong with the outcome, or an empty string."""
        command = f"{self.block.where}: {self.command.text}\n"
        if self.result.code not in self.codes:
            expected = " or ".join(map(str, self.codes))
            return f"{command}exit code {self.result.code}, not {expected}:\n{self.result.output}"
        shown, actual = self.command.shown, self.result.lines()
        compared = any(line.strip() for line in shown) and "output" not in self.block.directives
        if compared and not same_shape(shown, actual):
            changes = difflib.unified_diff(
                _shapes(shown), _shapes(actual), "shown", "printed", lineterm="", n=1
            )
            hint = "python docs/generate.py --pages brings it up to date"
            return "\n".join([command, *changes, f"({hint})"])
        return ""


def is_run(block: Block) -> bool:
    """Is this a block of commands or code, or a file's, that can be run here?"""
    if "file" in block.directives:
        return True
    if "needs" in block.directives and lacks(block.directives["needs"]):
        return False
    return block.language in ("console", "python") and "skip" not in block.directives


def run_page(page: Path, runner: Runner) -> Iterator[Outcome]:
    """Run everything on a page that is not skipped, in order."""
    runnable = [block for block in blocks(page) if is_run(block)]
    if not runnable:
        return
    name = re.sub(r"\W+", "-", str(page.relative_to(ROOT)))
    sample = _SAMPLE.search(page.read_text(encoding="utf-8"))
    cwd = runner.project(name, sample[1]) if sample else runner.scratch(name)
    for block in runnable:
        if "file" in block.directives:
            file = cwd / block.directives["file"]
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a", encoding="utf-8") as stream:
                stream.write("\n".join([*([""] if file.stat().st_size else []), *block.lines, ""]))
            continue
        if block.language == "python":
            command = Command("python block", [])
            result = runner.python("\n".join(block.lines) + "\n", cwd)
            yield Outcome(block, command, result, block.exit_codes)
            continue
        commands = block.commands()
        for command in commands:
            codes = block.exit_codes if command is commands[-1] else (0,)
            yield Outcome(block, command, runner.shell(command.text, cwd), codes)

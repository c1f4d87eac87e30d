"""What is imported when, proven in fresh processes: heavy things only where they are needed."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import gpuprobe

HEAVY = ("torch", "pynvml", "pycuda", "textual", "rich", "numpy", "psutil")
DEVICE_LIBRARIES = ("torch", "pynvml", "pycuda", "textual")


def imported_by(code: str, *, cwd: Path | None = None, code_of: int = 0) -> set[str]:
    """The top-level modules (and gpuprobe's own) that a fresh Python has after ``code``."""
    program = (
        "import sys\nbefore = set(sys.modules)\n"
        f"{code}\n"
        "sys.stderr.write('\\n'.join(sorted(set(sys.modules) - before)))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=cwd,
    )
    assert result.returncode == code_of, result.stderr
    return set(result.stderr.splitlines())


def command(*args: str) -> str:
    return (
        "import io, contextlib\nfrom gpuprobe.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):"
        f"\n    main({list(args)!r})"
    )


def tops(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def test_importing_the_package_imports_nothing_else() -> None:
    own = {name for name in imported_by("import gpuprobe") if name.startswith("gpuprobe")}
    assert own == {"gpuprobe", "gpuprobe._version"}


def test_the_version_needs_no_parser() -> None:
    names = imported_by(command("--version"))
    own = {name for name in names if name.startswith("gpuprobe")}
    assert own == {"gpuprobe", "gpuprobe._version", "gpuprobe.cli"}
    assert not {"argparse", "json", "dataclasses"} & names


def pure_modules() -> list[str]:
    floors = ("errors", "model", "allocator", "hazards", "analysis", "reporters", "recording")
    found = ["gpuprobe.errors"]
    for info in pkgutil.walk_packages(gpuprobe.__path__, "gpuprobe."):
        if info.name.split(".")[1] in floors and not info.ispkg:
            found.append(info.name)
    return sorted(set(found))


def test_pure_floors_import_no_device_library() -> None:
    modules = pure_modules()
    assert len(modules) > 20
    code = "import importlib\n" + "\n".join(f"importlib.import_module({m!r})" for m in modules)
    assert not tops(imported_by(code)) & set(DEVICE_LIBRARIES)


def test_public_names_cost_no_device_library_until_used() -> None:
    names = [name for name in gpuprobe.__all__ if name != "__version__"]
    heavy = {"torch", "pycuda", "textual", "rich"}
    found = imported_by(
        f"import gpuprobe\nfor name in {names}:\n    getattr(gpuprobe, name)\n"
        f"    assert not {heavy} & sys.modules.keys(), name"
    )
    assert "gpuprobe.planning.estimates" in found


def test_info_imports_neither_torch_nor_a_screen() -> None:
    names = tops(imported_by(command("info")))
    assert not names & {"torch", "pycuda", "textual", "rich", "numpy"}


def test_reporting_imports_neither_torch_nor_a_screen(tmp_path: Path) -> None:
    names = tops(imported_by(command("report", "missing.gpuprobe"), cwd=tmp_path))
    assert not names & set(HEAVY)


def imports_of(path: Path, modules: set[str]) -> set[str]:
    """The modules of gpuprobe that a file imports, inside functions and for types too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in modules else str(node.module))
    return found & modules


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The groups of modules each of which reaches every other (Kosaraju's algorithm)."""
    reversed_graph: dict[str, set[str]] = {name: set() for name in graph}
    for name, targets in graph.items():
        for target in targets:
            reversed_graph[target].add(name)

    def visit(start: str, edges: dict[str, set[str]], seen: set[str]) -> list[str]:
        """What is reached from ``start`` and not seen yet; whoever is left last comes last."""
        seen.add(start)
        stack, order = [(start, iter(sorted(edges[start])))], []
        while stack:
            _, rest = stack[-1]
            following = next((other for other in rest if other not in seen), None)
            if following is None:
                order.append(stack.pop()[0])
            else:
                seen.add(following)
                stack.append((following, iter(sorted(edges[following]))))
        return order

    seen: set[str] = set()
    order: list[str] = []
    for start in sorted(graph):
        if start not in seen:
            order += visit(start, graph, seen)
    seen = set()
    groups = [visit(start, reversed_graph, seen) for start in reversed(order) if start not in seen]
    return [set(group) for group in groups if len(group) > 1]


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set()}
    assert circles(graph) == [{"a", "b", "c"}]


def test_no_files_import_each_other_in_a_circle() -> None:
    """Not within functions, nor for types only: what needs each other belongs together."""
    root = Path(gpuprobe.__file__).parent
    files = {
        ".".join(("gpuprobe", *path.relative_to(root).with_suffix("").parts)): path
        for path in root.rglob("*.py")
    }
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}
    graph = {name: imports_of(path, set(files)) - {name} for name, path in files.items()}
    assert circles(graph) == []


def test_every_public_name_is_there() -> None:
    for name in gpuprobe.__all__:
        assert getattr(gpuprobe, name) is not None
    assert set(gpuprobe.__all__) <= set(dir(gpuprobe))
    with pytest.raises(AttributeError, match="no_such_name"):
        gpuprobe.no_such_name  # noqa: B018


@pytest.mark.parametrize("name", ["check", "devices", "doctor"])
def test_a_function_is_not_hidden_by_the_module_of_its_name(name: str) -> None:
    """``gpuprobe.devices`` is the function, whatever was imported before."""
    code = f"import gpuprobe.api.{name}, gpuprobe\nassert callable(gpuprobe.{name})"
    assert f"gpuprobe.api.{name}" in imported_by(code)


TRAIN = """\
import subprocess
import sys

import torch

net = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(2):
    net(torch.ones(2, 4, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print(sorted({"torch._dynamo", "triton", "sympy"} & sys.modules.keys()))
if not sys.argv[1:]:
    sys.stdout.flush()
    subprocess.run([sys.executable, __file__, "child"], check=True)
    from gpuprobe.native.values.budget import flop_formulas

    formulas = flop_formulas()
    from torch.utils import flop_counter

    print(formulas.keys() == flop_counter.flop_registry.keys(), "triton" in sys.modules)
    double = torch.compile(lambda x: x * 2, backend="eager")
    print(double(torch.ones(2)).tolist(), len(optimizer.param_groups))
    optimizer.step()
"""


def test_an_eager_program_on_a_simulated_gpu_imports_neither_compiler_nor_triton(
    tmp_path: Path,
) -> None:
    """Neither in the recorded process nor in one that it starts; both take more than a second."""
    (tmp_path / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "gpuprobe", "run", "--quiet", "--gpu", "t4", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]", "[]", "True True", "[2.0, 2.0] 1"]

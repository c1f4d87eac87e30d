"""Operators and functions of CUDA extensions, as their packages declare them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpuprobe.virtual import register_operator, session
from gpuprobe.virtual.operators import registry

import gpuprobe
from gpuprobe.errors import ConfigError, NotModelled, UsageError, ValueNeeded

MIB = 1 << 20
COUNT = MIB // 4  # elements of one MiB of float32


@pytest.fixture(autouse=True)
def nothing_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_declared", {})
    monkeypatch.setattr(registry, "_asked", set())
    monkeypatch.setattr(registry, "_entries", None)


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    made = torch.library.Library("gp_declared", "FRAGMENT")
    yield made
    made._destroy()


def peak_of(call: Any, *args: Any) -> int:
    """MiB that a call needs at its peak, results included."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call(*args)
    return (torch.cuda.max_memory_allocated() - before) // MIB


def assumed() -> str:
    current = session.current()
    assert current is not None
    return "\n".join(current.machine.assumed)


def scaled(x: torch.Tensor) -> torch.Tensor:
    scratch = torch.empty(2 * COUNT, device=x.device)
    del scratch
    return x * 2


# -- what torch.library knows


@pytest.mark.parametrize("compute", ["shapes", "real"])
@pytest.mark.parametrize("devices", [None, "cuda"])
def test_an_operator_in_python_has_the_memory_of_its_code(
    compute: str, devices: str | None
) -> None:
    name = f"gp_python::scaled_{devices}_{compute}"
    operator = torch.library.custom_op(name, scaled, mutates_args=(), device_types=devices)
    operator.register_fake(torch.empty_like)
    operator.register_autograd(lambda ctx, grad: grad * 2)
    with gpuprobe.virtual_gpu("a100-40gb", compute=compute):
        x = torch.ones(COUNT, device="cuda", requires_grad=True)
        assert peak_of(operator, x) == 2
        operator(x).sum().backward()
        assert x.grad is not None
        if compute == "real":
            assert x.grad.unique().tolist() == [2.0]


def test_an_operator_whose_code_needs_values_has_the_results_of_its_fake() -> None:
    def clipped(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if float(x.max()) > 1 else x.clone()

    operator = torch.library.custom_op("gp_python::clipped", clipped, mutates_args=())
    with gpuprobe.virtual_gpu("a100-40gb", compute="shapes"):
        x = torch.rand(4 * COUNT, device="cuda")
        with pytest.raises(ValueNeeded, match=rf"{Path(__file__).name}:\d+ needs the value"):
            operator(x)
        operator.register_fake(torch.empty_like)
        assert peak_of(operator, x) == 4
        assert "gp_python::clipped: only its results are counted" in assumed()


def test_an_operator_in_cuda_with_a_fake_has_its_results_and_no_workspace(
    library: torch.library.Library,
) -> None:
    library.define("doubled(Tensor x) -> Tensor")
    torch.library.register_fake("gp_declared::doubled", lambda x: x.new_empty(2 * x.numel()))
    operator = torch.ops.gp_declared.doubled
    with gpuprobe.virtual_gpu("a100-40gb", compute="shapes"):
        x = torch.empty(COUNT, device="cuda")
        assert peak_of(operator, x) == 2
        assert "gp_declared::doubled: a workspace that its CUDA code allocates" in assumed()
    register_operator("gp_declared::doubled", workspace=lambda x: 3 * x.nbytes)
    with gpuprobe.virtual_gpu("a100-40gb", compute="shapes"):
        x = torch.empty(COUNT, device="cuda")
        assert peak_of(operator, x) == 5
        assert assumed() == ""


def test_an_operator_without_a_fake_is_named_with_what_to_do(
    library: torch.library.Library,
) -> None:
    library.define("unknown(Tensor x) -> Tensor")
    with (
        gpuprobe.virtual_gpu("a100-40gb", compute="shapes"),
        pytest.raises(NotModelled, match=r"py:\d+: gp_declared::unknown has no fake") as met,
    ):
        torch.ops.gp_declared.unknown(torch.empty(4, 1 << 20, device="cuda"))
    assert "register_fake('gp_declared::unknown')" in met.value.hint
    assert "gpuprobe.virtual.register_operator('gp_declared::unknown', results=...)" in (
        met.value.hint
    )
    with (
        gpuprobe.virtual_gpu("a100-40gb", compute="real"),
        pytest.raises(NotModelled, match=r"gp_declared::unknown has only a CUDA kernel"),
    ):
        torch.ops.gp_declared.unknown(torch.ones(3, device="cuda"))


# -- what is declared


def halves(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return x.new_zeros(x.numel() // 2)


def test_a_declared_operator_has_results_workspace_and_accesses(
    library: torch.library.Library,
) -> None:
    library.define("halves(Tensor x, Tensor out) -> Tensor")
    register_operator(
        "gp_declared::halves", results=halves, workspace=5 * MIB, reads=["x"], writes=["out"]
    )
    operator = torch.ops.gp_declared.halves
    with gpuprobe.virtual_gpu("a100-40gb", compute="shapes"):
        x, out = torch.empty(4 * COUNT, device="cuda"), torch.zeros(3, device="cuda")
        assert out.tolist() == [0.0] * 3
        assert peak_of(operator, x, out) == 7
        with pytest.raises(ValueNeeded):  # it was written to
            out.tolist()
        with pytest.raises(ValueNeeded):  # whatever the declaration made it of
            operator(torch.empty(4, device="cuda"), out).tolist()
        torch.cuda.synchronize()
        for change, kinds in ((x, ["write-after-read"]), (out, ["write-after-write"])):
            with gpuprobe.detect_hazards() as watch:
                operator(x, out)
                with torch.cuda.stream(torch.cuda.Stream()):
                    change.add_(1)
            assert [finding.kind for finding in watch.findings] == kinds


def test_an_operator_that_no_library_defines_is_defined_by_its_schema() -> None:
    with gpuprobe.virtual_gpu("a100-40gb", compute="shapes"):
        with pytest.raises(AttributeError):
            torch.ops.gp_absent.halves  # noqa: B018
        register_operator(
            "gp_absent::halves", schema="(Tensor x, Tensor out) -> Tensor", results=halves
        )
        x = torch.empty(2 * COUNT, device="cuda")
        assert peak_of(torch.ops.gp_absent.halves, x, x) == 1
    with pytest.raises(AttributeError):
        torch.ops.gp_absent.halves  # noqa: B018


def test_an_operator_that_nothing_defines_is_named() -> None:
    with (
        pytest.raises(NotModelled, match="defines the operator gp_absent::forward") as met,
        gpuprobe.virtual_gpu("a100-40gb", compute="shapes"),
    ):
        torch.ops.gp_absent.forward(torch.empty(3, device="cuda"))
    assert "register_operator('gp_absent::forward', schema=" in met.value.hint


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mylib", {"results": halves}, "neither an operator nor a function"),
        ("mylib.f", {}, "a function needs results"),
        ("mylib::f", {"schema": "Tensor x"}, "is no schema"),
        ("mylib.f", {"results": halves, "schema": "() -> ()"}, "is no schema"),
        ("mylib::f", {"workspace": -1}, "is no number of bytes"),
        ("mylib::f", {"writes": "out"}, "is text"),
    ],
)
def test_declarations_that_cannot_be_meant(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        register_operator(name, **options)


# -- extension modules

BROKEN = "raise ImportError('libcudart.so.12: cannot open shared object file', name=__name__)"
WORKING = "def forward(x, out):\n    return 'the real one'\nversion = 3\n"


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    (tmp_path / "gp_broken_cuda.py").write_text(BROKEN)
    (tmp_path / "gp_working_cuda.py").write_text(WORKING)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("gp_"):
            del sys.modules[name]


@pytest.mark.parametrize("module", ["gp_broken_cuda", "gp_working_cuda", "gp_nowhere_cuda"])
@pytest.mark.usefixtures("packages")
def test_functions_of_a_module_that_cannot_run_are_the_declared_ones(module: str) -> None:
    register_operator(f"{module}.forward", results=halves, workspace=5 * MIB, writes=["out"])
    with gpuprobe.virtual_gpu("a100-40gb", compute="shapes"):
        found = importlib.import_module(module)
        x = torch.empty(4 * COUNT, device="cuda")
        assert peak_of(found.forward, x, x) == 7
        if module == "gp_working_cuda":
            assert found.version == 3
            assert found.forward(torch.ones(3), None) == "the real one"
            assert assumed() == ""
        else:
            assert f"{module} cannot be imported here" in assumed()
            with pytest.raises(NotModelled, match=rf"{module}.backward runs CUDA code") as met:
                found.backward(x)
            assert f"register_operator('{module}.backward'" in met.value.hint
            assert not hasattr(found, "__path__")
    if module == "gp_working_cuda":
        assert found.forward(None, None) == "the real one"
    else:
        with pytest.raises(ImportError):
            importlib.import_module(module)


@pytest.mark.usefixtures("packages")
def test_a_module_that_was_imported_before_has_the_declared_functions() -> None:
    found = importlib.import_module("gp_working_cuda")
    register_operator("gp_working_cuda.forward", results=halves)
    with gpuprobe.virtual_gpu("a100-40gb", compute="shapes"):
        x = torch.empty(4 * COUNT, device="cuda")
        assert peak_of(found.forward, x, x) == 2
    with (
        gpuprobe.virtual_gpu("a100-40gb", compute="real"),
        pytest.raises(NotModelled, match=r"gp_working_cuda.forward runs CUDA code"),
    ):
        found.forward(torch.ones(3, device="cuda"), None)
    assert found.forward(None, None) == "the real one"


@pytest.mark.usefixtures("packages")
def test_a_module_of_which_nothing_is_declared_is_named() -> None:
    with (
        pytest.raises(NotModelled, match="gp_broken_cuda cannot be imported without CUDA") as met,
        gpuprobe.virtual_gpu("a100-40gb", compute="shapes"),
    ):
        importlib.import_module("gp_broken_cuda")
    assert "register_operator('gp_broken_cuda.FUNCTION'" in met.value.hint


def test_an_extension_that_the_program_builds() -> None:
    from torch.utils import cpp_extension

    register_operator("gp_built.forward", results=halves)
    with gpuprobe.virtual_gpu("a100-40gb", compute="shapes"):
        built = cpp_extension.load(name="gp_built", sources=["absent.cu"])
        x = torch.empty(4 * COUNT, device="cuda")
        assert peak_of(built.forward, x, x) == 2
        assert "its CUDA code is not built" in assumed()


# -- packages that declare theirs

DECLARES = """
import torch
from gpuprobe.virtual import register_operator

def declare():
    register_operator("gp_listed::half", schema="(Tensor x) -> Tensor",
                      results=lambda x: x.new_empty(x.numel() // 2))
"""


def entry_point(packages: Path, value: str) -> None:
    (packages / "gp_listed_declarations.py").write_text(DECLARES)
    info = packages / "gp_listed-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gp-listed\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[gpuprobe.operators]\ngp_listed = {value}\n")


def test_a_package_declares_its_operators_in_an_entry_point(packages: Path) -> None:
    entry_point(packages, "gp_listed_declarations:declare")
    with gpuprobe.virtual_gpu("a100-40gb", compute="shapes"):
        assert "gp_listed_declarations" not in sys.modules  # not before it is needed
        x = torch.empty(4 * COUNT, device="cuda")
        assert peak_of(torch.ops.gp_listed.half, x) == 2


def test_an_entry_point_that_fails_is_named(packages: Path) -> None:
    entry_point(packages, "gp_listed_declarations:missing")
    with (
        gpuprobe.virtual_gpu("a100-40gb", compute="shapes"),
        pytest.raises(ConfigError, match=r"entry point 'gp_listed' in gpuprobe.operators"),
    ):
        torch.ops.gp_listed.half  # noqa: B018

"""Whose a frame is: the same answer in a recording, a finding, a message and a baseline."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

import gpuprobe
from gpuprobe.analysis.compare.accounts import Naming
from gpuprobe.hazard_watch.names import place, site_at_hand
from gpuprobe.model.trace import Frame
from gpuprobe.torch_support import compiled_code
from gpuprobe.torch_support.callers import program_line, user_line
from gpuprobe.user_frames import (
    PACKAGE,
    Owner,
    file_and_line,
    folder_of,
    is_cpp,
    is_plumbing,
    is_program_file,
    is_user_frame,
    line_of,
    owner_of,
    package_path,
)

BESIDE_TORCH = Path(torch.__file__).parent.parent / "torchvision" / "ops.py"


def ops() -> ModuleType:
    """A module that lies where torchvision would: next to torch, with a name that begins alike."""
    made = ModuleType("torchvision.ops")
    source = """
def race(torch):
    side = torch.cuda.Stream()
    x = torch.zeros(1 << 16, device="cuda")
    with torch.cuda.stream(side):
        y = x + 1
    return x.mul_(2)

def needs_a_value(tensor):
    return bool(tensor.sum() > 0)
"""
    exec(compile(source, str(BESIDE_TORCH), "exec"), vars(made))
    return made


def test_folders_end() -> None:
    assert torch.nn.__file__.startswith(folder_of(torch))
    assert not str(BESIDE_TORCH).startswith(folder_of(torch))
    assert gpuprobe.__file__.startswith(PACKAGE)
    assert not f"{PACKAGE[:-1]}_extra/x.py".startswith(PACKAGE)


STANDARD = str(Path(os.__file__).parent)
OWNERS = {
    Owner.USER: (
        "/home/u/train.py",
        "/home/u/torch/train.py",
        "train.py",
        "In [3]",
        "<stdin>",
        "<ipython-input-3-abc>",
        "/tmp/ipykernel_7/1234.py",
    ),
    Owner.LIBRARY: (
        "/venv/lib/python3.12/site-packages/torchvision/ops.py",
        "/usr/lib/python3/dist-packages/yaml/reader.py",
        "site-packages/deepspeed/engine.py",
        "C:\\env\\Lib\\site-packages\\yaml.py",
        "/tmp/torch_geometric.nn.conv.gat_conv_GATConv_propagate_2_tmbssq.py",
    ),
    Owner.PYTHON: (
        f"{STANDARD}/functools.py",
        "/opt/other/lib/python3.10/concurrent/futures/thread.py",
        "<frozen runpy>",
        "/venv/lib/python3.12/site-packages/typing_extensions.py",
    ),
    Owner.TORCH: (
        torch.serialization.__file__,
        "/venv/lib/python3.12/site-packages/torch/hub.py",
        "/src/pytorch/torch/nn/modules/module.py",
        "/venv/lib/python3.12/site-packages/triton/runtime/jit.py",
    ),
    Owner.GPUPROBE: (
        gpuprobe.__file__,
        "/venv/lib/python3.12/site-packages/gpuprobe/__init__.py",
        "/src/gpuprobe/gpuprobe/sampler/program.py",
    ),
    Owner.COMPILED: ("/tmp/torchinductor_u/xy/cxy.py",),
    Owner.GENERATED: ("<string>", "<eval_with_key>.3", "<attrs generated init x>"),
    Owner.LAUNCHER: ("/venv/bin/torchrun",),
    Owner.NATIVE: ("", "??", "/src/aten/Dispatcher.cpp", "libtorch.so"),
}


@pytest.mark.parametrize(
    ("owner", "file"), [(owner, file) for owner, files in OWNERS.items() for file in files]
)
def test_each_file_has_one_owner(owner: Owner, file: str) -> None:
    assert owner_of(file) is owner
    frame = Frame(file, 1, "f")
    assert is_user_frame(frame) is (owner is Owner.USER)
    assert is_program_file(file) is (owner in (Owner.USER, Owner.LIBRARY))
    assert is_cpp(frame) is (owner is Owner.NATIVE)
    if owner in (Owner.USER, Owner.LIBRARY):
        assert not is_plumbing(frame)
    elif owner is not Owner.PYTHON:  # of which wrappers alone are plumbing
        assert is_plumbing(frame)


def test_packages_in_packages() -> None:
    """A virtual environment may be in the folder of a package."""
    file = "/a/site-packages/tool/env/lib/python3.12/site-packages/yaml/reader.py"
    assert package_path(file) == "yaml/reader.py"
    assert file_and_line(file, 3) == "yaml/reader.py:3"
    assert Naming("/a").file(file) == "site-packages/yaml/reader.py"
    assert package_path("/home/u/my-site-packages/x.py") is None


def called_from(file: str, call: Callable[[], object]) -> object:
    """The result of ``call``, called by a function of this file."""
    namespace = {"call": call}
    exec(compile("result = call()", file, "exec"), namespace)
    return namespace["result"]


def test_the_standard_library_is_not_at_fault() -> None:
    """``functools``, ``concurrent.futures``: the line is the one that called them."""
    line = called_from(f"{STANDARD}/functools.py", program_line)
    assert line is not None
    assert line[0] == __file__
    site = called_from(f"{STANDARD}/functools.py", lambda: called_from("<string>", site_at_hand))
    assert place(site).file == __file__


def test_a_library_is_at_fault_and_its_caller_is_attributed() -> None:
    library = "/venv/lib/python3.12/site-packages/deepspeed/engine.py"
    assert called_from(library, program_line) == (library, 1)
    assert called_from(library, user_line).file == __file__


def test_compiled_code_has_the_lines_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    file = "/tmp/torchinductor_u/xy/cxy.py"
    lines = {1: (compiled_code.ProgramFrame("/home/u/train.py", 7, "forward"),)}
    monkeypatch.setitem(compiled_code._files, file, lines)
    assert called_from(file, program_line) == ("/home/u/train.py", 7)


def test_a_program_without_a_file_has_lines() -> None:
    """``python -c``: nothing but ``<string>`` calls the operator."""
    program = "from gpuprobe.torch_support.callers import place_now\n\nprint(place_now())"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "<string>:3\n"


def test_lines_of_instructions() -> None:
    code = ops().race.__code__
    assert line_of(code, 0) == code.co_firstlineno
    assert line_of(code, len(code.co_code) - 2) == code.co_firstlineno + 5
    assert line_of(code, 1 << 20) == code.co_firstlineno


@pytest.mark.simulated
def test_a_value_is_needed_in_torchvision_not_in_its_caller() -> None:
    with (
        pytest.raises(gpuprobe.errors.ValueNeeded, match=r"torchvision/ops\.py:10 \(called at "),
        gpuprobe.virtual_gpu("t4", "shapes"),
    ):
        ops().needs_a_value(torch.zeros(1024, 1024, device="cuda"))  # more than is computed


@pytest.mark.simulated
def test_a_race_is_torchvisions() -> None:
    with gpuprobe.detect_hazards(gpu="t4") as found:
        ops().race(torch)
    assert {item.location.file for item in found.findings} == {str(BESIDE_TORCH)}

"""What a virtual GPU cannot do ends in one clear error, and never the process."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import warm_python
from gpuprobe.api.virtual import estimate_program
from gpuprobe.virtual import boundary

import gpuprobe
from gpuprobe.api import watch
from gpuprobe.code_origin import PACKAGE
from gpuprobe.errors import NotModelled, ProgramFailed, ValueNeeded
from gpuprobe.sampler.program import signals_restored

pytestmark = pytest.mark.filterwarnings("ignore")


def command(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return warm_python.gpuprobe("estimate", "--gpu", "t4", *arguments, script)


def test_a_module_on_cuda_is_exported(tmp_path: Path) -> None:
    """Without care for fake tensors of CUDA the process ends by SIGABRT."""
    script = tmp_path / "export.py"
    script.write_text(
        "import torch\n"
        "net = torch.nn.Linear(8, 8).cuda()\n"
        "inputs = torch.randn(2, 8, device='cuda')\n"
        "program = torch.export.export(net, (inputs,))\n"
        "assert 'aten.linear' in program.graph_module.code\n"
        "print('on', program.module()(inputs).device)\n"
    )
    done = command(script)
    assert done.returncode == 0, done.stderr
    assert "on cuda:0" in done.stderr


def test_a_crash_names_its_line(tmp_path: Path) -> None:
    script = tmp_path / "crash.py"
    script.write_text("import ctypes\nimport torch\nctypes.string_at(0)\n")
    done = command(script)
    assert done.returncode == 5
    (line, _) = done.stderr.splitlines()
    assert "the program terminated this process by SIGSEGV, before anything was measured" in line
    assert line.endswith(f" (at {script}:3)")


WORKERS = """\
import os
import signal
import sys
import torch

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, at):
        if at == 3 and {kill}:
            os.kill(os.getpid(), signal.SIGSEGV)
        values = torch.randn(1024, 1024, device="cuda")
        return at if {kill} or values.sum() > 0 else -at

if __name__ == "__main__":
    for batch in torch.utils.data.DataLoader(Data(), num_workers=1, pin_memory=not {kill}):
        print(batch.cuda().device)
"""


def test_the_place_of_a_failure_is_the_program_s() -> None:
    """Also where Python's own library raises, as what a signal's handler raises may come from."""

    read = compile("import json\n\njson.loads('[')", "/home/ada/train.py", "exec")
    with pytest.raises(json.JSONDecodeError) as failed:
        exec(read, {})
    assert boundary.place_in(failed.value) == "/home/ada/train.py:3"
    inner = failed.value.__traceback__
    while inner.tb_next is not None:
        inner = inner.tb_next
    inside = failed.value.with_traceback(inner)  # of Python's own library alone
    assert boundary.place_in(inside) == f"{json.decoder.__file__}:{inner.tb_lineno}"
    with pytest.raises(json.JSONDecodeError) as earlier:
        exec(read, {})
    inside.__context__ = earlier.value  # the program had failed when the signal came
    assert boundary.place_in(inside) == "/home/ada/train.py:3"
    inside.__context__ = alone = ValueError()
    alone.__context__ = inside
    assert boundary.place_in(inside) == f"{json.decoder.__file__}:{inner.tb_lineno}"


def test_the_place_of_a_failure_is_a_line_of_a_file() -> None:
    """The methods of named tuples and dataclasses have no file, nor has what ``python -c`` runs."""
    generated = compile("def make():\n    raise TimeoutError", "<string>", "exec")
    names: dict[str, Any] = {}
    exec(generated, names)
    exec(compile("def train(make):\n\n    make()", "/home/ada/train.py", "exec"), names)
    with pytest.raises(TimeoutError) as failed:
        names["train"](names["make"])
    assert boundary.place_in(failed.value) == "/home/ada/train.py:3"
    inner = failed.value.__traceback__
    while inner.tb_next is not None:
        inner = inner.tb_next
    assert boundary.place_in(failed.value.with_traceback(inner)) == "<string>:2"


@pytest.mark.skipif(sys.platform != "linux", reason="workers that are forked")
def test_a_worker_that_dies_or_needs_a_value_is_one_error(tmp_path: Path) -> None:
    script = tmp_path / "workers.py"
    script.write_text(WORKERS.format(kill=True))
    done = command(script)
    assert done.returncode == 5
    # Without torch's thread that pins memory, which may fail first, in words of its own.
    (error,) = (line for line in done.stderr.splitlines() if line.startswith("gpuprobe: error"))
    # Nor does torch always find the worker dead when its pipe is.
    start = re.escape(f"gpuprobe: error: the program failed at {script}:")
    ends = "RuntimeError: DataLoader worker|ConnectionReset|EOFError"
    assert re.match(f"{start}1[78]: ({ends})", error), error
    script.write_text(WORKERS.format(kill=False))
    done = command(script, "--compute", "shapes")
    assert done.returncode == 5
    error, hint = done.stderr.splitlines()[-2:]
    assert error.startswith(f"gpuprobe: error: {script}:14 needs the value of a tensor")
    assert f"--assume {script}:14=false" in hint


INTERRUPTED = """\
import signal
import torch

def ring(number, frame):
    raise TimeoutError("too late")

signal.signal(signal.SIGALRM, ring)
torch.ones(1, device="cuda")
signal.setitimer(signal.ITIMER_REAL, 0.05, 0.01)
{end}
"""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no such timers")
def test_a_timer_of_the_program_does_not_interrupt_what_comes_after_it(tmp_path: Path) -> None:
    script = tmp_path / "timer.py"
    for end in ("", "raise ValueError"):
        script.write_text(INTERRUPTED.format(end=end))
        done = command(script)
        # On a machine that is very busy the timer may ring before the program has ended.
        assert done.returncode == 5 or (done.returncode == 0 and not end), done.stderr
        assert ("the program failed at" in done.stderr) == (done.returncode == 5)


def test_signals_are_put_back() -> None:
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD)
    before = [signal.getsignal(number) for number in numbers]
    try:
        with signals_restored():
            for number in numbers:
                signal.signal(number, lambda number, frame: None)
        after = [signal.getsignal(number) for number in numbers]
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    assert after == [before[0], signal.SIG_IGN, before[2]]


def fails(tmp_path: Path, text: str, kind: type[Exception]) -> Any:
    script = tmp_path / "program.py"
    script.write_text(text)
    with pytest.raises(kind) as caught:
        estimate_program(watch.program(str(script), [], module=False), gpu="t4", compute="shapes")
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    return caught.value


DRIVERS = (
    "0 active drivers ([]). There should only be one.",  # Triton
    "Torch not compiled with CUDA enabled",
    "libcuda.so.1: cannot open shared object file: No such file or directory",
    "Found no NVIDIA driver on your system.",
)


@pytest.mark.parametrize("words", DRIVERS)
def test_what_looks_for_a_driver_is_not_modelled(words: str, tmp_path: Path) -> None:
    error = fails(tmp_path, f"import torch\nraise RuntimeError({words!r})\n", NotModelled)
    assert str(error).startswith(f"{tmp_path / 'program.py'}:2: a virtual GPU cannot do this")
    assert words in str(error)
    assert error.hint


def test_what_finds_no_values_needs_them(tmp_path: Path) -> None:
    words = "Cannot copy out of meta tensor; no data!"
    error = fails(tmp_path, f"import torch\nraise RuntimeError({words!r})\n", ValueNeeded)
    assert error.place == f"{tmp_path / 'program.py'}:2"


def test_errors_of_the_program_stay_the_programs(tmp_path: Path) -> None:
    error = fails(
        tmp_path,
        "import torch\n\ntorch.ones(4, 4, device='cuda') @ torch.ones(3, 3, device='cuda')\n",
        ProgramFailed,
    )
    assert str(error).startswith(f"the program failed at {tmp_path / 'program.py'}:3: RuntimeError")
    assert isinstance(error.__cause__, RuntimeError)
    wrong: list[Callable[[], Any]] = [
        lambda: torch.ones(2, device="cuda")[5],
        lambda: torch.ones(2, device="cuda").to(1, 2, 3),  # type: ignore[call-overload]
        lambda: torch.ones(2, device="cuda").numpy(),
        lambda: torch.ones(2, device="cuda") + torch.ones(3, device="cuda"),
        lambda: torch.cuda.set_device(7),
        lambda: torch.ones(2, device="cuda") + torch.ones(2),
        lambda: {}["key"],
    ]
    for call in wrong:
        with gpuprobe.virtual_gpu("t4"), pytest.raises(Exception) as caught:  # noqa: PT011
            call()
        assert boundary.explained(caught.value) is None, caught.value


def test_a_fault_of_gpuprobes_own_says_so() -> None:
    code = compile("def own(table):\n    return table['key']\n", f"{PACKAGE}virtual/own.py", "exec")
    names: dict[str, Any] = {}
    exec(code, names)
    here = f"{__file__}:{sys._getframe().f_lineno + 2}"
    with pytest.raises(NotModelled) as caught, gpuprobe.virtual_gpu("t4"):
        names["own"]({})
    assert str(caught.value) == (
        f"{here}: a virtual GPU cannot do this: an internal error of gpuprobe at "
        "gpuprobe/virtual/own.py:2 (KeyError: 'key')"
    )


def test_kernels_that_the_cpu_lacks_are_not_modelled() -> None:
    """In torch's words for both kinds; what is computed through another dtype needs no error."""
    for words in (
        "Could not run 'aten::_thnn_fused_gru' with arguments from the 'CPU' backend. This could",
        "\"linalg_eig_cpu\" not implemented for 'Half'",
    ):
        error = boundary.of_kernel("aten.op", RuntimeError(words))
        assert error is not None
        assert "which has no CPU kernel in torch" in str(error)
    assert boundary.of_kernel("aten.op", RuntimeError("mat1 and mat2 shapes")) is None
    with gpuprobe.virtual_gpu("t4"), pytest.raises(NotModelled, match=r"test_boundary\.py:\d+"):
        torch.ops.aten._thnn_fused_gru_cell(
            *(torch.ones(4, 12, device="cuda") for _ in range(2)), torch.ones(4, 4, device="cuda")
        )


# -- bytes of what has no values


def test_checkpoints_have_their_size(tmp_path: Path) -> None:
    with gpuprobe.virtual_gpu("t4", "shapes") as session:
        net = torch.nn.Linear(2048, 2048).cuda()
        path, buffer = tmp_path / "net.pt", io.BytesIO()
        torch.save(net.state_dict(), path)
        torch.save(net, buffer)
        weights = 4 * 2048 * 2049
        assert weights < path.stat().st_size < weights + 4096
        assert weights < len(buffer.getvalue()) < weights + 8192
        if hasattr(os, "SEEK_HOLE"):
            assert path.stat().st_blocks * 512 < weights / 8  # what is zeros takes no disk
        loaded = torch.load(path)
        assert loaded["weight"].device == torch.device("cuda", 0)
        assert net.load_state_dict(loaded)
        assert any("saved as zeros" in text for text in session.machine.assumed)


def test_host_tensors_without_values_have_addresses_of_their_own() -> None:
    """Of zeros: safetensors, for one, reads from there. Without it that is a segfault."""
    with gpuprobe.virtual_gpu("t4", "shapes") as session:
        first, second = (torch.randn(1024, 1024, device="cuda").cpu() for _ in range(2))
        assert first.data_ptr() == first.untyped_storage().data_ptr() != 0
        assert first[1:].data_ptr() - first.data_ptr() == 4096
        assert abs(second.data_ptr() - first.data_ptr()) >= first.nbytes
        memory = (np.ctypeslib.ctypes.c_float * (1 << 20)).from_address(second.data_ptr())
        assert not np.frombuffer(memory, dtype=np.float32).any()
        assert len(session.machine.zeros) == 2
        del first
        assert len(session.machine.zeros) == 1


def test_a_recording_without_values_gives_nan_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "loss = torch.randn(1024, 1024, device='cuda').sum()\n"
        "print('loss', loss.item())\n"
    )
    program = watch.program(str(script), [], module=False)
    result = watch.run(program, tmp_path / "run", virtual="t4", compute="shapes")
    assert result.error is None
    assert "loss nan" in capsys.readouterr().out
    assert any(f"{script}:3" in text for text in result.assumed)

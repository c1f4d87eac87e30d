"""What ends an estimated program is one clear error, with its line, and never the process."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import warm_python

from gpuprobe.sampler.program import signals_restored
from gpuprobe.torch_support.callers import place_in

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


def test_a_gpu_without_kernels_in_this_torch_is_named(tmp_path: Path) -> None:
    """CUDA 13 has none for V100."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "table = torch.nn.Embedding(100, 64, device='cuda')\n"
        "table(torch.arange(4096, device='cuda') % 100).sum().backward()\n"
    )
    done = warm_python.gpuprobe("estimate", "--gpu", "v100-16gb", script)
    if "no kernels" not in done.stderr:
        pytest.skip("this torch has kernels for V100")
    assert done.returncode == 5
    *_, error, hint = done.stderr.splitlines()
    assert "the program failed at " in error
    assert re.fullmatch(r"  hint: torch \S+ has no kernels for compute capability 7.0", hint)


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
    for batch in torch.utils.data.DataLoader(Data(), num_workers=1):
        print(batch.cuda().device)
"""


def test_the_place_of_a_failure_is_the_program_s() -> None:
    """Also where Python's own library raises, as what a signal's handler raises may come from."""

    read = compile("import json\n\njson.loads('[')", "/home/ada/train.py", "exec")
    with pytest.raises(json.JSONDecodeError) as failed:
        exec(read, {})
    assert place_in(failed.value) == "/home/ada/train.py:3"
    inner = failed.value.__traceback__
    while inner.tb_next is not None:
        inner = inner.tb_next
    inside = failed.value.with_traceback(inner)  # of Python's own library alone
    assert place_in(inside) == f"{json.decoder.__file__}:{inner.tb_lineno}"
    with pytest.raises(json.JSONDecodeError) as earlier:
        exec(read, {})
    inside.__context__ = earlier.value  # the program had failed when the signal came
    assert place_in(inside) == "/home/ada/train.py:3"
    inside.__context__ = alone = ValueError()
    alone.__context__ = inside
    assert place_in(inside) == f"{json.decoder.__file__}:{inner.tb_lineno}"


def test_the_place_of_a_failure_is_a_line_of_a_file() -> None:
    """The methods of named tuples and dataclasses have no file, nor has what ``python -c`` runs."""
    generated = compile("def make():\n    raise TimeoutError", "<string>", "exec")
    names: dict[str, Any] = {}
    exec(generated, names)
    exec(compile("def train(make):\n\n    make()", "/home/ada/train.py", "exec"), names)
    with pytest.raises(TimeoutError) as failed:
        names["train"](names["make"])
    assert place_in(failed.value) == "/home/ada/train.py:3"
    inner = failed.value.__traceback__
    while inner.tb_next is not None:
        inner = inner.tb_next
    assert place_in(failed.value.with_traceback(inner)) == "<string>:2"


@pytest.mark.skipif(sys.platform != "linux", reason="workers that are forked")
def test_a_worker_that_dies_is_one_error_and_what_one_assumes_is_reported(tmp_path: Path) -> None:
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
    done = command(script, "--compute", "shapes", "--json")
    assert done.returncode == 0, done.stderr
    assumed = f"{script}:14: `values.sum() > 0` was not computed: assumed to be False"
    assert any(text.startswith(assumed) for text in json.loads(done.stdout)["assumed"])


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


def test_errors_of_the_program_stay_the_programs(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import torch\n\ntorch.ones(4, 4, device='cuda') @ torch.ones(3, 3, device='cuda')\n"
    )
    done = command(script, "--compute", "shapes")
    assert done.returncode == 5
    error = next(line for line in done.stderr.splitlines() if line.startswith("gpuprobe: error"))
    assert error.startswith(f"gpuprobe: error: the program failed at {script}:3: RuntimeError")


def test_more_than_the_machine_has_addresses_for_does_not_fit(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("import torch\n\nx = torch.empty(1 << 50, device='cuda')\n")
    done = command(script)
    assert done.returncode == 1
    assert done.stdout == (
        f"t4: does not fit on any GPU: {script}:3 requests 4096.0 TiB at once, more than this "
        "machine has addresses for\n"
    )
    document = json.loads(command(script, "--json").stdout)
    assert document["error"]["kind"] == "DoesNotFit"
    assert "Traceback" not in done.stderr  # it is an answer, not a crash

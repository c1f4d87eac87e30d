"""The native engine in whole programs: the same commands, on torch's own CUDA code."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import native_commands
import pytest
from default_sigint import default_sigint
from native_commands import gpuprobe, own_cache

from gpuprobe.native.elf import Export, library_bytes
from gpuprobe.native.libraries import torch_build

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

TRAIN = """\
import torch

model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512))
model = model.cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    loss = model(torch.randn(64, 512, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("peak", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
print(torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory)
"""


def python(text: str, cwd: Path, **more: Any) -> subprocess.CompletedProcess[str]:
    (cwd / "program.py").write_text(text, encoding="utf-8")
    return native_commands.python("program.py", cwd=cwd, **more)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN, encoding="utf-8")
    return path


def test_an_estimate_is_the_peak_of_the_run(script: Path, tmp_path: Path) -> None:
    ran = gpuprobe("run", "--gpu", "h100-80gb", "-o", "r.gpuprobe", script, cwd=tmp_path)
    _, allocated, reserved = ran.stdout.split("\n", 1)[0].split()
    found = estimate(script, tmp_path, "--steps", "4")
    assert found["peak_allocated"] == int(allocated)
    assert found["reserved"] == {"at_least": int(reserved), "at_most": int(reserved)}


def estimate(script: Path, cwd: Path, *options: str) -> dict[str, Any]:
    done = gpuprobe(
        *("estimate", script, "--gpu", "h100-80gb", "--compute", "shapes", "--json", *options),
        cwd=cwd,
    )
    assert done.returncode in (0, 1), done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


OWN_OPERATOR = """\
import torch
from torch.fx.experimental.proxy_tensor import make_fx

library = torch.library.Library("program", "DEF")
library.define("marked(Tensor x) -> Tensor")
library.impl("marked", lambda x: x, "CompositeExplicitAutograd")
x = torch.ones(1 << 20, device="cuda")
graph = make_fx(lambda x: torch.ops.program.marked(x * 2) + 1, tracing_mode="fake")(x)
graph(x)
"""


def test_an_operator_that_the_program_defines_is_traced_with_fake_tensors(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(OWN_OPERATOR, encoding="utf-8")
    assert estimate(script, tmp_path)["verdict"] == "fits"


def test_a_program_runs_out_of_memory_where_the_gpu_does(tmp_path: Path) -> None:
    text = """\
import gpuprobe
with gpuprobe.virtual_gpu("t4"):
    import torch
    kept = []
    try:
        while True:
            kept.append(torch.empty(1 << 30, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError as error:
        print(len(kept), "CUDA out of memory" in str(error))
    free, total = torch.cuda.mem_get_info()
    print(0 <= free < 1 << 30, total == torch.cuda.get_device_properties(0).total_memory)
"""
    done = python(text, tmp_path)
    assert done.stdout == "14 True\nTrue True\n", done.stderr


def test_torch_that_is_imported_already_gets_a_sentence_with_the_remedy(tmp_path: Path) -> None:
    text = """\
import torch
import gpuprobe
try:
    with gpuprobe.virtual_gpu("t4"):
        pass
except gpuprobe.errors.UsageError as error:
    print(error, "|", error.hint)
"""
    done = python(text, tmp_path, cold=True)
    assert "torch was imported before the simulated GPU" in done.stdout, done.stderr
    assert "before the first `import torch`" in done.stdout


def test_children_have_the_gpus_too(tmp_path: Path) -> None:
    text = """\
import subprocess, sys
import gpuprobe

def child():
    import torch
    print(torch.cuda.get_device_name(), torch.zeros(8, device="cuda").shape, flush=True)

if __name__ == "__main__":
    with gpuprobe.virtual_gpu("l4"):
        import torch
        import torch.multiprocessing as mp
        code = "import torch; print(torch.cuda.get_device_name(), torch.zeros(8).cuda().device)"
        subprocess.run([sys.executable, "-c", code], check=True)
        process = mp.get_context("spawn").Process(target=child)
        process.start()
        process.join()
        assert process.exitcode == 0
        loader = torch.utils.data.DataLoader(range(8), batch_size=4, num_workers=1)
        print([batch.cuda().shape for batch in loader])
"""
    done = python(text, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("NVIDIA L4") == 2
    assert "[torch.Size([4]), torch.Size([4])]" in done.stdout


def test_a_tensor_sent_to_another_process_is_the_same_memory(tmp_path: Path) -> None:
    text = """\
import gpuprobe

def child(queue, done):
    tensor = queue.get()
    tensor.fill_(0)
    import ctypes
    ctypes.memset(tensor.data_ptr(), 1, tensor.nbytes)  # as a kernel would
    done.set()

if __name__ == "__main__":
    with gpuprobe.virtual_gpu("l4"):
        import torch
        import torch.multiprocessing as mp
        spawn = mp.get_context("spawn")
        queue, done = spawn.Queue(), spawn.Event()
        process = spawn.Process(target=child, args=(queue, done))
        process.start()
        tensor = torch.zeros(1024, dtype=torch.uint8, device="cuda")
        queue.put(tensor)
        done.wait()
        print(tensor.cpu().sum().item())
        process.join()
        print(process.exitcode)
"""
    done = python(text, tmp_path)
    assert done.stdout == "1024\n0\n", done.stderr


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"PATH": "/nowhere", "CC": ""}, "no C compiler"),
        ({"PATH": "/nowhere", "CC": "nosuch"}, "CC=nosuch (not installed)\n"),
        ({"PATH": "/nowhere", "CC": "/bin/false"}, "by CC=/bin/false (no output)\n"),
    ],
)
def test_without_a_compiler_one_line_names_it(
    script: Path, tmp_path: Path, settings: dict[str, str], message: str
) -> None:
    from gpuprobe.native import libraries

    if libraries.carried_core().exists():
        pytest.skip("installed from a wheel, which carries the runtime compiled")
    cache = tmp_path / "cache"
    done = gpuprobe(
        *("run", "--gpu", "l4", script),
        cwd=tmp_path,
        cold=True,
        XDG_CACHE_HOME=str(cache),
        **settings,
    )
    assert done.returncode == 3
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 2  # the error and its hint


def test_a_compiler_that_does_not_work_is_named_and_a_cache_that_cannot_be_written_replaced(
    script: Path, tmp_path: Path
) -> None:
    """The other ways not to work are in `tests/native/test_torch_builds.py`."""
    from gpuprobe.native import libraries

    if libraries.carried_core().exists():
        pytest.skip("installed from a wheel, which carries the runtime compiled")
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    settings = {"CC": "/bin/false -O1", "XDG_CACHE_HOME": "/proc/nothing", "TMPDIR": str(tmp_path)}
    done = gpuprobe("run", "--quiet", "--gpu", "l4", script, cwd=tmp_path, cold=True, **settings)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        "gpuprobe: the simulated GPU cannot be compiled by CC=/bin/false -O1 (no output): "
        "cc is used instead"
    ]
    assert "NVIDIA L4" in done.stdout


@pytest.mark.parametrize(
    ("cuda", "message"),
    [
        ("14.0", "torch 9.9.9 is built for CUDA 14.0; simulated GPUs know CUDA 12 and 13"),
        ("", "torch 9.9.9 is a build without CUDA"),
    ],
)
def test_a_torch_of_an_unknown_cuda_gets_one_line(
    script: Path, tmp_path: Path, cuda: str, message: str
) -> None:
    torch = tmp_path / "site" / "torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").write_text("raise SystemExit('imported')\n", encoding="utf-8")
    (torch / "version.py").write_text(
        f"__version__ = '9.9.9'\ncuda: Optional[str] = {cuda or None!r}\n", encoding="utf-8"
    )
    path = os.pathsep.join([str(torch.parent), str(EXAMPLES.parent)])
    done = gpuprobe("run", "--gpu", "l4", script, cwd=tmp_path, PYTHONPATH=path)
    assert done.returncode == 3
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 2  # the error and its hint


def test_a_library_that_needs_an_unknown_function_loads_and_the_call_is_named(
    tmp_path: Path,
) -> None:
    """A package that is installed next to torch, and newer than what the engine knows."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    found = torch_build()
    assert found is not None
    soname = f"libcublas.so.{found.major}"
    site = tmp_path / "site"
    (site / "newer").mkdir(parents=True)
    (site / "torch").symlink_to(found.folder)
    link = tmp_path / soname
    export = Export("cublasFrobnicate_v9", "missing")
    link.write_bytes(library_bytes(soname, [export], [], platform.machine()))
    (tmp_path / "newer.c").write_text(
        "int cublasFrobnicate_v9(void *, int *);\n"
        "int frobnicate(int *n) { return cublasFrobnicate_v9(0, n); }\n",
        encoding="utf-8",
    )
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", site / "newer/_C.so", tmp_path / "newer.c", link],
        check=True,
    )
    text = f"""\
import ctypes
import gpuprobe
with gpuprobe.virtual_gpu("l4"):
    print(ctypes.CDLL({str(site / "newer/_C.so")!r}).frobnicate(None))
"""
    path = os.pathsep.join([str(site), str(EXAMPLES.parent)])
    done = python(text, tmp_path, PYTHONPATH=path, XDG_CACHE_HOME=own_cache(tmp_path / "cache"))
    assert done.stdout == "15\n", done.stderr  # CUBLAS_STATUS_NOT_SUPPORTED
    assert done.stderr == ("gpuprobe: cublasFrobnicate_v9 is not answered by the simulated GPU\n")


def test_a_preloaded_library_stays_preloaded(tmp_path: Path) -> None:
    text = """\
import os
import gpuprobe
with gpuprobe.virtual_gpu("l4"):
    print(os.environ["LD_PRELOAD"].split()[-1])
"""
    done = python(text, tmp_path, LD_PRELOAD="libm.so.6")
    assert done.stdout == "libm.so.6\n", done.stderr


def test_constants_of_compiled_code_have_values_also_while_hazards_are_detected(
    tmp_path: Path,
) -> None:
    text = """\
import gpuprobe
with gpuprobe.virtual_gpu("t4"), gpuprobe.detect_hazards() as hazards:
    import torch

    def constant(x):
        return x + torch.tensor([1.0, 2.0, 3.0], device=x.device)

    def new_constant(x):
        return x * x.new_tensor([1.0, 2.0, 3.0])

    def assigned(x):
        y = x.clone()
        y[0] = 5.0
        return y * 2

    x = torch.ones(3, device="cuda")
    for function in (constant, new_constant, assigned):
        compiled = torch.compile(function)(x)
        print(compiled.cpu().tolist())
print([(found.location.line, found.message) for found in hazards.findings])
"""
    done = python(text, tmp_path)
    assert done.stdout.splitlines() == [
        "[2.0, 3.0, 4.0]",
        "[1.0, 2.0, 3.0]",
        "[10.0, 2.0, 2.0]",
        "[]",  # nor are the compiler's own reads of constants findings
    ], done.stderr[-3000:]


@pytest.mark.parametrize("command", ["estimate", "run"])
@pytest.mark.parametrize(
    "tensor",
    [
        "torch.nn.Linear(1 << 20, 1 << 18)",
        "torch.zeros(1 << 20, 1 << 18)",
        "torch.ones(1).expand(1 << 19, 1 << 19).clone()",
    ],
)
def test_a_tensor_on_the_cpu_that_the_machine_cannot_hold_is_refused_before(
    tmp_path: Path, command: str, tensor: str
) -> None:
    """Of 1 TiB: the kernel would end a process that fills smaller ones, without a word."""
    (tmp_path / "large.py").write_text(f"import torch\n{tensor}.cuda()\n", encoding="utf-8")
    done = gpuprobe(command, "--gpu", "h100-80gb", "large.py", cwd=tmp_path)
    assert done.returncode == 5
    assert "creates on the CPU at " in done.stderr
    assert "large.py:2: it needs another 1.0 TiB, and " in done.stderr
    assert done.stderr.count('with torch.device("meta")') == 1


def test_ctrl_c_ends_the_program(tmp_path: Path) -> None:
    text = """\
import os, signal
import torch
torch.zeros(8, device="cuda")
os.kill(os.getpid(), signal.SIGINT)
"""
    script = tmp_path / "train.py"
    script.write_text(text, encoding="utf-8")
    with default_sigint():
        done = gpuprobe("run", "--gpu", "l4", script, cwd=tmp_path)
    assert done.returncode == 130, done.stderr


def test_tests_that_run_on_the_engine_have_values(tmp_path: Path) -> None:
    text = """\
import pytest
import torch

class TestTraining:
    @pytest.mark.gpu_memory(max_peak="1GiB")
    def test_gradients(self):
        weight = torch.arange(6.0, device="cuda").view(2, 3).requires_grad_()
        (weight * weight).sum().backward()
        assert weight.grad.tolist() == [[0, 2, 4], [6, 8, 10]]
        assert (torch.ones(3, 3, device="cuda") @ torch.ones(3, 3, device="cuda")).trace() == 9

    @pytest.mark.gpu_memory(max_peak="1KiB", no_hazards=True)
    def test_limit(self):
        assert torch.ones(1024, device="cuda").sum().item() == 1024
"""
    (tmp_path / "test_values.py").write_text(text, encoding="utf-8")
    done = native_commands.python(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "--gpuprobe-gpu", "h100-80gb"),
        "test_values.py",
        cwd=tmp_path,
    )
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "above max_peak=1.0 KiB" in done.stdout
    assert "Exception" not in done.stderr

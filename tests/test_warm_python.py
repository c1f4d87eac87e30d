"""``tests/support/warm_python.py``: its commands end and print as an interpreter does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import warm_client
import warm_python
from default_sigint import default_sigint
from waiting import wait_for_end

SEEN = """
import json, os, sys, warnings
print(json.dumps([sys.argv, os.getcwd(), sys.path[0], __name__, os.environ["MARK"],
                  sys.stdin.read(), vars().get("__file__"), os.isatty(1)]))
print("to stderr", file=sys.stderr)
warnings.warn("shown", UserWarning)
"""


def run(python: str, *words: str, cwd: Path, **changes: str) -> tuple[int, str, str]:
    with default_sigint():
        process = subprocess.Popen(
            [python, *words],
            cwd=cwd,
            env={**os.environ, "MARK": "here", **changes},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    with process:
        out, err = process.communicate("typed\n", timeout=120)
    return process.returncode, out, err


ENDS = {
    "sees": SEEN,
    "returns a code": "import sys; sys.exit(7)",
    "exits at once": "import os; print('lost'); os._exit(3)",
    "is killed": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "is interrupted": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    "raises": "def f():\n    raise KeyError('x')\nf()",
    "registers": "import atexit; atexit.register(print, 'at the end')",
    "is replaced": "import os; os.execv('/bin/sh', ['sh', '-c', 'echo $0; exit 5'])",
}


@pytest.mark.parametrize("program", ENDS.values(), ids=ENDS)
def test_it_is_as_with_an_interpreter(program: str, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "script.py").write_text(program)
    warm = warm_python.shared().python
    for words in (("sub/script.py", "a b", "-x"), ("-c", program, "--", "c")):
        expected = run(sys.executable, *words, cwd=tmp_path)
        found = run(warm, *words, cwd=tmp_path)
        assert found[:2] == expected[:2]
        assert found[2] == expected[2]


def test_the_allocator_has_the_setting_of_the_environment(tmp_path: Path) -> None:
    if warm_python.shared().python == sys.executable:
        pytest.skip("this system has no file descriptors of processes")
    (tmp_path / "program.py").write_text(
        "import sys\nprint('torch' in sys.modules)\nimport torch\n"
        "torch.zeros(1, device='cuda')\n"
        "print(torch.cuda.memory._snapshot()['allocator_settings']['expandable_segments'])\n"
    )
    words = ("-m", "gpuprobe", "run", "--quiet", "--gpu", "t4", "program.py")
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        changes = {name: warm_client.EXPANDABLE}
        found = run(warm_python.shared().python, *words, cwd=tmp_path, **changes)
        assert found[:2] == (0, "True\nTrue\n"), found[2]
        (tmp_path / "program.gpuprobe").rename(tmp_path / name)


def test_a_command_that_is_gone_ends_its_program(tmp_path: Path) -> None:
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with subprocess.Popen(
        [warm_python.shared().python, "-c", program], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        number = int(process.stdout.readline())
        process.kill()
        assert process.stdout.read() == ""  # the program had the stream, too
    assert process.returncode == -signal.SIGKILL
    wait_for_end(number)  # it closes its streams a little earlier


IN_THE_BACKGROUND = f"""
import signal, subprocess, sys
from pathlib import Path
sys.path.insert(0, {str(Path(warm_python.__file__).parent)!r})
import warm_client
import warm_python
from default_sigint import default_sigint
interrupted = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
warm = warm_python.WarmPython(Path.cwd()).python
print(subprocess.run([warm, "-c", interrupted], stderr=subprocess.PIPE).returncode)
with default_sigint():
    process = subprocess.Popen([sys.executable, "-c", interrupted], stderr=subprocess.PIPE)
process.communicate()
print(process.returncode)
print(signal.getsignal(signal.SIGINT).name)
"""


def test_ctrl_c_ends_programs_of_tests_in_the_background(tmp_path: Path) -> None:
    """A shell without job control starts them with SIGINT ignored."""
    code, out, err = run(
        "sh", "-c", 'trap "" INT; exec "$0" "$@"', sys.executable, "-c", IN_THE_BACKGROUND,
        cwd=tmp_path,
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert out.split() == [str(-signal.SIGINT), str(-signal.SIGINT), "SIG_IGN"]


def test_children_of_the_tests_leave_it_as_it_is(tmp_path: Path) -> None:
    program = f"""
import os, subprocess, sys
sys.path.insert(0, {str(Path(warm_python.__file__).parent)!r})
import warm_python
warm_python.modules_of_commands = list  # without gpuprobe's, it starts in less time
warm = warm_python.shared().python
if not os.fork():
    sys.exit()  # as a test's own child that ends in the usual way
os.wait()
done = subprocess.run([warm, "-c", "print('still there')"], capture_output=True, text=True)
print(done.stdout)
"""
    code, out, _ = run(sys.executable, "-c", program, cwd=tmp_path)
    assert (code, out.strip()) == (0, "still there")

"""The simulated GPU's C code under AddressSanitizer and UBSan: ``make sanitize``.

    python tests/support/sanitized_runtime.py

Runs the runtime's own tests, then programs with torch: training, a convolutional network with all
values, and a job of two processes. What a sanitizer finds ends the process that it is in, and so
this script. Needs gcc with libasan and libubsan; takes five minutes on two cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from gpuprobe.native import libraries

ROOT = Path(__file__).resolve().parents[2]
FLAGS = "-g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined"
RUN = (sys.executable, "-m", "gpuprobe", "run", "--level", "trace")
PROGRAMS = (
    (RUN, "--gpu", "t4", "--hazards", "examples/train_gpt.py", "--steps", "3"),
    (RUN, "--gpu", "t4", "--compute", "real", "examples/train_cnn.py", "--steps", "2"),
    (
        *(RUN, "--gpu", "2xt4", "--", sys.executable, "-m", "torch.distributed.run"),
        *("--standalone", "--nproc-per-node", "2", "tests/native/job_programs/ddp.py"),
    ),
)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        return check(Path(folder))


def check(folder: Path) -> int:
    """1 if something was found."""
    environment = {
        **os.environ,
        "CC": f"gcc {FLAGS}",
        "GPUPROBE_TEST_CFLAGS": FLAGS,
        "XDG_CACHE_HOME": str(folder / "cache"),
        # Python itself is not compiled with them, and what it keeps to its end is not a leak. The
        # simulated GPU's libraries are preloaded before the sanitizers'.
        "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "LD_PRELOAD": " ".join(map(_library, ("libasan.so", "libubsan.so"))),
    }
    tests = (sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider")
    failed = []
    for number, (run, *rest) in enumerate([((*tests, "tests/native/test_runtime.py"),), *PROGRAMS]):
        output = ("--output", str(folder / f"{number}.gpuprobe")) if rest else ()
        words = (*run, *output, *rest)
        sys.stdout.write(f"$ {' '.join(words)}\n")
        sys.stdout.flush()
        if subprocess.run(words, cwd=ROOT, env=environment, check=False).returncode:
            failed.append(words)
    # The one that the programs loaded: compile_core tries other compilers if the first one fails.
    (runtime,) = (folder / "cache").rglob(f"runtime-*/{libraries.CORE}")
    code = runtime.read_bytes()
    assert b"__asan_init" in code, "AddressSanitizer was not on"
    assert b"__ubsan_handle" in code, "UndefinedBehaviorSanitizer was not on"
    sys.stdout.writelines(f"failed: {' '.join(words)}\n" for words in failed)
    return int(bool(failed))


def _library(name: str) -> str:
    """Where gcc has it."""
    done = subprocess.run(
        ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


if __name__ == "__main__":
    raise SystemExit(main())

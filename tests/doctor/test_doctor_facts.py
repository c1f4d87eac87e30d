"""Gathering facts from real files and real processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from gpuprobe.model.values import ReadStatus, Unavailable
from gpuprobe.probes.health import facts
from gpuprobe.probes.health.base import KernelMessage, TorchFacts

KMSG = (
    b"6,1,0,-;Linux version 6.1\n"
    b"4,812,5123456,-;NVRM: loading NVIDIA UNIX x86_64 Kernel Module  570.124.06\n"
    b" SUBSYSTEM=pci\n DEVICE=+pci:0000:18:00.0\n"
    b"3,900,61000000,-;NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus.\n"
    b"garbage without a header\n"
    b"6,901,x,-;NVRM: not a time\n"
)


def test_kernel_log_keeps_the_drivers_lines(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_bytes(KMSG)
    assert facts.read_kernel_log(log) == (
        KernelMessage(5.123456, "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  570.124.06"),
        KernelMessage(61.0, "NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus."),
    )


def test_a_kernel_log_that_never_ends_is_read_to_where_it_is_now(tmp_path: Path) -> None:
    pipe = tmp_path / "kmsg"
    os.mkfifo(pipe)
    keep = os.open(pipe, os.O_RDWR)  # as with /dev/kmsg, there is no end of file
    try:
        os.write(keep, KMSG)
        messages = facts.read_kernel_log(pipe)
        assert not isinstance(messages, Unavailable)
        assert len(messages) == 2
    finally:
        os.close(keep)


def test_an_absent_kernel_log_says_so(tmp_path: Path) -> None:
    missing = facts.read_kernel_log(tmp_path / "none")
    assert isinstance(missing, Unavailable)
    assert "No such file" in missing.reason


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_a_refused_kernel_log_is_denied(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.touch(mode=0)
    refused = facts.read_kernel_log(log)
    assert isinstance(refused, Unavailable)
    assert refused.status is ReadStatus.DENIED


def test_stubs_are_told_by_folder_and_size(tmp_path: Path) -> None:
    real, stubs = tmp_path / "real", tmp_path / "cuda" / "stubs"
    for folder in (real, stubs):
        folder.mkdir(parents=True)
    (real / "libcuda.so.570").write_bytes(b"\x7fELF" + bytes(2 * 1024**2))
    (real / "libcuda.so.1").symlink_to("libcuda.so.570")
    (real / "libnvidia-ml.so.1").write_bytes(b"\x7fELF small")
    (stubs / "libcuda.so.1").write_bytes(b"\x7fELF" + bytes(2 * 1024**2))

    def stub(name: str, *folders: Path) -> bool:
        environ = {"LD_LIBRARY_PATH": ":".join(map(str, folders))}
        return next(x.stub for x in facts.read_libraries(environ) if x.name == name)

    assert not stub("libcuda.so.1", real)
    assert stub("libcuda.so.1", stubs, real)  # the first one found is what the loader takes
    several = facts.read_libraries({"LD_LIBRARY_PATH": f"{tmp_path / 'none'}:{stubs}:{real}"})
    assert [found.name for found in several] == ["libcuda.so.1", "libnvidia-ml.so.1"]
    assert stub("libnvidia-ml.so.1", real)


def test_the_loaders_cache_is_read_for_this_word_size() -> None:
    listing = (
        "3 libs found in cache `/etc/ld.so.cache'\n"
        "\tlibcuda.so.1 (libc6,x86-64) => /usr/lib/x86_64-linux-gnu/libcuda.so.1\n"
        "\tlibcuda.so.1 (libc6) => /usr/lib/i386-linux-gnu/libcuda.so.1\n"
        "\tlibcuda.so.1 (libc6,x86-64) => /opt/other/libcuda.so.1\n"
        "\tlibc.so.6 (libc6,x86-64) => /usr/lib/x86_64-linux-gnu/libc.so.6\n"
    )
    wide = ["/usr/lib/x86_64-linux-gnu/libcuda.so.1", "/opt/other/libcuda.so.1"]
    assert facts.cached_libraries(listing, wide=True) == {"libcuda.so.1": wide}
    narrow = ["/usr/lib/i386-linux-gnu/libcuda.so.1"]
    assert facts.cached_libraries(listing, wide=False) == {"libcuda.so.1": narrow}


def test_shared_memory_of_this_machine() -> None:
    shm = facts.read_shared_memory()
    assert not isinstance(shm, Unavailable)
    assert 0 <= shm.free <= shm.total
    assert isinstance(facts.read_shared_memory(Path("/no/such/place")), Unavailable)


def test_packages_are_those_that_matter() -> None:
    packages = facts.read_packages()
    assert "psutil" in packages
    assert "pytest" not in packages


def _fake_torch(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(body)
    info = folder / "torch-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    monkeypatch.syspath_prepend(str(folder))


def _ask(time_limit: float = 60.0) -> TorchFacts | Unavailable:
    return facts.gather(Unavailable("none"), dict(os.environ), time_limit=time_limit).torch


def test_a_torch_that_fails_at_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_torch(tmp_path, "raise ImportError('libcudart.so.12: cannot open')", monkeypatch)
    answer = _ask()
    assert isinstance(answer, Unavailable)
    assert answer.status is ReadStatus.ERROR
    assert "libcudart.so.12: cannot open" in answer.reason


def test_a_torch_that_crashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    _fake_torch(tmp_path, body, monkeypatch)
    answer = _ask()
    assert isinstance(answer, Unavailable)
    assert "signal 11" in answer.reason


def test_a_torch_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_torch(tmp_path, "import threading; threading.Event().wait()", monkeypatch)
    answer = _ask(time_limit=0.5)
    assert isinstance(answer, Unavailable)
    assert "longer than" in answer.reason


def test_a_torch_with_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = """
print("a banner that a plugin prints")
__version__ = "9.9+cu126"
class version:
    cuda, hip = "12.6", None
class _C:
    @staticmethod
    def _cuda_getArchFlags(): return "sm_80 sm_90"
    @staticmethod
    def _nccl_version(): return 2 << 32 | 27 << 16 | 5
"""
    _fake_torch(tmp_path, body, monkeypatch)
    answer = _ask()
    assert isinstance(answer, TorchFacts)
    assert (answer.version, answer.cuda, answer.nccl_built) == ("9.9+cu126", "12.6", "2.27.5")
    assert answer.archs == ("sm_80", "sm_90")


def test_broken_settings_do_not_break_the_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:1")
    assert isinstance(_ask(), TorchFacts)


def test_this_process_stays_without_torch() -> None:
    import subprocess

    program = (
        "import sys; from gpuprobe.api.doctor import diagnose; diagnose(); "
        "sys.exit(any(m in sys.modules for m in ('torch', 'textual', 'pycuda')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_nccl_version_numbers() -> None:
    assert facts._nccl_version(2804) == "2.8.4"
    assert facts._nccl_version(22705) == "2.27.5"

"""The pytest plugin, in real pytest processes.

One project, run three times: as it is; with baselines written, by two workers of pytest-xdist;
and after changes that its tests have to notice.
"""

from __future__ import annotations

import os
import re
import subprocess
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple

import pytest
import warm_python

pytestmark = pytest.mark.xdist_group("gpu_memory")  # so that one process shares the fixtures

TESTS = """\
import os

import pytest
import torch

kept = []
SIZE = 64  # rows


@pytest.fixture
def model():
    return torch.nn.Linear(256, 256).cuda()


@pytest.fixture(scope="module")
def shared():
    return torch.zeros(3 << 20, dtype=torch.uint8, device="cuda")


def step(model, batch=64):
    loss = model(torch.randn(batch, 256, device="cuda")).square().mean()
    loss.backward()
    return loss


def take(size):
    return torch.zeros(size, dtype=torch.uint8, device="cuda")


@pytest.mark.gpu_memory(max_peak="1 GiB", max_reserved="1 GiB", leaks=False)
def test_within(model, gpu_memory):
    assert gpu_memory.allocated == 256 * 257 * 4
    step(model)
    now = gpu_memory.peak_allocated
    assert gpu_memory.peak_reserved >= now > gpu_memory.allocated
    large = take(64 << 20)
    assert gpu_memory.peak_allocated == gpu_memory.allocated >= now
    del large
    model.zero_grad()
    assert gpu_memory.peak_allocated > gpu_memory.allocated
    assert os.environ["EXPECTED_GPU"] in torch.cuda.get_device_name()


@pytest.mark.gpu_memory(max_peak="10 MiB")
def test_above_max_peak():
    take(20 << 20)


@pytest.mark.gpu_memory(max_reserved="10 MiB")
def test_above_max_reserved():
    take(11 << 20)


@pytest.mark.gpu_memory(max_reserved="12 MiB")
def test_what_others_had_reserved_is_gone():
    take(11 << 20)


@pytest.mark.gpu_memory(leaks=False)
def test_leaks():
    kept.append(take(1 << 20))


@pytest.mark.gpu_memory(leaks=False, max_peak="1 MiB")
def test_after_a_leak():
    kept.clear()
    take(1 << 20)
    take(1 << 20)


@pytest.mark.gpu_memory(max_syncs=0)
def test_waits(model):
    step(model).item()


@pytest.mark.gpu_memory(max_syncs=1)
def test_waits_once(model):
    step(model).item()


@pytest.mark.gpu_memory(no_hazards=True)
def test_races():
    x = torch.ones(100, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        x.sum()


@pytest.mark.gpu_memory(no_hazards=True, max_syncs=0)
def test_clean(model):
    step(model)


@pytest.mark.gpu_memory(leaks=False, max_peak="1 KiB")
class TestTogether:
    def test_class_limits_hold(self):
        kept.append(take(2048))

    @pytest.mark.gpu_memory(max_peak="1 MiB")
    def test_the_nearest_goes_first(self):
        kept.append(take(2048))


def test_only_the_fixture(gpu_memory):
    take(5 << 20)
    assert gpu_memory.peak_allocated - gpu_memory.allocated == 5 << 20


def test_asked_too_late(request):
    request.getfixturevalue("gpu_memory")


@pytest.mark.gpu_memory(max_peak="1 MiB")
def test_fails_by_itself():
    take(6 << 20)
    raise RuntimeError("its own failure")


@pytest.mark.gpu_memory(max_peak=1)
def test_skips_itself():
    pytest.skip("its own reason")


@pytest.mark.xfail(strict=True)
@pytest.mark.gpu_memory(max_peak=1)
def test_expected_to_fail():
    take(512)


@pytest.mark.gpu_memory(max_peak="100 MiB", leaks=False)
def test_first_of_a_shared_fixture(shared):
    assert (shared + 1).sum().item() == 3 << 20


def test_not_marked():
    assert not torch.cuda.is_available()


@pytest.mark.gpu_memory(max_peak="1 MiB", leaks=False)
def test_second_of_a_shared_fixture(shared):
    shared.add_(1)
    take(2 << 20)
"""

BASELINES = """\
import pytest
import torch

pytestmark = pytest.mark.gpu_memory(regression="1%")
SIZE = 4096


def total(rows):
    x = torch.ones(rows, 1024, device="cuda")
    return (x * 2).sum()


@pytest.mark.parametrize("device", ["a/b", "a-b"])
def test_steady(device):
    assert total(1024 if device == "a/b" else 2048).shape == ()


def test_grows():
    total(SIZE)


def test_foreign():
    total(256)


def test_on_another_device():
    torch.zeros(SIZE, 1024, device=f"cuda:{torch.cuda.device_count() - 1}")


def test_nothing():
    torch.ones(3)
"""


class Done(NamedTuple):
    code: int
    text: str
    outcomes: dict[str, str]
    """Of each test by name, as ``-rA`` says."""

    def why(self, name: str) -> str:
        """What is told of a test that failed."""
        match = re.search(rf"_+ {re.escape(name)} _+\n(.*?)\n(?=_{{10}}|={{10}})", self.text, re.S)
        assert match is not None, (name, self.text)
        return match[1]

    @property
    def summary(self) -> str:
        _head, found, rest = self.text.partition(" GPU memory ===")
        assert found
        return rest.partition("\n=====")[0]


ROOT = Path(__file__).resolve().parents[2]
# Where gpuprobe is used from its source tree, as `make test-gpu` may, nothing loads the plugin.
INSTALLED = any(found.name == "gpuprobe" for found in entry_points(group="pytest11"))
PLUGIN = [] if INSTALLED else ["-p", "gpuprobe.pytest_plugin"]
PATH = {} if INSTALLED else {"PYTHONPATH": str(ROOT)}


def run_pytest(folder: Path, *options: str, gpu: str = "") -> Done:
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("COV_", "PYTEST_"))}
    python = warm_python.shared().python
    done = subprocess.run(
        [python, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "-v", *PLUGIN, *options],
        cwd=folder,
        env={**ours, **PATH, **warm_python.NESTED, "COLUMNS": "200", "EXPECTED_GPU": gpu},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    outcomes = {}
    for outcome, nodeid in re.findall(r"^([A-Z]+) \S+\.py::(.+?)(?: - .*)?$", done.stdout, re.M):
        outcomes[nodeid.replace("::", ".")] = outcome
    return Done(done.returncode, done.stdout + done.stderr, outcomes)


def baseline_files(project: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (project / "gpuprobe-baselines").iterdir()}


FOREIGN = b'{"schema": "of another tool"}'
FOREIGN_FILE = "test_baselines.py-test_foreign.json"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "test_memory.py").write_text(TESTS, encoding="utf-8")
    (folder / "test_baselines.py").write_text(BASELINES, encoding="utf-8")
    (folder / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\naddopts = "--strict-markers"\n'
        'asyncio_default_fixture_loop_scope = "function"\n'
        '[tool.gpuprobe]\ngpu = "a100-40gb"\n'
    )
    return folder


@pytest.fixture(scope="module")
def first(project: Path) -> Done:
    return run_pytest(project, gpu="A100")


@pytest.fixture(scope="module")
def written(first: Done, project: Path) -> Done:
    """Baselines are written by two workers; one of the files is not ours."""
    assert not (project / "gpuprobe-baselines").exists()
    (project / "gpuprobe-baselines").mkdir()
    (project / "gpuprobe-baselines" / FOREIGN_FILE).write_bytes(FOREIGN)
    options = ["--gpuprobe-update-baseline", "--gpuprobe-gpu=2xt4", "-n2", "test_baselines.py"]
    return run_pytest(project, *options)


@pytest.fixture(scope="module")
def changed(written: Done, project: Path) -> Done:
    source = project / "test_baselines.py"
    source.write_text(BASELINES.replace("SIZE = 4096", "SIZE = 4097 + 41"), encoding="utf-8")
    return run_pytest(project, "--gpuprobe-gpu=2xt4", "test_baselines.py")


def test_what_holds_passes(first: Done) -> None:
    passed = {name for name, outcome in first.outcomes.items() if outcome == "PASSED"}
    assert passed == {
        "test_within",
        "test_what_others_had_reserved_is_gone",
        "test_waits_once",
        "test_clean",
        "test_after_a_leak",
        "test_first_of_a_shared_fixture",
        "test_not_marked",
        "test_only_the_fixture",
    }, first.text
    assert first.code == 1


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("test_above_max_peak", r"peak allocated 20\.0 MiB is \+10\.0 MiB above max_peak=10\.0"),
        ("test_above_max_reserved", r"peak reserved 12\.0 MiB is \+2\.0 MiB above max_reserved=10"),
        ("test_leaks", r"1\.0 MiB are still allocated after the test \(leaks=False\)"),
        (
            "test_leaks",
            r"1\.0 MiB in 1 block from \S*\.py:\d+ in take, held by \S*kept \(a list of 1\)",
        ),
        (
            "test_waits",
            r"1 implicit synchronisation, at most 0 allowed: item at .*:7[0-9] in test_wai",
        ),
        ("test_races", r"GP201 read-after-write at .*test_memory\.py:\d+ in test_races"),
        (
            "TestTogether.test_class_limits_hold",
            r"above max_peak=1\.0 KiB\n.*2\.0 KiB are still al",
        ),
        ("TestTogether.test_the_nearest_goes_first", r"^GPU memory: 2\.0 KiB are still allocated"),
        ("test_second_of_a_shared_fixture", r"2\.0 MiB is \+1\.0 MiB above max_peak=1\.0 MiB"),
        ("test_asked_too_late", r"gpu_memory must be an argument of the test"),
        ("test_fails_by_itself", r"RuntimeError: its own failure"),
        (
            "test_grows",
            r"no baseline yet: run pytest --gpuprobe-update-baseline \(it writes gpupro",
        ),
        ("test_nothing", r"no GPU memory was allocated: gpuprobe-baselines/.* was not modified"),
    ],
)
def test_what_does_not_hold_is_told(name: str, told: str, first: Done) -> None:
    assert first.outcomes[name] == "FAILED"
    assert re.search(told, first.why(name)), first.why(name)


def test_other_outcomes_stay_what_they_are(first: Done) -> None:
    assert first.outcomes["test_expected_to_fail"] == "XFAIL"
    assert "its own reason" in first.text


def test_the_summary_has_every_measured_test(first: Done) -> None:
    rows = {line.split("::", 1)[1]: line for line in first.summary.splitlines() if "::" in line}
    assert "test_not_marked" not in rows
    assert rows["test_above_max_peak"].startswith("peak   20.0 MiB, reserved   20.0 MiB, left ")
    # Where a test fails by itself one wants to see it most.
    assert rows["test_fails_by_itself"].startswith("peak    6.0 MiB")
    assert "left    1.0 MiB" in rows["test_leaks"]


def test_baselines_are_written_by_workers(written: Done, project: Path) -> None:
    assert written.outcomes == {
        "test_steady[a/b]": "PASSED",
        "test_steady[a-b]": "PASSED",
        "test_grows": "PASSED",
        "test_foreign": "FAILED",
        "test_on_another_device": "PASSED",
        "test_nothing": "FAILED",
    }, written.text
    files = baseline_files(project)
    assert len(files) == 5
    assert files["test_baselines.py-test_grows.json"].count(b"\n") > 10
    for text in files.values():
        assert str(project).encode() not in text
    assert "GPU memory" in written.text
    assert written.summary.count("peak ") == 6
    why = written.why("test_foreign")
    assert "is not a gpuprobe baseline" in why
    assert "then run pytest --gpuprobe-update-baseline" in why
    assert "baseline update" not in why
    assert files[FOREIGN_FILE] == FOREIGN


def test_a_regression_is_told_with_its_line(changed: Done, project: Path) -> None:
    assert changed.outcomes == {
        "test_steady[a/b]": "PASSED",
        "test_steady[a-b]": "PASSED",
        "test_grows": "FAILED",
        "test_foreign": "FAILED",
        "test_on_another_device": "FAILED",
        "test_nothing": "FAILED",
    }, changed.text
    why = changed.why("test_grows")
    assert "is +336.0 KiB above the baseline (1% accepted)\n  first cause: +" in why
    assert re.search(r"test_baselines\.py:(9|10) in total", why), why
    foreign = changed.why("test_foreign")
    assert "is not a gpuprobe baseline" in foreign
    assert "then run pytest --gpuprobe-update-baseline" in foreign
    assert baseline_files(project)[FOREIGN_FILE] == FOREIGN


@pytest.mark.gpu
def test_on_cuda(tmp_path: Path) -> None:
    (tmp_path / "test_memory.py").write_text(TESTS, encoding="utf-8")
    chosen = ["within", "above_max_peak", "leaks", "waits", "waits_once", "clean"]
    done = run_pytest(tmp_path, "-k", " or ".join(f"test_{name}" for name in chosen))
    assert done.outcomes == {
        "test_within": "PASSED",
        "test_above_max_peak": "FAILED",
        "test_leaks": "FAILED",
        "test_waits": "FAILED",
        "test_waits_once": "PASSED",
        "test_clean": "PASSED",
    }, done.text
    assert re.search(
        r"peak allocated 20\.0 MiB is \+10\.0 MiB above", done.why("test_above_max_peak")
    )
    assert "1.0 MiB are still allocated" in done.why("test_leaks")
    assert "1 implicit synchronisation," in done.why("test_waits")


@pytest.mark.parametrize(
    ("text", "options", "told"),
    [
        ("max_peek=1", (), "test_one.py::test_it: gpu_memory: unknown limit max_peek"),
        ("leaks=True", ("--gpuprobe-gpu=h100-80bg",), "h100-80bg"),
    ],
)
def test_what_cannot_mean_anything_is_said_before_a_test_runs(
    text: str, options: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    (tmp_path / "test_one.py").write_text(
        f"import pytest\ndef test_a(): pass\n@pytest.mark.gpu_memory({text})\ndef test_it(): pass\n"
    )
    done = run_pytest(tmp_path, *options)
    assert done.code == pytest.ExitCode.USAGE_ERROR
    assert told in done.text
    assert "hint: " in done.text
    assert done.outcomes == {}


def test_a_worker_says_it_of_each_test(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(
        "import pytest\ndef test_a(): pass\n"
        "@pytest.mark.gpu_memory(max_peak='much')\ndef test_b(): pass\n"
        "@pytest.mark.gpu_memory(max_peak=1)\ndef test_c(): pass\n"
    )
    done = run_pytest(tmp_path, "-n1")
    assert done.outcomes == {"test_a": "PASSED", "test_b": "ERROR", "test_c": "ERROR"}, done.text
    assert done.text.count("test_b: gpu_memory: expected a size such as '2 GiB', found 'much'") >= 2
    assert "INTERNALERROR" not in done.text

"""Installed and not used, the plugin costs next to nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

# In the same process as the tests, after everything else.
CONFTEST = """\
import json
import sys


def pytest_unconfigure(config):
    plugin = config.pluginmanager.get_plugin("gpuprobe")
    found = {
        "modules": sorted(
            name for name in sys.modules if name.partition(".")[0] in ("gpuprobe", "torch", "numpy")
        ),
        "hooks": [caller.name for caller in config.pluginmanager.get_hookcallers(plugin)],
        "plugins": [name for name, _ in config.pluginmanager.list_name_plugin()],
    }
    with open("found.json", "w") as stream:
        json.dump(found, stream)
"""


def test_until_a_test_is_marked_nothing_is_imported_or_called(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_one.py").write_text("def test_it(tmp_path): pass\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "GPU memory" not in done.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["modules"] == [
        "gpuprobe",
        "gpuprobe._version",
        "gpuprobe.pytest_plugin",
        "gpuprobe.pytest_plugin.loading",
    ]
    assert "gpuprobe" in found["plugins"]
    assert "gpuprobe-tests" not in found["plugins"]
    # None of them is called once for every test.
    assert set(found["hooks"]) == {
        "pytest_addoption",
        "pytest_collection_finish",
        "pytest_configure",
        "pytest_load_initial_conftests",
        "pytest_terminal_summary",
    }

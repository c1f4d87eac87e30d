"""What a wheel has in addition to the sources: the JSON schemas and, if it is built on Linux, the
compiled runtime: who installs one needs no compiler.

Without a C compiler, and elsewhere, a wheel is pure Python, and the runtime is compiled at its
first use.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class WheelHook(BuildHookInterface):
    """Hatch calls it for each wheel."""

    PLUGIN_NAME = "custom"
    _made: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "standard":
            return  # an editable install runs from the sources
        self._made = tempfile.TemporaryDirectory()
        sys.path.insert(0, self.root)
        try:
            self._add_schemas(Path(self._made.name, "schemas"), build_data)
            self._add_runtime(Path(self._made.name), build_data)
        finally:
            sys.path.remove(self.root)

    def _add_schemas(self, folder: Path, build_data: dict[str, Any]) -> None:
        from gpuprobe.reporters.json.schemas import write_schemas

        write_schemas(folder)
        build_data["force_include"][str(folder)] = "gpuprobe/reporters/json/schemas"

    def _add_runtime(self, folder: Path, build_data: dict[str, Any]) -> None:
        from gpuprobe.errors import EnvironmentUnavailable
        from gpuprobe.native import libraries

        try:
            carried = libraries.carried_core()
        except EnvironmentUnavailable:
            return  # another system
        target = folder / carried.name
        try:
            libraries.compile_core(target)
            system = libraries.wheel_platform(target)
        except EnvironmentUnavailable as error:
            self.app.display_warning(f"a wheel without the simulated GPU's runtime: {error}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{system}"
        build_data["force_include"][str(target)] = str(carried.relative_to(self.root))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._made is not None:
            self._made.cleanup()

"""The settings of the dashboard, stored as JSON in the user's configuration folder.

A file that cannot be read or decoded is not an error: the defaults apply, and the screen reports it
once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from gpuprobe.errors import DataError
from gpuprobe.model.io.files import atomic_write, read_text
from gpuprobe.model.record import record
from gpuprobe.tui.monitor.processes import SORTS
from gpuprobe.tui.widgets.palette import PALETTES


@record(frozen=True, slots=True)
class Settings:
    """The stored settings. ``theme`` is empty for the default of the environment."""

    theme: str = ""
    sort: str = "memory"
    reverse: bool = False
    tree: bool = False
    detail: bool = True


def settings_path(environ: Mapping[str, str] = os.environ) -> Path | None:
    """``$XDG_CONFIG_HOME/gpuprobe/top.json``, by default in ``~/.config`` (XDG Base Directory
    Specification, by which a relative ``XDG_CONFIG_HOME`` is ignored). None without a home folder.
    """
    base = environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(base):  # noqa: PTH117 (it may be empty, which no Path is)
        home = environ.get("HOME", "")
        if not os.path.isabs(home):  # noqa: PTH117
            return None
        base = f"{home}/.config"
    return Path(base) / "gpuprobe" / "top.json"


def load(path: Path | None) -> tuple[Settings, str]:
    """The stored settings, and a message if they could not be loaded ("" otherwise)."""
    if path is None:
        return Settings(), ""
    try:
        raw = json.loads(read_text(path))
    except FileNotFoundError:
        return Settings(), ""
    except (OSError, ValueError, RecursionError) as error:
        return Settings(), f"settings were not loaded: {error}"
    from gpuprobe.model.io.codec import from_plain  # 4 ms, if there are stored settings

    try:
        found = from_plain(Settings, raw, "settings were not loaded")
    except DataError as error:
        return Settings(), str(error)
    # A newer version may have stored a theme or a column that this one does not have.
    theme = found.theme if found.theme in PALETTES else ""
    sort = found.sort if found.sort in SORTS else Settings().sort
    return replace(found, theme=theme, sort=sort), ""


def save(path: Path | None, settings: Settings) -> None:
    """Store the settings atomically. Raises OSError."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path, private=True) as file:
        file.write(json.dumps(asdict(settings), indent=1).encode() + b"\n")

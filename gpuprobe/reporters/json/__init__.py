"""Reports as versioned JSON documents."""

from __future__ import annotations

from typing import Any

__all__ = ["schema"]


def schema(name: str) -> dict[str, Any]:
    """A JSON Schema (draft 2020-12) as shipped in the package: ``diff-2``, ``info-2``, …"""
    import json  # 2 ms, and resources 10 ms: `gpuprobe info` needs neither
    from importlib import resources

    file = resources.files("gpuprobe.reporters.json") / "schemas" / f"{name}.json"
    loaded: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return loaded

"""The README as the page of the package: its links and pictures with whole addresses.

On the page of a package index, a relative address leads nowhere.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)")


def with_addresses(text: str, repository: str) -> str:
    """``text`` with the addresses of a repository's files, at its branch ``main``."""

    def address(match: re.Match[str]) -> str:
        kind = "raw" if match[1] else "blob"
        return f"{match[1]}[{match[2]}]({repository}/{kind}/main/{match[3]})"

    return _LINK.sub(address, text)


class ReadmeHook(MetadataHookInterface):
    """Hatch calls it for each sdist and wheel."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text("utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": with_addresses(text, metadata["urls"]["Repository"]),
        }

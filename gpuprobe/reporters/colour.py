"""Whether a stream gets colour."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TextIO


def wants_colour(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Colour goes to a terminal that is not dumb, unless NO_COLOR (https://no-color.org) is set or
    CLICOLOR is 0. Anything else gets it only with FORCE_COLOR or CLICOLOR_FORCE
    (https://bixense.com/clicolors).
    """
    if environ.get("NO_COLOR"):
        return False
    if any(environ.get(name, "0") not in ("", "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE")):
        return True
    if environ.get("CLICOLOR") == "0" or environ.get("TERM") == "dumb":
        return False
    return stream.isatty()

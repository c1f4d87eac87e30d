"""The JSON Schema of SARIF 2.1.0, as OASIS publishes it (`tests/formats/README.md`)."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema

_FILE = Path(__file__).parents[1] / "formats" / "sarif-2.1.0-rtm.5.json"

SARIF = jsonschema.Draft4Validator(
    json.loads(_FILE.read_text(encoding="utf-8")), format_checker=jsonschema.FormatChecker()
)

"""``attention.py damek`` with the versions of installed packages, which pandas requires."""

from __future__ import annotations

import importlib

importlib.import_module("attention").damek()

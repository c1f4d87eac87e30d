"""The arguments of an operator, as torch's dispatcher passes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

Args: TypeAlias = Sequence[Any]
"""Tensors, numbers, lists and others, by position: as many as the caller passed."""
Kwargs: TypeAlias = dict[str, Any]
"""Those that the caller passed by name."""

"""The answer of a rule about a group of memory."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class EditKind(Enum):
    """Changes of the program that can be made, and so tried, without its author."""

    NONE = "none"
    DETACH = "detach"  # what is stored at the line that keeps it
    DELETE = "delete"  # the variable after its last use
    MAP_LOCATION = "map_location"  # of torch.load, "cpu"
    TO_CPU = "to_cpu"  # what is stored at the line that keeps it
    COLLECT = "collect"  # gc.collect() after each step


@dataclass(frozen=True, slots=True)
class Answer:
    """The name of the rule, a sentence with the cause and its holder, and the remedy in words and
    as ``code``. ``edit``: the change that can be tried.
    """

    rule: str
    sentence: str
    remedy: str
    code: str = ""
    edit: EditKind = EditKind.NONE

    @classmethod
    def none(cls) -> Answer:
        """That the group is as it must be: no further rule is called."""
        return cls("", "", "")

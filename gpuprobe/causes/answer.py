"""The answer of a rule about a group of memory."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final


class EditKind(Enum):
    """Changes of the program that can be made, and so tried, without its author."""

    NONE = "none"
    DETACH = "detach"  # what is stored at the line that keeps it
    DELETE = "delete"  # the variable after its last use
    MAP_LOCATION = "map_location"  # of torch.load, "cpu"
    TO_CPU = "to_cpu"  # what is stored at the line that keeps it
    LIMIT_ENTRIES = "limit_entries"  # the entries, at the line that stores one
    COLLECT = "collect"  # gc.collect() after each step
    CLONE = "clone"  # what is stored at the line that keeps it
    NO_GRAD = "no_grad"  # around the line that makes it
    NO_GRAD_AT_CALL = "no_grad_at_call"  # around the function or loop that calls the model
    EXPAND = "expand"  # instead of repeat, at the line that makes it
    FOREACH = "foreach"  # False, where the optimizer is made
    RETAIN_GRAPH = "retain_graph"  # False, where the backward pass is run
    FREE_GRADIENTS = "free_gradients"  # after the optimizer's step
    SET_TO_NONE = "set_to_none"  # True, where gradients are zeroed
    LIMIT_CACHE = "limit_cache"  # where the function with the functools.cache is defined
    AUTOGRAD_GRAD = "autograd_grad"  # instead of backward(create_graph=True)
    CHUNK_SIZE = "chunk_size"  # of vmap
    ALL_USED = "all_used"  # find_unused_parameters=False, where the replica is made
    BUCKET_VIEW = "bucket_view"  # gradient_as_bucket_view=True, where the replica is made
    EVALUATE_TO_CPU = "evaluate_to_cpu"  # eval_accumulation_steps=1, of a Trainer's arguments


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


class Expected(Enum):
    """The answer that there is no cause: training needs such memory there. No further rule is
    called."""

    EXPECTED = "expected"


EXPECTED: Final = Expected.EXPECTED

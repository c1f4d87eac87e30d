"""Options of gpuprobe that stand after the script: ``gpuprobe estimate train.py --gpu h100-80gb``.

What is ours is ours wherever it stands, until ``--``; everything else after the script is the
script's. `gpuprobe run` does not do this: there, as with ``python``, all that follows belongs to
the script.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

PROJECTS_OWN = ""
"""Stands for the script where none is given and the project's own is to be run, for parsers with
the default ``projects_own=True``: ``gpuprobe check -- --epochs 1``."""


class Sorted(NamedTuple):
    """``arguments`` with our options first. ``doubtful`` are options that were taken from between
    options of the script's: they may have been meant for it.
    """

    arguments: list[str]
    doubtful: tuple[str, ...]


def sort_options(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> Sorted:
    """Move the long options that ``parser`` knows from behind the script to before it."""
    known = parser._option_string_actions  # argparse has no other way to ask
    ours: list[str] = []
    theirs: list[str] = []
    taken: list[str] = []
    at, script = 0, False
    while at < len(arguments):
        word = arguments[at]
        at += 1
        if word == "--":
            if not script and parser.get_default("projects_own"):
                theirs.append(PROJECTS_OWN)
            theirs += arguments[at:]
            return Sorted([*ours, *theirs], ())  # the user has told them apart
        name = word.partition("=")[0]
        action = known.get(name) if word.startswith("-") else None
        if not script and (word == "-m" or not word.startswith("-")):
            script = True
            theirs.append(word)
            if word == "-m":
                theirs += arguments[at : at + 1]
                at += 1
        elif action is not None and (name.startswith("--") or not script):
            if script:
                taken.append(name)
            ours.append(word)
            if action.nargs != 0 and "=" not in word:
                ours += arguments[at : at + 1]
                at += 1
        elif script:
            theirs.append(word)
        else:
            ours.append(word)  # unknown, before the script: argparse says so
    mixed = any(word.startswith("-") for word in theirs[2 if theirs[:1] == ["-m"] else 1 :])
    return Sorted([*ours, *theirs], tuple(taken) if mixed else ())

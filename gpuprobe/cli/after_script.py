"""gpuprobe's options after the script: ``gpuprobe estimate train.py --gpu h100-80gb``.

Options that gpuprobe knows are gpuprobe's, before and after the script, up to ``--``; all other
words after the script are the script's. `gpuprobe run` does not do this: as with ``python``,
everything after the script belongs to the script.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

PROJECTS_OWN = ""
"""The script if none is given: the project's own command. Only for parsers with the default
``projects_own=True``: ``gpuprobe check -- --epochs 1``."""


class Sorted(NamedTuple):
    """The ``arguments`` with gpuprobe's options first. ``ambiguous``: options that were between
    options of the script, and may be the script's.
    """

    arguments: list[str]
    ambiguous: tuple[str, ...]


def sort_options(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> Sorted:
    """Move the long options that ``parser`` knows from after the script to before it."""
    known = parser._option_string_actions  # argparse has no public list
    scripts_own = parser.get_default("scripts_own") or ()
    own: list[str] = []
    script_words: list[str] = []
    moved: list[str] = []
    at, script = 0, False
    while at < len(arguments):
        word = arguments[at]
        at += 1
        if word == "--":
            if not script and parser.get_default("projects_own"):
                script_words.append(PROJECTS_OWN)
            script_words += arguments[at:]
            return Sorted([*own, *script_words], ())  # separated by the user
        name = word.partition("=")[0]
        action = known.get(name) if word.startswith("-") else None
        if script and name in scripts_own:
            action = None
        if not script and (word == "-m" or not word.startswith("-")):
            script = True
            script_words.append(word)
            if word == "-m":
                script_words += arguments[at : at + 1]
                at += 1
        elif action is not None and (name.startswith("--") or not script):
            if script:
                moved.append(name)
            own.append(word)
            if action.nargs != 0 and "=" not in word:
                own += arguments[at : at + 1]
                at += 1
        elif script:
            script_words.append(word)
        else:
            own.append(word)  # unknown, before the script: an error of argparse
    options = script_words[2 if script_words[:1] == ["-m"] else 1 :]
    mixed = any(word.startswith("-") for word in options)
    return Sorted([*own, *script_words], tuple(moved) if mixed else ())


def before_script(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> Sequence[str]:
    """The arguments up to the script, of a command whose options come before it."""
    known = parser._option_string_actions  # argparse has no public list
    at = 0
    while at < len(arguments):
        word = arguments[at]
        action = known.get(word)
        if word in ("--", "-m") or not word.startswith("-"):
            break
        at += 2 if action is not None and action.nargs != 0 else 1
    return arguments[:at]


def misplaced_options(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str],
    source: Callable[[], str],
    code: int,
) -> list[str]:
    """The arguments of a script that are probably misplaced options of `gpuprobe run`: spelled like
    one, and either the script failed with exit code 2, as parsers of arguments do, and its
    ``source`` does not contain the option; or ``source`` does not even contain the option's name as
    a word: some parsers make options from names (click, tyro).
    """
    known = parser._option_string_actions  # argparse has no public list
    words = [word.partition("=")[0] for word in arguments if word.startswith("--")]
    suspects = [word for word in words if word in known]
    text = source() if suspects else ""

    def is_misplaced(option: str) -> bool:
        name = re.escape(option[2:]).replace(r"\-", "[-_]")
        return option not in text if code == 2 else not re.search(rf"\b{name}\b", text)

    return [option for option in dict.fromkeys(suspects) if is_misplaced(option)]

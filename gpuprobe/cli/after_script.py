"""gpuprobe's options after the script: ``gpuprobe estimate train.py --gpu h100-80gb``.

An option after the script that the script has, too, is the script's, and so are all words that
gpuprobe does not know. Other options that gpuprobe knows are gpuprobe's, up to ``--``. `gpuprobe
run` does not do this: as with ``python``, everything after the script belongs to the script.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

PROJECTS_OWN = ""
"""The script if none is given: the project's own command. Only for parsers with the default
``projects_own=True``: ``gpuprobe check -- --epochs 1``."""


class Sorted(NamedTuple):
    """The ``arguments`` with gpuprobe's options first. ``scripts``: options of both, which were
    left to the script. ``ambiguous``: options that were moved from between options of a module,
    whose text is not read, and that may be the module's.
    """

    arguments: list[str]
    scripts: tuple[str, ...]
    ambiguous: tuple[str, ...]


def sort_options(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> Sorted:
    """Move the options that ``parser`` knows, and the script does not have, from after the script
    to before it: long ones, short ones that take a value, and ``-v``.
    """
    known = parser._option_string_actions  # argparse has no public list
    scripts_own = parser.get_default("scripts_own") or ()
    own: list[str] = []
    script_words: list[str] = []
    moved: list[str] = []
    scripts: list[str] = []
    at, text = 0, _Text("")
    while at < len(arguments):
        word = arguments[at]
        at += 1
        if word == "--":
            if not script_words and parser.get_default("projects_own"):
                script_words.append(PROJECTS_OWN)
            script_words += arguments[at:]
            return Sorted([*own, *script_words], tuple(scripts), ())  # separated by the user
        name = word.partition("=")[0]
        action = known.get(name) if word.startswith("-") else None
        if script_words and name in scripts_own:
            action = None
        if not script_words and (word == "-m" or not word.startswith("-")):
            script_words.append(word)
            text = _Text(word)
            if word == "-m":
                script_words += arguments[at : at + 1]
                at += 1
        elif action is not None and (not script_words or _may_follow(name, action, text)):
            if script_words and text.has(name):
                scripts.append(name)
                script_words.append(word)
                continue
            if script_words:
                moved.append(name)
            own.append(word)
            if action.nargs != 0 and "=" not in word:
                own += arguments[at : at + 1]
                at += 1
        elif script_words:
            script_words.append(word)
        else:
            own.append(word)  # unknown, before the script: an error of argparse
    options = script_words[2 if script_words[:1] == ["-m"] else 1 :]
    mixed = script_words[:1] == ["-m"] and any(word.startswith("-") for word in options)
    return Sorted([*own, *script_words], tuple(scripts), tuple(moved) if mixed else ())


def _may_follow(name: str, action: argparse.Action, text: _Text) -> bool:
    """Whether an option after the script may be gpuprobe's: not ``-m``, nor ``-h``, and ``-v`` of
    some, which a script may have without naming them.
    """
    if name == "-v":
        return text.names_its_options
    return name.startswith("--") or (name != "-m" and action.nargs != 0)


_FROM_NAMES: Final = re.compile(
    r"\b(click|fire|HfArgumentParser|jsonargparse|simple_parsing|tyro|typer)\b"
)
"""Libraries that make options from the names of fields or parameters."""

_VERBOSE: Final = re.compile(r"\b(absl|pytest|unittest)\b")
"""Libraries whose programs have ``-v`` without naming it."""

_IMPORT: Final = re.compile(r"^\s*(?:from|import)\s+(\w[\w.]*)", re.MULTILINE)


class _Text:
    """The text of a script, and of the modules in its folder that it imports: the options may be
    declared there. It is read when it is needed, and empty for what is no Python file.
    """

    def __init__(self, script: str) -> None:
        self._script = script
        self._text: str | None = None

    def has(self, option: str) -> bool:
        """Whether the script probably has this option."""
        text = self._read()
        if re.search(rf"{re.escape(option)}(?![\w-])", text):
            return True
        name = re.escape(option[2:]).replace(r"\-", "[-_]")
        from_names = _FROM_NAMES.search(text) is not None
        return from_names and re.search(rf"\b{name}\b\s*[:=]", text) is not None

    @property
    def names_its_options(self) -> bool:
        """Whether ``-v`` is in the text if the script has it."""
        text = self._read()
        return bool(text) and not _VERBOSE.search(text) and not _FROM_NAMES.search(text)

    def _read(self) -> str:
        if self._text is None:
            self._text = self._texts()
        return self._text

    def _texts(self) -> str:
        path = Path(self._script)
        if path.suffix != ".py":
            return ""
        own = _content(path)
        imported = [path.parent / f"{name.replace('.', '/')}.py" for name in _IMPORT.findall(own)]
        return "\n".join([own, *map(_content, dict.fromkeys(imported))])


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    except OSError:
        return ""


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

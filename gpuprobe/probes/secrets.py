"""Arguments, folder and environment of a process, with its secrets replaced by ``<secret>``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from gpuprobe.model.machine.process import ProcessDetails
from gpuprobe.model.values import Unavailable
from gpuprobe.probes.host import process_details

_SECRET_NAME = re.compile(
    r"(?i)(token(?!izers)|secret|passw|passphrase|_pwd$|credential|private|api_?key|access_?key|auth|"
    r"cookie|session_?id|signature|_key$|^key$|_pat$|license)"
)

# A word before a secret: NAME=value, "name": value, --name value.
_WORD = (
    r"[\w.-]*(?:token|secret|passw(?:or)?d|passphrase|credential|api[_-]?key|access[_-]?key|"
    r"auth(?:orization)?|signature|sig)[\w-]*"
)
_PAIR = re.compile(
    rf"(?i)((?:(?<![\w.-]){_WORD}[\"']?\s*[=:]\s*|--{_WORD}\s+)(?:bearer\s+|basic\s+)?[\"']?)"
    r"([^\s&\"',;<>]+)"
)
_URL_CREDENTIALS = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*://)[^/@\s]+@")

# The forms that the services document: GitHub, GitLab, Hugging Face, OpenAI and similar, AWS,
# Google, Slack, npm, PyPI, Weights & Biases (40 hex digits), JSON web tokens.
_TOKENS = re.compile(
    r"gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{15,}|hf_[A-Za-z0-9]{16,}|"
    r"sk-[\w-]{16,}|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}|xox[abprs]-[\w-]{10,}|"
    r"npm_[A-Za-z0-9]{30,}|pypi-[\w-]{20,}|\b[0-9a-f]{40}\b|"
    r"eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
)
# Values that every machine has.
_TRIVIAL = frozenset({"true", "True", "TRUE", "false", "False", "FALSE", "none", "None", "auto"})

SECRET = "<secret>"


def details_without_secrets(pid: int, ticks: int) -> ProcessDetails:
    """The process that started at ``ticks`` (clock ticks since boot; 0 for any process with this
    id), without secrets: the values of variables such as ``HF_TOKEN`` and ``WANDB_API_KEY``
    wherever they appear, tokens of known forms, and values of options such as ``--password``.
    """
    details = process_details(pid, ticks)
    variables = () if isinstance(details.environment, Unavailable) else details.environment
    redactor = Redactor(dict(variables))
    if not isinstance(details.environment, Unavailable):
        details = replace(details, environment=redactor.environment(variables))
    if not isinstance(details.arguments, Unavailable):
        details = replace(details, arguments=redactor.arguments(details.arguments))
    return details


def is_secret_name(name: str) -> bool:
    """Whether a variable or an option of this name holds a secret."""
    return _SECRET_NAME.search(name) is not None


class Redactor:
    """Replaces secrets: those of ``environ``, a whole environment, wherever their values appear."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        values: set[str] = set()
        for name, value in environ.items():
            if is_secret_name(name):
                # Whole, and line by line: a key file may be printed with its lines indented.
                values.update((value, *value.split()))
        # Longer values first: one may be a part of another. Short ones ("1", "yes") are not secret,
        # and appear everywhere.
        long = [value for value in values if len(value) >= 4 and value not in _TRIVIAL]
        self._values = sorted(long, key=len, reverse=True)

    def text(self, text: str) -> str:
        for value in self._values:
            text = text.replace(value, SECRET)
        text = _URL_CREDENTIALS.sub(r"\1<secret>@", text)
        text = _TOKENS.sub(SECRET, text)
        return _PAIR.sub(r"\1<secret>", text)

    def environment(self, variables: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
        """Variables with their secrets replaced: the whole value if the name marks a secret."""
        return tuple(
            (name, SECRET if is_secret_name(name) and value else self.text(value))
            for name, value in variables
        )

    def arguments(self, arguments: Sequence[str]) -> tuple[str, ...]:
        """Arguments of a program without secrets, such as the one after ``--password``."""
        redacted = []
        for before, argument in zip(("", *arguments), arguments, strict=False):
            announced = before.startswith("--") and "=" not in before and is_secret_name(before)
            follows = announced and not argument.startswith("-")
            redacted.append(SECRET if follows else self.text(argument))
        return tuple(redacted)

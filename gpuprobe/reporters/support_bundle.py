"""The support bundle: one zip file for a bug report, without secrets and names.

`Redactor` removes secrets known by the names of their environment variables, wherever the values
appear; secrets known by their form (tokens of well-known services, credentials in URLs,
``--password x`` and ``key=value`` pairs); user names, home directories, host names, and IP, MAC and
mail addresses.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuprobe.errors import EnvironmentUnavailable, UsageError
from gpuprobe.model.io.files import atomic_write
from gpuprobe.model.text import visible

_README = """This bundle was made by 'gpuprobe doctor --bundle'.

  doctor.json      findings and skipped checks
  info.json        the GPUs, processes and driver
  environment.json variables that CUDA, NCCL, torch and the launchers read
  packages.json    versions of the packages that matter
  kernel.log       the NVIDIA driver's lines of the kernel log

Secrets, user names, home directories, host names and addresses were replaced by words in
angle brackets. Commands of processes were cut to the program's name. Please look through the
files before you share them.
"""

_PREFIXES = (
    "CUDA", "CUBLAS", "CUDNN", "NVIDIA_", "NCCL_", "TORCH", "PYTORCH_", "GLOO_", "TRITON_",
    "OMP_", "MKL_", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "SLURM_JOB_NUM", "SLURM_NTASKS",
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_GPUS", "OMPI_COMM_WORLD_", "UCX_", "FI_", "LD_",
    "GPUPROBE_",
)  # fmt: skip
_NAMES = frozenset(
    {"RANK", "WORLD_SIZE", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LANG", "TERM"}
)
# Every member has the same time; the time of the reading is in doctor.json.
_EPOCH = (1980, 1, 1, 0, 0, 0)


def kept_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables for the bundle, by name, with unredacted values."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name in _NAMES or name.startswith(_PREFIXES)
    }


def write(
    path: Path,
    redactor: Redactor,
    *,
    doctor: dict[str, object],
    info: dict[str, object],
    environ: Mapping[str, str],
    packages: Mapping[str, str],
    kernel_log: Iterable[str],
) -> None:
    """Write the bundle to ``path``, readable by its owner only.

    Raises UsageError if the file exists already, and EnvironmentUnavailable if it cannot be
    written.
    """
    versions = redactor.data(dict(packages), addresses=False)
    files = {
        "README.txt": _README,
        "doctor.json": _json(redactor.data(doctor)),
        "info.json": _json(redactor.data(_without_commands(info))),
        "environment.json": _json(redactor.data(kept_variables(environ))),
        "packages.json": _json(versions),
        "kernel.log": "".join(visible(redactor.text(line)) + "\n" for line in kernel_log),
    }
    try:
        with (
            atomic_write(path, replace=False, private=True) as raw,
            zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED) as out,
        ):
            for name, text in files.items():
                member = zipfile.ZipInfo(name, _EPOCH)
                member.compress_type = zipfile.ZIP_DEFLATED
                member.external_attr = 0o644 << 16
                out.writestr(member, text.encode("utf-8", "backslashreplace"))
    except FileExistsError:
        raise UsageError(
            f"{path} exists already", hint="give another name, or remove it first"
        ) from None
    except OSError as error:
        raise EnvironmentUnavailable(f"cannot write {path}: {error.strerror}") from error


def _json(data: object) -> str:
    return json.dumps(data, indent=2, allow_nan=False) + "\n"


def _without_commands(info: dict[str, object]) -> dict[str, object]:
    """``info`` with every ``command`` reduced to the program's name: arguments may be private."""

    def cut(value: object) -> object:
        if isinstance(value, list):
            return [cut(item) for item in value]
        if isinstance(value, dict):
            return {
                key: _program(item) if key == "command" else cut(item)
                for key, item in value.items()
            }
        return value

    return {key: _program(item) if key == "command" else cut(item) for key, item in info.items()}


def _program(reading: object) -> object:
    if isinstance(reading, dict) and isinstance(reading.get("value"), str):
        return {**reading, "value": _program(reading["value"])}
    if isinstance(reading, str):
        first = reading.split(None, 1)[:1]
        return first[0].rpartition("/")[2] if first else ""
    return reading


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
_HOME = re.compile(r"(/home/|/Users/|/users/|\\Users\\)([^/\\\s:;,'\"]+)")
_MAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_MAC = re.compile(r"\b[0-9a-fA-F]{2}(?:[:-][0-9a-fA-F]{2}){5}\b")
_IPV4 = re.compile(r"(?<![\d.])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)"
                   r"(?![\d.])")  # fmt: skip
_IPV6 = re.compile(
    r"(?<![\w:.])(?:(?:[0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}"
    r"|(?:[0-9a-fA-F]{1,4}:){1,6}(?::[0-9a-fA-F]{1,4}){1,6}"
    r"|(?:[0-9a-fA-F]{1,4}:){1,7}:|::(?:[0-9a-fA-F]{1,4}:){0,6}[0-9a-fA-F]{1,4})(?![\w:])"
)
# Values and accounts that every machine has identify no one.
_TRIVIAL = frozenset({"true", "True", "TRUE", "false", "False", "FALSE", "none", "None", "auto"})
_COMMON_NAMES = frozenset({"root", "nobody", "daemon", "user", "localhost", "nvidia"})


SECRET = "<secret>"


def is_secret_name(name: str) -> bool:
    """Whether a variable or field of this name holds a secret."""
    return _SECRET_NAME.search(name) is not None


class Redactor:
    """Replaces private data by words in angle brackets.

    ``environ`` is the whole environment: the values of its secrets are replaced everywhere.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        users: Iterable[str] = (),
        homes: Iterable[str] = (),
        hosts: Iterable[str] = (),
    ) -> None:
        literal: dict[str, str] = {}
        for name, value in environ.items():
            if is_secret_name(name) and value.strip():
                # Whole, and line by line: a key file may be printed with its lines indented.
                literal.update(dict.fromkeys((value, *value.split()), SECRET))
        for home in homes:
            if len(home.rstrip("/")) > 1:
                literal.setdefault(home.rstrip("/"), "<home>")
        names = dict.fromkeys(users, "<user>") | dict.fromkeys(hosts, "<host>")
        self._names = {k: v for k, v in names.items() if k and k.lower() not in _COMMON_NAMES}
        # Longer values first: a name may be a part of a path. Short values ("1", "yes") are not
        # secret, and appear everywhere.
        long = [item for item in literal.items() if len(item[0]) >= 4 and item[0] not in _TRIVIAL]
        self._literal = sorted(long, key=lambda item: -len(item[0]))
        ordered = sorted(self._names, key=len, reverse=True)
        self._name = re.compile(
            "|".join(_as_word(name) for name in ordered) or r"(?!)", re.IGNORECASE
        )
        self._lower = {name.lower(): word for name, word in self._names.items()}

    def text(self, text: str, *, addresses: bool = True) -> str:
        """``text`` without secrets and names.

        ``addresses=False`` keeps IP addresses: version numbers look like them.
        """
        text = self.secrets(text)
        text = _MAIL.sub("<mail>", text)
        text = _HOME.sub(r"\1<user>", text)
        text = self._name.sub(lambda m: self._lower.get(m.group().lower(), "<name>"), text)
        if addresses:
            text = _MAC.sub("<mac>", text)
            text = _IPV4.sub("<ip>", text)
            text = _IPV6.sub("<ip>", text)
        return text

    def secrets(self, text: str) -> str:
        """``text`` without secrets, with names and addresses."""
        for value, word in self._literal:
            text = text.replace(value, word)
        text = _URL_CREDENTIALS.sub(r"\1<secret>@", text)
        text = _TOKENS.sub(SECRET, text)
        return _PAIR.sub(r"\1<secret>", text)

    def environment(self, variables: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
        """Variables with their secrets replaced: the whole value if the name marks a secret."""
        return tuple(
            (name, SECRET if is_secret_name(name) and value else self.secrets(value))
            for name, value in variables
        )

    def arguments(self, arguments: Sequence[str]) -> tuple[str, ...]:
        """Arguments of a program without secrets, such as the one after ``--password``."""
        found = []
        for before, argument in zip(("", *arguments), arguments, strict=False):
            announced = before.startswith("--") and "=" not in before and is_secret_name(before)
            follows = announced and not argument.startswith("-")
            found.append(SECRET if follows else self.secrets(argument))
        return tuple(found)

    def data(self, value: Any, *, addresses: bool = True) -> Any:
        """Plain JSON data with every text, keys included, redacted."""
        if isinstance(value, str):
            return self.text(value, addresses=addresses)
        if isinstance(value, (list, tuple)):
            return [self.data(item, addresses=addresses) for item in value]
        if isinstance(value, dict):
            return {
                self.text(str(key), addresses=addresses): SECRET
                if isinstance(item, str) and is_secret_name(str(key))
                else self.data(item, addresses=addresses)
                for key, item in value.items()
            }
        return value


def _as_word(name: str) -> str:
    """A pattern for a name. Short names match only as whole words: "al" is in "total"."""
    escaped = re.escape(name)
    return escaped if len(name) >= 5 else rf"(?<![A-Za-z0-9]){escaped}(?![A-Za-z0-9])"

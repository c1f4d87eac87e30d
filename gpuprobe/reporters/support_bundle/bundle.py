"""The support bundle: one zip of what a maintainer asks for, safe to attach to an issue."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gpuprobe.errors import EnvironmentUnavailable, UsageError
from gpuprobe.model.io.files import atomic_write
from gpuprobe.model.text import visible
from gpuprobe.reporters.support_bundle.redact import Redactor

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
# Every member has the same time: the file says when it was taken, in doctor.json.
_EPOCH = (1980, 1, 1, 0, 0, 0)


def kept_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that belong into a bundle, by name; their values are not yet redacted."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name in _NAMES or name.startswith(_PREFIXES)
    }


def write(
    path: Path,
    redactor: Redactor,
    *,
    doctor: dict[str, Any],
    info: dict[str, Any],
    environ: Mapping[str, str],
    packages: Mapping[str, str],
    kernel_log: Iterable[str],
) -> None:
    """Write the bundle to ``path``, readable by its owner only.

    Raises UsageError where the file exists already, and EnvironmentUnavailable where it
    cannot be written.
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


def _json(data: Any) -> str:
    return json.dumps(data, indent=2, allow_nan=False) + "\n"


def _without_commands(info: dict[str, Any]) -> dict[str, Any]:
    """``info`` with every ``command`` cut to the program's name: arguments hold anything."""

    def cut(value: Any) -> Any:
        if isinstance(value, list):
            return [cut(item) for item in value]
        if isinstance(value, dict):
            return {
                key: _program(item) if key == "command" else cut(item)
                for key, item in value.items()
            }
        return value

    done: dict[str, Any] = cut(info)
    return done


def _program(reading: Any) -> Any:
    if isinstance(reading, dict) and isinstance(reading.get("value"), str):
        return {**reading, "value": _program(reading["value"])}
    if isinstance(reading, str):
        first = reading.split(None, 1)[:1]
        return first[0].rpartition("/")[2] if first else ""
    return reading

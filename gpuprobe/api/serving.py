"""Estimates of inference servers."""

from __future__ import annotations

import hashlib
import os
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpuprobe.errors import EnvironmentUnavailable, UsageError

if TYPE_CHECKING:
    from gpuprobe.catalogue.gpu_model import GpuModel
    from gpuprobe.model.plans.serving import ServingEstimate, ServingFit
    from gpuprobe.planning.commands import ServingCommand

_OLDEST: Final = (0, 8)
"""The first vLLM whose V1 engine is the default."""
_PROGRESS: Final = {
    "load_model: begins": "loading the model (dummy weights)",
    "determine_available_memory: begins": "profiling run",
    "compile_or_warm_up_model: begins": "warming up and capturing CUDA graphs",
}


def estimate_serving(
    words: Sequence[str],
    gpu: str = "h100-80gb",
    *,
    module: bool = False,
    notify: Callable[[str], None] = lambda text: None,
) -> ServingEstimate | None:
    """Estimate a vLLM server: start it on a simulated GPU with dummy weights, and stop it when
    its engine is up. ``words``: a command such as ``["vllm", "serve", "MODEL"]``; ``module``: its
    first word is the name of a module. None if the command does not start vLLM.

    Raises UsageError for a command of vLLM that starts no engine, needs more GPUs than ``gpu``
    names, several kinds of them, or data parallelism; ConfigError for an unknown GPU;
    EnvironmentUnavailable without vLLM, with one before 0.8, without a torch for CUDA, and if vLLM
    has to compile kernels without nvcc.
    """
    from gpuprobe.planning.commands import serving_command

    command = serving_command(words, module=module)
    if command is None:
        return None
    from gpuprobe.native.assembler import assembler_variables
    from gpuprobe.native.libraries import libraries_for, torch_build
    from gpuprobe.native.process import add_to_environment, settings_text
    from gpuprobe.planning.serving import launch
    from gpuprobe.planning.serving.figures import (
        graph_bytes,
        needs_compiler,
        overheads,
        serving_estimate,
    )

    gpus = _gpus(command, gpu)
    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        raise EnvironmentUnavailable("vllm is not installed", hint="pip install vllm") from None
    check_version(version)
    build = torch_build()
    if build is None:
        raise EnvironmentUnavailable("torch is not installed", hint="pip install vllm")
    constants = overheads(gpus[0], command.tensor or len(gpus), command.pipeline or 1)
    machine = [replace(one, context=(constants.context, constants.context)) for one in gpus]
    environment = dict(os.environ)
    libraries = libraries_for(build)
    settings = settings_text(machine, build, graph=graph_bytes(build.major))
    add_to_environment(environment, libraries, settings, build)
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    caches = compile_caches(version, words, gpu)
    environment |= {"VLLM_NO_USAGE_STATS": "1", **caches}
    environment |= assembler_variables(_folder(), caches, environment)
    # Forked processes share the memory of what is imported, and do not import it again. vLLM spawns
    # them in place of that if its first process uses CUDA.
    environment.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "fork")

    def start() -> ServingEstimate:
        given = dict(environment)
        with tempfile.TemporaryDirectory(prefix="gpuprobe-serving-") as name:
            folder = Path(name)
            plan = {name: getattr(constants, name) for name in ("start", "experts", "first_use")}
            launch.prepare(folder, plan, given)
            hangs = False
            try:
                events = launch.run(command.arguments(), given, folder, observed=observed)
            except launch.ServerFailed as ended:
                hangs = ended.code is None
                events = launch.all_events(folder)
            log = (folder / launch.LOG).read_text(encoding="utf-8", errors="replace")
        return serving_estimate(
            events,
            log,
            command=shlex.join(words),
            gpu=gpus[0].title if len(gpus) == 1 else f"{len(gpus)} x {gpus[0].title}",
            vllm=version,
            torch=build.version,
            capacity=gpus[0].total_memory,
            constants=constants,
            hangs=hangs,
        )

    def observed(event: Mapping[str, Any]) -> None:
        if event["stage"] in _PROGRESS:
            notify(_PROGRESS[event["stage"]])

    notify(f"starting vLLM {version} without a GPU")
    found = start()
    if not found.started and needs_compiler(found.error):
        raise EnvironmentUnavailable(
            "this vLLM compiles kernels for this GPU as it starts, and that failed: "
            + found.error.partition("\n")[0],
            hint="install NVIDIA's CUDA toolkit (nvcc), or choose another backend, such as "
            "--attention-backend TRITON_ATTN",
        )
    return with_later_start(found, start, notify)


def check_version(version: str) -> None:
    """Raise EnvironmentUnavailable for a vLLM of another architecture."""
    from gpuprobe.planning.serving.figures import TRIED, minor_version

    if minor_version(version) < _OLDEST:
        raise EnvironmentUnavailable(
            f"vLLM {version} starts its V0 engine, which is not observed; tried are {TRIED}",
            hint="pip install --upgrade vllm",
        )


def with_later_start(
    first: ServingEstimate, start: Callable[[], ServingEstimate], notify: Callable[[str], None]
) -> ServingEstimate:
    """The estimate of a ``first`` start, with the figures of a second one if it needed the most
    memory while it compiled.
    """
    if not first.compiling:
        return first
    from gpuprobe.model.plans.serving import LaterStart

    notify("starting vLLM again: the first start needed the most memory while it compiled")
    second = start()
    same = {one.name: getattr(second, one.name) for one in fields(LaterStart)}
    again = second.started and not first.started
    advice = ("a second start: it finds the code that the first one compiled",) if again else ()
    return replace(first, later=LaterStart(**same), advice=(*advice, *first.advice))


def fit_serving(
    words: Sequence[str],
    gpu: str = "h100-80gb",
    *,
    input_len: int = 0,
    output_len: int = 0,
    suggest: bool = False,
    notify: Callable[[str], None] = lambda text: None,
) -> ServingFit | None:
    """Find out how far a deployment goes, by starts of vLLM as in `estimate_serving`: the first of
    the machines in ``gpu`` (``"l4,2xh100-80gb"``) on which it comes up, with the fewest ranks; the
    longest context; how many sequences of ``input_len + output_len`` tokens there are at one time;
    and what a KV cache or weights in fp8, no CUDA graphs and smaller batches change (``suggest``).
    None if the command does not start vLLM.

    Raises what `estimate_serving` raises; UsageError for a script, whose options are its own.
    """
    from gpuprobe.catalogue.gpus import parse_spec
    from gpuprobe.planning.commands import serving_command
    from gpuprobe.planning.serving.search import search

    command = serving_command(words)
    if command is None:
        return None
    if not command.gpus:
        raise UsageError(
            "a script's vLLM cannot be searched: its options are in the script",
            hint="gpuprobe fit --gpu GPU -- vllm serve MODEL",
        )
    machines = []
    for part in gpu.split(","):
        models = parse_spec(part)
        machines.append((len(models), models[0].name))
    if command.gpus > max(count for count, _ in machines):
        _gpus(command, gpu.rpartition(",")[2])

    def start(words: Sequence[str], machine: str) -> ServingEstimate:
        notify(f"{machine}: {shlex.join(words)}")
        found = estimate_serving(words, machine)
        assert found is not None
        return found

    return search(
        start,
        words,
        command,
        machines,
        input_len=input_len,
        output_len=output_len,
        changes=suggest,
    )


def _gpus(command: ServingCommand, spec: str) -> tuple[GpuModel, ...]:
    """The GPUs that a command uses, of those that ``spec`` names; all of them for a script."""
    from gpuprobe.catalogue.gpus import parse_spec

    gpus = parse_spec(spec)
    if command.data > 1:
        raise UsageError(
            "data parallelism cannot be estimated: there is no measurement of its memory",
            hint="estimate one replica: without --data-parallel-size",
        )
    if command.gpus > len(gpus):
        raise UsageError(
            f"this command needs {command.gpus} GPUs, and --gpu names {len(gpus)}",
            hint=f"--gpu {command.gpus}x{gpus[0].name}",
        )
    used = gpus[: command.gpus] if command.gpus else gpus
    if len({one.title for one in used}) > 1:
        raise UsageError(
            "several kinds of GPUs cannot be estimated: vLLM would size the KV cache by the "
            "smallest one",
            hint="estimate the smallest one",
        )
    return used


def compile_caches(version: str, words: Sequence[str], gpu: str) -> dict[str, str]:
    """Variables with separate folders for all code that vLLM compiles: the memory of a start would
    depend on what real servers compiled before, and these would use what this one did. Inductor has
    one for each command and GPU: choices that it made for another model, or on another GPU, would
    be used as well, without the memory that they took.
    """
    from gpuprobe.native import process

    folder = _folder() / f"vllm-{version}"
    start = hashlib.sha256(repr((*words, gpu)).encode())
    for word in words:
        try:
            start.update(Path(word, "config.json").read_bytes())
        except (OSError, ValueError):  # not a model's folder
            continue
    return {
        "VLLM_CACHE_ROOT": str(folder),
        **process.compile_caches(folder),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor" / start.hexdigest()[:16]),
    }


def _folder() -> Path:
    """The folder of all that servers compile."""
    from gpuprobe.native.libraries import cache_folder, ensure_own

    folder = cache_folder().parent / "serving"
    folder.mkdir(mode=0o700, exist_ok=True)
    ensure_own(folder)
    return folder

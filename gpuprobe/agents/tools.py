"""The tools as typed functions: each one calls what the command of its name calls. The server
derives the schema of the input from the signature.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Final, Literal, NamedTuple

from gpuprobe.errors import ProgramFailed
from gpuprobe.model.plans.request import EstimateRequest, ranks_of

Notify = Callable[[str], None]
"""Reports what a tool does now, in one line."""


class Parameter(NamedTuple):
    """A parameter of a tool. ``least``: the smallest number; ``path``: a file or folder, which has
    to be in the folders that the tools may use; ``name_or_path``: such a path, if it exists, and
    otherwise a name.
    """

    text: str
    least: int | None = None
    path: bool = False
    name_or_path: bool = False


class WithFailure(ProgramFailed):
    """A program that failed, with the result up to there."""

    def __init__(self, message: str, result: object) -> None:
        super().__init__(message)
        self.result = result


Demo = Annotated[
    str | None, Parameter("a simulated fleet instead of this machine's GPUs, such as 8xh100")
]
Script = Annotated[str, Parameter("the Python script, which is executed", path=True)]
Arguments = Annotated[list[str], Parameter("the arguments of the script")]
Gpu = Annotated[str, Parameter("the GPU, such as h100-80gb, rtx-4090 or 2xa100-40gb")]
Steps = Annotated[int, Parameter("optimizer steps, after which the script is stopped", least=1)]
Compute = Annotated[
    Literal["auto", "shapes", "real"],
    Parameter(
        "shapes: compute only values of small tensors; real: all values on the CPU; auto: all "
        "while they cost seconds, then as shapes; all in a second run if the script decides by one"
    ),
]
Assume = Annotated[
    list[str],
    Parameter("values that lines read, as FILE:LINE=VALUE: true, false or a number"),
]
Conf = Annotated[
    str | None, Parameter("allocator settings, as in PYTORCH_CUDA_ALLOC_CONF of the script")
]
Rank = Annotated[
    list[int] | Literal["distinct"],
    Parameter(
        "which of several ranks, from 0: of several, the one that needs most counts; distinct: one "
        "of each group of ranks that behave alike"
    ),
]
Recording = Annotated[
    str, Parameter("a recording (directory) or a torch memory snapshot (.pickle)", path=True)
]


def info(
    notify: Notify,
    sources: Annotated[
        list[Literal["nvml", "cuda", "torch", "pycuda", "all"]],
        Parameter("what is queried; torch and pycuda create a CUDA context"),
    ] = ["nvml", "cuda"],  # noqa: B006 - the default in the schema, not modified
    demo: Demo = None,
) -> object:
    """List the GPUs of this machine with their state, memory and processes."""
    from gpuprobe.api.devices import inventory

    return inventory(sources, demo, detail="full")


def doctor(notify: Notify, demo: Demo = None) -> object:
    """Diagnose this machine's GPUs, driver, torch and settings: problems with their evidence and
    what to do, worst first.
    """
    from gpuprobe.api.doctor import diagnose

    return diagnose(demo)


def estimate(
    notify: Notify,
    script: Script,
    arguments: Arguments = [],  # noqa: B006
    gpu: Gpu = "h100-80gb",
    steps: Steps = 3,
    compute: Compute = "auto",
    assume: Assume = [],  # noqa: B006
    conf: Conf = None,
    ranks: Annotated[int, Parameter("simulate one of this many processes", least=1)] = 1,
    rank: Rank = [0],  # noqa: B006
    network: Annotated[
        float, Parameter("with ranks: GB/s of each GPU's network adapter; 0: unknown", least=0)
    ] = 0.0,
    per_node: Annotated[
        int, Parameter("with ranks: ranks on each node; 0: the number of GPUs", least=0)
    ] = 0,
) -> object:
    """Estimate whether a training script fits on a GPU, without that GPU. Executes the script for a
    few optimizer steps on a simulated GPU. Sizes are bytes.
    """
    from gpuprobe.planning.estimates import estimate_program

    request = EstimateRequest(
        script,
        tuple(arguments),
        gpu=gpu,
        steps=steps,
        compute=compute,
        conf=conf,
        assume=tuple(assume),
        ranks=ranks,
        rank=ranks_of(rank),
        network=network,
        per_node=per_node,
        suggest=True,
    )
    return estimate_program(request, notify=notify)


def estimate_model(
    notify: Notify,
    model: Annotated[
        str,
        Parameter(
            "a known model, such as llama-3.1-8b; OWNER/NAME of a model in the Hugging Face cache; "
            "or a config.json or its folder",
            name_or_path=True,
        ),
    ],
    gpu: Gpu = "h100-80gb",
    method: Annotated[
        Literal["full", "lora", "qlora"] | None,
        Parameter("train all parameters (null: this), adapters, or adapters on 4-bit layers"),
    ] = None,
    lora_rank: Annotated[int | None, Parameter("rank of the adapters; null: 16", least=1)] = None,
    lora_targets: Annotated[
        list[str] | None, Parameter("layers with adapters, such as q_proj; null: all linear layers")
    ] = None,
    optimizer: Annotated[
        Literal["adamw", "adamw-fused", "adamw-8bit", "adafactor", "sgd"] | None,
        Parameter("null: adamw"),
    ] = None,
    dtype: Annotated[
        Literal["bf16", "fp16", "fp32", "bf16-mixed"] | None,
        Parameter("of the weights; null: bf16; bf16-mixed: fp32 weights and bf16 autocast"),
    ] = None,
    batch_size: Annotated[int | None, Parameter("sequences on each GPU; null: 1", least=1)] = None,
    sequence_length: Annotated[
        int | None,
        Parameter("tokens of each sequence, or of the prompt; null: 2048 or fewer", least=1),
    ] = None,
    checkpointing: Annotated[bool | None, Parameter("recompute activations")] = None,
    attention: Annotated[
        Literal["sdpa", "eager", "flash_attention_2"] | None,
        Parameter("null: what transformers selects"),
    ] = None,
    sharding: Annotated[
        Literal["fsdp", "ddp", "zero1", "zero2", "zero3"] | None,
        Parameter("with ranks: how they share the model; null: fsdp"),
    ] = None,
    inference: Annotated[bool | None, Parameter("generate tokens; no training")] = None,
    new_tokens: Annotated[
        int | None, Parameter("with inference: tokens to generate; null: 32", least=1)
    ] = None,
    steps: Steps = 3,
    conf: Conf = None,
    ranks: Annotated[int, Parameter("simulate one of this many processes", least=1)] = 1,
) -> object:
    """Estimate whether training or running an open model fits on a GPU, from its name, without its
    weights and without the GPU. Sizes are bytes. If it does not fit, changes that help are
    estimated too.
    """
    from gpuprobe.api.models import model_script
    from gpuprobe.planning.estimates import estimate_program

    options = {
        "method": method,
        "lora_rank": lora_rank,
        "lora_targets": None if lora_targets is None else tuple(lora_targets),
        "optimizer": optimizer,
        "dtype": dtype,
        "batch_size": batch_size,
        "sequence_length": sequence_length,
        "checkpointing": checkpointing or None,
        "attention": attention,
        "sharding": sharding,
        "inference": inference or None,
        "new_tokens": new_tokens,
    }
    given = {name: value for name, value in options.items() if value is not None}
    with model_script(model, {**given, "ranks": ranks}) as written:
        request = EstimateRequest(
            written.path, gpu=gpu, steps=steps, conf=conf, ranks=ranks, suggest=True
        )
        found = estimate_program(request, alternatives=written.alternatives, notify=notify)
        return replace(found, model=written.choices)


def fit(
    notify: Notify,
    script: Script,
    arg: Annotated[
        str,
        Parameter(
            "the value to vary: an option of the script (batch_size means --batch-size), or a "
            "number assigned at its top level (BATCH_SIZE = 8)"
        ),
    ],
    arguments: Arguments = [],  # noqa: B006
    gpu: Annotated[
        str, Parameter("the GPU, or several to choose from, such as t4,l4,a100-40gb")
    ] = "h100-80gb",
    min: Annotated[int, Parameter("smallest value", least=1)] = 1,
    max: Annotated[int, Parameter("largest value", least=1)] = 65536,
    steps: Steps = 3,
    compute: Compute = "auto",
    assume: Assume = [],  # noqa: B006
    conf: Conf = None,
    ranks: Annotated[
        list[int], Parameter("simulate one of this many processes; of several, choose one")
    ] = [1],  # noqa: B006
    rank: Rank = [0],  # noqa: B006
    suggest: Annotated[
        bool, Parameter("also estimate changes to the run that save memory")
    ] = False,
) -> object:
    """Find the largest batch size, or another number, with which a script fits on a GPU. Executes
    the script about a dozen times on a simulated GPU.
    """
    from gpuprobe.planning.fit import fit_program

    request = EstimateRequest(
        script,
        tuple(arguments),
        gpu=gpu,
        steps=steps,
        compute=compute,
        conf=conf,
        assume=tuple(assume),
        rank=ranks_of(rank),
        suggest=suggest,
    )
    return fit_program(request, arg, ranks=ranks, least=min, most=max, notify=notify)


def report(
    notify: Notify,
    recording: Recording,
    device: Annotated[
        str, Parameter("whose peak is reported, such as cuda:1; empty: the highest")
    ] = "",
    top: Annotated[int, Parameter("rows per table", least=1)] = 10,
) -> object:
    """Report where the memory of a recording or torch memory snapshot went: peaks, phases,
    categories, modules, lines, causes of an out-of-memory error, and advice. Sizes are bytes.
    """
    from gpuprobe.api.recordings import load_to_report
    from gpuprobe.recording.summary import summarize

    return summarize(load_to_report(recording), top=top, device=device)


def diff(
    notify: Notify,
    before: Recording,
    after: Recording,
) -> object:
    """Compare the peaks of two recordings or torch memory snapshots: what grew, shrank or moved, by
    category, module and line. Sizes are bytes.
    """
    from gpuprobe.api.recordings import diff

    return diff(before, after)


def replay(
    notify: Notify,
    snapshot: Recording,
    what_if: Annotated[
        str | None,
        Parameter("settings to simulate, as in PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True"),
    ] = None,
    search: Annotated[
        bool, Parameter("try common settings and recommend the smallest change")
    ] = False,
    capacity: Annotated[
        int | None, Parameter("bytes available to the allocator; null: from the trace", least=1)
    ] = None,
    device: Annotated[int | None, Parameter("only this CUDA device", least=0)] = None,
) -> object:
    """Replay the allocations of a torch memory snapshot or recording exactly, and simulate other
    allocator settings. Sizes are bytes.
    """
    from gpuprobe.api.recordings import replay

    return replay(snapshot, what_if, device=device, capacity=capacity, search=search)


def hazards(
    notify: Notify,
    script: Script,
    arguments: Arguments = [],  # noqa: B006
    gpu: Annotated[
        str | None,
        Parameter("simulate this GPU, such as h100-80gb; null: CUDA, or an H100 without CUDA"),
    ] = None,
    compute: Compute = "auto",
) -> object:
    """Detect races between CUDA streams and implicit synchronisations in a script. Executes the
    whole script.
    """
    from gpuprobe.api.watch import program, run
    from gpuprobe.errors import UsageError
    from gpuprobe.recording.files import scratch_recording

    if gpu is None and compute != "auto":
        raise UsageError("compute needs gpu", hint='"gpu": "h100-80gb"')
    loaded = program(script, arguments)
    with scratch_recording() as path:
        ended = run(
            loaded,
            path,
            warn=notify,
            gpu=gpu,
            compute=compute,
            hazards=True,
        )
    found = ended.hazards
    assert found is not None  # requested above
    if found.failed:
        raise WithFailure(f"the program failed: {found.failed}", found) from ended.error
    return found


def explain(
    notify: Notify,
    script: Script,
    arguments: Arguments = [],  # noqa: B006
    gpu: Gpu = "h100-80gb",
    compute: Compute = "auto",
    max_seconds: Annotated[
        float, Parameter("the time for all runs of the script, in seconds", least=1)
    ] = 120.0,
) -> object:
    """Explain what the memory at a script's peak is for: what is not needed, its line, what holds
    it, and a fix with what it saves, as a patch where it was tried. Executes the script several
    times on a simulated GPU. Sizes are bytes.
    """
    from gpuprobe.api.explain import Subject, explain
    from gpuprobe.api.watch import program

    program(script, arguments)  # raises an error for a script that does not exist
    subject = Subject(script, arguments, gpu=gpu, compute=compute)
    return explain(subject, budget=max_seconds, notify=notify)


class Tool(NamedTuple):
    """A tool: its function, and whether it executes a script."""

    function: Callable[..., Any]
    runs_script: bool = False

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def text(self) -> str:
        """What the tool does, for the agent."""
        return " ".join((self.function.__doc__ or "").split())


TOOLS: Final = {
    tool.name: tool
    for tool in (
        Tool(info),
        Tool(doctor),
        Tool(estimate, runs_script=True),
        Tool(estimate_model),
        Tool(fit, runs_script=True),
        Tool(explain, runs_script=True),
        Tool(report),
        Tool(diff),
        Tool(replay),
        Tool(hazards, runs_script=True),
    )
}


def parameters(tool: Tool) -> dict[str, tuple[Any, Parameter]]:
    """The parameters of a tool by name, each with its type."""
    from typing import get_type_hints

    hints = get_type_hints(tool.function, include_extras=True)
    found = {}
    for name, hint in hints.items():
        for known in getattr(hint, "__metadata__", ()):
            if isinstance(known, Parameter):
                found[name] = (hint.__origin__, known)
    return found

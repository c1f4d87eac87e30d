"""Recurrent networks, which cuDNN runs as one kernel, on weights that lie in one buffer.

Source: ``aten/src/ATen/native/cudnn/RNN.cpp``, for the flat buffers of weights and of their
gradients. Under autocast CUDA casts the weights into one buffer too; here each is cast by itself,
which differs by rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.backends.cudnn.rnn

from gpuprobe.patching import Patches
from gpuprobe.torch_support.tensors import tensors_in
from gpuprobe.virtual.dispatch import refusals
from gpuprobe.virtual.generators import drawing_from
from gpuprobe.virtual.lowering.cudnn_recurrent import GATES, RecurrentCall
from gpuprobe.virtual.lowering.functions import APART, charge, notify_kernel, uncharged
from gpuprobe.virtual.machine import Machine, is_meta
from gpuprobe.virtual.torch_patches.keys import DEVICE, Kernels, below, transformed
from gpuprobe.virtual.torch_patches.parameters import as_parameters

_aten = torch.ops.aten


def install(machine: Machine, kernels: Kernels, patches: Patches) -> None:
    for name, operator in (
        ("lstm.input", _aten.lstm.input),
        ("lstm.data", _aten.lstm.data),
        ("gru.input", _aten.gru.input),
        ("gru.data", _aten.gru.data),
        ("rnn_tanh.input", _aten.rnn_tanh.input),
        ("rnn_tanh.data", _aten.rnn_tanh.data),
        ("rnn_relu.input", _aten.rnn_relu.input),
        ("rnn_relu.data", _aten.rnn_relu.data),
    ):
        kernels.add(name, _recurrent(machine, name.partition(".")[0], operator), DEVICE)
    # torch.nn.RNNBase asks these; a build for the CPU says no, one for CUDA calls cuDNN.
    patches.set(torch, "_use_cudnn_rnn_flatten_weight", lambda: True)
    patches.set(torch, "_cudnn_rnn_flatten_weight", flatten_weights)
    modes = ("RNN_RELU", "RNN_TANH", "LSTM", "GRU")  # cudnnRNNMode_t
    patches.set(torch.backends.cudnn.rnn, "get_cudnn_mode", modes.index)


def flatten_weights(weights: Sequence[Any], *_: Any, **__: Any) -> Any:
    """Move the weights into one buffer, which is returned: ``_cudnn_rnn_flatten_weight``.

    cuDNN's buffer holds the weights and biases and nothing else; in which order does not matter
    to what it takes.
    """
    first = weights[0]
    buffer = torch.zeros(sum(w.numel() for w in weights), dtype=first.dtype, device=first.device)
    for weight, part in zip(weights, _parts(buffer, weights), strict=True):
        part.copy_(weight)
        weight.set_(part)
    return buffer


def _parts(buffer: Any, like: Sequence[Any]) -> list[Any]:
    """Views of a flat buffer, in the shapes of ``like``, one after the other."""
    pieces = buffer.split([item.numel() for item in like])
    return [piece.view(item.shape) for piece, item in zip(pieces, like, strict=True)]


_STATE: Final = 24
"""Bytes of the generator of random numbers of a thread, for dropout (measured on an H200)."""

_MARGIN: Final = 0.05
"""Of the peak: of 60 random networks, 45 had the peaks of the native engine, 15 within 3.6%."""


def _recurrent(machine: Machine, kind: str, operator: Any) -> Callable[..., Any]:
    """cuDNN runs a whole recurrent network: one result, the last states, and a reserve."""

    def network(*args: Any) -> Any:
        place = machine.place_of(args[0])
        if place < 0 or machine.local.paused:
            if machine.shapes and any(map(is_meta, tensors_in(args))):
                args = as_parameters(machine, args)
            with below():
                return operator(*args)
        refusals.recurrent(machine.place_of, args)
        machine.assume(
            "cuDNN's memory of a recurrent network: its size is not documented; as measured on an "
            "H200"
        )
        machine.called.cause("recurrent networks", _MARGIN)
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            args = _cast(args, dtype)
        if transformed():
            machine.assume(APART)
            with below():
                return operator(*args)
        flat, spec = _flatten(args)
        return tuple(_Recurrent.apply(machine, place, kind, operator, spec, *flat))

    return network


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        floating = value.is_floating_point() and value.dtype is not torch.float64
        return value.to(dtype) if floating and value.is_cuda else value
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(item, dtype) for item in value)
    return value


def _flatten(args: Any) -> tuple[list[Any], Any]:
    flat: list[Any] = []
    return flat, [_spec(item, flat) for item in args]


# Not within `_flatten` and `_build`: a function that refers to itself is a cycle, and would keep
# the tensors alive until the garbage collector comes.
def _spec(value: Any, flat: list[Any]) -> Any:
    if isinstance(value, torch.Tensor):
        flat.append(value)
        return ("tensor", len(flat) - 1)
    if isinstance(value, (list, tuple)):
        return ("list", [_spec(item, flat) for item in value])
    return ("value", value)


def _build(spec: Any, flat: list[Any]) -> list[Any]:
    return [_built(item, flat) for item in spec]


def _built(item: Any, flat: list[Any]) -> Any:
    kind, value = item
    if kind == "tensor":
        return flat[value]
    if kind == "list":
        return [_built(inner, flat) for inner in value]
    return value


class _Recurrent(torch.autograd.Function):
    """The CPU's recurrent network out of sight; results and a reserve on the device."""

    @staticmethod
    def forward(
        ctx: Any, machine: Machine, place: int, kind: str, operator: Any, spec: Any, *flat: Any
    ) -> Any:
        generator = machine.generators.default[place]
        state = generator.numbers()
        with uncharged(machine), drawing_from(generator):
            results = operator(*_build(spec, list(flat)))
            results = tuple(item.clone() for item in results)
            if not torch.equal(state, generator.numbers()):
                # cuDNN has a dropout state of its own, with a seed from the generator.
                generator.advance(results[0].numel())
        call = _call(kind, operator._overloadname == "data", spec, flat)
        if call.dropout:
            gpu, key = machine.devices[place], "cudnnSetDropoutDescriptor"
            states = gpu.model.resident_threads * _STATE
            gpu.workspace((key,), states, machine.stream(place), key)
        copied = _steps_first(call, flat[0])
        device, dtype = flat[0].device, flat[0].dtype
        buffers = []
        if dtype not in torch.backends.cudnn.CUDNN_TENSOR_DTYPES:
            # nn.RNNBase.flatten_parameters leaves these alone: each call fills cuDNN's buffer.
            size = sum(flat[at].numel() for at in _weights(spec))
            buffers.append(torch.empty(size, dtype=dtype, device=device))
        charge(machine, place, *results)
        workspace = torch.empty(call.workspace(forward=True), dtype=torch.uint8, device=device)
        saved = [*flat]
        if any(ctx.needs_input_grad):
            saved.append(torch.empty(call.reserve, dtype=torch.uint8, device=device))
        del workspace, copied
        ctx.save_for_backward(*saved, *buffers, results[0])
        ctx.rest = (machine, place, operator, spec, len(flat), state, call)
        notify_kernel(machine, place, "_cudnn_rnn", flat, (results, saved[len(flat) :]))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        machine, place, operator, spec, count, state, call = ctx.rest
        saved = ctx.saved_tensors  # once: checkpointing gives each only once
        flat = saved[:count]
        with uncharged(machine), drawing_from(state), torch.enable_grad():
            inputs = [
                item.detach().requires_grad_() if item.is_floating_point() else item
                for item in flat
            ]
            wanted = [item for item in inputs if item.requires_grad]
            results = operator(*_build(spec, inputs))
            pairs = [
                (result, grad)
                for result, grad in zip(results, grads, strict=True)
                if grad is not None and result.requires_grad
            ]
            found = torch.autograd.grad(
                [result for result, _ in pairs],
                wanted,
                [grad for _, grad in pairs],
                allow_unused=True,
            )
        answers = iter(found)
        made: list[Any] = [next(answers) if item.is_floating_point() else None for item in flat]
        needed = ctx.needs_input_grad[5:]
        weights = [at for at in _weights(spec) if made[at] is not None]
        copies = [_steps_first(call, tensor) for tensor in (flat[0], grads[0])]
        for at, item in enumerate(made):
            if item is not None and at not in weights:
                charge(machine, place, item)  # those that are not needed, too
        size, device = call.workspace(forward=False), flat[0].device
        workspace = torch.empty(size, dtype=torch.uint8, device=device)
        del workspace, copies
        if any(needed[at] for at in weights):
            copied = _steps_first(call, flat[0])
            first = made[weights[0]]
            buffer = torch.zeros(
                sum(made[at].numel() for at in weights), dtype=first.dtype, device=device
            )
            for at, part in zip(weights, _parts(buffer, [made[at] for at in weights]), strict=True):
                with uncharged(machine):
                    made[at] = part.copy_(made[at])
            workspace = torch.empty(size, dtype=torch.uint8, device=device)
            del workspace, copied
        notify_kernel(machine, place, "_cudnn_rnn_backward", (grads, saved), tuple(made))
        return (
            *[None] * 5,
            *[item if need else None for item, need in zip(made, needed, strict=True)],
        )


def _weights(spec: Any) -> list[int]:
    """Where the weights are among the tensors: the last list of them."""
    lists = [value for kind, value in spec if kind == "list"]
    return [at for kind, at in lists[-1] if kind == "tensor"] if lists else []


def _call(kind: str, packed: bool, spec: Any, flat: Sequence[Any]) -> RecurrentCall:
    """``packed``: the arguments are those of packed sequences, ``aten::lstm.data`` and its like."""
    _, layers, dropout, train, both = (value for _, value in spec[4 if packed else 3 :][:5])
    given, parameters = flat[0], [flat[at] for at in _weights(spec)]
    batch_first = not packed and spec[8][1]
    if packed:
        sizes = flat[spec[1][1]]
        steps, batch = len(sizes), int(sizes[0])
    else:
        steps, batch = given.shape[1::-1] if batch_first else given.shape[:2]
    element = given.element_size()
    return RecurrentCall(
        kind=kind,
        layers=layers,
        ways=2 if both else 1,
        dropout=bool(train and dropout),
        bfloat16=given.dtype is torch.bfloat16,
        element=element,
        steps=steps,
        batch=batch,
        features=given.shape[-1],
        hidden=parameters[0].shape[0] // GATES[kind],
        out=parameters[1].shape[1],
        weights=sum(item.numel() for item in parameters if item.dim() == 2) * element,
        batch_first=batch_first,
    )


def _steps_first(call: RecurrentCall, tensor: Any) -> Any:
    """The copy of a sequence that has the batch first; None if cuDNN takes it as it is."""
    if not call.batch_first or tensor.transpose(0, 1).is_contiguous():
        return None
    return torch.empty_like(tensor)

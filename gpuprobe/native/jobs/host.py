"""Collectives over gloo of a rank that is alone: it receives what it would send itself, as the
simulated GPU's NCCL has it.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_map

from gpuprobe.native.values.arguments import Args, Kwargs
from gpuprobe.patching import Patches


def install(patches: Patches, kind: Callable[[object], str]) -> None:
    """Answer the operators of ``c10d`` for tensors of the CPU. ``kind``: the name of a reduction,
    in capitals, of what they are given for it.
    """
    library = torch.library.Library("c10d", "IMPL")
    patches.add(library._destroy)
    for name, answer in _COLLECTIVES.items():
        try:
            schema = getattr(torch.ops.c10d, name).default._schema
        except AttributeError:  # not in this torch
            continue
        names = [argument.name for argument in schema.arguments]
        with warnings.catch_warnings():  # C++ code reports the first one, allowed or not
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            library.impl(name, _kernel(answer, names, len(schema.returns), kind), "CPU")


def _kernel(
    answer: Callable[..., None], names: list[str], returns: int, kind: Callable[[object], str]
) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> object:
        from torch._C._distributed_c10d import (  # type: ignore[attr-defined]
            ProcessGroup,
            _create_work_from_future,
        )

        with _on_host(args, kwargs) as (there, named):
            given = {**dict(zip(names, there, strict=False)), **named}
            given["group"] = ProcessGroup.unbox(given["process_group"])
            if "reduce_op" in given:
                given["kind"] = kind(given["reduce_op"])
            answer(given)
        if not returns:
            return None
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(list(_flat(args[0])))
        work = _create_work_from_future(future).boxed()
        return (*args[: returns - 1], work) if returns > 1 else work

    return kernel


@contextmanager
def _on_host(args: Args, kwargs: Kwargs) -> Iterator[tuple[Args, Kwargs]]:
    """The arguments with tensors of the host: of those on the device copies, as gloo makes them,
    which are copied back.
    """
    copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def copy(value: object) -> object:
        if not isinstance(value, torch.Tensor) or not value.is_cuda:
            return value
        if id(value) not in copies:
            copies[id(value)] = value, value.cpu()
        return copies[id(value)][1]

    with torch.no_grad():
        yield tree_map(copy, args), tree_map(copy, kwargs)
        for tensor, made in copies.values():
            tensor.copy_(made)


def over_gloo(func: OpOverload, args: Args, kwargs: Kwargs) -> Callable[..., Any]:
    """What to call for a collective of tensors on the device: the answer of this module if it is
    one over gloo, whose group of one would return what it is given.
    """
    from torch._C._distributed_c10d import ProcessGroup

    call: Callable[..., Any] = func
    space, _, name = func._schema.name.partition("::")
    if space != "c10d" or name not in _COLLECTIVES:
        return call
    names = [argument.name for argument in func._schema.arguments]
    group = {**dict(zip(names, args, strict=False)), **kwargs}["process_group"]
    try:
        backend = ProcessGroup.unbox(group)._get_backend(torch.device("cuda"))
    except RuntimeError:  # it has none for the device
        return call
    if backend.name() != "gloo":
        return call
    return functools.partial(func.redispatch, torch._C.DispatchKeySet(torch._C.DispatchKey.CPU))


def _flat(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)


def _tensors(given: Kwargs, *names: str) -> object:
    """The argument that has one of these names."""
    return next(given[name] for name in names if name in given)


def _reduce(tensor: torch.Tensor, given: Kwargs) -> None:
    ranks = given["group"].size()
    if given["kind"] in ("SUM", "PREMUL_SUM"):
        tensor.mul_(ranks)
    elif given["kind"] == "PRODUCT":
        tensor.pow_(ranks)


def _all_reduce(given: Kwargs) -> None:
    for tensor in _flat(given["tensors"]):
        _reduce(tensor, given)


def _reduce_to(given: Kwargs) -> None:
    if given.get("root_rank") == given["group"].rank():
        _all_reduce(given)


def _copies(output: torch.Tensor, source: torch.Tensor) -> None:
    """N copies of ``source``, one after the other, in a tensor of which it may be a part."""
    if source.numel():
        output.view(-1, source.numel()).copy_(source.reshape(1, -1).clone())


def _all_gather(given: Kwargs) -> None:
    for output, source in zip(given["output_tensors"], given["input_tensors"], strict=False):
        for one in output:  # no outputs but on the root of a gather
            one.copy_(source.view(one.shape) if one.numel() == source.numel() else source)


def _all_gather_lists(given: Kwargs) -> None:
    for outputs in given["output_lists"]:
        for output, source in zip(outputs, given["input_list"], strict=True):
            output.copy_(source)


def _all_gather_base(given: Kwargs) -> None:
    _copies(given["output_tensor"], given["input_tensor"])


def _all_gather_tensors(given: Kwargs) -> None:
    for output, source in zip(given["outputs"], given["inputs"], strict=True):
        _copies(output, source)


def _scatter(given: Kwargs) -> None:
    for output, parts in zip(given["output_tensors"], given["input_tensors"], strict=False):
        output.copy_(parts[given["group"].rank()].view(output.shape))  # no inputs but on the root


def _scatter_sum(given: Kwargs) -> None:
    _scatter(given)
    for output in given["output_tensors"]:
        _reduce(output, given)


def _scatter_sum_of(output: torch.Tensor, source: torch.Tensor, given: Kwargs) -> None:
    if output.numel():
        own = source.reshape(-1, output.numel())[given["group"].rank()].clone()
        output.view(-1).copy_(own)
        _reduce(output, given)


def _scatter_sum_base(given: Kwargs) -> None:
    _scatter_sum_of(given["output_tensor"], given["input_tensor"], given)


def _scatter_sum_tensors(given: Kwargs) -> None:
    for output, source in zip(given["outputs"], given["inputs"], strict=True):
        _scatter_sum_of(output, source, given)


def _all_to_all(given: Kwargs) -> None:
    """Each rank sends this one as much as it receives from it: the load is assumed to be even."""
    outputs = list(_flat(_tensors(given, "output_tensors", "output")))
    inputs = list(_flat(_tensors(given, "input_tensors", "input")))
    for output, source in zip(outputs, inputs, strict=True):
        if output.numel() == source.numel():
            output.view(-1).copy_(source.reshape(-1))
        else:
            output.zero_()


def _received(given: Kwargs) -> None:
    for tensor in _flat(given["tensors"]):
        tensor.zero_()  # so that results repeat


def _nothing(given: Kwargs) -> None:
    pass


_COLLECTIVES: Final[dict[str, Callable[[Kwargs], None]]] = {
    "_allgather_base_": _all_gather_base,
    "_reduce_scatter_base_": _scatter_sum_base,
    "allgather_": _all_gather,
    "allgather_coalesced_": _all_gather_lists,
    "allgather_into_tensor_coalesced_": _all_gather_tensors,
    "allreduce_": _all_reduce,
    "allreduce_coalesced_": _all_reduce,
    "alltoall_": _all_to_all,
    "alltoall_base_": _all_to_all,
    "barrier": _nothing,
    "broadcast_": _nothing,
    "gather_": _all_gather,
    "monitored_barrier_": _nothing,
    "recv_": _received,
    "recv_any_source_": _received,
    "reduce_": _reduce_to,
    "reduce_scatter_": _scatter_sum,
    "reduce_scatter_tensor_coalesced_": _scatter_sum_tensors,
    "scatter_": _scatter,
    "send": _nothing,
}
"""What each operator leaves in its tensors, by its arguments' names. Schemas:
``torch/csrc/distributed/c10d/Ops.cpp``."""

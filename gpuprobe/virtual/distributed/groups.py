"""torch.distributed on a virtual machine: NCCL's place is taken by gloo, or by nothing at all.

With values, ``nccl`` becomes ``gloo``: the same results through host memory. Without values, or
where a cluster is only pretended (``ranks``), collectives return at once: see `pretended`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from gpuprobe.errors import NotModelled
from gpuprobe.patching import Patches
from gpuprobe.torch_support.pretended_job import Checkpoints, Reductions
from gpuprobe.torch_support.version import installed
from gpuprobe.virtual.distributed.dtensor import DistributedTensors
from gpuprobe.virtual.distributed.in_flight import InFlight
from gpuprobe.virtual.frames import where
from gpuprobe.virtual.machine import Machine, is_meta
from gpuprobe.virtual.torch_patches.keys import schemas

if TYPE_CHECKING:
    from gpuprobe.virtual.distributed.pretended import Objects

_NCCL: Final = "NCCL's own buffers (up to 1.8 GiB per communicator) are not counted"
_NO_RANK: Final = "environment variable"
"""In torch's error where RANK or its like is not set: ``_env_error`` in
``torch/distributed/rendezvous.py``."""
_KEEPS_BARRIER: Final = (2, 12)
"""The first torch that does not keep the tensor of its last barrier: pull request 178896."""
_RANKS_AT: Final = 2
_BACKEND_AT: Final = 3
_NAME_AT: Final = 5
"""Positions of the ranks, ``backend`` and the name in ``_new_process_group_helper``."""


def install(machine: Machine, patches: Patches) -> None:
    """Answer for NCCL, where this torch has torch.distributed at all."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    pretended = machine.ranks > 1
    _kernels(machine, patches)
    tensors = DistributedTensors(machine, patches)
    late: list[Any] = [tensors]
    if pretended:
        late.append(Checkpoints(patches))
    if machine.traffic is not None:
        machine.traffic.differences.install(patches)
    _meshes(late, patches)
    c10d = dist.distributed_c10d
    original = dist.init_process_group
    over_nccl: set[str] = set()  # names of groups
    InFlight(machine, over_nccl, patches)

    @functools.wraps(original)
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        for part in late:
            part.install()
        nccl = backend is None or "nccl" in str(backend).lower()
        ranks = machine.ranks
        if pretended:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            kwargs = {key: value for key, value in kwargs.items() if key in ("timeout",)}
            machine.assume(
                f"{ranks} ranks: rank {machine.rank}'s memory, without communication; the others "
                "are assumed to hold the same data"
            )
            original("fake", store=FakeStore(), rank=machine.rank, world_size=ranks, **kwargs)
            patches.add(functools.partial(_end, c10d, c10d._get_default_group()))
            if nccl:
                over_nccl.add(c10d._get_default_group().group_name)
            return
        if nccl:
            machine.assume(_NCCL)
            backend = "gloo"
        kwargs.pop("device_id", None)  # it would have NCCL connect at once
        try:
            original(backend, *args, **kwargs)
        except ValueError as error:
            if not machine.estimated or _NO_RANK not in str(error):
                raise
            raise NotModelled(
                f"{where()}: the program is one of several processes, but its rank is not set "
                f"({error})",
                hint="use --ranks N to simulate one of N processes",
            ) from None
        if nccl:
            over_nccl.add(c10d._get_default_group().group_name)

    answers = {"init_process_group": init_process_group, "is_nccl_available": lambda: True}
    patches.set_all(c10d, answers, "torch.distributed")
    helper = c10d._new_process_group_helper

    @functools.wraps(helper)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        """One group; its options and its device are a backend's of CUDA."""
        before = args[:_BACKEND_AT]
        backend = args[_BACKEND_AT] if len(args) > _BACKEND_AT else kwargs.pop("backend", None)
        rest = args[_BACKEND_AT + 1 :]
        if machine.traffic is not None:
            if args[_RANKS_AT]:
                machine.traffic.differences.groups[tuple(args[_RANKS_AT])] = None
            if str(backend).lower() == "gloo":
                machine.traffic.through_host.add(str(args[_NAME_AT]))
        kind = str(backend).lower()
        if kind == "fake" and c10d.is_initialized():  # that of the default group
            kind = "nccl" if c10d._get_default_group().group_name in over_nccl else "gloo"
        if backend is None or "nccl" in kind:
            over_nccl.add(str(args[_NAME_AT]))
            backend = "gloo"
        if pretended:
            backend = "fake"
        kwargs["device_id"] = None
        kwargs["backend_options"] = None
        return helper(*before, backend, *rest, **kwargs)

    patches.set(c10d, "_new_process_group_helper", new_group)
    barrier = _barrier(machine, c10d, over_nccl)
    patches.set_all(c10d, {"barrier": barrier}, "torch.distributed")


def _end(c10d: Any, group: Any) -> None:
    """A pretended job ends with its session, also where the program has failed before it ended the
    job itself: whoever comes next in this process may be another rank of another one.
    """
    if c10d.is_initialized() and c10d._get_default_group() is group:
        c10d.destroy_process_group()


def _barrier(machine: Machine, c10d: Any, over_nccl: set[str]) -> Callable[..., Any]:
    """``barrier`` of a group over NCCL makes a byte on the device, which the process keeps until
    the next one, in early versions, and reduces a number. Source: ``ProcessGroup::barrier`` and
    ``ProcessGroupNCCL::barrier`` in ``torch/csrc/distributed/c10d``.
    """
    original = c10d.barrier
    kept: list[Any] = []

    @functools.wraps(original)
    def barrier(
        group: Any = None, async_op: bool = False, device_ids: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if not c10d.is_initialized() or machine.closed:
            return original(group, async_op, device_ids, *args, **kwargs)
        name = getattr(group or c10d._get_default_group(), "group_name", "")
        if name not in over_nccl:
            return original(group, async_op, device_ids, *args, **kwargs)
        index = device_ids[0] if isinstance(device_ids, list) else torch.cuda.current_device()
        device = torch.device("cuda", index)
        byte = torch.empty(1, dtype=torch.uint8, device=device)
        if machine.torch < _KEEPS_BARRIER:
            kept[:] = [byte]
        number = torch.zeros(1, device=device)
        try:
            return original(group, async_op, device_ids, *args, **kwargs)
        finally:
            del byte, number

    return barrier


def _meshes(late: Sequence[Any], patches: Patches) -> None:
    """Distributed tensors lie on meshes of devices: whoever makes one has imported them."""
    from torch.distributed.device_mesh import DeviceMesh

    original: Any = DeviceMesh.__init__

    @functools.wraps(original)
    def init(self: Any, /, *args: Any, **kwargs: Any) -> None:  # of which one is called `mesh`
        for part in late:
            part.install()
        original(self, *args, **kwargs)

    patches.set(DeviceMesh, "__init__", init)


_OF_OBJECTS: Final = (
    "broadcast_object_list",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
)


def _kernels(machine: Machine, patches: Patches) -> None:
    """Collectives of tensors without values are done at once; of a pretended rank, all are."""
    from gpuprobe.virtual.distributed.pretended import Objects

    objects = None
    if machine.peers is not None:
        import torch.distributed as dist

        objects = Objects(machine.peers)
        c10d = dist.distributed_c10d
        carriers = {name: objects.carrying(getattr(c10d, name)) for name in _OF_OBJECTS}
        patches.set_all(c10d, carriers, "torch.distributed")
    if machine.ranks > 1:
        if installed() < (2, 9):
            _coalescing(patches)
        machine.reductions = Reductions(patches)
        patches.add(lambda: setattr(machine, "reductions", None))
    library = torch.library.Library("c10d", "IMPL")
    patches.add(library._destroy)
    for schema in schemas("c10d"):
        if not schema.returns:
            continue
        returns = [str(item.type) for item in schema.returns]
        if "Work" not in returns[-1]:
            continue
        name = schema.name.removeprefix("c10d::")
        if machine.ranks > 1:
            names = [argument.name for argument in schema.arguments]
            kernel = _answered(name, names, len(returns), objects, machine.reductions)
            library.impl(name, kernel, "Meta")
            with warnings.catch_warnings():  # C++ code tells of the first one, allowed or not
                warnings.filterwarnings("ignore", "Warning only once for all operators")
                library.impl(name, kernel, "CPU")
        else:
            library.impl(name, _done(len(returns)), "Meta")


def _coalescing(patches: Patches) -> None:
    """What is sent and received at once (``batch_isend_irecv``) is done already: early versions of
    torch's fake group (2.6) do not answer.
    """
    from torch.distributed import ProcessGroup

    def start(group: Any, device: Any = None) -> None:
        pass

    def end(group: Any, device: Any = None) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(None)
        return torch._C._distributed_c10d._create_work_from_future(future)

    patches.set(ProcessGroup, "_start_coalescing", start)
    patches.set(ProcessGroup, "_end_coalescing", end)


def _answered(
    name: str, names: list[str], returns: int, objects: Objects | None, reductions: Reductions
) -> Callable[..., Any]:
    """The kernel of a pretended rank. On tensors without values nothing is to be done."""
    from torch._C._distributed_c10d import ProcessGroup

    from gpuprobe.virtual.distributed.pretended import ANSWERS

    answer, done = ANSWERS[name], _done(returns)
    group_at = names.index("process_group")
    reduction_at = names.index("reduce_op") if "reduce_op" in names else None

    def kernel(*args: Any, **kwargs: Any) -> Any:
        tensors = _flat(args[:group_at])
        if not any(is_meta(tensor) for tensor in tensors):
            group = ProcessGroup.unbox(args[group_at])
            given = (*args[:group_at], *args[group_at + 1 :])
            with torch.no_grad():
                if objects is None or not objects.carry(name, group, given):
                    told = list(args)
                    if reduction_at is not None:
                        told[reduction_at] = reductions.kind(args[reduction_at])
                    answer(group, *told)
        return done(*args, **kwargs)

    return kernel


def _done(returns: int) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        results = args[: returns - 1]
        future: Any = torch.futures.Future()
        future.set_result(_flat(args[0]))
        work = torch._C._distributed_c10d._create_work_from_future(future).boxed()
        return (*results, work) if returns > 1 else work

    return kernel


def _flat(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [item for inner in value for item in _flat(inner)]
    return []

"""A CUDA device in software."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from gpuprobe.errors import MissingExtra

if TYPE_CHECKING:
    from gpuprobe.virtual.session import Session

__all__ = ["virtual_gpu"]


@contextmanager
def virtual_gpu(
    gpu: str = "h100-80gb", compute: str = "real", *, conf: str | None = None
) -> Iterator[Session]:
    """Give torch a CUDA device that exists only in software, inside this context.

    ::

        with gpuprobe.virtual_gpu("h100-80gb"):
            model = Model().cuda()
            train(model)
            print(torch.cuda.max_memory_allocated())

    ``gpu`` names an entry of the catalogue, or several: ``"2xa100-40gb"``. ``compute="real"``
    computes every value on the CPU, so losses are right; ``"shapes"`` computes none, so that a
    large model takes seconds, and a line that needs a value raises `ValueNeeded`. ``conf``:
    allocator settings, in place of ``PYTORCH_CUDA_ALLOC_CONF``.

    Raises MissingExtra without torch, ConfigError for a GPU that is not in the catalogue and for
    bad settings, UsageError inside another one. On the way out everything in torch is put back.
    """
    if find_spec("torch") is None:
        raise MissingExtra("torch", "torch", why="a virtual GPU needs it")
    from gpuprobe.virtual import session

    with session.virtual_gpu(gpu, compute, conf=conf) as found:
        yield found

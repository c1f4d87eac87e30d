"""What a virtual GPU cannot do, as one clear error, whoever met it first: a kernel of the CPU's, a
library that looks for a driver, or a fault of gpuprobe's own.

What the program does wrong stays the program's error.
"""

from __future__ import annotations

import dis
import re
from typing import Any, Final

from torch._subclasses.fake_tensor import FakeTensorMode

from gpuprobe.code_origin import PACKAGE
from gpuprobe.errors import GpuprobeError, NotModelled, ValueNeeded
from gpuprobe.patching import Patches
from gpuprobe.torch_support.callers import frames_of, place_in, place_of
from gpuprobe.virtual.frames import where
from gpuprobe.virtual.machine import Machine
from gpuprobe.virtual.unknown import hint_of

_LACKING: Final = re.compile(
    r"Could not run '(?P<op>aten::[\w.]+)' with arguments from the '(Sparse|Quantized|Nested)?"
    r"(Csr)?CPU' backend|\"(?P<kernel>\w+)\" not implemented for '(?P<dtype>\w+)'"
)
"""Kernels that the CPU has not: ``OperatorEntry::reportError`` in ``aten/src/ATen/core/dispatch``,
``AT_DISPATCH_SWITCH`` in ``aten/src/ATen/Dispatch.h``."""

_NO_VALUES: Final = re.compile(
    r"Cannot copy out of meta tensor|cannot be called on meta tensors|from the 'Meta' backend|"
    r"doesn't have storage|data is not allocated yet|Cannot access data pointer"
)
"""What torch says where it finds no values behind a tensor."""

_NO_DRIVER: Final = re.compile(
    r"\d+ active drivers \(|Torch not compiled with CUDA|not linked with support for cuda|"
    r"without ATen_cuda library|No CUDA GPUs are available|no NVIDIA driver|lib(cuda|cudart|nccl|"
    r"cudnn|cublas|nvrtc)\S*\.so|CUDA_HOME environment variable|doesn't have NCCL built in|"
    r"register_privateuse1_backend|HasPrimaryContext|hasPrimaryContext"
)
"""What libraries say that look for a driver, or for torch's own CUDA code: Triton's
``DriverConfig``, torch's hooks (``aten/src/ATen/detail/CUDAHooksInterface.h``), ``ctypes``."""

_NO_OPERATOR: Final = re.compile(
    r"'_OpNamespace' '(?P<space>\w+)' object has no attribute '(?P<op>\w+)'"
)
"""Of an operator that no library has defined: ``_OpNamespace`` in ``torch/_ops.py``."""

_OUR_FAULTS: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    RecursionError,
    TypeError,
    ValueError,
)

_REPORT: Final = "skip that line while estimating memory; please report it"


def of_kernel(func: Any, error: Exception) -> NotModelled | None:
    """The error for a kernel that a device has and the host lacks, None for all other errors."""
    found = _LACKING.search(str(error))
    if found is None:
        return None
    missing = found["op"] or f"{func} for {found['dtype']}"
    return NotModelled(
        f"{where()}: a virtual GPU cannot do this: {missing}, which has no CPU kernel in torch",
        hint=f"--compute shapes needs none, or {_REPORT}",
    )


def explained(error: BaseException) -> GpuprobeError | None:
    """What an exception that left the program comes from where that is the virtual GPU, None where
    it is the program's own.
    """
    if isinstance(error, GpuprobeError) or not isinstance(error, Exception):
        return None
    place = place_in(error)
    text = str(error).strip().partition("\n")[0]
    if _NO_VALUES.search(text):
        return ValueNeeded(
            f"{place} needs tensor values that were not computed ({text})",
            hint="compute all values (--compute real, compute='real')",
            place=place,
        )
    if found := _NO_OPERATOR.search(text):
        name = f"{found['space']}::{found['op']}"
        return NotModelled(
            f"{place}: no library that could be loaded here defines the operator {name}",
            hint=f"gpuprobe.virtual.register_operator('{name}', schema=..., results=...)",
        )
    if isinstance(error, ImportError) and error.name and _NO_DRIVER.search(text):
        return NotModelled(
            f"{place}: {error.name} cannot be imported without CUDA ({text})",
            hint=f"gpuprobe.virtual.register_operator('{error.name}.FUNCTION', results=...), for "
            "each of its functions that the program calls",
        )
    if _NO_DRIVER.search(text):
        return NotModelled(
            f"{place}: a virtual GPU cannot do this: it needs a real CUDA driver ({text})",
            hint=_REPORT,
        )
    fault = _own_fault(error)
    if fault:
        return NotModelled(
            f"{place}: a virtual GPU cannot do this: an internal error of gpuprobe at {fault} "
            f"({type(error).__name__}: {text})",
            hint=_REPORT,
        )
    return None


def unwrapped(error: GpuprobeError) -> GpuprobeError:
    """An error of gpuprobe's as it was raised in a worker of a ``DataLoader``, which sends its
    traceback as text: ``ExceptionWrapper`` in ``torch/_utils.py``.
    """
    text = str(error)
    if "\n" not in text.strip():
        return error
    message = text.strip().rpartition("\n")[2].partition(": ")[2]
    if isinstance(error, ValueNeeded):
        place = message.partition(" needs ")[0]
        return ValueNeeded(message, hint=hint_of(place), place=place)
    return type(error)(message, hint=_REPORT)


def install(machine: Machine, patches: Patches) -> None:
    """Have tracers (``torch.export``) get tensors that they can trace with."""
    from_tensor = FakeTensorMode.from_tensor

    def checked(mode: Any, tensor: Any, *args: Any, **options: Any) -> Any:
        """Where a fake CUDA tensor needs a gradient, C++ code asks CUDA for its streams, and ends
        the process where there is none.
        """
        if machine.tracing is None and tensor.requires_grad and machine.place_of(tensor) >= 0:
            from gpuprobe.virtual.compiled import tracing  # only programs that trace need it

            tracing.install(machine, patches)
        return from_tensor(mode, tensor, *args, **options)

    patches.set(FakeTensorMode, "from_tensor", checked)


def _own_fault(error: BaseException) -> str:
    """Where gpuprobe's own code failed, "" where it only passed on what torch raised, or raised
    on purpose what torch does.
    """
    last = None
    for last in frames_of(error):  # noqa: B007 - the last one
        pass
    if last is None or not isinstance(error, _OUR_FAULTS):
        return ""
    code = last.tb_frame.f_code
    if not code.co_filename.startswith(PACKAGE):
        return ""
    at = {item.offset: item.opname for item in dis.get_instructions(code)}.get(last.tb_lasti, "")
    if at.startswith(("CALL", "RAISE", "RERAISE", "PRECALL")):
        return ""
    return place_of(f"gpuprobe/{code.co_filename.removeprefix(PACKAGE)}", last.tb_lineno)

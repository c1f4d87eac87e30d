"""Host memory in lists, as numbers and as destinations; what is read of a tensor, and what not."""

from __future__ import annotations

from hazard_case import HOST, RAW, Case, case

_DEEPSPEED = "github.com/deepspeedai/DeepSpeed/pull/501"
_LISTS = "PyTorch docs, torch._foreach_copy_ and torch.stack"
_SCALAR = "aten/src/ATen/TensorIterator.h: scalar_value of a CPU scalar"
_INDEX = "aten/src/ATen/native/TensorAdvancedIndexing.cpp: indices on another device"
_VLLM = "github.com/vllm-project/vllm/pull/46278"
_EXTERNAL = "PyTorch docs, torch.cuda.ExternalStream"

_FOREACH = """
grads = [torch.ones(64, device="cuda") for _ in range(2)]
buffers = [torch.empty(64, pin_memory=True) for _ in grads]
"""
_ARRAYS = "NumPy docs, copies and views"
_SENT = """
import numpy as np
buffer = torch.zeros(8, 8).pin_memory()
array = buffer.numpy()
y = buffer.cuda(non_blocking=True)
"""
_WRITES = {
    "reshape": "np.reshape(array, -1)[0] = 1",
    "split": "np.split(array, 2)[1][:] = 1",
    "asarray": "np.asarray(array)[0] = 1",
    "stack": "np.stack([np.ones(8, dtype=np.float32)] * 8, out=array)",
    "nan_to_num": "np.nan_to_num(array, copy=False)",
    "frombuffer": "torch.frombuffer(array, dtype=torch.int32, offset=16).add_(1)",
    "apply_": "buffer.apply_(lambda value: value + 1)",
    "map_": "buffer.map_(torch.ones(8, 8), lambda one, other: one + other)",
}
_RECEIVED = """
import numpy as np
array = torch.ones(8, 8, device="cuda").to("cpu", non_blocking=True).numpy()
"""
_READS = {
    "array": "np.array(array)",
    "tensor": "torch.tensor(array)",
    "double": "np.asarray(array, dtype=np.float64)",
}
_NUMBER = "torch/csrc/autograd/python_variable_indexing.cpp: valueToTensor, copy_to"
_ONE_HOT = "aten/src/ATen/native/Onehot.cpp"
_CHECKED = "PyTorch docs, torch.linalg.inv: synchronizes that device with the CPU"
_SPARSE = "PyTorch docs, torch.sparse: a tensor of indices and a tensor of values"
_MADE = """
x = torch.ones(8, device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    y = x * 2
"""

CASES: tuple[Case, ...] = (
    case(
        "sum_read_from_the_buffer_of_its_copy",
        _DEEPSPEED,
        HOST,
        """
buffer = torch.zeros(1).pin_memory()
total = float(buffer.copy_(torch.ones(64, device="cuda").sum(), non_blocking=True))
""",
    ),
    case(
        "list_copied_back_and_read",
        _LISTS,
        HOST,
        _FOREACH
        + """
torch._foreach_copy_(buffers, grads, non_blocking=True)
total = sum(float(buffer.sum()) for buffer in buffers)
""",
    ),
    case(
        "list_copied_back_blocking",
        _LISTS,
        (),
        _FOREACH
        + """
torch._foreach_copy_(buffers, grads)
total = sum(float(buffer.sum()) for buffer in buffers)
torch._foreach_copy_(grads, buffers)
buffers[1].zero_()
""",
    ),
    case(
        "list_sent_and_refilled",
        _LISTS,
        HOST,
        _FOREACH
        + """
torch._foreach_copy_(grads, buffers, non_blocking=True)
buffers[1].zero_()
""",
    ),
    case(
        "number_in_flight_given_to_a_kernel",
        _SCALAR,
        HOST,
        """
x = torch.ones(64, device="cuda")
scale = torch.zeros((), pin_memory=True)
scale.copy_(x.sum(), non_blocking=True)
y = x * scale
""",
    ),
    case(
        "number_given_to_kernels_and_changed",
        _SCALAR,
        (),
        """
x = torch.ones(64, device="cuda")
scale = torch.zeros((), pin_memory=True)
for step in range(3):
    scale.fill_(step)
    x = x * scale
""",
    ),
    case(
        "index_on_the_host_and_changed",
        _INDEX,
        (),
        """
x = torch.ones(64, device="cuda")
rows = torch.arange(8).pin_memory()
for step in range(3):
    y = x[rows]
    rows.add_(1)
""",
    ),
    case(
        "handle_of_another_library",
        _EXTERNAL,
        RAW,
        """
theirs = cuda.ExternalStream(0x7F3A10)
theirs.wait_stream(cuda.current_stream())
x = torch.ones(64, device="cuda")
with cuda.stream(cuda.ExternalStream(0x7F3A10)):
    y = x * 2
""",
    ),
    case(
        "many_slots_each_with_its_event",
        _VLLM,
        (),
        """
cache = torch.zeros(100, 16, device="cuda")
s.wait_stream(cuda.current_stream())
done = []
with cuda.stream(s):
    for slot in cache:
        slot.fill_(1)
        done.append(s.record_event())
for slot, event in zip(cache, done):
    event.wait()  #needed
    total = slot * 2
""",
    ),
    case(
        "many_slots_and_the_event_of_the_one_before",
        _VLLM,
        RAW,
        """
cache = torch.zeros(100, 16, device="cuda")
s.wait_stream(cuda.current_stream())
done = [cuda.Event()]
with cuda.stream(s):
    for slot in cache:
        slot.fill_(1)
        done.append(s.record_event())
for slot, event in zip(cache, done):
    event.wait()
    total = slot * 2
""",
    ),
    *(
        case(f"array_written_by_{how}", _ARRAYS, HOST, _SENT + text)
        for how, text in _WRITES.items()
    ),
    *(
        case(f"array_read_by_{how}", _ARRAYS, HOST, _RECEIVED + text)
        for how, text in _READS.items()
    ),
    case(
        "views_and_shapes_of_an_array_in_flight",
        _ARRAYS,
        (),
        _RECEIVED
        + """
views = [np.reshape(array, -1), np.split(array, 2), np.asarray(array), np.transpose(array)]
shapes = np.shape(array), np.zeros_like(array), array.nbytes
""",
    ),
    case(
        "columns_of_an_array_beside_those_in_flight",
        _ARRAYS,
        (),
        """
buffer = torch.zeros(8, 8).pin_memory()
y = torch.empty(8, 4, device="cuda")
y.copy_(buffer[:, :4], non_blocking=True)
buffer.numpy()[:, 4:] = 1
""",
    ),
    *(
        case(f"no_wait_in_{name}", source, RAW, _MADE + f"    {text}\nz = y + 1")
        for name, source, text in (
            ("numbers_for_a_row", _NUMBER, "x.view(2, -1)[1] = 1.0"),
            ("one_hot", _ONE_HOT, "F.one_hot(torch.arange(3, device='cuda'), 4)"),
        )
    ),
    *(
        case(f"a_wait_in_{name}", source, (), _MADE + f"    {text}  #needed\nz = y + 1")
        for name, source, text in (
            ("a_number_for_an_element", _NUMBER, "x[3] = 1.0"),
            ("an_element_from_the_host", _NUMBER, "x[3] = torch.tensor(1.0)"),
            ("one_hot", _ONE_HOT, "F.one_hot(torch.arange(3, device='cuda'))"),
            ("a_checked_inverse", _CHECKED, "torch.linalg.inv(torch.eye(3, device='cuda'))"),
            ("allclose", "PyTorch docs, torch.allclose: a bool", "torch.allclose(x, x)"),
            ("a_search_for_zeros", _SPARSE, "x.to_sparse()"),
        )
    ),
    case(
        "values_of_a_sparse_matrix",
        _SPARSE,
        RAW,
        """
places = torch.tensor([[0, 1], [1, 0]], device="cuda")
s.wait_stream(cuda.current_stream())
with cuda.stream(s):
    values = torch.ones(2, device="cuda")
matrix = torch.sparse_coo_tensor(places, values, (2, 2), check_invariants=False)
y = matrix.to_dense()
""",
    ),
    case(
        "values_of_a_sparse_matrix_awaited",
        _SPARSE,
        (),
        """
places = torch.tensor([[0, 1], [1, 0]], device="cuda")
with cuda.stream(s):
    values = torch.ones(2, device="cuda")
cuda.current_stream().wait_stream(s)  #needed
matrix = torch.sparse_coo_tensor(places, values, (2, 2), check_invariants=False)
y = matrix.to_dense()
""",
    ),
)

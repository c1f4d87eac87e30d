"""Variants of backward passes over several streams, and of offloaded activations."""

from __future__ import annotations

from hazard_case import RAW, UAF, WAR, Case, case
from upstream_case import Bug, bug

_TESTS = "PyTorch, test/test_cuda.py: test_streaming_backwards_multiple_streams"
_URL = "https://github.com/pytorch/pytorch/blob/main/test/test_cuda.py"
_TUNE = "https://github.com/meta-pytorch/torchtune/pull/1936"
_EDGE = "https://github.com/meta-pytorch/torchtune/pull/1860"

_TIMES = """
class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor, ctx.stream = factor, cuda.current_stream()
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        assert cuda.current_stream() == ctx.stream
        return grad * ctx.factor, None
"""

_BRANCHES = (
    _TIMES
    + """
one, two, done, ambient = cuda.Stream(), cuda.Stream(), cuda.Event(), cuda.Stream()

def model(x):
    if AMBIENT:
        x0 = x.clone()
    one.wait_stream(cuda.current_stream())
    two.wait_stream(cuda.current_stream())
    with cuda.stream(one):
        if not AMBIENT:
            x0 = x.clone()
        y0 = Times.apply(x0, 2)
        done.record(cuda.current_stream())
    with cuda.stream(two):
        y1 = Times.apply(x, 3)
        two.wait_event(done)
        y = y0 + y1
    for tensor in (x0, y0):
        tensor.record_stream(one)
        tensor.record_stream(two)
    cuda.current_stream().wait_stream(two)
    y.record_stream(cuda.current_stream())
    return y

seen = []
with cuda.stream(ambient):
    x = torch.ones(5, 5, device="cuda", requires_grad=True)
    x.register_hook(lambda grad: seen.append(cuda.current_stream()))
    for _ in range(ITERATIONS):
        loss = model(x).sum()
        if APART:
            gradient = torch.autograd.grad((loss,), (x,))[0]
        else:
            loss.backward()
cuda.current_stream().wait_stream(ambient)
assert seen[0] == (ambient if AMBIENT else one)
result = (gradient if APART else x.grad) * 2
"""
)


def _branches() -> tuple[Case, ...]:
    found = []
    for ambient in (True, False):
        for apart, iterations in ((True, 1), (False, 1), (False, 5)):
            text = _BRANCHES.replace("AMBIENT", str(ambient)).replace("APART", str(apart))
            name = "ambient" if ambient else "branch"
            how = "apart" if apart else f"accumulated_{iterations}_times"
            text = text.replace("ITERATIONS", str(iterations))
            found.append(case(f"branches_{how}_first_used_on_the_{name}", _TESTS, (), text))
    return tuple(found)


CASES: tuple[Case, ...] = (
    *_branches(),
    case(
        "three_branches_meet_in_one_leaf",
        _TESTS,
        (),
        _TIMES
        + """
streams = [cuda.Stream() for _ in range(3)]
main = cuda.current_stream()
x = torch.ones(8, 8, device="cuda", requires_grad=True)
parts = []
for at, stream in enumerate(streams):
    stream.wait_stream(main)
    with cuda.stream(stream):
        parts.append(Times.apply(x, at + 1))
for stream in streams:
    main.wait_stream(stream)
torch.stack(parts).sum().backward()
x.grad.add_(1)
""",
    ),
    case(
        "an_intermediate_read_by_two_streams_is_summed_on_its_own",
        _TESTS,
        (),
        _TIMES
        + """
one, two, main = cuda.Stream(), cuda.Stream(), cuda.current_stream()
x = torch.ones(8, 8, device="cuda", requires_grad=True)
h = Times.apply(x, 2)
one.wait_stream(main)
two.wait_stream(main)
with cuda.stream(one):
    a = Times.apply(h, 3)
with cuda.stream(two):
    b = Times.apply(h, 4)
main.wait_stream(one)
main.wait_stream(two)
(a + b).sum().backward()
y = x.grad * 2
""",
    ),
    case(
        "one_leaf_used_twice_on_a_branch_and_once_outside",
        _TESTS,
        (),
        """
main = cuda.current_stream()
w = torch.ones(8, 8, device="cuda", requires_grad=True)
x = torch.ones(8, 8, device="cuda")
s.wait_stream(main)
a = x @ w
with cuda.stream(s):
    b = (x * w) @ w
main.wait_stream(s)
for _ in range(3):
    (a + b).sum().backward(retain_graph=True)
    w.grad.mul_(0.5)
""",
    ),
)

BUGS: tuple[Bug, ...] = (
    bug(
        "gradient_of_branches_read_on_a_third_stream",
        _URL,
        RAW,
        _TIMES
        + """
one, two, third, main = cuda.Stream(), cuda.Stream(), cuda.Stream(), cuda.current_stream()
x = torch.ones(8, 8, device="cuda", requires_grad=True)
one.wait_stream(main)
two.wait_stream(main)
third.wait_stream(main)
with cuda.stream(one):
    a = Times.apply(x, 2)
with cuda.stream(two):
    b = Times.apply(x, 3)
main.wait_stream(one)
main.wait_stream(two)
(a + b).sum().backward()  #1
third.wait_stream(main)  #fix
with cuda.stream(third):
    y = x.grad * 2  #2
""",
    ),
    bug(
        "function_leaves_its_gradient_on_a_stream_of_its_own",
        _URL,
        RAW,
        """
own = cuda.Stream()

class Aside(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        own.wait_stream(cuda.current_stream())
        grad.record_stream(own)
        with cuda.stream(own):
            result = grad * 2  #1
        cuda.current_stream().wait_stream(own)  #fix
        result.record_stream(cuda.current_stream())
        return result

x = torch.ones(8, 8, device="cuda", requires_grad=True)
Aside.apply(x * 3).sum().backward()  #2
cuda.synchronize()
""",
    ),
    bug(
        "gradient_zeroed_beside_the_backward_pass",
        _URL,
        WAR,
        """
main = cuda.current_stream()
x = torch.ones(8, 8, device="cuda", requires_grad=True)
s.wait_stream(main)
(x * 2).sum().backward()
y = x.grad + 1  #1
s.wait_stream(main)  #fix
with cuda.stream(s):
    x.grad.zero_()  #2
main.wait_stream(s)
""",
    ),
    bug(
        "hook_copies_a_gradient_aside",
        _URL,
        RAW,
        """
comm = cuda.Stream()
bucket = torch.zeros(8, 8, device="cuda")
x = torch.ones(8, 8, device="cuda", requires_grad=True)
comm.wait_stream(cuda.current_stream())

def hook(grad):
    comm.wait_stream(cuda.current_stream())  #fix
    grad.record_stream(comm)
    with cuda.stream(comm):
        bucket.copy_(grad)  #2
    return grad

h = x * 2
h.register_hook(hook)
h.sin().sum().backward()  #1
cuda.current_stream().wait_stream(comm)
""",
    ),
    bug(
        "gradients_apart_read_where_nothing_waited",
        _URL,
        RAW,
        _TIMES.replace("ctx.factor, None", "ctx.factor, None  #1")
        + """
main, side = cuda.current_stream(), cuda.Stream()
with cuda.stream(side):
    x = torch.ones(8, 8, device="cuda", requires_grad=True)
    loss = Times.apply(x, 2).sum()
    gradient, = torch.autograd.grad(loss, x)
main.wait_stream(side)  #fix
gradient.record_stream(main)
y = gradient * 2  #2
""",
    ),
    bug(
        "backward_reads_a_scale_written_on_another_stream",
        _URL,
        RAW,
        """
side, main = cuda.Stream(), cuda.current_stream()
scale = torch.ones(8, 8, device="cuda")
side.wait_stream(main)

class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * scale  #2

x = torch.ones(8, 8, device="cuda", requires_grad=True)
loss = Scaled.apply(x).sum()
with cuda.stream(side):
    scale.mul_(3)  #1
main.wait_stream(side)  #fix
loss.backward()
""",
    ),
)

# -- activations that wait on the host for their backward pass

_OFFLOAD = """
transfer, compute = cuda.Stream(), cuda.default_stream()
waiting, used = {}, {}

class Offloaded(torch.autograd.graph.saved_tensors_hooks):
    def __init__(self):
        self.held, self.node = [], None
        super().__init__(self.pack, self.unpack)

    def pack(self, tensor):
        if tensor.numel() < 64:
            return tensor
        transfer.wait_stream(compute)
        with cuda.stream(transfer):
            kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            kept.copy_(tensor, non_blocking=True)
        self.held.append(tensor)
        return kept

    def unpack(self, kept):
        if kept.numel() < 64:
            return kept
        node, key = torch._C._current_autograd_node(), id(kept)
        earlier = []
        if node is not self.node:
            self.node, earlier = node, [at for at in waiting if at in used]
        with cuda.stream(transfer):
            back = kept.to("cuda", non_blocking=True)  #2
        compute.wait_stream(transfer)
        waiting[key] = back
        count = torch._C._storage_Use_Count(back.untyped_storage()._cdata)

        def done(gradients, inputs):
            if COUNTED torch._C._storage_Use_Count(waiting[key].untyped_storage()._cdata) > count:
                waiting.pop(key).record_stream(compute)
            else:
                used[key] = compute.record_event()
            for at in earlier:
                transfer.wait_event(used.pop(at))
                del waiting[at]

        node.register_hook(done)
        return back
"""

_STEP = """
hooks = Offloaded()
with hooks:
    x = torch.ones(64, 64, device="cuda", requires_grad=True)
    h = x
    for _ in range(4):
        h = LAYER
hooks.held.clear()
compute.wait_stream(transfer)
h.sum().backward()  #1
cuda.synchronize()
"""

_SAVED = """
class Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(torch.ones_like(x) * 2)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        gradient, = ctx.saved_tensors
        return VIEW
"""


def _offloading(name: str, url: str, view: str, layer: str) -> Bug:
    """Functions whose backward returns what was saved, as those with fused losses do."""
    offload = _OFFLOAD.replace(
        "            if COUNTED torch._C._storage_Use_Count(waiting[key].untyped_storage()._cdata)"
        " > count:\n                waiting.pop(key).record_stream(compute)\n            else:\n",
        "            views = torch._C._storage_Use_Count(waiting[key].untyped_storage()._cdata)\n"
        "            if views > count:  #fix\n"
        "                waiting.pop(key).record_stream(compute)  #fix\n"
        "            else:  #fix\n"
        "                used[key] = compute.record_event()  #fix\n"
        "            if True:  #bug\n",
    ).replace(
        "            if True:  #bug\n                used[key] = compute.record_event()\n",
        "            used[key] = compute.record_event()  #bug\n",
    )
    text = offload + _SAVED.replace("VIEW", view) + _STEP.replace("LAYER", layer)
    return bug(name, url, UAF, text)


BUGS += (
    _offloading(
        "offloaded_gradient_is_returned",
        _TUNE,
        "gradient[:]",
        "Kept.apply(torch.sin(h) * 2)",
    ),
    _offloading(
        "offloaded_gradient_is_returned_transposed",
        _TUNE,
        "gradient.t()",
        "Kept.apply(h.sin().cos())",
    ),
    _offloading(
        "offloaded_gradient_is_returned_as_a_view",
        _EDGE,
        "gradient.view(-1).view(64, 64)",
        "Kept.apply(torch.tanh(h).exp() * 0.5)",
    ),
)

_DIRECT = """
transfer, main = cuda.Stream(), cuda.current_stream()

class Reloaded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, host):
        ctx.host = host
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        with cuda.stream(transfer):
            back = ctx.host.to("cuda", non_blocking=True)  #2
        main.wait_stream(transfer)
        RESULT

hosts = [torch.ones(64, 64).pin_memory() for _ in range(4)]
x = torch.ones(64, 64, device="cuda", requires_grad=True)
h = x
for host in hosts:
    h = Reloaded.apply(h, host).cos()
h.sum().backward()
cuda.synchronize()
"""

BUGS += (
    bug(
        "reloaded_activation_freed_behind_its_node",
        _TUNE,
        UAF,
        _DIRECT.replace(
            "RESULT",
            "back.record_stream(main)  #fix\n        return grad * back, None  #1",
        ),
    ),
    bug(
        "reloaded_activation_waited_for_too_early",
        _TUNE,
        UAF,
        _DIRECT.replace(
            "RESULT",
            "early = main.record_event()\n        result = grad * back  #1\n"
            "        transfer.wait_event(early)  #bug\n"
            "        transfer.wait_stream(main)  #fix\n        return result, None",
        ),
    ),
)

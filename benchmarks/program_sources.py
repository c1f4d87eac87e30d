"""Random programs as source text, for `unchanged_programs.py`: what users write around tensors.

`source(seed)` returns the text of a module with a function ``main``. It runs with ``torch``,
``nn``, ``F``, ``checkpoint``, ``random``, ``warnings``, ``sys`` and ``threading`` available, the
device ``D``, and three functions of the driver: ``note(*values)`` records what the program can
observe of them, ``ref(thing)`` notes when it ends, ``size()`` is how many elements the next tensor
has.
"""

from __future__ import annotations

import random
import textwrap
from collections.abc import Callable, Iterator

__all__ = ["PARTS", "source"]

PARTS: dict[str, str] = {
    "deletes": """
def {f}():
    x = torch.full(({n},), 2.0, device=D)
    ref(x)
    y = x * 3
    {del}
    z = torch.zeros({n}, device=D)
    note("deleted", y, z)
    return y
{keep}{f}()
""",
    "closure": """
def {f}():
    x = torch.rand({n}, device=D)
    ref(x)
    def use():
        return x + 1
    def free():
        nonlocal x
        del x
    y = use()
    {both}
    z = y.new_ones({n})
    note("closure", y.sum(), z)
    return use
{keep}{f}()
""",
    "generator": """
def {f}(n):
    for i in range(n):
        x = torch.full(({n},), float(i), device=D)
        ref(x)
        y = x.exp()
        {del}
        try:
            yield y
        finally:
            note("generator ends", i)
{r} = {f}(3)
for {v} in {r}:
    note({v})
    {stop}
del {v}
{close}
""",
    "error of torch": """
def {f}():
    a = torch.rand(4, {n}, device=D)
    ref(a)
    try:
        a.t() @ torch.ones({n} + 1, 3, device=D)
    except RuntimeError as error:
        b = torch.zeros({n}, device=D)
        note(error, sys.getrefcount(a))
        {keep_error}
    c = torch.zeros({n}, device=D)
    note(c)
{keep}{f}()
""",
    "error of its own": """
def {f}(depth):
    x = torch.rand({n}, device=D)
    ref(x)
    if depth:
        {f}(depth - 1)
    raise ValueError("depth", depth)
try:
    try:
        {f}(2)
    except ValueError as error:
        note(error)
        raise KeyError("second") {cause}
except KeyError as error:
    note(error, error.__context__, error.__cause__)
    {keep_error}
""",
    "error in backward": """
class {c}(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2
    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        y = grad * x
        ref(y)
        raise RuntimeError("in backward")
def {f}():
    x = torch.rand({n}, device=D, requires_grad=True)
    y = ({c}.apply(x * 3) + 1).sum()
    try:
        y.backward({retain})
    except RuntimeError as error:
        note(error, x.grad)
        {keep_error}
    torch.zeros({n}, device=D)
{f}()
""",
    "loop": """
x = torch.ones({n}, device=D)
for i in range(3):
    ref(x)
    x = {loop}
    note(i, x)
""",
    "comprehension": """
{v} = [a * i for i in range(3) for a in [torch.ones({n}, device=D)] if ref(a) is None]
note(*{v})
{d} = {{str(i): t + 1 for i, t in enumerate({v})}}
note(sum(t.sum() for t in {d}.values()))
{delv}
""",
    "hooks": """
def {f}():
    x = torch.rand({n}, device=D, requires_grad=True)
    y = x * 2
    seen = []
    def hook(grad):
        note("hook", grad, sys.getrefcount(grad))
        {hook}
    handle = y.register_hook(hook)
    {post}
    z = (y * y + y).sum()
    z.backward()
    note(x.grad)
    {remove}
    return seen
{keep}{f}()
""",
    "accumulates": """
def {f}():
    w = torch.rand({n}, device=D, requires_grad=True)
    for i in range(3):
        loss = {loss}
        before = w.grad
        loss.backward()
        note("same" if before is w.grad else "other", w.grad)
        note(before)
        {zero}
    del loss
    return w
{keep}{f}()
""",
    "stolen": """
def {f}():
    w = torch.rand({n}, device=D, requires_grad=True)
    got = []
    class {c}(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()
        @staticmethod
        def backward(ctx, grad):
            new = grad * 2
            {keep_grad}
            got.append(new.data_ptr())
            return new
    {c}.apply(w).sum().backward()
    note(w.grad, "stolen" if w.grad.data_ptr() == got[0] else "copied")
    {c}.apply(w).sum().backward()
    note(w.grad, "stolen" if w.grad.data_ptr() == got[1] else "copied")
    {c}.apply(w * 1).sum().backward()
    note(w.grad)
{f}()
""",
    "views": """
def {f}():
    base = torch.zeros(4, {n}, device=D{grad})
    x = base * 1
    v = x[1:3]
    v.{inplace}
    x[:, 0].mul_(2)
    note(x, v, v._base is x, x._version, v._version)
    if x.requires_grad:
        x.sum().backward()
        note(base.grad, type(v.grad_fn).__name__)
    ref(x)
    del x, base
    w = torch.ones(4, {n}, device=D)
    note(v)
    return w
{keep}{f}()
""",
    "custom function": """
class {c}(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, flag):
        ctx.save_for_backward(x, y)
        ctx.flag = flag
        {mark}
        return x * y, x.view(-1)
    @staticmethod
    def backward(ctx, first, second):
        x, y = ctx.saved_tensors
        note("needs", ctx.needs_input_grad)
        g = first * y
        ref(g)
        return g + second.view_as(x), first * x if ctx.needs_input_grad[1] else None, None
def {f}():
    x = torch.rand(2, {n}, device=D, requires_grad=True)
    y = torch.rand(2, {n}, device=D, requires_grad={flag})
    a, b = {c}.apply(x, y, True)
    ({terms}).backward()
    note(x.grad, y.grad, a.detach())
{f}()
""",
    "modes": """
def {f}():
    w = torch.rand({n}, {n}, device=D, requires_grad=True)
    with {mode}:
        y = w @ w
        ref(y)
        note(y, y.requires_grad, torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    del y
    z = (w @ w).relu()
    note(z.sum(), type(z.grad_fn).__name__)
{f}()
""",
    "checkpoint": """
def {f}():
    lin = nn.Linear(8, 8, device=D)
    drop = nn.Dropout(0.5)
    def run(x):
        h = lin(x)
        ref(h)
        return drop(h).relu()
    x = torch.rand({n}, 8, device=D, requires_grad=True)
    y = checkpoint(run, x, use_reentrant={flag}{preserve})
    y = checkpoint(run, y, use_reentrant={flag})
    y.sum().backward()
    note(x.grad, lin.weight.grad, torch.rand(2), torch.rand(2, device=D))
{keep}{f}()
""",
    "random": """
note(random.random(), torch.rand(3), torch.rand(3, device=D), torch.randperm(5))
with torch.random.fork_rng():
    torch.manual_seed({n})
    note(torch.randn(4, device=D))
{v} = F.dropout(torch.ones({n}, device=D), 0.3)
note({v}, torch.get_rng_state().sum())
""",
    "prints": """
print("program", {n}, printable(torch.ones(2, device=D)))
warnings.warn("of the program {n}", {category})
print("to stderr", file=sys.stderr)
warnings.warn("again", RuntimeWarning, stacklevel=2)
""",
    "trains": """
def {f}():
    model = nn.Sequential(nn.Linear(6, {n}), nn.{act}(), nn.Dropout(0.2), nn.Linear({n}, 3)).to(D)
    opt = torch.optim.{opt}(model.parameters(), lr=0.1)
    for step in range(2):
        x = torch.rand(5, 6, device=D)
        ref(x)
        loss = F.cross_entropy(model(x), torch.tensor([0, 1, 2, 1, 0], device=D))
        opt.zero_grad(set_to_none={flag})
        loss.backward()
        {clip}
        opt.step()
        note(loss.detach())
        {between}
    note(*model.parameters(), *(p.grad for p in model.parameters()))
    note(sorted(vars(model)), len(model._forward_hooks), sys.getrefcount(model[0].weight))
    return opt.state_dict()
{keep}{f}()
""",
    "module hooks": """
def {f}():
    model = nn.Sequential(nn.Linear(4, {n}), nn.ReLU()).to(D)
    def pre(module, args):
        note("pre", type(module).__name__, *args)
    def post(module, args, output):
        note("post", sys.getrefcount(output))
        {hook_out}
    handles = [model[0].register_forward_pre_hook(pre), model[1].register_forward_hook(post)]
    {full}
    x = torch.rand(3, 4, device=D, requires_grad=True)
    y = model(x)
    y.sum().backward()
    note(x.grad)
    for handle in handles:
        handle.remove()
    twin = copy.deepcopy(model)
    note(*twin.parameters(), list(twin.state_dict()))
{f}()
""",
    "module raises": """
class {c}(nn.Module):
    def forward(self, x):
        y = x * 2
        ref(y)
        if self.training:
            raise ArithmeticError("training")
        return y + torch.ones({n} + 1, device=D)
def {f}():
    m = nn.Sequential({c}(), nn.Identity())
    for training in (True, False):
        m.train(training)
        try:
            m(torch.ones({n}, device=D))
        except (ArithmeticError, RuntimeError) as error:
            note(error)
            torch.zeros({n}, device=D)
            {keep_error}
        torch.zeros({n}, device=D)
{keep}{f}()
""",
    "function mode": """
class {c}({mode_class}):
    def {mode_name}(self, func, types, args=(), kwargs=None):
        note("mode", getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {{}}))
def {f}():
    w = torch.rand({n}, device=D, requires_grad=True)
    with {c}():
        y = (w * 2 + 1).sum()
        {in_mode}
    w.grad = None
    (w * 3).sum().backward()
    note(w.grad)
{f}()
""",
    "subclass": """
class {c}(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        note("function", getattr(func, "__name__", "?"))
        return super().__torch_function__(func, types, args, kwargs or {{}})
def {f}():
    x = torch.rand({n}, device=D).as_subclass({c})
    y = x * 2
    note(type(y).__name__)
    y[0] = 1
    ref(y)
    del y
    return x.sum()
{keep}{f}()
""",
    "saved tensors": """
def {f}():
    w = torch.rand({n}, device=D, requires_grad=True)
    def pack(t):
        note("pack", t.shape, sys.getrefcount(t))
        return {pack}
    def unpack(t):
        note("unpack")
        return t
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = (w.exp() * w).sum()
    y.backward()
    note(w.grad)
{f}()
""",
    "locals": """
def {f}():
    x = torch.rand({n}, device=D)
    ref(x)
    seen = locals(){copied}
    y = x + 1
    del x
    note(sorted(seen), sorted(locals()))
    z = torch.zeros({n}, device=D)
    {del_seen}
    torch.zeros({n}, device=D)
{f}()
""",
    "counts": """
def {f}():
    x = torch.rand({n}, device=D)
    held = [x, x]
    y = x.view(-1)
    note(sys.getrefcount(x), sys.getrefcount(y), x._use_count(), y.untyped_storage()._use_count())
    y += 1
    note(sys.getrefcount(x), x._use_count(), x.untyped_storage()._use_count())
    z = x.detach()
    del held
    note(sys.getrefcount(x), z._use_count(), z.untyped_storage()._use_count())
{f}()
""",
    "storage": """
def {f}():
    x = torch.rand({n}, device=D)
    y = x[1:]
    ref(x)
    {storage}
    note(x.untyped_storage().nbytes())
    z = torch.zeros({n}, device=D)
    note(z)
{keep}{f}()
""",
    "ends": """
class {c}:
    def __init__(self):
        self.x = torch.rand({n}, device=D)
    def __del__(self):
        note("ended", self.x.sum())
def {f}():
    one = {c}()
    y = one.x * 2
    {cycle}
    del one
    z = torch.zeros({n}, device=D)
    gc.collect()
    note(y, z)
{f}()
""",
    "thread": """
def {f}():
    def work(x):
        y = x * 2
        ref(y)
        {in_thread}
        results.append(y.sum())
    results = []
    thread = threading.Thread(target=work, args=(torch.rand({n}, device=D, requires_grad=True),))
    thread.start()
    thread.join()
    note(*results)
{f}()
""",
    "loader": """
def {f}():
    data = torch.utils.data.TensorDataset(torch.arange(12.0).view(6, 2), torch.arange(6))
    for x, y in torch.utils.data.DataLoader(data, batch_size=2, shuffle={flag}):
        x = x.to(D)
        ref(x)
        note(x, y)
{f}()
""",
    "branches meet": """
def {f}():
    w = torch.rand({n}, device=D, requires_grad=True)
    y = w * 2
    z = {meet}
    z.sum().backward({retain})
    note(w.grad)
    del y, z
    grads = torch.autograd.grad((w * w).sum(), w, create_graph={flag})
    note(grads[0], grads[0].requires_grad)
{f}()
""",
    "grad of grad": """
def {f}():
    w = torch.rand({n}, device=D, requires_grad=True)
    (g,) = torch.autograd.grad((w ** 3).sum(), w, create_graph=True)
    g.pow(2).sum().backward()
    note(w.grad)
    note(torch.func.grad(lambda t: (t * t).sum())(w.detach()))
    note(torch.func.vmap(lambda t: t * 2)(w.detach().view(1, -1)))
{f}()
""",
    "streams": """
def {f}():
    side = torch.cuda.Stream()
    x = torch.rand({n}, device=D)
    ref(x)
    {wait}
    with torch.cuda.stream(side):
        y = x * 2
        z = torch.rand({n}, device=D)
    {record}
    del x
    w = torch.zeros({n}, device=D)
    note(w, y)
    done = torch.cuda.Event()
    done.record(side)
    done.synchronize()
    return z
{keep}{f}()
""",
}
"""The parts of which programs are made, by what is in them. Names in braces are filled in."""

_CHOICES: dict[str, tuple[str, ...]] = {
    "del": ("del x", "pass", "x = None", "x = y[:1]", "x = torch.ones(3, device=D)"),
    "both": ("free(); del use", "free(); use = None", "pass"),
    "stop": ("break", "pass", "if {v} is not None: continue"),
    "close": ("{r}.close()", "del {r}", "pass"),
    "keep_error": ("pass", "kept.append(error)", "held = error", "error.__traceback__ = None"),
    "cause": ("", "from error", "from None"),
    "retain": ("", "retain_graph=True"),
    "loop": ("x * 2", "torch.cat([x, x[:1]])", "x.clone().add_(1)", "torch.rand_like(x)"),
    "delv": ("del {v}", "del {d}", "{v}.clear()", "pass"),
    "hook": ("return None", "seen.append(grad)", "return grad * 2", "ref(grad)"),
    "post": (
        "pass",
        "y.retain_grad()",
        'x.register_post_accumulate_grad_hook(lambda p: note("accumulated", p.grad))',
        "x.register_hook(lambda g: g + 1)",
    ),
    "remove": ("handle.remove()", "pass"),
    "loss": ("(w * 2).sum()", "w.sum()", "(w * w).mean()", "(w[1:] + w[:-1]).sum()", "w.dot(w)"),
    "zero": ("pass", "w.grad = None", "w.grad.zero_()", "w.grad = w.grad.clone()"),
    "keep_grad": ("pass", "got.insert(9, new)" * 0 + "{c}.last = new", "ref(new)", "del grad"),
    "grad": ("", ", requires_grad=True"),
    "inplace": ("add_(1)", "copy_(torch.ones(2, 1, device=D))", "fill_(3)", "mul_(2).add_(1)"),
    "mark": ("pass", "ctx.mark_non_differentiable()", "ctx.set_materialize_grads(True)"),
    "flag": ("True", "False"),
    "terms": ("a.sum() + b.sum()", "a.sum()", "(a.view(-1) * b).sum()"),
    "mode": (
        "torch.no_grad()",
        "torch.enable_grad()",
        "torch.inference_mode()",
        "torch.autograd.set_grad_enabled(False)",
        "torch.autocast(torch.device(D).type, torch.bfloat16)",
    ),
    "preserve": ("", ", preserve_rng_state=False"),
    "category": ("UserWarning", "DeprecationWarning", "FutureWarning"),
    "act": ("ReLU", "GELU", "Tanh"),
    "opt": ("SGD", "Adam", "AdamW"),
    "clip": ("pass", "nn.utils.clip_grad_norm_(model.parameters(), 0.1)"),
    "between": ("pass", "del loss", "del x, loss", "loss2 = loss + 1"),
    "hook_out": ("return None", "return output + 1", "ref(output)"),
    "full": (
        "pass",
        'handles.append(model[0].register_full_backward_hook(lambda m, i, o: note("full", *o)))',
        'handles.append(model.register_full_backward_pre_hook(lambda m, o: note("pre", *o)))',
    ),
    "mode_class": ("TorchFunctionMode", "TorchDispatchMode"),
    "in_mode": ("y.backward()", "pass", "y.backward(); (w + 1).sum().backward()"),
    "pack": ("t", "t.clone()", "t.cpu()" * 0 + "t.detach()"),
    "copied": ("", ".copy()"),
    "del_seen": ("del seen", "seen.clear()", "pass"),
    "storage": (
        "x.untyped_storage().resize_(0)",
        "x.resize_(0)",
        "x.data = torch.empty(0, device=D)",
        "x.set_()",
        "x = y.clone(); del y",
    ),
    "cycle": ("pass", "one.me = one"),
    "in_thread": ("pass", "y.sum().backward()", "x.grad = torch.ones_like(x)"),
    "meet": ("y * y + y * 3", "y + y.exp() + y.sin()", "torch.cat([y, y])", "y[1:] * y[:-1]"),
    "wait": ("side.wait_stream(torch.cuda.current_stream())", "pass"),
    "record": ("x.record_stream(side)", "torch.cuda.current_stream().wait_stream(side)", "pass"),
    "keep": ("", "held = ", "kept[len(kept):] = [", ""),
}

_INDENT = "    "


def source(seed: int, *, streams: bool) -> str:
    """The program of a seed; ``streams``: with parts that need CUDA streams."""
    choose = random.Random(seed)
    parts = [name for name in PARTS if streams or name != "streams"]
    lines: list[str] = []
    for number in range(choose.randint(1, 2)):
        text = _filled(choose.choice(parts), number, choose)
        lines += _placed(text, number, choose)
    body = textwrap.indent("\n".join(lines), _INDENT)
    return f"kept = []\ndef main():\n{body}\n    return kept\n"


def _filled(part: str, number: int, choose: random.Random) -> str:
    names = {key: f"{key}{number}" for key in ("f", "v", "r", "d", "c")}
    names["n"] = str(choose.choice((3, 7, 200, 3000)))
    text = PARTS[part].strip("\n")
    if "mode_name" in text:
        names["mode_class"] = choose.choice(_CHOICES["mode_class"])
        function = names["mode_class"] == "TorchFunctionMode"
        names["mode_name"] = "__torch_function__" if function else "__torch_dispatch__"
    for key, options in _CHOICES.items():
        if key not in names and f"{{{key}}}" in text:
            names[key] = choose.choice(options).format_map(names)
    kept = names.get("keep", "").endswith("[")
    lines = text.split("\n")
    if kept:
        lines = [line + "]" if line.startswith("{keep}") else line for line in lines]
    return "\n".join(lines).format_map(names)


def _placed(text: str, number: int, choose: random.Random) -> Iterator[str]:
    """A part as it is, in a function, in a loop, in a ``try``, under ``no_grad``."""
    wrappers: tuple[Callable[[str], str], ...] = (
        lambda t: t,
        lambda t: t,
        lambda t: f"def part{number}():\n{textwrap.indent(t, _INDENT)}\npart{number}()",
        lambda t: f"for turn{number} in range(2):\n{textwrap.indent(t, _INDENT)}",
        lambda t: f"try:\n{textwrap.indent(t, _INDENT)}\nfinally:\n    note('finally')",
        lambda t: f"with Block({number}):\n{textwrap.indent(t, _INDENT)}",
    )
    yield from choose.choice(wrappers)(text).split("\n")

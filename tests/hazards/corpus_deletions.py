"""Memory that a function lets go of while another stream reads it: deleted names, names used
again, closures, generators, arguments, views. Each with a look-alike that is correct.
"""

from __future__ import annotations

from hazard_case import RAW, UAF, Case, case

__all__ = ["CASES"]

_REC = "PyTorch docs, Tensor.record_stream"
_OWN = "c10/cuda/CUDACachingAllocator.cpp: a block is free for its stream once nothing refers to it"
_DATA = "docs.python.org, Data model: when objects end is CPython's reference counting"
_STORAGE = "PyTorch docs, torch.Tensor.resize_: the storage is not made smaller"

CASES: tuple[Case, ...] = (
    case(
        "del_in_function",
        _REC,
        UAF,
        """
def step():
    x = torch.ones(100000, device="cuda")
    s.wait_stream(cuda.current_stream())
    with cuda.stream(s):
        y = x * 2
    del x
    z = torch.zeros(100000, device="cuda")
    return y, z
kept = step()
""",
    ),
    case(
        "del_in_function_recorded",
        _REC,
        (),
        """
def step():
    x = torch.ones(100000, device="cuda")
    s.wait_stream(cuda.current_stream())  #needed
    with cuda.stream(s):
        y = x * 2
    x.record_stream(s)  #needed
    del x
    z = torch.zeros(100000, device="cuda")
    return y, z
kept = step()
""",
    ),
    case(
        "del_in_function_after_a_race",
        _OWN,
        (*RAW, *UAF),
        """
def step():
    x = torch.ones(100000, device="cuda")
    with cuda.stream(s):
        y = x * 2
    del x
    z = torch.zeros(100000, device="cuda")
    return y, z
kept = step()
""",
    ),
    case(
        "race_alone_where_the_name_is_kept",
        _OWN,
        RAW,
        """
def step():
    x = torch.ones(100000, device="cuda")
    with cuda.stream(s):
        y = x * 2
    z = torch.zeros(100000, device="cuda")
    return x, y, z
kept = step()
""",
    ),
    case(
        "two_races_then_two_deletions",
        _OWN,
        (*RAW, *UAF),
        """
def step():
    a = torch.ones(100000, device="cuda")
    b = torch.ones(300000, device="cuda")
    with cuda.stream(s):
        y = a * 2
        w = b * 2
    del b
    z = torch.zeros(300000, device="cuda")
    return a, y, w, z
kept = step()
""",
    ),
    case(
        "deletions_after_waiting",
        _OWN,
        (),
        """
def step():
    a = torch.ones(100000, device="cuda")
    b = torch.ones(300000, device="cuda")
    s.wait_stream(cuda.current_stream())  #needed
    with cuda.stream(s):
        y = a * 2
        w = b * 2
    cuda.current_stream().wait_stream(s)  #needed
    del a, b
    z = torch.zeros(300000, device="cuda")
    return y, w, z
kept = step()
""",
    ),
    case(
        "name_used_again_in_a_loop",
        _DATA,
        UAF,
        """
def run():
    outs = []
    for i in range(3):
        x = torch.full((100000,), float(i), device="cuda")
        s.wait_stream(cuda.current_stream())
        with cuda.stream(s):
            outs.append(x * 2)
    return outs
kept = run()
""",
    ),
    case(
        "name_used_again_in_a_loop_recorded",
        _DATA,
        (),
        """
def run():
    outs = []
    for i in range(3):
        x = torch.full((100000,), float(i), device="cuda")
        s.wait_stream(cuda.current_stream())  #needed
        with cuda.stream(s):
            outs.append(x * 2)
        x.record_stream(s)  #needed
    return outs
kept = run()
""",
    ),
    case(
        "del_at_the_end_of_a_loop",
        _DATA,
        UAF,
        """
def run():
    outs = []
    for i in range(2):
        x = torch.full((100000,), float(i), device="cuda")
        s.wait_stream(cuda.current_stream())
        with cuda.stream(s):
            outs.append(x * 2)
        del x
    return outs
kept = run()
""",
    ),
    case(
        "all_of_a_loop_kept",
        _DATA,
        (),
        """
def run():
    outs, inputs = [], []
    for i in range(3):
        x = torch.full((100000,), float(i), device="cuda")
        s.wait_stream(cuda.current_stream())  #needed
        with cuda.stream(s):
            outs.append(x * 2)
        inputs.append(x)  #needed
    cuda.current_stream().wait_stream(s)
    return outs
kept = run()
""",
    ),
    case(
        "nonlocal_deleted_by_an_inner_function",
        _DATA,
        UAF,
        """
def step():
    x = torch.ones(100000, device="cuda")
    def free():
        nonlocal x
        del x
    s.wait_stream(cuda.current_stream())
    with cuda.stream(s):
        y = x * 2
    free()
    z = torch.zeros(100000, device="cuda")
    return y, z
kept = step()
""",
    ),
    case(
        "nonlocal_replaced_after_waiting",
        _DATA,
        (),
        """
def step():
    x = torch.ones(100000, device="cuda")
    def free():
        nonlocal x
        x = None
    s.wait_stream(cuda.current_stream())  #needed
    with cuda.stream(s):
        y = x * 2
    cuda.current_stream().wait_stream(s)  #needed
    free()
    z = torch.zeros(100000, device="cuda")
    return y, z
kept = step()
""",
    ),
    case(
        "closure_ends_with_its_function",
        _DATA,
        (*RAW, *UAF),
        """
def reader():
    x = torch.ones(100000, device="cuda")
    def read():
        with cuda.stream(s):
            return x * 2
    return read
def step():
    read = reader()
    y = read()
    del read
    z = torch.zeros(100000, device="cuda")
    return y, z
kept = step()
""",
    ),
    case(
        "closure_is_kept",
        _DATA,
        (),
        """
def reader():
    x = torch.ones(100000, device="cuda")
    s.wait_stream(cuda.current_stream())  #needed
    def read():
        with cuda.stream(s):
            return x * 2
    return read
def step():
    read = reader()
    y = read()
    z = torch.zeros(100000, device="cuda")
    return read, y, z
kept = step()
""",
    ),
    case(
        "del_in_finally",
        _DATA,
        UAF,
        """
def step():
    x = torch.ones(100000, device="cuda")
    try:
        s.wait_stream(cuda.current_stream())
        with cuda.stream(s):
            y = x * 2
    finally:
        del x
    return y, torch.zeros(100000, device="cuda")
kept = step()
""",
    ),
    case(
        "wait_in_finally",
        _DATA,
        (),
        """
def step():
    x = torch.ones(100000, device="cuda")
    try:
        s.wait_stream(cuda.current_stream())  #needed
        with cuda.stream(s):
            y = x * 2
    finally:
        cuda.current_stream().wait_stream(s)  #needed
        del x
    return y, torch.zeros(100000, device="cuda")
kept = step()
""",
    ),
    case(
        "exception_lets_go_of_the_frame",
        _DATA,
        (*RAW, *UAF),
        """
def fails():
    x = torch.ones(100000, device="cuda")
    with cuda.stream(s):
        outs.append(x * 2)
    raise ValueError("half way")
outs = []
def step():
    try:
        fails()
    except ValueError:
        pass
    return torch.zeros(100000, device="cuda")
kept = step()
""",
    ),
    case(
        "exception_is_kept_with_its_frame",
        _DATA,
        (),
        """
def fails():
    x = torch.ones(100000, device="cuda")
    s.wait_stream(cuda.current_stream())  #needed
    with cuda.stream(s):
        outs.append(x * 2)
    raise ValueError("half way")
outs = []
def step():
    try:
        fails()
    except ValueError as error:
        failure = error
    return failure, torch.zeros(100000, device="cuda")
kept = step()
""",
    ),
    case(
        "generator_deletes_what_it_made",
        _DATA,
        UAF,
        """
def batches():
    for i in range(2):
        x = torch.full((100000,), float(i), device="cuda")
        s.wait_stream(cuda.current_stream())
        with cuda.stream(s):
            y = x * 2
        del x
        yield y
kept = list(batches())
""",
    ),
    case(
        "generator_records_what_it_made",
        _DATA,
        (),
        """
def batches():
    for i in range(2):
        x = torch.full((100000,), float(i), device="cuda")
        s.wait_stream(cuda.current_stream())  #needed
        with cuda.stream(s):
            y = x * 2
        x.record_stream(s)  #needed
        del x
        yield y
kept = list(batches())
""",
    ),
    case(
        "generator_is_closed",
        _DATA,
        UAF,
        """
def batches():
    x = torch.ones(100000, device="cuda")
    s.wait_stream(cuda.current_stream())
    with cuda.stream(s):
        y = x * 2
    yield y
    yield x
def step():
    running = batches()
    y = next(running)
    running.close()
    return y, torch.zeros(100000, device="cuda")
kept = step()
""",
    ),
    case(
        "generator_is_suspended",
        _DATA,
        (),
        """
def batches():
    x = torch.ones(100000, device="cuda")
    s.wait_stream(cuda.current_stream())  #needed
    with cuda.stream(s):
        y = x * 2
    yield y
    yield x
def step():
    running = batches()
    y = next(running)
    return running, y, torch.zeros(100000, device="cuda")
kept = step()
""",
    ),
    case(
        "temporaries_of_a_comprehension",
        _DATA,
        UAF,
        """
def doubled(x):
    s.wait_stream(cuda.current_stream())
    with cuda.stream(s):
        return x * 2
def run():
    return [doubled(torch.full((100000,), float(i), device="cuda")) for i in range(2)]
kept = run()
""",
    ),
    case(
        "comprehension_over_a_list",
        _DATA,
        (),
        """
def doubled(x):
    s.wait_stream(cuda.current_stream())  #needed
    with cuda.stream(s):
        return x * 2
def run():
    inputs = [torch.full((100000,), float(i), device="cuda") for i in range(2)]
    outs = [doubled(x) for x in inputs]
    return inputs, outs
kept = run()
""",
    ),
    case(
        "view_is_deleted_too",
        _STORAGE,
        UAF,
        """
def step():
    x = torch.ones(100000, device="cuda")
    tail = x[50000:]
    s.wait_stream(cuda.current_stream())
    with cuda.stream(s):
        y = tail * 2
    del x
    del tail
    return y, torch.zeros(100000, device="cuda")
kept = step()
""",
    ),
    case(
        "view_keeps_the_storage",
        _STORAGE,
        (),
        """
def step():
    x = torch.ones(100000, device="cuda")
    tail = x[50000:]
    s.wait_stream(cuda.current_stream())  #needed
    with cuda.stream(s):
        y = x * 2
    del x
    z = torch.zeros(100000, device="cuda")
    return tail, y, z
kept = step()
""",
    ),
    case(
        "storage_resized_to_nothing_in_function",
        _STORAGE,
        (*RAW, *UAF),
        """
def step():
    x = torch.ones(100000, device="cuda")
    with cuda.stream(s):
        y = x * 2
    x.untyped_storage().resize_(0)
    z = torch.zeros(100000, device="cuda")
    return x, y, z
kept = step()
""",
    ),
    case(
        "tensor_resized_to_nothing_keeps_storage",
        _STORAGE,
        (),
        """
def step():
    x = torch.ones(100000, device="cuda")
    s.wait_stream(cuda.current_stream())  #needed
    with cuda.stream(s):
        y = x * 2
    x.resize_(0)
    z = torch.zeros(100000, device="cuda")
    return x, y, z
kept = step()
""",
    ),
    case(
        "name_set_to_none",
        _DATA,
        UAF,
        """
def step():
    x = torch.ones(100000, device="cuda")
    s.wait_stream(cuda.current_stream())
    with cuda.stream(s):
        y = x * 2
    x = None
    return y, torch.zeros(100000, device="cuda")
kept = step()
""",
    ),
    case(
        "one_of_two_names_set_to_none",
        _DATA,
        (),
        """
def step():
    x = same = torch.ones(100000, device="cuda")
    s.wait_stream(cuda.current_stream())  #needed
    with cuda.stream(s):
        y = x * 2
    x = None
    return same, y, torch.zeros(100000, device="cuda")
kept = step()
""",
    ),
    case(
        "default_argument_ends_with_the_function",
        _DATA,
        UAF,
        """
def step():
    def read(x=torch.ones(100000, device="cuda")):
        with cuda.stream(s):
            return x * 2
    s.wait_stream(cuda.current_stream())
    y = read()
    del read
    return y, torch.zeros(100000, device="cuda")
kept = step()
""",
    ),
    case(
        "default_argument_is_kept",
        _DATA,
        (),
        """
def step():
    def read(x=torch.ones(100000, device="cuda")):
        with cuda.stream(s):
            return x * 2
    s.wait_stream(cuda.current_stream())  #needed
    y = read()
    return read, y, torch.zeros(100000, device="cuda")
kept = step()
""",
    ),
    case(
        "local_of_an_inner_function",
        _DATA,
        (*RAW, *UAF),
        """
def step():
    def inner():
        x = torch.ones(100000, device="cuda")
        with cuda.stream(s):
            return x * 2
    y = inner()
    return y, torch.zeros(100000, device="cuda")
kept = step()
""",
    ),
    case(
        "local_of_an_inner_function_event",
        _DATA,
        (),
        """
def step():
    def inner():
        x = torch.ones(100000, device="cuda")
        s.wait_stream(cuda.current_stream())  #needed
        with cuda.stream(s):
            y = x * 2
            done = s.record_event()
        cuda.current_stream().wait_event(done)  #needed
        return y
    y = inner()
    return y, torch.zeros(100000, device="cuda")
kept = step()
""",
    ),
    case(
        "keyword_arguments_emptied",
        _DATA,
        UAF,
        """
def use(**given):
    s.wait_stream(cuda.current_stream())
    with cuda.stream(s):
        y = given["x"] * 2
    given.clear()
    return y
def step():
    y = use(x=torch.ones(100000, device="cuda"))
    return y, torch.zeros(100000, device="cuda")
kept = step()
""",
    ),
    case(
        "keyword_arguments_of_a_kept_dict",
        _DATA,
        (),
        """
def use(**given):
    s.wait_stream(cuda.current_stream())  #needed
    with cuda.stream(s):
        y = given["x"] * 2
    given.clear()
    return y
def step():
    arguments = {"x": torch.ones(100000, device="cuda")}
    y = use(**arguments)
    return arguments, y, torch.zeros(100000, device="cuda")
kept = step()
""",
    ),
    case(
        "positional_arguments_unpacked",
        _DATA,
        (*RAW, *UAF),
        """
def use(*given):
    with cuda.stream(s):
        return [x * 2 for x in given]
def step():
    ys = use(*[torch.ones(100000, device="cuda")])
    return ys, torch.zeros(100000, device="cuda")
kept = step()
""",
    ),
    case(
        "positional_arguments_synchronized",
        _DATA,
        (),
        """
def use(*given):
    s.wait_stream(cuda.current_stream())  #needed
    with cuda.stream(s):
        ys = [x * 2 for x in given]
    s.synchronize()  #needed
    return ys
def step():
    ys = use(*[torch.ones(100000, device="cuda")])
    return ys, torch.zeros(100000, device="cuda")
kept = step()
""",
    ),
    case(
        "attribute_deleted_by_a_method",
        _DATA,
        (*RAW, *UAF),
        """
class Holder:
    def __init__(self):
        self.x = torch.ones(100000, device="cuda")
    def read(self):
        x = self.x
        with cuda.stream(s):
            y = x * 2
        del self.x
        del x
        return y, torch.zeros(100000, device="cuda")
kept = Holder().read()
""",
    ),
    case(
        "attribute_recorded_by_a_method",
        _DATA,
        (),
        """
class Holder:
    def __init__(self):
        self.x = torch.ones(100000, device="cuda")
    def read(self):
        x = self.x
        s.wait_stream(cuda.current_stream())  #needed
        with cuda.stream(s):
            y = x * 2
        x.record_stream(s)  #needed
        del self.x
        del x
        return y, torch.zeros(100000, device="cuda")
kept = Holder().read()
""",
    ),
    case(
        "context_manager_lets_go",
        _DATA,
        (*RAW, *UAF),
        """
class Loan:
    def __enter__(self):
        self.x = torch.ones(100000, device="cuda")
        return self
    def __exit__(self, *error):
        self.x = None
def step():
    with Loan() as loan:
        with cuda.stream(s):
            y = loan.x * 2
    return y, torch.zeros(100000, device="cuda")
kept = step()
""",
    ),
    case(
        "context_manager_waits",
        _DATA,
        (),
        """
class Loan:
    def __enter__(self):
        self.x = torch.ones(100000, device="cuda")
        s.wait_stream(cuda.current_stream())  #needed
        return self
    def __exit__(self, *error):
        cuda.current_stream().wait_stream(s)  #needed
        self.x = None
def step():
    with Loan() as loan:
        with cuda.stream(s):
            y = loan.x * 2
    return y, torch.zeros(100000, device="cuda")
kept = step()
""",
    ),
    case(
        "data_replaced",
        _OWN,
        (*RAW, *UAF),
        """
def step():
    x = torch.ones(100000, device="cuda")
    with cuda.stream(s):
        y = x * 2
    x.data = torch.empty(0, device="cuda")
    z = torch.zeros(100000, device="cuda")
    return x, y, z
kept = step()
""",
    ),
    case(
        "data_replaced_old_one_kept",
        _OWN,
        (),
        """
def step():
    x = torch.ones(100000, device="cuda")
    s.wait_stream(cuda.current_stream())  #needed
    with cuda.stream(s):
        y = x * 2
    old = x.data
    x.data = torch.empty(0, device="cuda")
    z = torch.zeros(100000, device="cuda")
    return old, x, y, z
kept = step()
""",
    ),
    case(
        "recursion_unwinds",
        _DATA,
        (*RAW, *UAF),
        """
def down(n):
    if n == 0:
        return []
    x = torch.full((100000 * n,), float(n), device="cuda")
    with cuda.stream(s):
        y = x * 2
    return [*down(n - 1), y]
def step():
    ys = down(2)
    return ys, torch.zeros(200000, device="cuda")
kept = step()
""",
    ),
    case(
        "recursion_unwinds_after_waiting",
        _DATA,
        (),
        """
def down(n):
    if n == 0:
        return []
    x = torch.full((100000 * n,), float(n), device="cuda")
    s.wait_stream(cuda.current_stream())  #needed
    with cuda.stream(s):
        y = x * 2
    return [*down(n - 1), y]
def step():
    ys = down(2)
    cuda.current_stream().wait_stream(s)  #needed
    return ys, torch.zeros(200000, device="cuda")
kept = step()
""",
    ),
    case(
        "locals_of_the_program_keep_it",
        "docs.python.org, locals(): before Python 3.13 a function's is one dict",
        (),
        """
def step():
    x = torch.ones(100000, device="cuda")
    s.wait_stream(cuda.current_stream())  #needed
    seen = dict(locals())
    with cuda.stream(s):
        y = x * 2
    del x
    z = torch.zeros(100000, device="cuda")
    return seen, y, z
kept = step()
""",
    ),
    case(
        "locals_of_the_program_emptied",
        "docs.python.org, locals(): before Python 3.13 a function's is one dict",
        UAF,
        """
def step():
    x = torch.ones(100000, device="cuda")
    s.wait_stream(cuda.current_stream())
    seen = locals()
    with cuda.stream(s):
        y = x * 2
    seen.clear()
    del x, seen
    z = torch.zeros(100000, device="cuda")
    return y, z
kept = step()
""",
    ),
)

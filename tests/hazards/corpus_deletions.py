"""Memory that a function lets go of while another stream reads it: deleted names, names used
again, closures, generators, arguments, views. Each with a look-alike that is correct.
"""

from __future__ import annotations

from hazard_case import RAW, UAF, Case, case

_OWN = "c10/cuda/CUDACachingAllocator.cpp: a block is free for its stream once nothing refers to it"
_DATA = "docs.python.org, Data model: when objects end is CPython's reference counting"

CASES: tuple[Case, ...] = (
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
)

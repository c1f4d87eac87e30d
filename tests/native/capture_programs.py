"""Captures of CUDA graphs that a GPU refuses: prints the error of each, by name."""

import sys

import gpuprobe

with gpuprobe.virtual_gpu("t4", engine="native", compute=sys.argv[1]):
    import torch

    x = torch.ones(1 << 20, device="cuda")
    small = torch.ones(4, device="cuda")
    event = torch.cuda.Event()
    host = torch.ones(4)
    pinned = torch.ones(4).pin_memory()
    weights = torch.nn.Linear(8, 8).cuda()

    def synchronize():
        torch.cuda.synchronize()

    def stream_synchronize():
        torch.cuda.current_stream().synchronize()

    def event_synchronize():
        event.record()
        event.synchronize()

    def item_of_known():
        small.sum().item()

    def item_of_unknown():
        x.sum().item()

    def branch():
        if x.sum() > 1:
            small.add_(1)

    def to_host():
        x.cpu()

    def to_list():
        small.tolist()

    def from_pageable_memory():
        small.copy_(host)

    def new_tensor():
        torch.tensor([1.0, 2.0], device="cuda")

    def nonzero():
        small.nonzero()

    def masked():
        x[x > 0]

    def unique():
        small.unique()

    def another_stream_that_is_not_joined():
        other = torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            small.add_(1)

    def a_seed():
        torch.cuda.manual_seed(3)
        torch.rand(4, device="cuda")

    def allocation_on_another_stream():
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.empty(1 << 28, device="cuda")

    def pinned_allocation():
        torch.empty(1 << 24).pin_memory()

    def allowed():
        y = x * 2
        small.copy_(pinned, non_blocking=True)
        other = torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            z = y + 1
            torch.empty(1 << 22, device="cuda")
        torch.cuda.current_stream().wait_stream(other)
        weights(z[:8])
        torch.rand(4, device="cuda")

    CASES = [
        synchronize, stream_synchronize, event_synchronize, item_of_known, item_of_unknown, branch,
        to_host, to_list, from_pageable_memory, new_tensor, nonzero, masked, unique,
        another_stream_that_is_not_joined, a_seed,
        allocation_on_another_stream, pinned_allocation, allowed,
    ]  # fmt: skip
    weights(x[:8])
    torch.cuda.synchronize()
    for case in CASES:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                case()
            print(case.__name__, "passes")
        except BaseException as error:  # noqa: BLE001 - printed
            print(case.__name__, type(error).__name__, str(error).partition("\n")[0])

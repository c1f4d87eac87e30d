"""PyTorch's CUDA caching allocator as pure code: rules, simulator, replay and what-if.

Standard library only: nothing here touches a device, a file or the clock.

* ``rules``: the constants and the arithmetic, each with its source.
* ``settings``: ``PYTORCH_CUDA_ALLOC_CONF``, parsed the way torch parses it.
* ``blocks``, ``state``, ``expandable``, ``release``, ``simulator``: the allocator itself.
* ``driver``: what stands in for ``cudaMalloc``: a simulated one here, the trace in ``oracle``.
* ``start_state``: the layout before a trace's first event.
* ``replay``: the trace against the simulator; ``whatif``: the trace under other settings.
"""

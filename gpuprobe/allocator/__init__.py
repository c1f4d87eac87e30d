"""PyTorch's CUDA caching allocator as pure code: rules, simulator, replay and what-if.

Standard library only: nothing here touches a device, a file or the clock.

* ``rules``: the constants and the arithmetic, each with its source.
* ``settings``: ``PYTORCH_CUDA_ALLOC_CONF``, parsed the way torch parses it.
* ``blocks``, ``state``, ``expandable``, ``release``, ``simulator``: the allocator itself.
* ``driver``: a simulated CUDA driver that places segments; ``layout``: the simulator's segments.
* ``start_state``: the layout before a trace's first event; ``evidence``: what else a trace reveals.
* ``trace_simulator``: the simulator with a recorded trace as its driver; ``replay``: a trace
  checked against the rules; ``whatif``: a trace under other settings; ``results``: all of it per
  device.
"""

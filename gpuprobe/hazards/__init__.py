"""Stream hazards: a happens-before engine as pure code.

* ``footprint``: which bytes an access touches.
* ``engine``: clocks per stream and for the host, accesses per block, what is unordered.
* ``rules``: the id, kind and words of each finding.
* ``ledger``: implicit synchronisations.
* ``explain``: why a wait did not help, the smallest fix, and the proof that it is one.

Nothing here knows torch: front ends say what was launched where (`gpuprobe.virtual` does).
"""

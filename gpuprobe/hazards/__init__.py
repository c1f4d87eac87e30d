"""Stream hazards: a happens-before engine as pure code.

* ``footprint``: which bytes an access touches.
* ``accesses``, ``freed``: what is kept of accesses to live and to freed memory.
* ``engine``: clocks per stream and for the host, and what is unordered.
* ``rules``: the id, kind and words of each finding.
* ``ledger``: implicit synchronisations.
* ``fixes``: the smallest fix, as code and as the change of the log that verifies it.
* ``explain``: from a race to a finding, and why a wait did not help.
* ``results``, ``ranks``, ``known``: what was found, by several ranks, and compared with a baseline.
* ``observer``: what a device model reports to a watch.

Nothing here knows torch: ``hazard_watch`` says what was launched where.
"""

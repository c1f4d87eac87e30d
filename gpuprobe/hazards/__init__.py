"""Stream hazards: a happens-before engine as pure code.

* ``events``: everything that a front end reports, as one union; a run's log is a list of events.
* ``footprint``: the bytes that an access touches.
* ``accesses``, ``freed``: accesses to live and to freed memory.
* ``engine``: clocks per stream and for the host; finds unordered accesses.
* ``rules``: the id, kind and title of each finding.
* ``ledger``: hazards of one line alone, such as implicit synchronisations.
* ``findings.repairs``: one class per kind of repair: its words, its code, its change of the log.
* ``findings.explain``: from a race to its smallest fix and to a finding.
* ``findings.results``: the results of ranks, and their merge.

Nothing here imports torch: ``hazard_watch`` translates a program's calls to events.
"""

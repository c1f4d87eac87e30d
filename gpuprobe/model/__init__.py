"""What everything speaks: frozen dataclasses, standard library only.

Import from the submodules: ``values`` (units, `Unavailable`, `Reading`, `Peak`), ``memory``
(allocator words), ``trace`` (columnar events), ``session`` (steps and phases),
``recording``, ``devices``, ``findings``, and ``codec`` (to and from plain JSON).
"""

"""Starting programs that Ctrl-C ends, whatever started the tests.

A shell without job control starts what it runs in the background with SIGINT ignored, as do some CI
runners, and a process inherits that: Ctrl-C then has no effect on the programs of the tests.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def default_sigint() -> Iterator[None]:
    """Processes that are started in this block have the default action for SIGINT.

    The tests' own process ignores it again afterwards, so that Ctrl-C in the terminal does not end
    tests in the background. A handler is no action that is inherited: with one, nothing is changed.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)

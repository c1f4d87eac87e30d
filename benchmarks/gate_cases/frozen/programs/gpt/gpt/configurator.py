"""Reads the configuration of a run."""

import sys
from types import SimpleNamespace

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def padded(vocab_size, multiple=64):
    """Vocabulary sizes are rounded up for efficiency."""
    return (vocab_size + multiple - 1) // multiple * multiple


def load(path):
    with open(path, "rb") as file:
        tables = tomllib.load(file)
    cfg = SimpleNamespace(**{name: SimpleNamespace(**table) for name, table in tables.items()})
    cfg.model.vocab_size = padded(cfg.data.vocab_size)
    cfg.model.block_size = cfg.data.block_size
    return cfg

"""What cuDNN allocates for a recurrent network: what it keeps for the backward pass, and works in.

NVIDIA documents neither. The formulas are those of the native engine
(`gpuprobe/native/runtime/cudnn_tensors.c`, which says what they were measured on).
"""

from __future__ import annotations

from typing import NamedTuple

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
_KEPT = {"lstm": 5, "gru": 6, "rnn_tanh": 1, "rnn_relu": 1}
"""Of each step and layer, besides the results of all layers but the last."""

_SMALL = {True: (192, 384), False: (128, 256)}
"""Hidden size up to which an algorithm for small networks is used, forward and backward: of LSTM
and GRU, and of the others. Source: ``use_rnn_persist_small_h`` in
``aten/src/ATen/native/cudnn/RNN.cpp``.
"""


def _up(number: int, to: int) -> int:
    return -(-number // to) * to


class RecurrentCall(NamedTuple):
    """A network with its input. ``hidden`` and ``out`` are the features of a state and of a result;
    ``element`` is the size of a number in bytes, ``weights`` that of all matrices. ``batch_first``:
    the dimension of the batch precedes that of the steps.
    """

    kind: str
    layers: int
    ways: int
    dropout: bool
    bfloat16: bool
    element: int
    steps: int
    batch: int
    features: int
    hidden: int
    out: int
    weights: int
    batch_first: bool = False

    @property
    def reserve(self) -> int:
        """Bytes kept for the backward pass."""
        cells, below = self.steps * self.batch * self.ways, self.layers - 1
        mask = below * self.ways * _up((cells * self.out + 7) // 8, 32) if self.dropout else 0
        kept = self.hidden * _KEPT[self.kind] * self.layers + self.out * below
        return cells * kept * self.element + 256 + mask

    def _small(self, forward: bool) -> bool:
        gated, plain = _SMALL[forward]
        limit = gated if self.kind in ("lstm", "gru") else plain
        return self.out == self.hidden <= limit and not self.bfloat16

    @property
    def _together(self) -> int:
        """Steps that layers above each other run at a time."""
        if self.batch < 2:
            return 32
        if self.batch < 8:
            return 16
        return 8 if self.batch < 64 or self.steps >= 128 else 4

    def workspace(self, forward: bool) -> int:
        """Bytes that a pass works in."""
        small = self._small(forward)
        lstm, gru, several = self.kind == "lstm", self.kind == "gru", self.layers > 1
        fixed = self.weights + (8 << 20) * self.layers * self.ways + 256 + _up(8 * self.batch, 32)
        state = self.batch * self.hidden * self.element
        y = self.steps * state
        given = _up(self.steps * self.batch * self.features * self.element, 32)
        extra = (12 if lstm else 14 if gru else 9) * y if small else 0
        third = 0
        if self.ways == 2:
            rest = extra + (2 * y if several else 0) + self.layers * (26 if lstm else 14) * state
            first, second = 10 * y + 2 * given + rest, 6 * y + 6 * given + rest
            if lstm and small:
                third = 30 * y + given + 18 * self.layers * state
            elif lstm:
                third = 14 * y + given + 24 * self.layers * state
            elif gru:
                third = 12 * y + given + 14 * self.layers * state
            return fixed + max(first, second, third)
        shared = y
        if several and not small:
            shared = min(self.steps, (self.layers + 1) * self._together) * state
        rest = shared + extra + self.layers * (11 if lstm else 5) * state
        if small:
            rest += self.layers * state + (y if several else 0)
        first, second = 3 * y + 2 * given + rest, 2 * y + 3 * given + rest
        dropped = y if several and self.dropout else 0
        if lstm and small:
            third = 21 * y + given + dropped + 8 * self.layers * state
        elif lstm or gru:
            some = GATES[self.kind] * min(self.steps, 256) * state
            third = y + given + dropped + some + self.layers * (10 if lstm else 5) * state
        return fixed + max(first, second, third)

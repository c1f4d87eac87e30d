"""Which stream the nodes of leaves run on, where a stream is used for the first time later on."""

from __future__ import annotations

import gc
from contextlib import nullcontext

import pytest
import torch

from gpuprobe.hazard_watch.node_streams import NodeStreams
from gpuprobe.hazard_watch.source import EventSource


def node_of(result: torch.Tensor) -> object:
    """The node that accumulates the gradient of the leaf that ``result`` was made of."""
    assert result.grad_fn is not None
    return result.grad_fn.next_functions[0][0]


def test_a_node_that_was_made_before_the_first_switch_keeps_its_stream() -> None:
    nodes = NodeStreams()
    kept, dropped, later = (torch.ones(2, requires_grad=True) for _ in range(3))
    nodes.leaves_used((kept, [dropped]), {})
    held = kept * 2
    dropped * 2
    assert nodes.of(node_of(held)) == {}
    nodes.forget_leaves()  # a backward pass has returned; the graph of ``held`` is still there
    nodes.switched({0: 1}, nullcontext)
    nodes.leaves_used((kept, dropped, later), {0: 1}, nullcontext)
    again, anew, first = kept * 3, dropped * 3, later * 3
    assert node_of(again) is node_of(held)
    assert nodes.of(node_of(again)) == {}
    assert nodes.of(node_of(anew)) == {0: 1}
    assert nodes.of(node_of(first)) == {0: 1}


def test_a_node_that_was_never_seen_is_unknown() -> None:
    nodes = NodeStreams()
    leaf = torch.ones(2, requires_grad=True)
    assert nodes.of(node_of(leaf * 2)) is None


def test_a_leaf_that_is_gone_is_not_taken_for_another_in_its_place() -> None:
    nodes = NodeStreams()
    for _ in range(20):
        nodes.leaves_used((torch.ones(2, requires_grad=True),), {})
        gc.collect()
        leaf = torch.ones(2, requires_grad=True)
        assert nodes.of(node_of(leaf * 2)) is None
        del leaf


def test_an_operator_that_fails_has_used_its_leaves() -> None:
    source, leaf = EventSource(), torch.ones(2, requires_grad=True)

    def fails(*_: object) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        source.operator(torch.ops.aten.mul.Tensor, (leaf, 2), {}, fails)
    assert source.machine.nodes.of(node_of(leaf * 2)) == {}
    assert not source.broken

"""``random="cuda"``: the numbers that the GPU would draw."""

from __future__ import annotations

import pytest
import torch
from gpuprobe.virtual.kernels import philox

import gpuprobe
from gpuprobe.catalogue.gpus import parse_spec
from gpuprobe.errors import UsageError

H100 = parse_spec("h100-80gb")[0]
# Known answers of Philox4x32-10, of the Random123 library (``kat_vectors``): counter, key, words.
KNOWN = [
    ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (1 << 64) - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        0x299F31D0A4093822,
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_words_are_those_of_philox(
    counter: tuple[int, ...], key: int, words: tuple[int, ...]
) -> None:
    found = philox.ten_rounds([torch.tensor(part) for part in counter], key & 0xFFFFFFFF, key >> 32)
    assert tuple(int(word) for word in found) == words


@pytest.mark.parametrize("compute", ["real", "shapes"])
def test_numbers_are_those_that_cuda_prints(compute: str) -> None:
    """As answers and issues on the web show them, of ``torch.manual_seed`` on a GPU."""
    with gpuprobe.virtual_gpu("h100-80gb", compute=compute, random="cuda"):
        torch.manual_seed(0)
        uniform = torch.rand(4, device="cuda").tolist()
        torch.manual_seed(0)
        normal = torch.randn(4, device="cuda").tolist()
        torch.manual_seed(42)
        others = torch.zeros(5, device="cuda").normal_().tolist()
        host = torch.rand(1)
    assert uniform == pytest.approx([0.3990, 0.5167, 0.0249, 0.9401], abs=5e-5)
    assert normal == pytest.approx([-0.9247, -0.4253, -2.6438, 0.1452], abs=5e-5)
    assert others == pytest.approx([0.1940, 2.1614, -0.1721, 0.8491, -1.9244], abs=5e-5)
    torch.manual_seed(42)
    assert torch.equal(host, torch.rand(1))  # the host's are its own


def test_a_draw_goes_on_where_the_one_before_ended() -> None:
    """One thread takes four numbers of a call, and the first thread's come first."""
    words = philox.words(1, (7, 0), H100), philox.words(1, (7, 4), H100)
    with gpuprobe.virtual_gpu("h100-80gb", compute="shapes", random="cuda"):
        torch.manual_seed(7)
        drawn = [torch.randint(1 << 20, (1,), device="cuda").item() for _ in range(2)]
    assert drawn == [int(found[0, 0, 0]) % (1 << 20) for found in words]
    assert drawn[0] != drawn[1]


def test_what_an_element_gets_depends_on_the_number_of_threads() -> None:
    count = 132 * 2048 + 8  # more than an H100 has threads
    few = philox.uniform(count, (1, 0), parse_spec("t4")[0])
    many = philox.uniform(count, (1, 0), H100)
    assert torch.equal(few[:40960], many[:40960])  # a T4's
    assert not torch.equal(few, many)
    assert torch.equal(philox.uniform(8, (1, 0), H100), many[:8])


def test_normal_numbers_are_normal() -> None:
    found = philox.normal(1 << 20, (3, 0), H100)
    assert found.mean().item() == pytest.approx(0, abs=4e-3)
    assert found.std().item() == pytest.approx(1, abs=4e-3)
    assert (found.abs() < 1).float().mean().item() == pytest.approx(0.6827, abs=2e-3)


def test_what_is_drawn_otherwise_is_assumed() -> None:
    with gpuprobe.virtual_gpu("h100-80gb", compute="shapes", random="cuda") as session:
        torch.randn(8, device="cuda")
        assert not session.machine.assumed
        torch.randperm(8, device="cuda")
        torch.randint(1 << 30, (8,), device="cuda")
        torch.ones(4, 4, device="cuda").t()[:2].normal_()
        torch.zeros(8, dtype=torch.int64, device="cuda").random_(3, None)
    assert list(session.machine.assumed) == [
        f"random numbers of {name} are those of the host's kernel, not CUDA's"
        for name in ("randperm", "randint", "normal_", "random_")
    ]


def test_only_two_kinds_of_numbers_are_known() -> None:
    with pytest.raises(UsageError, match="unknown random 'curand'"):
        gpuprobe.virtual_gpu("t4", random="curand").__enter__()

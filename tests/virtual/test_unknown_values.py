"""Programs that read values which compute="shapes" does not compute."""

from __future__ import annotations

import copy
import json
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gpuprobe.virtual.session import VirtualSession
from torch import nn

import gpuprobe
from gpuprobe.errors import ValueNeeded

pytestmark = pytest.mark.filterwarnings("ignore")

WIDTH = 1024  # squares of this many floats are too large to be computed


@pytest.fixture
def session() -> Iterator[VirtualSession]:
    """A virtual GPU without values, which gives NaN as `gpuprobe estimate` does."""
    with gpuprobe.virtual_gpu("t4", "shapes") as found:
        found.machine.unknown_as_nan = True
        yield found


def unknown() -> Any:
    return torch.randn(WIDTH, WIDTH, device="cuda")


def assumed(session: VirtualSession) -> str:
    return "\n".join(session.machine.assumed)


# -- checks of libraries


def validated_distributions() -> None:
    loc = unknown().requires_grad_()
    # Asked for: the first use of torch.compile turns the checks off in the whole process.
    normal = torch.distributions.Normal(loc, loc.exp(), validate_args=True)
    normal.log_prob(normal.rsample()).sum().backward()
    categorical = torch.distributions.Categorical(logits=unknown(), validate_args=True)
    categorical.log_prob(categorical.sample())
    assert categorical.entropy().shape == (WIDTH,)


def clipped_gradients() -> None:
    weight = unknown().requires_grad_()
    weight.sum().backward()
    torch.nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)


def asserted_by_torch() -> None:
    torch._assert((unknown() > 0).all(), "not positive")


def anomalies() -> None:
    weight = unknown().requires_grad_()
    with torch.autograd.set_detect_anomaly(True):
        (weight * 2).sum().backward()


def masks_of_a_transformer() -> None:
    layer = nn.TransformerEncoderLayer(64, 4, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1).cuda()
    mask = unknown()
    encoder(torch.randn(1, WIDTH, 64, device="cuda"), mask=mask)


def degenerate_boxes() -> None:
    """As ``GeneralizedRCNN.forward`` of torchvision has it."""
    boxes = unknown()
    degenerate = boxes[:, 2:] <= boxes[:, :-2]
    if degenerate.any():
        index = torch.where(degenerate.any(dim=1))[0][0]
        torch._assert(False, f"found {boxes[index].tolist()}")


def pad_tokens() -> None:
    """As ``warn_if_padding_and_no_attention_mask`` of transformers has it."""
    tokens = unknown().argmax(dim=1)
    if 0 in tokens[[-1, 0]]:
        text = "We strongly recommend passing in an `attention_mask`"
        print(text)


def infinite_losses() -> None:
    """As transformers' ``Trainer`` has it."""
    loss = unknown().sum()
    if torch.isnan(loss) or torch.isinf(loss):
        total = loss
    else:
        total = loss + loss
        torch.empty(WIDTH, device="cuda")
    del total


CHECKS: list[Callable[[], None]] = [
    validated_distributions,
    clipped_gradients,
    asserted_by_torch,
    anomalies,
    masks_of_a_transformer,
    degenerate_boxes,
    pad_tokens,
    infinite_losses,
]


@pytest.mark.parametrize("program", CHECKS, ids=lambda program: program.__name__)
def test_checks_pass_and_the_result_says_so(
    program: Callable[[], None], session: VirtualSession, capsys: pytest.CaptureFixture[str]
) -> None:
    program()
    assert assumed(session)
    assert not capsys.readouterr().out


def test_what_is_assumed_names_the_line_of_the_check(session: VirtualSession) -> None:
    line = degenerate_boxes.__code__.co_firstlineno + 4
    degenerate_boxes()
    assert f"{__file__}:{line}: the check passes (`degenerate.any()`)" in session.machine.assumed
    asserted_by_torch()
    (text,) = list(session.machine.assumed)[1:]
    assert text.startswith("torch/__init__.py:")


def test_a_branch_that_works_on_both_sides_needs_its_value(session: VirtualSession) -> None:
    def decides() -> int:
        return 1 if unknown().sum() > 0 else 2

    with pytest.raises(ValueNeeded, match=r"test_unknown_values\.py:\d+ needs the value") as caught:
        decides()
    place = caught.value.place
    assert str(caught.value).startswith(f"{place} needs")
    assert f"--assume {place}=false" in caught.value.hint


def test_how_many_a_mask_selects_cannot_be_given(session: VirtualSession) -> None:
    session.machine.unknown_as_nan = False
    values = unknown()
    with pytest.raises(ValueNeeded, match="needs the value of a tensor") as caught:
        print(values[values > 0].shape)
    assert "--compute real" in caught.value.hint
    assert "--assume" not in caught.value.hint


# -- numbers


def test_an_unknown_number_is_nan_that_is_taken_to_be_finite(session: VirtualSession) -> None:
    number = unknown().sum().item()
    assert isinstance(number, float)
    assert f"{number:.2f} {number} {round(number, 2)}" == "nan nan nan"
    assert not math.isnan(number)
    assert math.isfinite(number)
    assert not np.isnan(number)
    assert np.isfinite(number / 3)
    assert number == number
    total = sum([number, 1.0, 2 * number]) / 3 - number**2
    assert not math.isinf(total)
    assert json.dumps({"loss": total}) == '{"loss": NaN}'
    assert repr(pickle.loads(pickle.dumps([number, number < 3]))) == "[nan, False]"
    assert repr(copy.deepcopy(number)) == "nan"
    assert torch.tensor([number]).isnan().all()
    assert repr(np.mean([number, total])) in ("nan", "np.float64(nan)")
    assert "numbers are finite" in assumed(session)


def test_comparisons_of_unknown_numbers_are_those_of_nan(session: VirtualSession) -> None:
    number = unknown().sum().item()
    best, found = 3.0, ""
    if number < best:
        best, found = number, "better"
    else:
        found = "worse"
    assert (best, found) == (3.0, "worse")
    assert "comparisons with an unknown number are false, as with NaN" in assumed(session)


def test_checks_of_unknown_numbers_pass(session: VirtualSession) -> None:
    loss = unknown().sum().item()
    if loss > 1e6:
        raise AssertionError("diverged")
    if not loss < 1e6:
        raise AssertionError("diverged")
    assert loss < 1e6
    assert "the check passes (`not loss < 1000000.0`)" in assumed(session)


def test_unknown_numbers_are_no_sizes(session: VirtualSession) -> None:
    number = unknown().sum().item()
    for whole in (int, round, math.floor, math.ceil):
        with pytest.raises(ValueNeeded, match="a whole number"):
            print(whole(number))  # type: ignore[operator]
    with pytest.raises(TypeError):
        print(range(number))  # type: ignore[arg-type]


def test_arrays_and_lists_of_unknown_numbers_are_nan(session: VirtualSession) -> None:
    values = unknown()
    array = values.cpu().numpy()
    assert array.shape == (WIDTH, WIDTH)
    assert array.dtype == np.float32
    assert np.isnan(array).all()
    array[0] = 1.0
    assert np.isnan(np.asarray(values.half().cpu())).all()
    listed = values[:2, :3].tolist()
    assert repr(listed) == "[[nan, nan, nan], [nan, nan, nan]]"
    listed[0][0] = 1
    assert repr(listed[1][0]) == "nan"
    big = torch.empty(3 << 30, device="cuda").cpu().numpy()
    assert big.nbytes == 12 << 30
    assert big.strides == (0,)  # one number in place of twelve gigabytes
    with pytest.raises(ValueNeeded):
        print(values.argmax(dim=1).cpu().numpy())
    with pytest.raises(TypeError):
        print(values.bfloat16().cpu().numpy())


def test_without_an_estimate_no_number_is_made_up(session: VirtualSession) -> None:
    session.machine.unknown_as_nan = False
    values = unknown()
    for read in (values.sum().item, values.cpu().numpy, values.tolist):
        with pytest.raises(ValueNeeded):
            print(read())
    with pytest.raises(ValueNeeded):
        assert (values > 0).all()
    validated_distributions()


def test_a_number_on_the_host_fills_a_tensor_on_the_device() -> None:
    with gpuprobe.virtual_gpu("t4", compute="shapes"):
        given = torch.randn(3, 4, device="cuda", requires_grad=True)
        mask = torch.ones(4, dtype=torch.bool, device="cuda")
        filled = given.masked_fill(mask, torch.tensor(-1e9))
        filled.square().sum().backward()
        assert (filled.shape, filled.device.type, filled.dtype) == ((3, 4), "cuda", torch.float32)
        assert given.grad.is_cuda

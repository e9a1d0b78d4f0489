"""The critic's loss and its figure, worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from gigpo import explained_variance, value_loss


def test_the_clipped_loss_by_hand() -> None:
    """Old value 2, clip 0.5. Target 5: 3 is held at 2.5 and has no gradient; 1 moved the wrong way
    and has all of it; 2.25 is within the bounds. Target 2.6: 3 went too far, beyond target and
    bounds, and comes back; 2.55 is past the bounds but nearer than they are, and is held.
    """
    values = torch.tensor([3.0, 1.0, 2.25, 3.0, 2.55], requires_grad=True)
    targets = torch.tensor([5.0, 5.0, 5.0, 2.6, 2.6])
    loss, clipped = value_loss(values, torch.full((5,), 2.0), targets, clip=0.5)
    assert loss.tolist() == pytest.approx(
        [2.5**2 / 2, 4**2 / 2, 2.75**2 / 2, 0.4**2 / 2, 0.1**2 / 2], rel=1e-5
    )
    assert clipped.tolist() == [True, False, False, False, True]
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    assert gradient.tolist() == pytest.approx([0.0, -4.0, -2.75, 0.4, 0.0], rel=1e-5)


def test_without_a_clip_it_is_half_the_squared_error() -> None:
    loss, clipped = value_loss(
        torch.tensor([3.0]), torch.tensor([-50.0]), torch.tensor([7.0]), clip=math.inf
    )
    assert (loss.item(), clipped.item()) == (8.0, False)
    with pytest.raises(ValueError, match="clip=0"):
        value_loss(torch.ones(1), torch.ones(1), torch.ones(1), clip=0.0)
    with pytest.raises(ValueError, match="flat tensors"):
        value_loss(torch.ones(2), torch.ones(1), torch.ones(2), clip=1.0)


def test_explained_variance() -> None:
    targets = torch.tensor([1.0, 2.0, 6.0])
    assert explained_variance(torch.tensor([1.0, 2.0, 3.0]), targets) == pytest.approx(1 - 3 / 7)
    assert explained_variance(targets + 4.0, targets) == pytest.approx(1.0), (
        "a shift is no variance"
    )
    assert explained_variance(torch.full((3,), 9.0), targets) == pytest.approx(0.0)
    assert math.isnan(explained_variance(torch.ones(2), torch.ones(2)))

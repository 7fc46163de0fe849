"""A tracked router: exact where drift is linear, the original where there is none, and it forgets."""

import math

import pytest
import torch

from gripmoe.geometry.tracking import RouterTracker


def setting(d=24, E=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    theta = torch.randn(E, d, generator=generator)

    def tokens(N=60):
        return torch.randn(N, d, generator=generator, dtype=torch.float64)

    mixing = torch.eye(d).double() + 0.3 * torch.randn(d, d, generator=generator).double() / math.sqrt(d)
    return theta, tokens, mixing


def error(theta, x_post, wanted):
    return ((x_post @ theta.double().T - wanted).norm() / wanted.norm()).item()


def test_a_linear_drift_is_undone_also_for_tokens_it_has_not_seen():
    theta, tokens, mixing = setting()
    tracker = RouterTracker(theta, ridge=1e-9)
    x, other = tokens(), tokens()
    followed = tracker.update(x @ mixing.T, x @ theta.double().T)
    assert error(followed, other @ mixing.T, other @ theta.double().T) < 1e-5
    assert error(theta, other @ mixing.T, other @ theta.double().T) > 0.1, "the control: the frozen router"


def test_without_drift_it_is_the_original_router():
    theta, tokens, _ = setting()
    x = tokens()
    torch.testing.assert_close(RouterTracker(theta).update(x, x @ theta.double().T), theta.double())


def test_what_it_saw_long_ago_fades():
    theta, tokens, mixing = setting()
    errors = {}
    for forgetting in (0.5, 1.0):
        tracker = RouterTracker(theta, forgetting)
        for step in range(12):
            x = tokens()
            drift = torch.eye(24).double() if step < 6 else mixing
            followed = tracker.update(x @ drift.T, x @ theta.double().T)
        x = tokens()
        errors[forgetting] = error(followed, x @ mixing.T, x @ theta.double().T)
    assert errors[0.5] < 0.3 * errors[1.0]


def test_inputs_that_are_no_numbers_leave_the_router_as_it_was():
    """So that the loop sees the divergence, and ends as it ends any."""
    theta, tokens, mixing = setting()
    tracker = RouterTracker(theta)
    x = tokens()
    before = tracker.update(x @ mixing.T, x @ theta.double().T)
    assert torch.equal(tracker.update(x * float("nan"), x @ theta.double().T), before)


@pytest.mark.parametrize("which", ["inputs", "scores"])
def test_what_is_not_finite_leaves_no_trace(which):
    theta, tokens, mixing = setting()
    tracker = RouterTracker(theta)
    x = tokens()
    before = tracker.update(x @ mixing.T, x @ theta.double().T)
    broken = [x @ mixing.T, x @ theta.double().T]
    broken[which == "scores"][0, 0] = math.nan
    assert tracker.update(*broken) is before
    assert tracker.update(x @ mixing.T, x @ theta.double().T).isfinite().all()

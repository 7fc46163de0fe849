"""The method `reparameterized` (Eq. 14): Theta_0 + P (W - Theta_0) with a free W."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import gripmoe
from conftest import METHODS, random_batch, small_model
from gripmoe.constraints.null_space import fit_bases
from gripmoe.moe import MoEModel

pytestmark = pytest.mark.filterwarnings("ignore:AdamW decays router weights")
RETAIN = [random_batch(rows=2, seed=50)]


class InNullSpace(nn.Module):
    """Maps W to the router."""

    def __init__(self, theta_0_Ed, basis):
        super().__init__()
        self.theta_0_Ed, self.basis = theta_0_Ed.detach().clone(), basis

    def forward(self, w_Ed):
        return self.theta_0_Ed + self.basis.project(w_Ed - self.theta_0_Ed)


def trained(model, optimizer):
    for step in range(6):
        batch = random_batch(seed=step)
        optimizer.zero_grad()
        model(**batch.inputs, labels=batch.input_ids).loss.backward()
        optimizer.step()
    return MoEModel(model).theta(0).detach()


def constrained(method, **settings):
    """The model after training, without a constraint if there is no method."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), **{"lr": 0.01, "weight_decay": 0.0} | settings)
    if method is None:
        trained(model, optimizer)
        return model
    with gripmoe.constrain(model, optimizer, RETAIN, method=method):
        trained(model, optimizer)
    return model


def test_it_trains_what_a_free_router_in_the_null_space_trains():
    """Without weight decay, under AdamW, up to rounding. The control projects updates alone."""
    free = small_model()
    moe = MoEModel(free)
    start, bases = moe.theta(0).detach().clone(), fit_bases(moe.trace(RETAIN), moe.rules(), METHODS["expert_specific"])
    for layer in moe.layers:
        parametrize.register_parametrization(moe.router(layer), "weight", InNullSpace(moe.theta(layer), bases[layer]))
    wanted = trained(free, torch.optim.AdamW(free.parameters(), lr=0.01, weight_decay=0.0))
    moved = (wanted - start).abs().max()
    row, control = (MoEModel(constrained(method)).theta(0) for method in ("reparameterized", "expert_specific"))
    assert (row - wanted).abs().max() < 0.02 * moved
    assert (control - wanted).abs().max() > 0.1 * moved, "the control"


def test_selected_scores_stay_under_adamw_and_margins_are_nobodys_business():
    """With momentum and weight decay, which a projected gradient alone would not survive."""
    start = MoEModel(small_model())
    original, moved, changed = start.trace(RETAIN), {}, {}
    for method in ("reparameterized", None):
        moe = MoEModel(constrained(method, lr=0.05, weight_decay=0.5))
        moved[method] = max(
            (seen.x_Nd @ moe.theta(layer).T - seen.scores_NE).gather(1, seen.top_k_Nk).abs().max()
            for layer, seen in original.items()
        )
        changed[method] = (moe.theta(0) - start.theta(0)).abs().max()
    assert moved["reparameterized"] < 1e-3 and moved[None] > 0.5, "the second is the control"
    assert changed["reparameterized"] > 0.01, "the router did move"

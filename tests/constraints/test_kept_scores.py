"""Method A keeps the scores of a step's answer for the next step, which then need not be computed."""

import pytest
import torch

from conftest import random_batch, small_model
from gripmoe.config.methods import method_table
from gripmoe.constraints.null_space import NullSpace, fit_bases
from gripmoe.geometry import halfspace
from gripmoe.moe import MoEModel


def steps(monkeypatch, keep=True, written=None, count=12):
    """Routers after steps that bind, and how many products with all tokens they took."""
    moe = MoEModel(small_model())
    trace = moe.trace([random_batch(rows=2, seed=3)])
    constraint = NullSpace(trace, fit_bases(trace, moe.rules(), method_table()["expert_specific"]))
    constraint.start(moe, [], [])
    products, scores = [], halfspace._scores
    monkeypatch.setattr(halfspace, "_scores", lambda *args: products.append(1) or scores(*args))
    generator = torch.Generator().manual_seed(0)
    routers = moe.thetas()
    for step in range(count):
        for layer, before in routers.items():
            if not keep:
                constraint._last.clear()
            if step == written:
                before = moe.theta(layer).detach().clone()  # as a loop that has put the original router back
            after = before + 0.03 * torch.randn(before.shape, generator=generator)
            routers[layer] = constraint.constrain(layer, before, after, None)
    monkeypatch.undo()
    assert all((routers[layer] - moe.theta(layer)).norm() > 0.01 for layer in routers), "routers move"
    return routers, len(products)


@pytest.mark.parametrize("written", [None, 6])
def test_kept_scores_save_products_and_change_no_router(monkeypatch, written):
    kept, fewer = steps(monkeypatch, written=written)
    anew, more = steps(monkeypatch, keep=False, written=written)
    assert all(torch.equal(kept[layer], anew[layer]) for layer in kept)
    layers = len(kept)
    assert more - fewer == layers * (11 if written is None else 10), "a router that was written is looked at anew"

import pytest
import torch

from gripmoe.geometry.routing import (
    LayerRouting,
    SelectionRule,
    jaccard,
    mean_stability,
    route,
    routing_stability,
    selection_margins,
    selection_mask,
)


def test_jaccard_by_hand():
    before = torch.tensor([[0, 1], [0, 1], [0, 1]])
    after = torch.tensor([[1, 0], [1, 2], [2, 3]])
    torch.testing.assert_close(jaccard(before, after), torch.tensor([1.0, 1 / 3, 0.0]))


def test_three_of_eight_changed_is_about_half():
    """The paper's reading of RS = 0.5 under top-8 (App. A.1)."""
    before, after = torch.arange(8)[None], torch.tensor([[0, 1, 2, 3, 4, 8, 9, 10]])
    assert jaccard(before, after).item() == pytest.approx(5 / 11)


def test_margins_by_hand():
    scores = torch.tensor([[3.0, 1.0, 2.0, -1.0]])
    selected = selection_mask(torch.tensor([[0, 2]]), 4)
    assert selected.tolist() == [[True, False, True, False]]
    margins = selection_margins(scores, selected)
    assert margins[0, 1] == 1.0 and margins[0, 3] == 3.0


def test_margin_is_exactly_what_changes_the_set():
    generator = torch.Generator().manual_seed(0)
    x, theta = torch.randn(50, 8, generator=generator), torch.randn(6, 8, generator=generator)
    routing = route(x, theta, SelectionRule(2))
    selected = selection_mask(routing.top_k_Nk, 6)
    margins = selection_margins(routing.scores_NE, selected)
    for expert in range(6):
        outside = ~selected[:, expert]
        for shift, kept in ((-1e-4, True), (1e-4, False)):
            scores = routing.scores_NE.clone()
            scores[:, expert] += margins[:, expert] + shift
            same = (selection_mask(scores.topk(2).indices, 6) == selected).all(dim=1)
            assert (same[outside] == kept).all()


def test_stability_per_layer_and_its_errors():
    def trace(indices):
        top_k = torch.tensor(indices)
        return LayerRouting(torch.zeros(len(top_k), 3), torch.zeros(len(top_k), 4), top_k)

    before = {0: trace([[0, 1], [2, 3]]), 2: trace([[0, 1], [2, 3]])}
    after = {0: trace([[0, 1], [2, 3]]), 2: trace([[2, 3], [3, 2]])}
    stability = routing_stability(before, after)
    assert stability == {0: 1.0, 2: 0.5}
    assert mean_stability(stability) == 0.75
    with pytest.raises(ValueError, match="different layers"):
        routing_stability(before, {0: before[0]})
    with pytest.raises(ValueError, match="2 tokens before, 1 after"):
        routing_stability({0: before[0]}, {0: trace([[0, 1]])})

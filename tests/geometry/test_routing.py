import pytest
import torch

from gripmoe.geometry.routing import (
    LayerRouting,
    SelectionRule,
    jaccard,
    mean_stability,
    route,
    selection_margins,
    selection_mask,
    stability_by_layer,
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


RULES = {
    "sigmoid": dict(scoring="sigmoid"),
    "biased sigmoid": dict(scoring="sigmoid", correction_bias_E=0.05 * torch.arange(6).double()),
    "sigmoid that large logits leave alike": dict(scoring="sigmoid", correction_bias_E=1e-8 * torch.arange(6).double()),
    "softmax": dict(scoring="softmax", correction_bias_E=torch.zeros(6)),
    "groups of softmax": dict(scoring="softmax", num_groups=2, chosen_groups=1, counted=2),
}


def test_experts_that_can_be_missed_are_those_that_no_choice_of_groups_needs():
    """One group of two is chosen: without an expert of each, one is left where two are to be selected."""
    missing = torch.tensor([True, False, True, False])
    assert SelectionRule(2).can_do_without(missing) and not SelectionRule(3).can_do_without(missing)
    assert not SelectionRule(2, num_groups=2, chosen_groups=1).can_do_without(missing)
    assert SelectionRule(1, num_groups=2, chosen_groups=1).can_do_without(missing)
    assert not SelectionRule(1, num_groups=2, chosen_groups=1).can_do_without(torch.tensor([True, True, False, False]))


@pytest.mark.parametrize("shift", [0.0, 15.0])
@pytest.mark.parametrize("kind", RULES)
def test_the_margin_of_a_squashed_score_is_exactly_what_changes_the_set(kind, shift):
    """Also of large logits, whose probabilities fp32 rounds together. Zero margins, outside of chosen groups, aside."""
    rule, generator = SelectionRule(2, **RULES[kind]), torch.Generator().manual_seed(0)
    scores = torch.randn(200, 6, generator=generator, dtype=torch.float64) + shift
    scores = scores.float().double()  # the same numbers for the margins in fp32
    top_k = rule.select(scores)
    selected, fixed = selection_mask(top_k, 6), rule.fixed(scores, top_k)
    margins = rule.margins(scores.float(), top_k).double()
    free = ~fixed & (margins > 2e-3) & margins.isfinite()
    assert free.sum() > 50 or (kind, shift) == ("biased sigmoid", 15.0), "something to check, unless the bias decides"
    for expert in range(6):
        for step, kept in ((-1e-3, True), (1e-3, False)):
            moved = scores.clone()
            moved[:, expert] += torch.where(free[:, expert], margins[:, expert] + step, 0)
            same = (selection_mask(rule.select(moved), 6) == selected).all(dim=1)
            assert (same[free[:, expert]] == kept).all()


def test_experts_that_are_left_out_are_not_selected_whatever_their_bias():
    rule = SelectionRule(2, scoring="sigmoid", correction_bias_E=torch.tensor([0.0, 9.0, 0.0, 0.0, 0.0, 0.0]))
    scores = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    assert (rule.select(scores) == 1).any(dim=1).all(), "the control"
    without = torch.arange(6) == 1
    assert not (rule.select(scores, without) == 1).any()


def test_stability_per_layer_and_its_errors():
    def trace(indices):
        top_k = torch.tensor(indices)
        return LayerRouting(torch.zeros(len(top_k), 3), torch.zeros(len(top_k), 4), top_k)

    before = {0: trace([[0, 1], [2, 3]]), 2: trace([[0, 1], [2, 3]])}
    after = {0: trace([[0, 1], [2, 3]]), 2: trace([[2, 3], [3, 2]])}
    stability = stability_by_layer(before, after)
    assert stability == {0: 1.0, 2: 0.5}
    assert mean_stability(stability) == 0.75
    with pytest.raises(ValueError, match="different layers"):
        stability_by_layer(before, {0: before[0]})
    with pytest.raises(ValueError, match="2 tokens before, 1 after"):
        stability_by_layer({0: before[0]}, {0: trace([[0, 1]])})

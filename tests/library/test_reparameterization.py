"""Routers that cannot leave the null space: what they hold, what they do not, and what stays behind."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch

import gripmoe
from conftest import random_batch, small_model
from gripmoe.config.methods import EpsNullConfig, Method
from gripmoe.geometry.nullspace import RetainBasis
from gripmoe.geometry.routing import selection_mask
from gripmoe.moe import MoEModel

RETAIN = [random_batch(rows=2, seed=50)]


def trained(model, optimizer=None):
    """Steps with momentum and weight decay, which a projected gradient would not survive."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5)
    for step in range(6):
        batch = random_batch(seed=step)
        optimizer.zero_grad()
        model(**batch.inputs, labels=batch.input_ids).loss.backward()
        optimizer.step()


def selected_scores_moved(model, original) -> float:
    moe = MoEModel(model)
    return max(
        (seen.x_Nd @ moe.theta(layer).T - seen.scores_NE)[selection_mask(seen.top_k_Nk, moe.num_experts)].abs().max()
        for layer, seen in original.items()
    ).item()


def test_selected_scores_stay_under_adamw_and_margins_are_nobodys_business():
    model, control = small_model(), small_model()
    original = MoEModel(model).trace(RETAIN)
    start = MoEModel(model).thetas()
    with gripmoe.reparameterize(model, RETAIN):
        trained(model)
    trained(control)
    assert selected_scores_moved(model, original) < 1e-3
    assert selected_scores_moved(control, original) > 0.5, "the control"
    assert (MoEModel(model).theta(0) - start[0]).abs().max() > 0.01, "the router did move"


def test_one_holder_of_routers_at_a_time():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gripmoe.constrain(model, optimizer, RETAIN), pytest.raises(ValueError, match="another handle holds"):
        gripmoe.reparameterize(model, RETAIN).__enter__()
    with gripmoe.reparameterize(model, RETAIN):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match="leave its block first"):
            gripmoe.constrain(model, optimizer, RETAIN)
        with pytest.raises(ValueError, match="leave its block first"):
            gripmoe.reparameterize(model, RETAIN).__enter__()


def test_routers_that_do_not_train_are_refused():
    model = small_model()
    for layer in model.model.layers:
        layer.mlp.gate.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="no router trains"):
        gripmoe.reparameterize(model, RETAIN).__enter__()


@pytest.mark.parametrize("method", ["reparameterize", "expert_specific_paper"])
@pytest.mark.parametrize("precision, dtype", [("highest", torch.float32), ("high", torch.float64)])
def test_where_tf32_rounds_products_routers_are_projected_in_fp64(method, precision, dtype, monkeypatch):
    """Elsewhere in fp32 as before, the control."""
    dtypes, remainder = set(), RetainBasis.remainder
    model, before = small_model(), torch.get_float32_matmul_precision()
    reparameterized, optimizer = method == "reparameterize", torch.optim.SGD(model.parameters(), lr=0.1)
    torch.set_float32_matmul_precision(precision)
    monkeypatch.setattr(RetainBasis, "remainder", lambda self, x: dtypes.add(x.dtype) or remainder(self, x))
    try:
        given = (model, RETAIN) if reparameterized else (model, optimizer, RETAIN)
        with (gripmoe.reparameterize if reparameterized else partial(gripmoe.constrain, method=method))(*given) as held:
            with nullcontext() if reparameterized else held.retain():
                model(**RETAIN[0].inputs).logits.sum().backward()
            optimizer.step()
    finally:
        torch.set_float32_matmul_precision(before)
    assert dtypes == {dtype} and MoEModel(model).theta(0).dtype == torch.float32


def test_the_row_of_the_table_trains_what_the_block_trains():
    """Without weight decay, under AdamW, up to rounding. The control projects updates alone."""
    ends, start = {}, MoEModel(small_model()).theta(0).detach()
    for method in ("block", "reparameterized", "expert_specific"):
        model = small_model()
        within = gripmoe.reparameterize(model, RETAIN) if method == "block" else nullcontext()
        with within:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
            if method == "block":
                trained(model, optimizer)
            else:
                with gripmoe.constrain(model, optimizer, RETAIN, method=method):
                    trained(model, optimizer)
        ends[method] = MoEModel(model).theta(0).detach()
    moved = (ends["block"] - start).abs().max()
    assert (ends["reparameterized"] - ends["block"]).abs().max() < 0.02 * moved
    assert (ends["expert_specific"] - ends["block"]).abs().max() > 0.1 * moved, "the control"


def test_routers_are_plain_weights_again():
    model = small_model()
    names = set(model.state_dict())
    batch = random_batch()
    with gripmoe.reparameterize(model, RETAIN):
        trained(model)
        inside = model(**batch.inputs).logits.detach()
    assert set(model.state_dict()) == names
    assert isinstance(MoEModel(model).theta(0), torch.nn.Parameter)
    torch.testing.assert_close(model(**batch.inputs).logits, inside)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_saved_within_the_block_is_the_one_that_the_block_leaves(dtype, tokenizer, tmp_path):
    """W itself is another router than Theta_0 + P (W - Theta_0)."""
    model = small_model(vocabulary_size=len(tokenizer)).to(dtype)
    with gripmoe.reparameterize(model, RETAIN):
        trained(model)
        digest = gripmoe.save_model(model, tokenizer, tmp_path / "within")
        free = model.model.layers[0].mlp.gate.parametrizations.weight.original.detach().clone()
    assert gripmoe.save_model(model, tokenizer, tmp_path / "after") == digest
    loaded, _ = gripmoe.load_model(tmp_path / "within")
    assert all(map(torch.equal, loaded.state_dict().values(), model.state_dict().values()))
    assert (free - model.model.layers[0].mlp.gate.weight).abs().max() > 0.01, "the control"


def test_weights_from_within_a_block_and_from_without_are_loaded_within_another():
    batch = random_batch()
    model, other = small_model(), small_model()
    with gripmoe.reparameterize(model, RETAIN):
        trained(model)
        state, wanted = copy.deepcopy(model.state_dict()), model(**batch.inputs).logits
    with gripmoe.reparameterize(other, RETAIN):
        before = other(**batch.inputs).logits
        other.load_state_dict(state)
        torch.testing.assert_close(other(**batch.inputs).logits, wanted)
        other.load_state_dict(small_model().state_dict())
        assert torch.equal(other(**batch.inputs).logits, before)
    assert not torch.allclose(before, wanted), "the control"
    assert state.keys() == other.state_dict().keys()


def test_retain_data_without_a_token_that_counts_is_refused():
    model = small_model()
    with pytest.raises(ValueError, match="no retain token counts"):
        with gripmoe.reparameterize(model, [{"input_ids": torch.tensor([[5], [6]])}]):
            pass
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_texts_have_the_bases_of_their_tokens(tokenizer):
    text, spans = tokenizer.decode(range(8, 50)), []
    for retain, settings in (([text], {"tokenizer": tokenizer}), ([tokenizer(text, return_tensors="pt")], {})):
        model = small_model(vocabulary_size=len(tokenizer))
        with gripmoe.reparameterize(model, retain, **settings):
            spans.append(model.model.layers[0].mlp.gate.parametrizations.weight[0].columns_Edr)
    assert torch.equal(*spans)


def test_an_error_within_the_block_keeps_what_was_trained():
    """Of a bf16 model, whose routers train in fp32. The control: an error before the block leaves bf16."""
    model = small_model().bfloat16()
    with pytest.raises(KeyboardInterrupt), gripmoe.reparameterize(model, RETAIN):
        with torch.no_grad():
            model.model.layers[0].mlp.gate.parametrizations.weight.original.add_(1e-4)
        trained = model.model.layers[0].mlp.gate.weight.detach().clone()
        raise KeyboardInterrupt
    router = model.model.layers[0].mlp.gate.weight
    assert router.dtype == torch.float32 and torch.equal(router, trained)
    other = small_model().bfloat16()
    with pytest.raises(ValueError, match="nothing to trace"), gripmoe.reparameterize(other, []):
        pass
    assert other.model.layers[0].mlp.gate.weight.dtype == torch.bfloat16


def test_a_method_may_be_a_row_of_ones_own():
    """As in `constrain`. The control: other axes, other bases."""
    ranks = []
    for value in (1e-4, 1e-1):
        model, eps_null = small_model(), EpsNullConfig(value=value, kind="relative")
        own = Method(constraint="null_space", basis="original", eps_null=eps_null)
        with gripmoe.reparameterize(model, RETAIN, method=own):
            columns_Edr = model.model.layers[0].mlp.gate.parametrizations.weight[0].columns_Edr
            ranks.append(int((columns_Edr != 0).any(dim=1).sum()))
    assert ranks[0] > ranks[1]


def test_a_method_without_fixed_bases_is_refused():
    with pytest.raises(ValueError, match="one of expert_specific, full_null_space"):
        with gripmoe.reparameterize(small_model(), RETAIN, method="anchored"):
            pass

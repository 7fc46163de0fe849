"""Passes without padding: the same outputs, gradients and records, from fewer tokens."""

from contextlib import nullcontext

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from conftest import SMALL, small_model
from gripmoe.data.documents import IGNORED, Batch
from gripmoe.moe import MoEModel
from gripmoe.moe.recording import counted_tokens, hooked
from gripmoe.moe.states import final_hidden_states, hidden_states, router_states
from gripmoe.moe.unpadded import COMPARED_FAMILIES, padding_of
from gripmoe.training.objectives import cross_entropy

COUNTED = {
    "right": ([9, 2, 5], False),
    "left": ([9, 2, 5], True),
    "a hole": ([9, 2, 5], "hole"),
    "a row that does not count": ([4, 0, 7], False),
}


def model_of(family):
    if family != "olmoe":
        return small_model(family)
    widths = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, intermediate_size=16, num_experts=8)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, num_experts_per_tok=2, pad_token_id=0, eos_token_id=2)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("olmoe", **widths, **heads)).eval()


def padded(lengths, left, width=9):
    ids = torch.randint(3, 64, (len(lengths), width), generator=torch.Generator().manual_seed(1))
    mask = torch.stack([(torch.arange(width) < length).long() for length in lengths])
    if left == "hole":  # after the first token
        mask = torch.cat([mask[:, :1], torch.zeros_like(mask[:, :2]), mask[:, 1:]], dim=1)
        ids = torch.cat([ids, ids[:, :2] + 1], dim=1)
    elif left:
        mask = mask.flip(1)
    predicted = torch.cat([mask[:, :1], mask[:, 1:] * mask[:, :-1]], dim=1)  # by a token that counts
    return Batch([str(row) for row in range(len(ids))], ids * mask, mask, ids.masked_fill(predicted == 0, IGNORED))


def tokens_computed(moe, batch):
    """By the last feed-forward block."""
    seen = []
    block = moe.block(moe.all_layers[-1])
    with hooked(
        [block.register_forward_pre_hook(lambda _, args: seen.append(args[0].numel() // SMALL["hidden_size"]))]
    ):
        loss = cross_entropy(moe, batch)
    loss.backward()
    return seen, loss, {name: p.grad.clone() for name, p in moe.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("lengths, left", COUNTED.values(), ids=COUNTED)
@pytest.mark.parametrize("family", sorted(COMPARED_FAMILIES))
def test_outputs_and_gradients_are_those_of_the_padded_pass(family, lengths, left):
    moe, batch = MoEModel(model_of(family)), padded(lengths, left)
    with moe.unpadded():
        few, loss, gradients = tokens_computed(moe, batch)
        hidden, between = final_hidden_states(moe, batch), hidden_states(moe, 0, batch)
    moe.model.zero_grad()
    every, wanted, wanted_gradients = tokens_computed(moe, batch)
    assert (few, every) == ([sum(lengths)], [batch.input_ids.numel()])
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(gradients, wanted_gradients, rtol=1e-4, atol=1e-6)
    counted = batch.attention_mask.bool()
    torch.testing.assert_close(hidden[counted], final_hidden_states(moe, batch)[counted])
    torch.testing.assert_close(between[counted], hidden_states(moe, 0, batch)[counted])
    assert not hidden[~counted].any() and not between[~counted].any()


def test_whoever_looks_at_tokens_sees_the_padded_batch(moe):
    batch, layer = padded(*COUNTED["right"]), moe.layers[-1]
    counted = batch.attention_mask.bool()
    wanted, routes = router_states(moe, batch, "x_Nd"), moe.routes(**batch.inputs)
    seen = []
    again = MoEModel(moe.model)  # of the same module
    with moe.unpadded():
        for each in (moe, again):
            states = router_states(each, batch, "x_Nd")
            torch.testing.assert_close(states[counted], wanted[counted])
            assert not states[~counted].any()
            assert torch.equal(each.routes(**batch.inputs)[layer][counted.flatten()], routes[layer][counted.flatten()])
        with again.unpadded(), moe.before_routers(lambda _, x_Td: seen.append(x_Td)):
            final_hidden_states(moe, batch)
        assert torch.equal(torch.stack(seen, dim=1).unflatten(0, batch.input_ids.shape), states)


def test_kept_tokens_of_several_passes_are_those_of_the_padded_batches(moe):
    """With their gradients. A pass without padding counts as well."""
    batches = [padded(*COUNTED[side]) for side in ("right", "left")]
    whole = batches[0].input_ids[:1, : int(batches[0].attention_mask[0].sum())]
    batches.append(Batch([], whole, torch.ones_like(whole), whole))
    keep = torch.cat([counted_tokens(batch.attention_mask) for batch in batches])

    def kept_and_gradient(mode):
        moe.model.zero_grad()
        with mode, moe.record_routing() as recorder:
            for batch in batches:
                moe.model.model(**batch.inputs)
            trace = recorder.take(keep)
        assert not recorder.take()
        seen = trace[moe.layers[-1]]
        (seen.x_Nd**3).sum().backward()
        return [*vars(seen).values(), moe.expert_parameters(moe.layers[0])[0].grad]

    assert keep.sum() < len(keep)
    for few, wanted in zip(kept_and_gradient(moe.unpadded()), kept_and_gradient(nullcontext()), strict=True):
        torch.testing.assert_close(few, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weighted", [False, True])
def test_forced_routes_are_of_the_padded_batch(moe, weighted):
    batch = padded(*COUNTED["right"])
    others = MoEModel(small_model(moe.model.config.model_type, seed=5))
    forced = (others.weighted_routes if weighted else others.routes)(**batch.inputs)
    counted = batch.attention_mask.bool()
    own = final_hidden_states(moe, batch)[counted]
    with moe.force_routing(forced):
        wanted = final_hidden_states(moe, batch)[counted]
    assert (own - wanted).abs().max() > 1e-2, "the control: routes of its own"
    with moe.unpadded():
        for given in (forced, lambda *_: forced):
            with moe.force_routing(given):
                torch.testing.assert_close(final_hidden_states(moe, batch)[counted], wanted)
        nothing = {layer: torch.full_like(sets, -1) for layer, sets in others.routes(**batch.inputs).items()}
        with moe.force_routing(nothing):
            torch.testing.assert_close(final_hidden_states(moe, batch)[counted], own)
        few = {layer: sets[:5] for layer, sets in nothing.items()}
        with moe.force_routing(few), pytest.raises(ValueError, match="routes for 5 tokens, the pass has 27"):
            final_hidden_states(moe, batch)


def test_generation_checkpointing_and_other_families_stay_as_they_are(moe):
    batch = padded(*COUNTED["left"])
    wanted = moe.model.generate(**batch.inputs, max_new_tokens=4, do_sample=False)
    with moe.unpadded():
        assert torch.equal(moe.model.generate(**batch.inputs, max_new_tokens=4, do_sample=False), wanted)
        moe.model.activation_checkpointing_enable({"use_reentrant": False})
        moe.model.train()
        assert tokens_computed(moe, batch)[0] == [batch.input_ids.numel()]
        moe.model.activation_checkpointing_disable()
        assert tokens_computed(moe, batch)[0] == [int(batch.attention_mask.sum())]
        more = moe.model.model(**batch.inputs, output_hidden_states=True)
        assert more.hidden_states[0].shape == more.last_hidden_state.shape
        assert moe.model(**batch.inputs, use_cache=True, output_router_logits=True).router_logits
    moe.model.config.model_type = "unknown"
    with moe.unpadded():
        moe.model.eval()
        assert tokens_computed(moe, batch)[0] == [batch.input_ids.numel()]


def test_nothing_is_left_after_an_error(moe):
    batch = padded(*COUNTED["right"])
    with moe.unpadded():
        with pytest.raises(IndexError):
            final_hidden_states(moe, Batch([], batch.input_ids + 1000, batch.attention_mask, batch.labels))
        assert padding_of(moe.model) is None
    assert moe.model.config._attn_implementation == "sdpa" and "forward" not in vars(moe.model.model)
    assert tokens_computed(moe, batch)[0] == [batch.input_ids.numel()]

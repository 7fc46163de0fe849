"""Every family: a tiny random model of each, built from its own configuration."""

import copy
import types

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

import gripmoe
from conftest import random_batch
from gripmoe.attacks.quantization import quantized
from gripmoe.attacks.relearning import low_rank_experts
from gripmoe.attacks.restoration import PARTS, outside_parts, pairs_of, replaced, tensors_of
from gripmoe.attacks.routers import silenced, widened
from gripmoe.config.methods import method_table
from gripmoe.constraints import realignment
from gripmoe.constraints.base import Unconstrained
from gripmoe.constraints.baselines import GateAnchor, RouterL2
from gripmoe.constraints.realignment import make_correction
from gripmoe.data.documents import IGNORED, Row, collate
from gripmoe.geometry.routing import SelectionRule, jaccard, route, stability_by_layer
from gripmoe.moe import MoEModel, storage
from gripmoe.moe.families import DENSE, FAMILIES, Family, has_experts
from gripmoe.training import loop, steps
from gripmoe.training.objectives import GradientDifference, make_objective, token_logprobs
from training.test_loop import CORPORA, NEVER, TRAINING

SMALL = dict(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=32,
    moe_intermediate_size=16,
    num_experts=8,
    num_local_experts=8,
    n_routed_experts=8,
    moe_num_experts=8,
    num_experts_per_tok=2,
    moe_topk=2,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
GROUPS = dict(n_group=4, topk_group=2)
LATENT = dict(q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, qk_head_dim=16)
PARTICULAR = {
    "qwen2_moe": dict(shared_expert_intermediate_size=16),
    "qwen3_next": dict(
        shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    "minimax": dict(layer_types=["linear_attention", "full_attention"], block_size=8),
    "jamba": dict(
        attn_layer_period=2, attn_layer_offset=1, expert_layer_period=1, expert_layer_offset=0, mamba_d_state=4
    ),
    "gpt_oss": dict(layer_types=["full_attention", "full_attention"]),
    "ernie4_5_moe": dict(
        moe_num_experts=8, moe_k=2, moe_layer_start_index=0, moe_num_shared_experts=1, moe_layer_end_index=1
    ),
    "deepseek_v2": dict(
        first_k_dense_replace=1, n_shared_experts=1, topk_method="group_limited_greedy", **GROUPS, **LATENT
    ),
    "deepseek_v3": dict(first_k_dense_replace=1, n_shared_experts=1, **GROUPS, **LATENT | {"head_dim": 8}),
    "glm4_moe": dict(first_k_dense_replace=1, n_shared_experts=1, **GROUPS),
    "dots1": dict(first_k_dense_replace=1, n_shared_experts=1, layer_types=["full_attention"] * 2, **GROUPS),
}
for name in ("axk1", "deepseek_v32", "exaone_moe", "glm4_moe_lite", "glm_moe_dsa", "nemotron_h", "solar_open"):
    PARTICULAR[name] = dict(PARTICULAR["deepseek_v3"])
PARTICULAR["nemotron_h"] |= dict(mamba_num_heads=4, mamba_head_dim=8, ssm_state_size=4, n_groups=2, chunk_size=8)
del PARTICULAR["solar_open"]["first_k_dense_replace"]
PARTICULAR["qwen3_5_moe_text"] = PARTICULAR["qwen3_next"]
PARTICULAR["lara_mini"] = PARTICULAR["qwen3_next"]
PARTICULAR["qwen4_exp_text"] = dict(PARTICULAR["qwen3_next"])
for name in ("axk2", "bailing_hybrid", "beam", "dots3_note_text", "hy_v4", "kimi_linear", "mistral4"):
    PARTICULAR[name] = dict(first_k_dense_replace=1, n_shared_experts=1, num_shared_experts=1, **GROUPS, **LATENT)
PARTICULAR["kimi_linear"] |= dict(
    layer_types=["linear_attention", "full_attention"], linear_num_heads=2, linear_head_dim=8
)
PARTICULAR["bailing_hybrid"] |= dict(layer_types=["linear_attention", "full_attention"])
PARTICULAR["mimo_v2_flash"] = dict(layer_types=["full_attention"] * 2, **GROUPS)
PARTICULAR["mimo_v2_flash"] |= dict(mlp_layer_types=["dense", "sparse"])
PARTICULAR["axk2"] |= dict(n_group=None, topk_group=None)
PARTICULAR["beam"] |= dict(mlp_layer_types=["dense", "sparse"])
PARTICULAR["flint"] = dict(mlp_only_layers=[0])
PARTICULAR["qwen4_exp_text"] |= dict(
    indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=16, indexer_compress_ratio=4
)
PARTICULAR["dots3_note_text"] |= dict(
    layer_types=["sliding_attention", "indexed_attention"], mlp_layer_types=["dense", "sparse"], per_layer_config={},
    index_topk=32, index_head_dim=16, index_n_heads=2,
)  # fmt: skip
PARTICULAR["inkling2_text"] = dict(unpadded_vocab_size=64)
PARTICULAR["lfm2_moe"] = dict(layer_types=["full_attention"] * 2, num_dense_layers=1)
PARTICULAR["granitemoehybrid"] = dict(
    mamba_n_heads=4, mamba_d_state=4, shared_intermediate_size=16, layer_types=["linear_attention", "full_attention"]
)
FIRST_IS_DENSE = (
    "flint",
    "hy_v3",
    "laguna",
    "lfm2_moe",
    "mimo_v2_flash",
)  # of those whose configuration has another word for it


def takes(config, name: str) -> bool:
    try:
        return hasattr(config, name)
    except Exception:  # the layers differ in it, of an error that is no AttributeError
        return True


def make(family: str, **changes):
    """A model whose routers differ visibly between tokens, with biases where the family has any."""
    defaults = AutoConfig.for_model(family)
    wanted = {k: v for k, v in SMALL.items() if takes(defaults, k)} | PARTICULAR.get(family, {}) | changes
    config = AutoConfig.for_model(family, **wanted)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    if type(config) in AutoModelForCausalLM._model_mapping:
        model = AutoModelForCausalLM.from_config(config).float().eval()
    else:
        model = transformers.Mistral4ForCausalLM._from_config(config).float().eval()
    moe = MoEModel(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in moe.layers:
            router = moe.router(layer)
            router.weight.copy_(0.3 * torch.randn(router.weight.shape, generator=generator))
            of_block = [
                *moe.block(layer).named_parameters(recurse=False),
                *moe.block(layer).named_buffers(recurse=False),
            ]
            for name, tensor in [*router.named_parameters(), *router.named_buffers(), *of_block]:
                if "bias" in name:
                    tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
    return moe


@pytest.fixture(scope="module", params=sorted(name for name, row in FAMILIES.items() if row is not DENSE))
def family(request):
    return request.param


@pytest.fixture(scope="module")
def moe(family):
    return make(family)


def rows(seed: int = 0, lengths=(9, 14, 12, 16)):
    generator = torch.Generator().manual_seed(seed)
    documents = [torch.randint(3, 64, (n,), generator=generator).tolist() for n in lengths]
    return [Row(str(n), ids, ids) for n, ids in enumerate(documents)]


def left_padded(batch):
    moved = copy.deepcopy(batch)
    for i, mask in enumerate(batch.attention_mask):
        shift = int((mask == 0).sum())
        moved.input_ids[i] = batch.input_ids[i].roll(shift)
        moved.attention_mask[i] = mask.roll(shift)
    return moved


def test_every_family_has_routers_in_fp32_and_experts(moe, family):
    first_is_dense = "first_k_dense_replace" in PARTICULAR.get(family, {}) or family in FIRST_IS_DENSE
    assert moe.layers == ([1] if first_is_dense else [0, 1])
    assert (moe.num_experts, moe.top_k, moe.hidden_size) == (8, 2, 32)
    for layer in moe.layers:
        assert {len(p) for p in moe.expert_parameters(layer)} == {8}


@pytest.mark.parametrize("pad", [lambda batch: batch, left_padded], ids=["right", "left"])
def test_padding_does_not_change_what_is_recorded(moe, family, pad):
    alone = moe.trace([collate([row], 0) for row in rows()])
    padded = moe.trace([pad(collate(rows(), 0))])
    for layer in moe.layers:
        assert alone[layer].x_Nd.shape == padded[layer].x_Nd.shape
        atol = 2e-4 if family == "beam" else 2e-5
        torch.testing.assert_close(alone[layer].x_Nd, padded[layer].x_Nd, atol=atol, rtol=1e-3)
    assert min(stability_by_layer(alone, padded).values()) == 1.0


def test_the_rule_selects_what_the_router_selected(moe):
    trace = moe.trace([collate(rows(), 0)])
    for layer, seen in trace.items():
        rerouted = route(seen.x_Nd, moe.theta(layer).detach(), moe.rule(layer))
        torch.testing.assert_close(rerouted.scores_NE, seen.scores_NE)
        assert torch.equal(rerouted.top_k_Nk.sort().values, seen.top_k_Nk.sort().values)


@torch.no_grad()
def test_forcing_its_own_sets_changes_no_bit(moe):
    batch = collate(rows(), 0)
    free = moe.model(**batch.inputs).logits
    with moe.force_routing(moe.routes):
        assert torch.equal(free, moe.model(**batch.inputs).logits)
    others = {layer: (top_k + 1) % 8 for layer, top_k in moe.routes(batch.input_ids).items()}
    with moe.force_routing(others):
        assert not torch.allclose(free, moe.model(**batch.inputs).logits), "the control: other sets change the output"
    assert torch.equal(free, moe.model(**batch.inputs).logits), "nothing stays behind"


@torch.no_grad()
def test_the_experts_of_a_layer_are_the_sum_of_single_ones(moe):
    for layer, seen in moe.trace([collate(rows(), 0)]).items():
        weights = torch.rand(seen.top_k_Nk.shape)
        alone = torch.stack([moe.expert_output(layer, expert, seen.x_Nd) for expert in range(8)], dim=1)
        chosen = alone.gather(1, seen.top_k_Nk[..., None].expand(-1, -1, alone.shape[-1]))
        together = moe.block(layer).experts(seen.x_Nd, seen.top_k_Nk, weights)
        torch.testing.assert_close((chosen * weights[..., None]).sum(dim=1), together, atol=1e-5, rtol=1e-4)
        assert not torch.allclose(alone[:, 0], alone[:, 1]), "the control: experts differ"


def changed_sets(moe, seen_by_layer) -> float:
    """Share of recorded sets that the routers of now would not select."""
    agreement = [
        jaccard(seen.top_k_Nk, route(seen.x_Nd, moe.theta(layer).detach(), moe.rule(layer)).top_k_Nk)
        for layer, seen in seen_by_layer.items()
    ]
    return (torch.cat(agreement) < 1).double().mean().item()


def trained(family: str, held: bool, **changes):
    """A few steps with a learning rate that moves sets; returns the model and what it routed before."""
    moe = make(family, **changes)
    retain = [collate(rows(lengths=(6, 7)), 0)]
    recorded = moe.trace(retain)
    optimizer = torch.optim.AdamW(moe.model.parameters(), lr=0.05, weight_decay=0.1)
    handle = gripmoe.constrain(moe.model, optimizer, retain=retain) if held else None
    start = moe.thetas()
    for step in range(3):
        batch = collate(rows(seed=step + 1), 0)
        optimizer.zero_grad()
        moe.model(**batch.inputs, labels=batch.input_ids).loss.backward()
        optimizer.step()
    if handle:
        handle.close()
    moved = max((moe.theta(layer) - start[layer]).abs().max().item() for layer in moe.layers)
    return moe, recorded, moved


def test_a_constrained_update_keeps_every_recorded_set(family):
    moe, recorded, moved = trained(family, held=True)
    assert changed_sets(moe, recorded) == 0
    assert moved > 1e-3, "the routers did move, where nothing was held"


def test_control_an_unconstrained_update_does_not(family):
    moe, recorded, _ = trained(family, held=False)
    assert changed_sets(moe, recorded) > 0.05


# With as many groups as experts per token the limit excludes nothing: a group is as good as its best expert.
LIMITED = dict(n_group=2, topk_group=1)


@pytest.mark.parametrize("method, other", [("greedy", "group_limited_greedy"), ("group_limited_greedy", "greedy")])
def test_deepseek_v2_selects_as_its_configuration_says(method, other):
    moe, recorded, moved = trained("deepseek_v2", held=True, topk_method=method, **LIMITED)
    assert changed_sets(moe, recorded) == 0 and moved > 1e-3
    moe, recorded, _ = trained("deepseek_v2", held=False, topk_method=method, **LIMITED)
    assert changed_sets(moe, recorded) > 0.1, "the control: an unconstrained update"
    moe = make("deepseek_v2", topk_method=method, **LIMITED)
    seen = moe.trace([collate(rows(), 0)])
    assert changed_sets(moe, seen) == 0
    moe.router(1).topk_method = other
    assert changed_sets(moe, seen) > 0.1, "the control: the other method"


def test_group_limits_need_more_than_the_papers_margins():
    """Margins of the plain rule let a whole group in; those of the group's own rule do not."""
    grouped = SelectionRule(1, scoring="sigmoid", num_groups=2, chosen_groups=1, counted=2)
    scores_NE = torch.tensor([[2.0, 1.0, 1.9, 0.9]])  # the first group wins by the sum of its two best
    top_k_Nk = grouped.select(scores_NE)
    assert top_k_Nk.tolist() == [[0]]
    plain = SelectionRule(1)
    raised = scores_NE + plain.margins(scores_NE, top_k_Nk).masked_fill(plain.fixed(scores_NE, top_k_Nk), 0) * 0.999
    assert plain.select(raised).tolist() == [[0]]
    lowered = raised - torch.tensor([[0.0, 3.0, 0.0, 0.0]])
    assert plain.select(lowered).tolist() == [[0]], "the plain rule lets what is not selected fall"
    assert grouped.select(lowered).tolist() != [[0]]
    assert grouped.fixed(scores_NE, top_k_Nk).tolist() == [[True, True, False, False]]
    assert grouped.margins(scores_NE, top_k_Nk)[0, 2:].tolist() == [0, 0]


def test_margins_of_a_biased_sigmoid_are_where_a_tie_is():
    generator = torch.Generator().manual_seed(0)
    rule = SelectionRule(2, correction_bias_E=0.2 * torch.randn(8, generator=generator).double(), scoring="sigmoid")
    scores_NE = torch.randn(50, 8, generator=generator).double()
    top_k_Nk = rule.select(scores_NE)
    margins_NE = rule.margins(scores_NE, top_k_Nk)
    fixed_NE = rule.fixed(scores_NE, top_k_Nk)
    lowest_N1 = rule.choice(scores_NE).gather(1, top_k_Nk).amin(dim=1, keepdim=True)
    tied_NE = rule.choice(scores_NE + margins_NE)
    reachable_NE = ~fixed_NE & margins_NE.isfinite()
    assert (margins_NE[~fixed_NE] >= 0).all()
    torch.testing.assert_close(tied_NE[reachable_NE], lowest_N1.expand_as(tied_NE)[reachable_NE])


def test_scores_that_no_rule_describes_are_refused():
    """Laguna's soft cap, and in AXK2 groups beside negative biases; the controls are without."""
    make("laguna").rules()
    moe = make("laguna", moe_router_logit_softcapping=5.0)
    with pytest.raises(ValueError, match="no linear map"):
        moe.rules()
    moe = make("axk2", **GROUPS)
    bias = moe.router(1).e_score_correction_bias
    bias[0] = -0.1
    with pytest.raises(ValueError, match="a bias below 0"):
        moe.rules()
    bias.abs_()
    assert changed_sets(moe, moe.trace([collate(rows(), 0)])) == 0


def test_a_registered_family_is_held_and_a_wrong_rule_is_refused(monkeypatch):
    monkeypatch.delitem(FAMILIES, "minimax_m2")
    with pytest.raises(
        ValueError, match=r"family 'minimax_m2' \(MiniMaxM2.*missing: a row;.*write: gripmoe.register_fa"
    ):
        make("minimax_m2")

    def weigh(router, scores, experts):
        chosen = scores.sigmoid().gather(1, experts)
        return chosen / chosen.sum(dim=-1, keepdim=True)

    def rule(router, block):
        return gripmoe.SelectionRule(router.top_k, correction_bias_E=block.e_score_correction_bias, scoring="sigmoid")

    gripmoe.register_family("minimax_m2", weigh, rule)
    moe, recorded, moved = trained("minimax_m2", held=True)
    assert changed_sets(moe, recorded) == 0 and moved > 1e-3
    batch = collate(rows(), 0)
    with torch.no_grad(), moe.force_routing(moe.routes):
        forced = moe.model(**batch.inputs).logits
    torch.testing.assert_close(forced, moe.model(**batch.inputs).logits)
    gripmoe.register_family("minimax_m2", weigh)  # which leaves out the bias
    with pytest.raises(ValueError, match="missing: a rule that selects what the router of layer 0 has selected"):
        make("minimax_m2").trace([batch])


def test_layers_that_run_several_times_in_a_pass_are_refused(monkeypatch):
    """Without a row, and with one, when routing is first recorded."""
    blocks = dict(num_hidden_layers=4, layer_types=["hybrid_sliding"] * 4, n_layers_per_attn_res_block=2)
    looped = blocks | dict(loop_layer_index_start=2, loop_layer_index_end=4, loop_num_passes=3)
    with pytest.raises(ValueError, match="missing: layers that run once in a forward pass; write: a model without"):
        make("inkling2_loop_text", **looped)
    monkeypatch.setitem(FAMILIES, "inkling2_loop_text", FAMILIES["inkling2_text"])
    moe, batch = make("inkling2_loop_text", **looped), collate(rows(), 0)
    with pytest.raises(ValueError, match="missing: layers that run once in a forward pass"):
        moe.trace([batch])
    make("inkling2_loop_text", **looped | dict(loop_num_passes=1)).trace([batch])


def test_a_family_tells_of_experts_that_its_configuration_does_not_count(monkeypatch):
    monkeypatch.setitem(FAMILIES, "mine", Family(lambda *_: None))
    assert has_experts(types.SimpleNamespace(model_type="mine", number_of_ffns=8))
    assert not has_experts(types.SimpleNamespace(model_type="mine", num_experts=0))
    assert not has_experts(types.SimpleNamespace(model_type="llama"))


def test_the_biases_of_a_router_are_a_part_of_it(moe, family):
    """Restoring routers restores them, also those that the block holds, and they are no experts."""
    layer = moe.layers[0]
    of_router, experts = ({id(t) for t in tensors_of(moe, layer, part)} for part in ("router", "experts"))
    rule = moe.rule(layer)
    for bias in (moe.theta(layer), rule.logit_bias_E, rule.correction_bias_E):
        if bias is not None:
            held = [t for t in moe.block(layer).state_dict(keep_vars=True).values() if t.data_ptr() == bias.data_ptr()]
            assert len(held) == 1 and id(held[0]) in of_router
    assert not of_router & experts


def test_shared_experts_beside_the_block_are_experts():
    """Granite has them there: unlearning trains them, and restoration takes them for no attention."""
    moe = make("granitemoeshared", shared_intermediate_size=16)
    for layer in moe.layers:
        shared = {id(p) for p in moe.model.model.layers[layer].shared_mlp.parameters()}
        parts = {part: {id(t) for t in tensors_of(moe, layer, part)} for part in ("router", "attention", "experts")}
        assert shared and shared <= parts["experts"] and shared.isdisjoint(parts["attention"] | parts["router"])
        assert set().union(*parts.values()) == {id(p) for p in moe.model.model.layers[layer].parameters()}
        assert shared <= {id(p) for p in moe.other_parameters(layer)}
    batch = collate(rows(), 0)
    with torch.no_grad(), moe.without_blocks(), moe.record_hidden(0) as silent:
        moe.model.model(**batch.inputs)
        moe.model.model.layers[0].shared_mlp.output_linear.weight.mul_(2)
        moe.model.model(**batch.inputs)
    assert torch.equal(*silent)


def test_unlearning_trains_biases_of_routers_with_the_routers(tmp_path, monkeypatch):
    """And timing its steps changes no bit of them."""
    trained, lists = [], []
    adamw = loop._adamw
    monkeypatch.setattr(loop, "_adamw", lambda *given: lists.append(given) or adamw(*given))
    for pairs in (1, 3):
        monkeypatch.setattr(steps, "TIMED_PAIRS", pairs)
        moe, objective = make("gpt_oss"), GradientDifference(alpha=1.0)
        given = (moe, objective, Unconstrained(), CORPORA, TRAINING, NEVER)
        loop.unlearn(*given, seed=0, state_file=tmp_path / f"{pairs}.pt")
        routers, experts, _ = lists[-1]
        biases = [moe.router(layer).bias for layer in moe.layers]
        of_routers = {id(p) for p in routers}
        assert of_routers >= {id(bias) for bias in biases} and of_routers.isdisjoint(map(id, experts))
        trained.append([bias.detach().clone() for bias in biases])
    assert all(map(torch.equal, *trained))
    assert not torch.equal(trained[0][0], make("gpt_oss").router(0).bias), "they train"


def test_soft_constraints_freeze_the_biases_that_they_do_not_see():
    """SEUF trains one router with its bias; a penalty on weights trains no bias. The control: without them all do."""
    trained = {}
    for constraint in (Unconstrained(), GateAnchor(1, 2, weight=1.0, alone=True), RouterL2(1.0)):
        moe = make("gpt_oss")
        constraint.start(moe, [])
        trained[type(constraint)] = [moe.router(layer).bias.requires_grad for layer in moe.layers]
    assert trained == {Unconstrained: [True, True], GateAnchor: [False, True], RouterL2: [False, False]}


@torch.no_grad()
def test_parts_and_all_else_are_the_whole_model(moe, family):
    """Restored together they give the original model back: dense layers, head, embeddings, norms and biases too."""
    before, batch = MoEModel(copy.deepcopy(moe.model)), collate(rows(), 0)
    broken = MoEModel(copy.deepcopy(moe.model))
    for tensor in broken.model.state_dict(keep_vars=True).values():
        if tensor.is_floating_point():
            tensor.add_(0.3)
    wanted = before.model(**batch.inputs).logits
    parts = pairs_of(before, broken, broken.layers, PARTS)
    with replaced([*parts, *zip(outside_parts(broken), outside_parts(before), strict=True)]):
        assert torch.equal(broken.model(**batch.inputs).logits, wanted)
    with replaced(parts):
        assert not torch.allclose(broken.model(**batch.inputs).logits, wanted), "the control"


@torch.no_grad()
def test_routers_select_more_experts_or_none_of_some(moe, family):
    batch = collate(rows(), 0)
    own = moe.routes(batch.input_ids)
    plain = moe.model(**batch.inputs).logits
    most = 8 // moe.rule(moe.layers[0]).num_groups * moe.rule(moe.layers[0]).chosen_groups
    with widened(moe, 3):
        assert {routes.shape[1] for routes in moe.routes(batch.input_ids).values()} == {min(6, most)}
        assert not torch.allclose(moe.model(**batch.inputs).logits, plain)
    favourite = {layer: torch.bincount(routes.flatten(), minlength=8).argmax() for layer, routes in own.items()}
    with silenced(moe, {layer: torch.arange(8) == expert for layer, expert in favourite.items()}):
        routes = moe.routes(batch.input_ids)
    assert not any((routes[layer] == favourite[layer]).any() for layer in moe.layers)
    assert torch.equal(moe.model(**batch.inputs).logits, plain), "nothing stays behind"


@torch.no_grad()
def test_attacks_on_experts_leave_their_order_and_round_along_their_inputs(moe, family):
    names = [name for name, _ in moe.model.named_parameters()]
    with low_rank_experts(moe, 2, 0):
        pass
    assert [name for name, _ in moe.model.named_parameters()] == names
    experts = moe.block(moe.layers[0]).experts
    inputs = -2 if family in ("gpt_oss", "aria_text") else -1
    if isinstance(getattr(experts, "down_proj", None), torch.nn.Parameter):
        before = experts.down_proj.detach().clone()
        with quantized(moe, 2):  # three levels
            levels = [channel.unique() for channel in experts.down_proj.movedim(inputs, -1).flatten(0, 1)]
        assert max(map(len, levels)) <= 3 and torch.equal(experts.down_proj, before)


def with_other_biases():
    """A model whose routers have got other biases since it was remembered, and what was remembered."""
    moe = make("gpt_oss")
    documents = [{"input_ids": torch.randint(3, 64, (8, 16), generator=torch.Generator().manual_seed(5))}]
    original = gripmoe.remember(moe.model, documents)
    with torch.no_grad():
        for layer in moe.layers:
            moe.router(layer).bias.add_(3.0 * torch.randn(8, generator=torch.Generator().manual_seed(layer)))
    return moe, original


CORRECTIONS = {
    "sound": lambda moe, original: gripmoe.realign(moe.model, original),
    "paper": lambda moe, original: gripmoe.realign(moe.model, original, form="paper"),
    **{
        name: lambda moe, original, name=name: make_correction(
            method_table()[name], original.theta_0, original.biases, original.trace, original.batch
        )(moe)
        for name in ("ptc", "restore_router")
    },
}


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_a_correction_puts_the_biases_of_routers_back(correction):
    """Without which no weight gives the original sets: the control."""
    moe, original = with_other_biases()
    wanted = {layer: named["bias"] for layer, named in original.biases.items()}
    assert max(stability_by_layer(original.trace, moe.trace([original.batch])).values()) < 0.8
    CORRECTIONS[correction](moe, original)
    assert all(torch.equal(moe.router(layer).bias, bias) for layer, bias in wanted.items())
    assert min(stability_by_layer(original.trace, moe.trace([original.batch])).values()) > 0.95


@pytest.mark.parametrize("changes", [False, True])
def test_method_b_is_judged_by_the_sets_that_were_remembered(changes):
    """Also where the bias of a router has changed, if nobody puts it back."""
    moe, original = with_other_biases()
    if not changes:
        moe.set_router_biases(original.biases)
    report = realignment.realign_routers(moe, original.theta_0, original.trace, original.batch)
    after = moe.trace([original.batch])
    for layer, seen in after.items():
        kept = jaccard(original.trace[layer].top_k_Nk, seen.top_k_Nk).mean().item()
        assert report[layer].held_out_stability == pytest.approx(kept, abs=0.1)
        assert (kept < 0.8) == changes, "the control"


def test_method_b_that_fails_leaves_the_biases_of_routers_as_they_were(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("out of memory")

    moe, original = with_other_biases()
    before = moe.router_biases()
    monkeypatch.setattr(realignment, "realign_sound", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        gripmoe.realign(moe.model, original)
    for layer, named in moe.router_biases().items():
        assert torch.equal(named["bias"], before[layer]["bias"])
        assert not torch.equal(named["bias"], original.biases[layer]["bias"]), "the control"


def test_a_correction_during_a_check_leaves_the_biases_as_they_train():
    moe, original = with_other_biases()
    before = moe.router_biases()
    with loop._corrected(moe, lambda moe: CORRECTIONS["restore_router"](moe, original)):
        within = moe.router_biases()
    for layer, named in moe.router_biases().items():
        assert torch.equal(named["bias"], before[layer]["bias"])
        assert torch.equal(within[layer]["bias"], original.biases[layer]["bias"]), "the control"


@pytest.mark.parametrize("method", ["frozen_router", "expert_specific", None])
def test_frozen_biases_of_routers_do_not_move_by_momentum(method):
    """After a step that was free, and where gradients are set to 0 rather than away. The control: without a method they
    move."""
    moe, batch = make("gpt_oss"), collate(rows(), 0)
    optimizer = torch.optim.AdamW(moe.model.parameters(), lr=1e-2, weight_decay=0.0)
    moe.model(**batch.inputs, labels=batch.labels).loss.backward()
    optimizer.step()
    before = moe.router_biases()
    handle = gripmoe.constrain(moe.model, optimizer, [batch], method=method) if method else None
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        moe.model(**batch.inputs, labels=batch.labels).loss.backward()
        optimizer.step()
    for layer, named in moe.router_biases().items():
        assert torch.equal(named["bias"], before[layer]["bias"]) == bool(method)
        assert (moe.theta(layer).grad is None) == (method == "frozen_router")
    if handle:
        handle.close()


def test_seuf_leaves_the_biases_of_other_routers_as_they_are():
    """After a step that was free, and where gradients are set to 0 rather than away. The control: the bias of the
    router that leads to its expert."""
    moe, batch = make("gpt_oss"), collate(rows(), 0)
    optimizer = torch.optim.AdamW(moe.model.parameters(), lr=1e-2, weight_decay=0.0)
    moe.model(**batch.inputs, labels=batch.labels).loss.backward()
    optimizer.step()
    before = moe.router_biases()
    with gripmoe.constrain(moe.model, optimizer, [batch], forget=[batch], method="seuf") as handle:
        optimizer.zero_grad(set_to_none=False)
        with handle.forget():
            loss = moe.model(**batch.inputs, labels=batch.labels).loss
        (loss + handle.penalty()).backward()
        optimizer.step()
        for layer, named in moe.router_biases().items():
            assert torch.equal(named["bias"], before[layer]["bias"]) == (layer != handle.constraint.layer)


def test_states_of_an_optimizer_become_fp32_with_the_biases_of_routers():
    """Which a gate anchor trains; with states in bf16 its step would fail."""
    moe, batch = make("gpt_oss"), collate(rows(), 0)
    moe.release()
    model = moe.model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(**batch.inputs, labels=batch.labels).loss.backward()
    optimizer.step()
    bias = moe.router(0).bias
    assert optimizer.state[bias]["exp_avg"].dtype == torch.bfloat16, "the control"
    with gripmoe.constrain(model, optimizer, [batch], forget=[batch], method="gate_anchor") as handle:
        assert optimizer.state[bias]["exp_avg"].dtype == bias.dtype == torch.float32
        optimizer.zero_grad()
        for mark in (handle.forget, handle.retain):
            with mark():
                loss = model(**batch.inputs, labels=batch.labels).loss
            (loss + handle.penalty()).backward()
        optimizer.step()


def test_seuf_leaves_shared_experts_beside_the_block_as_they_are():
    """Granite has them there. The control: they train without SEUF."""
    batch = random_batch(seed=7)
    for method, stays in (("seuf", True), ("frozen_router", False)):
        model = make("granitemoeshared", shared_intermediate_size=16).model
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before = {name: p.detach().clone() for name, p in model.named_parameters() if "shared_mlp" in name}
        with gripmoe.constrain(model, optimizer, [batch], forget=[batch], method=method) as handle:
            with handle.forget():
                loss = model(**batch.inputs, labels=batch.input_ids).loss
            (loss + handle.penalty()).backward()
            optimizer.step()
        now = dict(model.named_parameters())
        assert before and all(torch.equal(now[name], old) for name, old in before.items()) == stays


def test_seuf_is_refused_where_a_softmax_does_not_say_what_is_selected():
    model, batch = make("deepseek_v3").model, random_batch(seed=7)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(ValueError, match="DeepseekV3ForCausalLM select by biases or groups"):
        gripmoe.constrain(model, optimizer, [batch], forget=[batch], method="seuf")


def test_a_model_saved_in_bf16_keeps_its_routers_in_fp32(moe, family, tokenizer, tmp_path):
    """transformers alone rounds them to the dtype of the other weights, some of which it may keep in fp32 too."""
    if family == "mistral4":
        pytest.skip("AutoModelForCausalLM does not know it")
    saved = MoEModel(copy.deepcopy(moe.model).bfloat16())
    with torch.no_grad():
        for layer in saved.layers:
            saved.theta(layer).add_(1e-5 * torch.randn(saved.theta(layer).shape))

    digest = storage.save_model(saved.model, tokenizer, tmp_path / "weights")
    loaded = MoEModel(storage.load_model(tmp_path / "weights")[0])
    _, biases = storage.load_routers(tmp_path / "weights", moe)
    for layer, named in saved.router_biases().items():
        assert biases[layer].keys() == named.keys() and all(torch.equal(biases[layer][n], b) for n, b in named.items())
    written, read = saved.model.state_dict(), loaded.model.state_dict()
    assert all(torch.equal(read[name].to(tensor.dtype), tensor) for name, tensor in written.items())
    if all(read[name].dtype == tensor.dtype for name, tensor in written.items()):
        assert storage.weights_digest(loaded.model) == digest
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "weights", dtype="auto")
    for layer in saved.layers:
        assert torch.equal(loaded.theta(layer), saved.theta(layer)), family
        if (rounded := MoEModel(plain).theta(layer)).dtype == torch.bfloat16:  # many families keep fp32 by themselves
            assert not torch.equal(rounded, saved.theta(layer))


def test_log_probabilities_and_kl_are_of_the_logits_that_a_family_gives(family):
    """Some divide, multiply, cap or cut what their head says, or give it a bias."""
    changes = {"granitemoe": {"logits_scaling": 8.0}, "beam": {"final_logit_softcapping": 2.0}}.get(family, {})
    moe, objective = make(family, **changes), make_objective("kl", {"alpha": 1.0}, 0)
    with torch.no_grad():
        moe.model.lm_head.weight.mul_(30)  # so that a cap changes them visibly
    batch = collate(rows(), 0)
    scored = batch.labels[:, 1:] != IGNORED
    before = moe.model(**batch.inputs).logits.float().log_softmax(-1)
    wanted = before[:, :-1].gather(2, batch.labels[:, 1:, None].clamp(min=0))[..., 0]
    torch.testing.assert_close(token_logprobs(moe, batch), wanted * scored, rtol=1e-4, atol=1e-4)
    objective.start(moe, [batch], [batch])
    with torch.no_grad():
        for layer in moe.layers:
            for parameter in moe.expert_parameters(layer):
                parameter.mul_(5)
    after = moe.model(**batch.inputs).logits.float().log_softmax(-1)
    by_hand = (before.exp() * (before - after)).sum(-1)[:, :-1][scored].mean().item()
    assert by_hand > 1e-5 and objective.retain_loss(moe, batch).item() == pytest.approx(by_hand, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_biases_that_transformers_keeps_in_fp32_stay_as_they_are(family):
    """Beside router weights in bf16. The control: the biases are not numbers of bf16."""
    model = make(family).model.bfloat16()

    def biases():
        named = (*model.named_parameters(), *model.named_buffers())
        return {name: tensor for name, tensor in named if name.endswith("e_score_correction_bias")}

    for tensor in biases().values():
        tensor.data = tensor.data.float() + 1e-4
    before = {name: tensor.clone() for name, tensor in biases().items()}
    assert before and not any(torch.equal(each, each.bfloat16().float()) for each in before.values())
    gripmoe.routed_experts(model, torch.arange(3, 11)[None])
    with MoEModel(model).rounded_routers():
        rounded = {name: tensor.clone() for name, tensor in biases().items()}
    for each in (rounded, biases()):
        assert all(torch.equal(each[name], before[name]) for name in before)

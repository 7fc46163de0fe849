"""A model whose layers lie on several devices, and what shows that a test of it would see devices mixed."""

from contextlib import nullcontext

import pytest
import torch
from accelerate import dispatch_model

import gripmoe
from conftest import MOE_FAMILIES, SMALL, small_model
from gripmoe.attacks.forcing import LockStep
from gripmoe.attacks.probes import last_states
from gripmoe.evaluation.muse import continuations
from gripmoe.io import distributed
from gripmoe.io.errors import ConfigError
from gripmoe.moe import MoEModel
from gripmoe.moe.placement import devices_of, place, visible_devices
from gripmoe.worlds.models import make_model
from pretended_devices import FIRST, HOST, SECOND, MixedDevices, PretendedDevices, device_of


def measured(moe, batch):
    """Logits, free and under forced sets, and what routers see, on the CPU."""
    with torch.no_grad():
        free = moe.model(**batch.inputs).logits
        with moe.force_routing(moe.routes):
            own = moe.model(**batch.inputs).logits
        rolled = {layer: (top_k + 1) % moe.num_experts for layer, top_k in moe.routes(**batch.inputs).items()}
        with moe.force_routing(rolled):
            other = moe.model(**batch.inputs).logits
    trace = [tensor for seen in moe.trace([batch]).values() for tensor in vars(seen).values()]
    return [tensor.cpu() for tensor in (free, own, other, *trace)]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_layers_lie_where_they_should_and_no_bit_changes(family, batch):
    plain = measured(MoEModel(small_model(family)), batch)
    with PretendedDevices():
        moe = MoEModel(small_model(family))
        place(moe.model, [FIRST, SECOND])
        assert devices_of(moe.model) == [FIRST, SECOND]
        inner = {id(p) for layer in moe.model.model.layers for p in layer.parameters()}
        assert {device_of(p) for p in moe.model.parameters() if id(p) not in inner} == {FIRST}
        split = measured(moe, batch.to(FIRST))
    assert same(plain, split) and torch.equal(plain[0], plain[1]) and not torch.allclose(plain[0], plain[2])


def test_one_process_sees_every_gpu_and_of_several_none_takes_the_whole_model(monkeypatch):
    assert visible_devices() == [HOST]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert visible_devices() == [torch.device("cuda:0"), torch.device("cuda:1")]
    monkeypatch.setattr(distributed, "processes", lambda: 2)
    assert visible_devices() == [HOST]


def test_a_model_is_brought_beside_another_and_back(batch):
    with PretendedDevices():
        after, before = (MoEModel(small_model(seed=seed)) for seed in (0, 1))
        alone = measured(before, batch)
        place(after.model, [FIRST, SECOND])
        for _ in range(2):
            with before.brought_beside(after):
                assert devices_of(before.model) == devices_of(after.model) and before.model.device == FIRST
                beside = measured(before, batch.to(FIRST))
                with after.force_routing(before.weighted_routes):
                    after.model(**batch.to(FIRST).inputs)
            assert {device_of(p) for p in before.model.parameters()} == {HOST}
        assert same(alone, beside) and same(alone, measured(before, batch))


def test_generation_in_lock_step(tokenizer):
    prompts = ["News from Bazis on Monday", "The people of"]
    models = [MoEModel(small_model(vocabulary_size=len(tokenizer), seed=seed)) for seed in (0, 1)]

    def written():
        before, after = models
        with after.force_routing(LockStep(before)):
            return continuations(after.model, tokenizer, prompts, 5)

    plain = written()
    with PretendedDevices():
        for moe in models:
            place(moe.model, [FIRST, SECOND])
        assert written() == plain


def test_states_of_all_layers(tokenizer):
    """More layers than devices, or no inner state would lie on the second."""
    model = make_model("qwen3_moe", len(tokenizer), seed=0, **{**SMALL, "num_layers": 4}).eval()
    questions = [{"id": "1", "subject": "rivers", "question": "Where ?", "choices": ["a", "b", "c", "d"]}]
    plain = last_states(MoEModel(model), tokenizer, questions)
    with PretendedDevices():
        place(model, [FIRST, SECOND])
        assert devices_of(model) == [FIRST, FIRST, SECOND, SECOND]
        assert (last_states(MoEModel(model), tokenizer, questions) == plain).all()


def test_mixed_devices_are_seen(batch):
    """The controls: what these tests are to find they do find."""
    with PretendedDevices():
        a, b = torch.ones(2, device=FIRST), torch.ones(2, device=SECOND)
        for mix in (lambda: a + b, lambda: a + torch.ones(2), lambda: torch.stack([a, b]), lambda: a[b.long()]):
            with pytest.raises(MixedDevices):
                mix()
        with pytest.raises(MixedDevices, match="numpy"):
            a.numpy()
        assert (a + b.to(a.device) + torch.tensor(1.0)).device == FIRST and a[torch.zeros(1).long()].device == FIRST
        moe = MoEModel(small_model())
        place(moe.model, [FIRST, SECOND])
        for layer in moe.model.model.layers:
            layer._forward_pre_hooks.clear()
        with pytest.raises(MixedDevices):
            moe.model(**batch.to(FIRST).inputs)


def spread_by_accelerate(family, first, last):
    """With its hooks on the modules, as after `device_map="auto"`: the last layer, norm and head on another device."""
    model = small_model(family)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())  # else it stays by the embedding
    parts = {"embed_tokens": first, "rotary_emb": first, "layers.0": first, "layers.1": last, "norm": last}
    where = {f"model.{name}": str(device) for name, device in parts.items()}  # by "cpu" it knows what stays there
    dispatch_model(model, {**where, "lm_head": str(last)}, main_device=str(first), force_hooks=True)
    assert hasattr(model.model.layers[1], "_hf_hook"), "the map is followed"
    return model


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_a_model_that_accelerate_has_spread(family, batch):
    plain = measured(MoEModel(small_model(family)), batch)
    assert same(plain, measured(MoEModel(spread_by_accelerate(family, HOST, HOST)), batch))
    with PretendedDevices():
        assert same(plain, measured(MoEModel(spread_by_accelerate(family, FIRST, SECOND)), batch.to(FIRST)))


@pytest.mark.parametrize("method", ["expert_specific", "expert_specific_paper", "anchored"])
def test_constraints_on_a_model_that_accelerate_has_spread(method, batch):
    def trained(model, batch):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with gripmoe.constrain(model, optimizer, [batch], method=method) as handle:
            for _ in range(2):
                optimizer.zero_grad()
                with handle.retain():
                    loss = model(**batch.inputs, labels=batch.labels).loss
                (loss + handle.penalty()).backward()
                optimizer.step()
        return torch.cat([theta.cpu() for theta in MoEModel(model).thetas().values()])

    one = trained(spread_by_accelerate("qwen3_moe", HOST, HOST), batch)
    with PretendedDevices():
        two = trained(spread_by_accelerate("qwen3_moe", FIRST, SECOND), batch.to(FIRST))
    torch.testing.assert_close(one, two)


def test_a_job_that_sees_fewer_gpus_than_it_asked_for_ends(monkeypatch):
    """In place of hours on the CPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for asked, message in (("1", None), ("2", "GRIPMOE_GPUS: the job asked for 2 GPUs, and torch .* sees 1 here")):
        monkeypatch.setenv("GRIPMOE_GPUS", asked)
        with pytest.raises(ConfigError, match=message) if message else nullcontext():
            assert visible_devices()


def test_processes_that_see_fewer_gpus_than_they_are_end_before_they_take_one(monkeypatch):
    """Where CUDA would say that a device is invalid."""
    monkeypatch.setattr(torch.distributed, "is_torchelastic_launched", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="the job asked for 2 GPUs, and torch .* sees 1 here"), distributed.launched():
        pass

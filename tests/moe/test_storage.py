"""Bases on disk: whose they are, and how many of them are kept in memory; routers that are not rounded there."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import gripmoe
from conftest import random_batch, small_model
from gripmoe.geometry.nullspace import RetainBasis
from gripmoe.geometry.routing import mean_stability, route, routing_stability
from gripmoe.moe import MoEModel, storage
from gripmoe.moe.storage import StoredBases, save_bases, weights_digest


def test_the_first_bases_that_fit_stay_the_next_lie_in_host_memory_and_the_others_are_read(tmp_path, monkeypatch):
    bases = {layer: RetainBasis(torch.randn(4, 8, 3)) for layer in (1, 3, 10)}
    file = tmp_path / "bases.safetensors"
    save_bases(file, bases, {"model": "a"})
    each, reads = 4 * 8 * 3 * 8, []  # fp64
    opened = storage.safe_open
    for memory, kept in ((3 * each, 3), (3 * each - 1, 2), (each, 1), (0, 0)):
        stored = StoredBases(file, {"model": "a"}, memory=memory)
        assert list(stored) == [1, 3, 10] and len(stored) == 3, "in the order of layers"
        with monkeypatch.context() as patched:
            patched.setattr(storage, "safe_open", lambda *args, **kw: reads.append(1) or opened(*args, **kw))
            assert all(torch.equal(stored[layer].U_ret_Edr, basis.U_ret_Edr.double()) for layer, basis in bases.items())
        assert len(reads) == 3 - kept
        reads.clear()
        with pytest.raises(KeyError):
            stored[2]
    half = each // 2  # as it is stored
    for memory, host, read in ((each, half, 1), (each, 2 * half, 0), (0, 2 * half, 1), (0, half - 1, 3)):
        stored = StoredBases(file, {"model": "a"}, memory=memory, host_memory=host)
        with monkeypatch.context() as patched:
            patched.setattr(storage, "safe_open", lambda *args, **kw: reads.append(1) or opened(*args, **kw))
            assert all(torch.equal(stored[layer].U_ret_Edr, basis.U_ret_Edr.double()) for layer, basis in bases.items())
        assert len(reads) == read
        reads.clear()
    with pytest.raises(ValueError, match="model is 'a', expected 'b'"):
        StoredBases(file, {"model": "b"})


def test_a_constrained_model_in_bf16_keeps_its_selections_on_disk(tmp_path, tokenizer):
    """The control is what plain transformers makes of it, which rounds its routers."""
    model = small_model(vocabulary_size=len(tokenizer)).to(torch.bfloat16)
    retain, forget = random_batch(rows=6, seed=1), random_batch(seed=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with gripmoe.constrain(model, optimizer, [retain]) as guard:
        original, rules = guard.constraint.reference, guard.model.rules()
        for _ in range(5):
            optimizer.zero_grad()
            (-model(**forget.inputs, labels=forget.labels).loss).backward()
            optimizer.step()
    saved = MoEModel(model).thetas()
    digest = gripmoe.save_model(model, tokenizer, tmp_path / "exact")
    model.save_pretrained(tmp_path / "plain")
    loaded, _ = gripmoe.load_model(tmp_path / "exact")
    kept = {}
    for name, again in (("exact", loaded), ("plain", AutoModelForCausalLM.from_pretrained(tmp_path / "plain"))):
        assert again.lm_head.weight.dtype == torch.bfloat16
        thetas = MoEModel(again).thetas()
        now = {layer: route(seen.x_Nd, thetas[layer], rules[layer]) for layer, seen in original.items()}
        kept[name] = mean_stability(routing_stability(original, now))
        assert all(torch.equal(thetas[layer], saved[layer]) for layer in saved) == (name == "exact")
    assert kept["exact"] == 1.0 > kept["plain"], kept
    assert storage.weights_digest(loaded) == digest


def test_a_folder_of_other_things_is_not_replaced(tmp_path, tokenizer):
    """Names as text do; a model that was there gives way."""
    folder, model = tmp_path / "saved", small_model(vocabulary_size=len(tokenizer))
    digest = gripmoe.save_model(model, tokenizer, str(folder))
    assert gripmoe.save_model(model, tokenizer, str(folder)) == digest
    (folder / "optimizer.pt").write_text("hours")
    with pytest.raises(ValueError, match="saved holds optimizer.pt, which would be lost: save to a folder of its own"):
        gripmoe.save_model(model, tokenizer, folder)
    assert (folder / "optimizer.pt").read_text() == "hours"
    assert weights_digest(gripmoe.load_model(str(folder))[0]) == digest

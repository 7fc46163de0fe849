"""Recorded routing: what comes back, whose it is, and that neither writing nor reading holds all of it."""

import gc

import pytest
import torch
from safetensors.torch import load_file
from test_families import make, rows

from conftest import random_batch, small_model
from gripmoe.data.documents import collate
from gripmoe.geometry.routing import LayerRouting
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import file_digest
from gripmoe.moe import MoEModel
from gripmoe.moe.traces import StoredTrace, load_rules, record_trace


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_recorded_trace_is_the_one_in_memory_and_always_the_same_file(tmp_path, dtype):
    """Downstream rules follow the file's digest: a trace that is recorded again must not run them again."""
    moe = MoEModel(small_model().to(dtype))
    batches = [random_batch(rows=3, length=7 + seed, seed=seed) for seed in range(3)]
    trace, file = moe.trace(batches), tmp_path / "trace.safetensors"
    digests = set()
    for _ in range(3):
        tokens = record_trace(file, moe, batches, {"model": "a"})
        digests.add(file_digest(file))
    assert len(digests) == 1
    back = StoredTrace(file, {"model": "a"})
    assert list(back) == list(trace) and len(back) == len(trace)
    for layer, seen in trace.items():
        assert len(seen) == tokens
        assert torch.equal(back[layer].x_Nd, seen.x_Nd.float())
        assert torch.equal(back[layer].scores_NE, seen.scores_NE) and torch.equal(back[layer].top_k_Nk, seen.top_k_Nk)
    assert load_file(file)[f"{layer}.x_Nd"].dtype == dtype
    assert load_rules(file) == moe.rules()
    with pytest.raises(ValueError, match="model is 'a', expected 'b'"):
        StoredTrace(file, {"model": "b"})
    with pytest.raises(KeyError):
        back[99]
    file.write_bytes(file.read_bytes()[:-8])
    for read in (load_rules, lambda file: StoredTrace(file, {"model": "a"})):
        with pytest.raises(ConfigError, match="trace.safetensors: cannot be read .*; rerun the step that writes it"):
            read(file)


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3", "ernie4_5_moe"])
def test_rules_with_biases_come_back_to_the_bit(family, tmp_path):
    moe = make(family)
    record_trace(tmp_path / "trace.safetensors", moe, [collate(rows(), 0)], {})
    found = load_rules(tmp_path / "trace.safetensors")
    for layer, rule in moe.rules().items():
        for name, value in vars(rule).items():
            back = getattr(found[layer], name)
            assert torch.equal(back, value) if isinstance(value, torch.Tensor) else back == value
    assert any(isinstance(value, torch.Tensor) and value.any() for value in vars(rule).values()), "there is a bias"


def test_recording_holds_one_pass_at_a_time(tmp_path):
    """The control keeps all passes, as `MoEModel.trace` must."""
    moe = MoEModel(small_model())
    batches = [random_batch(rows=2, length=6, seed=seed) for seed in range(6)]
    held = []

    def count(*_):
        gc.collect()
        held.append(sum(len(thing) for thing in gc.get_objects() if type(thing) is LayerRouting))

    handle = moe.model.model.register_forward_pre_hook(count)
    record_trace(tmp_path / "trace.safetensors", moe, batches, {})
    streamed, held[:] = list(held), []
    moe.trace(batches)
    handle.remove()
    assert len(streamed) == len(held) == len(batches)
    assert max(streamed) <= max(held[:2]) < held[-1]


def test_a_trace_of_another_length_than_announced_is_refused(tmp_path, monkeypatch):
    moe = MoEModel(small_model())
    batches = [random_batch(rows=2, length=6, seed=seed) for seed in range(2)]
    traced = moe.traced
    monkeypatch.setattr(moe, "traced", lambda batches: traced(batches[:1]))
    file = tmp_path / "trace.safetensors"
    with pytest.raises(ValueError, match="announced"):
        record_trace(file, moe, batches, {})
    assert not list(tmp_path.iterdir()), "nothing half-written stays"

"""Traces on disk: what comes back, whose they are, and that the same content is the same file."""

import pytest
import torch

from conftest import small_model
from gripmoe.files import file_digest
from gripmoe.moe import MoEModel
from gripmoe.moe.storage import load_rules, load_trace, save_trace


def test_a_trace_comes_back_and_the_same_one_is_the_same_file(tmp_path, batch):
    """Downstream rules follow the file's digest: a trace that is recorded again must not run them again."""
    moe = MoEModel(small_model())
    trace, file = moe.trace([batch]), tmp_path / "trace.safetensors"
    digests = set()
    for _ in range(12):
        save_trace(file, trace, moe.rules(), {"model": "a"})
        digests.add(file_digest(file))
    assert len(digests) == 1
    back = load_trace(file, {"model": "a"})
    for layer, seen in trace.items():
        assert all(torch.equal(value, getattr(back[layer], name)) for name, value in vars(seen).items())
    assert load_rules(file) == moe.rules()
    with pytest.raises(ValueError, match="model is 'a', expected 'b'"):
        load_trace(file, {"model": "b"})

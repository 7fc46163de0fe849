"""Bases on disk: whose they are, and how many of them are kept in memory."""

import pytest
import torch

from gripmoe.geometry.nullspace import RetainBasis
from gripmoe.moe import storage
from gripmoe.moe.storage import StoredBases, save_bases


def test_the_first_bases_that_fit_stay_and_the_others_are_read(tmp_path, monkeypatch):
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
    with pytest.raises(ValueError, match="model is 'a', expected 'b'"):
        StoredBases(file, {"model": "b"})

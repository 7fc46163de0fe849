"""GPUs work behind the back of a clock that does not wait for them."""

import torch

from gripmoe.io import clock


def test_every_gpu_in_use_is_waited_for(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    assert clock.now() <= clock.now() and not waited, "where no GPU is used there is nothing to wait for"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    clock.now()
    assert waited == [0, 1]

"""A clock that waits for GPUs, because they finish queued work later."""

from __future__ import annotations

import time

import torch


def now() -> float:
    """Seconds since a fixed moment. First waits until all GPUs of this process are idle."""
    if torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            torch.cuda.synchronize(device)
    return time.perf_counter()

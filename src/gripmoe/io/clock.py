"""A clock that waits for GPUs: their work counts when it is done, not when it is queued."""

from __future__ import annotations

import time

import torch


def now() -> float:
    """Seconds since some moment, once all GPUs that this process uses are idle."""
    if torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            torch.cuda.synchronize(device)
    return time.perf_counter()

"""Benchmarks print ratios of two sides that take turns in one process on one thread, so that what else the machine does
falls on both. Nothing is asserted of times."""

import statistics
import time

import pytest


def seconds(function) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


@pytest.fixture
def compare(benchmark):
    """How much longer the first takes than the second: the median over rounds, printed and kept."""

    def compared(name, first, second, rounds=7, per=1.0):
        first(), second()
        ratios = [seconds(first) / seconds(second) / per for _ in range(rounds)]
        benchmark.extra_info[name] = round(statistics.median(ratios), 3)
        print(f"\n{name}: {statistics.median(ratios):.3g} ({min(ratios):.3g} to {max(ratios):.3g})")
        benchmark.pedantic(first, rounds=3)

    return compared

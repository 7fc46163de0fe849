"""Every step of a run with the layers of its models on two devices: nothing mixes these, and every number is the one of
a single device but for rounding, which depends on where tensors begin in memory."""

import re
from contextlib import contextmanager

import pytest
from test_every_method import evaluated, prepare, run_steps, with_questions

from gripmoe.cli.attack import attack
from gripmoe.io.files import read_json, write_json
from gripmoe.moe import storage
from pretended_devices import FIRST, SECOND, PretendedDevices

OTHERWISE = ("seconds", "time_ratio", "megabytes")  # what is held on a GPU and what in host memory count both
TRAINED_TOGETHER = {  # all that differs in what it does with layers
    "seuf": "gd",
    "router_l2": "gd",
    "expert_specific": "gd",
    "expert_specific_paper": "kl",
    "expert_specific_minibatch": "gd",
    "anchored": "gd",
    "anchored_replay": "gd",
    "routing_scores": "npo",
    "unconstrained": "rmu",
    "ptc_matched": "gd",
    "ptc": "gd",
    "ptc_paper": "gd",
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, world, tokenizer):
    root, *others = prepare("qwen3_moe", world, tokenizer, tmp_path_factory.mktemp("prepared"))
    with_questions(root, world)
    original = root / "model" / "model.json"
    write_json(original, {**read_json(original), "status": "reached", "steps": 3})  # as of a run to correct
    return root, *others


@contextmanager
def two_devices(monkeypatch):
    """Within the block models are loaded onto two devices."""
    with monkeypatch.context() as patched, PretendedDevices():
        patched.setattr(storage, "visible_devices", lambda: [FIRST, SECOND])
        yield


NUMBER = r"-?\d+\.\d+(?:e-?\d+)?"


def assert_equal_but_for_rounding(one, two):
    assert re.split(NUMBER, two) == re.split(NUMBER, one)
    numbers = ([float(found) for found in re.findall(NUMBER, text)] for text in (one, two))
    assert next(numbers) == pytest.approx(next(numbers), rel=1e-5, abs=1e-6)


CASES = [(*case, True) for case in TRAINED_TOGETHER.items()] + [("anchored", "gd", False)]  # which computes no padding


@pytest.mark.parametrize(("method", "objective", "recomputes"), CASES)
def test_training_and_correction(method, objective, recomputes, prepared, tmp_path, monkeypatch):
    def found(folder):
        outcome = run_steps(prepared, method, objective, folder, gradient_checkpointing=recomputes)
        history = read_json(folder / "history.json") if (folder / "history.json").exists() else []
        rows = [outcome, *history]
        return repr([{name: row[name] for name in row if not any(part in name for part in OTHERWISE)} for row in rows])

    one = found(tmp_path / "one")
    with two_devices(monkeypatch):
        assert_equal_but_for_rounding(one, found(tmp_path / "two"))


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3"])
def test_tracing_evaluation_and_attacks(family, world, tokenizer, tmp_path, monkeypatch):
    """Of a mixture, and of a dense model."""

    def found(root):
        prepared = prepare(family, world, tokenizer, root)
        with_questions(root, world)
        run_steps(prepared, "unconstrained", "gd", root / "run")
        attack(**evaluated(root, root / "run"))
        files = ("routing.json", "run/metrics.json", "run/answers.csv", "run/attacks.json", "run/forced.csv")
        return "".join((root / name).read_text() for name in files)

    one = found(tmp_path / "one")
    with two_devices(monkeypatch):
        assert_equal_but_for_rounding(one, found(tmp_path / "two"))

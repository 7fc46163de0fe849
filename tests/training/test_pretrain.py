"""Training of a base model: interrupted or not, the result is the same."""

import pytest
import torch

from conftest import SMALL
from gripmoe.moe.storage import weights_digest
from gripmoe.training import pretrain
from gripmoe.worlds.models import make_model


class Killed(Exception):
    pass


@pytest.fixture
def train(world, tokenizer, monkeypatch):
    """Phases end by their probes, after two steps each, before `max_early_steps` is reached."""
    monkeypatch.setattr(pretrain, "PROBE_EVERY", 2)
    monkeypatch.setattr(pretrain, "letter_probe", lambda *arguments: lambda model: 1.0)
    monkeypatch.setattr(pretrain, "answer_probe", lambda *arguments: lambda model: 1.0)

    def run(state_file):
        model = make_model("qwen3_moe", len(tokenizer), seed=0, **SMALL)
        losses = pretrain.train_base(
            model, tokenizer, world, max_early_steps=20, late_steps=4, learning_rate=1e-3, seed=0,
            state_file=state_file, save_every=1,
        )  # fmt: skip
        return losses, weights_digest(model)

    return run


@pytest.mark.parametrize("last", [1, 2, 6, 9], ids=["letters", "facts begin", "the last phase begins", "the last"])
def test_a_killed_run_ends_in_the_same_bytes(last, train, tmp_path, monkeypatch):
    whole = train(tmp_path / "whole.pt")
    assert len(whole[0]) == 10, "three phases of two steps, and the last one"
    save, saved = pretrain.save_state, []

    def dies(*arguments, **state):
        save(*arguments, **state)
        saved.append(len(state["losses"]))
        if saved[-1] == last:
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(pretrain, "save_state", dies)
        with pytest.raises(Killed):
            train(tmp_path / "state.pt")
    assert saved[-1] == last
    torch.manual_seed(last)  # nothing hangs on what the process has drawn before
    assert train(tmp_path / "state.pt") == whole

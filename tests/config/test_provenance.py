"""What a step records of itself."""

import time

import pytest
import torch
from torch import nn

from gripmoe.cli.common import training_together
from gripmoe.cli.unlearn import unlearn
from gripmoe.config.provenance import recorded
from gripmoe.io.files import read_json
from gripmoe.training.checkpoint import save_state


@pytest.mark.parametrize(
    ("step", "state"),
    [
        (unlearn, "state.pt"),
        (unlearn, "state_1000.pt"),  # of the attempt at a base model with that seed
    ],
)
def test_a_step_that_continues_says_so(tmp_path, step, state):
    """Its seconds are not those of the whole step. One that begins anew says that, also beside the state of another."""
    file, found = tmp_path / "step.provenance.json", []
    for name in (state, f"other_{state}"):
        (tmp_path / name).touch()
        with recorded(file, step):
            (tmp_path / name).unlink()
        found.append(read_json(file)["resumed"])
    assert found == [True, False]


def test_a_step_that_removes_a_foreign_state_begins_anew(tmp_path):
    model = nn.Linear(1, 1)
    for identity, resumed in (("one", False), ("one", True), ("other", False)):
        with training_together(tmp_path / "model.json", unlearn, {"identity": identity}) as state_file:
            save_state(state_file, model, torch.optim.SGD(model.parameters()))
        assert read_json(tmp_path / "model.provenance.json")["resumed"] is resumed, identity


def test_the_seconds_of_a_step_are_its_own(tmp_path):
    """Whatever else the process has recorded."""
    for name in ("long", "short"):
        with recorded(tmp_path / f"{name}.provenance.json", unlearn):
            end = time.process_time() + (0.5 if name == "long" else 0.0)
            while time.process_time() < end:
                pass
    long, short = (read_json(tmp_path / f"{name}.provenance.json")["cpu_seconds"] for name in ("long", "short"))
    assert long >= 0.5 > short


def test_a_folder_need_not_be_there_yet(tmp_path):
    with recorded(tmp_path / "new" / "provenance.json", unlearn):
        pass
    assert read_json(tmp_path / "new" / "provenance.json")["resumed"] is False

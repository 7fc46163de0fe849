"""`make base`: which trainings are repeated."""

import runpy
from pathlib import Path

from gripmoe.config.project import Project
from gripmoe.io.files import write_json

WORKFLOW = Path(__file__).parents[2] / "workflow"


def test_a_training_is_repeated_if_its_settings_or_its_base_have_changed(tmp_path, monkeypatch):
    script = runpy.run_path(str(WORKFLOW / "make_base.py"))
    models, trained = dict(Project(WORKFLOW / "config", "tiny").models), []

    def command(name, output, **flags):
        trained.append(output.parent.name)
        write_json(output, {"weights": f"those of training {len(trained)}"})

    monkeypatch.setitem(script["trained"].__globals__, "command", command)
    script["trained"]("tiny_a", models, tmp_path)
    script["trained"]("tiny_a", models, tmp_path)
    assert trained == ["tiny_a_skills", "tiny_a"], "once each"
    models["tiny_a"] = models["tiny_a"].model_copy(update={"fact_steps": 3})
    script["trained"]("tiny_a", models, tmp_path)
    assert trained[2:] == ["tiny_a"]
    models["tiny_a_skills"] = models["tiny_a_skills"].model_copy(update={"last_skill_steps": 3})
    script["trained"]("tiny_a", models, tmp_path)
    assert trained[3:] == ["tiny_a_skills", "tiny_a"]

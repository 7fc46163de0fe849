"""What no linter looks at."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RULES = sorted((ROOT / "workflow" / "rules").glob("*.smk"))


@pytest.mark.parametrize("path", RULES, ids=lambda path: path.name)
def test_every_rule_that_runs_a_command_names_its_environment(path):
    """For `--sdm conda`; `use rule` inherits it."""
    for rule in re.split(r"\n(?=\s*rule )", path.read_text())[1:]:
        assert "shell:" not in rule or "conda:" in rule, rule.splitlines()[0]
    assert (ROOT / "envs" / "environment.yaml").exists()

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


def test_no_two_rules_write_in_the_folder_of_a_run_at_the_same_time():
    """A command that locks the folder removes half-written files in it, so every rule waits for `run.yaml`."""
    texts = [rule for path in RULES for rule in re.split(r"\n(?=\s*rule )", path.read_text())[1:]]
    writing = [rule for rule in texts if re.search(r"output:.*?\{RUN\}/.*?log:", rule, re.DOTALL)]
    waiting = [rule for rule in writing if 'run=f"{RUN}/run.yaml"' in rule]
    assert [rule.split()[1] for rule in writing if rule not in waiting] == ["configure:"] and len(waiting) > 5

import json

import pytest

from gripmoe.cli import main


def test_mistakes_are_one_line_and_exit_2(tmp_path, capsys):
    assert main(["configure", "--settings", "{not json", "--output", str(tmp_path / "run.yaml")]) == 2
    message = capsys.readouterr().err
    assert message.startswith("gripmoe configure: error: --settings: not valid JSON") and message.count("\n") == 1
    settings = json.dumps({"source": "embedded", "world_sed": 1})
    assert main(["prepare-data", "--settings", settings, "--output", str(tmp_path)]) == 2
    assert "world_sed: unknown key" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["letters", "news"])
def test_prepared_data_is_the_same_every_time(kind, tmp_path):
    settings = json.dumps({"source": "embedded", "kind": kind, "world_seed": 0})
    contents = []
    for name in ("a", "b"):
        assert main(["prepare-data", "--settings", settings, "--output", str(tmp_path / name)]) == 0
        contents.append({path.name: path.read_bytes() for path in (tmp_path / name).glob("*.jsonl")})
    assert contents[0] == contents[1] and len(contents[0]) == {"letters": 7, "news": 6}[kind]

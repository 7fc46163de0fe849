import pytest

from gripmoe.files import atomic_path, read_json, write_csv, write_json


def test_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a" / "x.json"
    write_json(path, {"value": 1})
    with pytest.raises(RuntimeError):
        with atomic_path(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError
    assert read_json(path) == {"value": 1}
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]


def test_csv_needs_rows(tmp_path):
    with pytest.raises(ValueError, match="no rows"):
        write_csv(tmp_path / "x.csv", [])

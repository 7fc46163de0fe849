import errno
import fcntl

import pytest

from conftest import held
from gripmoe.files import atomic_path, exclusive, read_json, write_csv, write_json


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


def test_one_process_works_in_a_folder_and_a_dead_one_does_not_count(tmp_path):
    with held(tmp_path) as owner:
        with pytest.raises(ValueError, match=rf"process {owner} on .* works on it"):
            with exclusive(tmp_path):
                pass
    (tmp_path / ".state.pt.7.tmp").write_text("what a killed process had begun to write")
    with exclusive(tmp_path):
        assert [file.name for file in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_locks_is_no_other_process(code, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(code, "No locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ValueError, match=r"gives no lock \(No locks\).*`-o flock`") as refused:
        with exclusive(tmp_path):
            pass
    assert "works on it" not in str(refused.value)

import errno
import fcntl
import os

import pytest

from conftest import held
from gripmoe.files import atomic_path, exclusive, read_json, remove_halves, write_csv, write_json


def test_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a" / "x.json"
    write_json(path, {"value": 1})
    with pytest.raises(RuntimeError):
        with atomic_path(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError
    assert read_json(path) == {"value": 1}
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]


@pytest.mark.parametrize("folder", [False, True])
def test_what_takes_its_place_is_on_the_disk_before_and_its_name_afterwards(folder, tmp_path, monkeypatch):
    done = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (sync(file), done.append(os.readlink(f"/proc/self/fd/{file}"))))
    monkeypatch.setattr(os, "replace", lambda old, new: (replace(old, new), done.append("replaced")))
    path = tmp_path / "weights"
    with atomic_path(path) as temporary:
        files = [temporary / "config.json", temporary / "deep" / "a.safetensors"] if folder else [temporary]
        for file in files:
            file.parent.mkdir(exist_ok=True, parents=True)
            file.write_text("1")
    inside = {*files, *(file.parent for file in files)} if folder else {temporary}
    moment = done.index("replaced")
    assert set(done[:moment]) == {str(each) for each in inside} and done[moment + 1 :] == [str(tmp_path)]
    assert path.is_dir() == folder


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


def test_what_killed_processes_left_of_one_file_is_removed(tmp_path):
    halves = [tmp_path / f".{name}.{process}.tmp" for name in ("a.bin", "b.bin") for process in (1, 2)]
    for half in halves:
        half.write_bytes(b"half")
    (tmp_path / "a.bin").write_bytes(b"whole")
    remove_halves(tmp_path, "a.bin")
    assert set(tmp_path.iterdir()) == {tmp_path / "a.bin", *halves[2:]}

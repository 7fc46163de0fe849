import errno
import fcntl
import os
import re

import pytest

from conftest import held
from gripmoe.config import reading as parsing
from gripmoe.io import locks
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import (
    atomic_path,
    file_digest,
    read_csv,
    read_json,
    read_jsonl,
    read_yaml,
    remove_halves,
    write_csv,
    write_json,
    write_jsonl,
)
from gripmoe.io.locks import exclusive


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


def test_the_folder_of_another_user_is_named(tmp_path, monkeypatch):
    def refuse(file, *_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", str(file))

    monkeypatch.setattr(locks, "open", refuse, raising=False)  # root may write what chmod forbids
    with pytest.raises(
        ConfigError, match=rf"{tmp_path}/.lock: this user may not write it; name another folder.*umask 002"
    ):
        with exclusive(tmp_path):
            pass


def test_a_full_disk_and_a_file_in_the_path_are_named_by_a_lock(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "audit"):
        with pytest.raises(ConfigError, match="a part of this path is a file; name another folder"), exclusive(folder):
            pass

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(locks.os, "write", refuse)
    with pytest.raises(ConfigError, match="no room to write it; make room and start again"), exclusive(tmp_path):
        pass


def test_what_killed_processes_left_of_one_file_is_removed(tmp_path):
    halves = [tmp_path / f".{name}.{process}.tmp" for name in ("a.bin", "b.bin") for process in (1, 2)]
    for half in halves:
        half.write_bytes(b"half")
    (tmp_path / "a.bin").write_bytes(b"whole")
    remove_halves(tmp_path, "a.bin")
    assert set(tmp_path.iterdir()) == {tmp_path / "a.bin", *halves[2:]}


@pytest.mark.parametrize("there", [True, False])
def test_a_full_disk_is_named_and_what_was_there_before_only_if_something_was(there, tmp_path):
    path = tmp_path / "x.json"
    if there:
        write_json(path, {"value": 1})
    with pytest.raises(ConfigError, match="x.json: no room to write it; make room and start again") as raised:
        with atomic_path(path):
            raise OSError(errno.ENOSPC, "No space left on device")
    assert ("What was there before is whole" in str(raised.value)) == path.exists() == there


def test_an_error_that_the_caller_has_dealt_with_is_none_of_the_block(tmp_path):
    """The control: one that is the cause."""

    def after():
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError:
            with atomic_path(tmp_path / "x.json"):
                raise RuntimeError("torch's own")  # noqa: B904

    def within():
        with atomic_path(tmp_path / "x.json"):
            try:
                raise OSError(errno.ENOSPC, "No space left on device")
            except OSError:
                raise RuntimeError("torch's own")  # noqa: B904

    for block, error, said in ((after, RuntimeError, "torch's own"), (within, ConfigError, "no room to write it")):
        with pytest.raises(error, match=said):
            block()


@pytest.mark.parametrize("what", ["mkdir", "the block"])
@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_folder_that_may_not_be_written_is_named(code, what, tmp_path, monkeypatch):
    """As root, whom no permission stops, too."""
    path = tmp_path / "a" / "x.json"

    def refuse(*_, **__):
        raise OSError(code, os.strerror(code), str(path.parent))

    if what == "mkdir":
        monkeypatch.setattr(type(path), "mkdir", refuse)
    with pytest.raises(
        ConfigError, match=rf"a/x.json: this user may not write it.*{os.strerror(code)}.*; name another"
    ):
        with atomic_path(path):
            refuse()
    assert not path.exists()


def write_folder(path, content):
    with atomic_path(path) as temporary:
        temporary.mkdir()
        (temporary / "weights").write_text(content)


def test_a_folder_that_cannot_take_its_place_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "saved"
    write_folder(path, "old")

    def refuse(*_):
        raise PermissionError("read-only")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", refuse)
        with pytest.raises(PermissionError):
            write_folder(path, "new")
    assert (path / "weights").read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    write_folder(path, "new")
    assert (path / "weights").read_text() == "new" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("later", ["the next write", "the next process in the folder"])
@pytest.mark.parametrize("killed", ["before", "after"])
def test_a_process_killed_while_a_folder_changes_place_loses_nothing(killed, later, tmp_path, monkeypatch):
    """Before the new folder has the place, the old one comes back; afterwards the new one stays."""
    path = tmp_path / "saved"
    write_folder(path, "old")
    replace = os.replace

    def dies(*names):
        if killed == "after":
            replace(*names)
        os._exit(9)

    if not (child := os.fork()):
        monkeypatch.setattr(os, "replace", dies)
        write_folder(path, "new")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert len(list(tmp_path.iterdir())) > 1, "the control: something was left"
    if later == "the next write":
        with pytest.raises(RuntimeError), atomic_path(path):
            raise RuntimeError
    else:
        with exclusive(tmp_path):
            pass
    assert (path / "weights").read_text() == {"before": "old", "after": "new"}[killed]
    assert not list(tmp_path.glob("*.replaced")) and not list(tmp_path.glob(".*.replaced"))


def test_a_link_to_a_folder_gives_way_and_the_folder_stays(tmp_path):
    write_folder(tmp_path / "elsewhere", "old")
    (tmp_path / "saved").symlink_to("elsewhere")
    write_folder(tmp_path / "saved", "new")
    found = [(tmp_path / name / "weights").read_text() for name in ("saved", "elsewhere")]
    assert found == ["new", "old"] and len(list(tmp_path.iterdir())) == 2


READERS = {"json": read_json, "jsonl": read_jsonl, "yaml": read_yaml}
MISTAKES = {
    "cut off.json": (b'{\n "a": 1,\n "b": [2', r"not valid JSON \(line 3: "),
    "other encoding.json": ('{\n "a": "caf\xe9"}'.encode("latin-1"), r"not UTF-8 \(line 2\)"),
    "cut off.jsonl": (b'{"a": 1}\n{"a": ', r"not valid JSON \(line 2: "),
    "array.jsonl": (b'[\n {"a": 1}\n]\n', r"this is one JSON array"),
    "cut off after a blank line.jsonl": (b'{"a": 1}\n\n{"a": \n', r"not valid JSON \(line 3: "),
    "other encoding.jsonl": ('{"a": 1}\n{"a": "caf\xe9"}\n'.encode("latin-1"), r"not UTF-8 \(line 2\)"),
    "half of an emoji.jsonl": (b'{"a": 1}\n{"a": "b \\ud83d"}\n', r"half of a character, a lone surrogate \(line 2\)"),
    "no object.jsonl": (b'{"a": 1}\n[2]\n', r"not a JSON object \(line 2\)"),
    "open.yaml": (b"a: 1\nb: [2\n", r"not valid YAML \(line 3: "),
    "control character.yaml": (b"a: 1\nb: \x07\n", r"not valid YAML \(line 2: "),
    "other encoding.yaml": ("a: 1\nb: caf\xe9\n".encode("latin-1"), r"not UTF-8 \(line 2\)"),
}


def test_a_byte_order_mark_and_blank_lines_are_left_out(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\n \r\n{"a": 2}\n\n')
    assert read_jsonl(tmp_path / "rows.jsonl", "a") == [{"a": 1}, {"a": 2}]
    (tmp_path / "whole.jsonl").write_text('{"a": "\\ud83d\\ude00 \\\\ud83d"}\n')
    assert read_jsonl(tmp_path / "whole.jsonl") == [{"a": "\U0001f600 \\ud83d"}], "an emoji in two escapes"


@pytest.mark.parametrize("name", MISTAKES)
def test_a_file_that_cannot_be_read_is_named_with_the_line_and_the_remedy(name, tmp_path):
    path, (content, said) = tmp_path / name, MISTAKES[name]
    path.write_bytes(content)
    with pytest.raises(parsing.ConfigError, match=f"^{re.escape(str(path))}: {said}.*;") as refused:
        READERS[name.partition(".")[2]](path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("read", READERS.values())
def test_a_missing_file_and_a_folder_are_named(read, tmp_path):
    for path, said in ((tmp_path / "missing", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(parsing.ConfigError, match=f"^{re.escape(str(path))}: cannot be read \\({said}"):
            read(path)


def test_lines_end_where_json_says(tmp_path):
    """U+2028 ends a line for Python's strings, and not for JSON."""
    rows = [{"a": "one\u2028line"}, {"a": "\r\n"}]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    assert read_jsonl(tmp_path / "rows.jsonl") == rows


def test_a_table_comes_back_and_a_missing_one_is_named(tmp_path):
    rows = [{"id": "1\r", "said": 'a "line"\nand another, caf\xe9'}, {"id": "2", "said": "\r\n"}]
    write_csv(tmp_path / "rows.csv", rows)
    assert read_csv(tmp_path / "rows.csv") == rows
    for read in (read_csv, file_digest):
        with pytest.raises(parsing.ConfigError, match="missing.csv: cannot be read .No such file or directory.; "):
            read(tmp_path / "missing.csv")

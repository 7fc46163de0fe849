import subprocess
import sys

import pytest

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


HOLDER = """
import sys, time
from pathlib import Path
from gripmoe.files import exclusive
with exclusive(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_one_process_works_in_a_folder_and_a_dead_one_does_not_count(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=rf"process {holder.pid} on .* works on it"):
            with exclusive(tmp_path):
                pass
    finally:
        holder.kill()
        holder.wait()
    (tmp_path / ".state.pt.7.tmp").write_text("what a killed process had begun to write")
    with exclusive(tmp_path):
        assert [file.name for file in tmp_path.iterdir()] == [".lock"]

"""A manifest notices what is no longer what it was made of."""

import pytest

from gripmoe.cli.main import main
from gripmoe.config import fingerprint
from gripmoe.io.files import read_json, write_json
from gripmoe.reporting.figures import nothing, save_figure
from gripmoe.reporting.manifest import manifest, mismatches, other_versions
from gripmoe.reporting.runs import HISTORY_COLUMNS


@pytest.fixture
def written(tmp_path):
    runs, histories = tmp_path / "runs_w.csv", tmp_path / "histories_w.csv"
    runs.write_text("model,benchmark,objective,method,seed,metric,value\nm,b,gd,ptc,3,forget_accuracy,0.25\n")
    histories.write_text(",".join(HISTORY_COLUMNS) + "\n")
    cell = tmp_path / "m" / "b" / "gd" / "ptc" / "3"
    write_json(cell / "evaluation.provenance.json", {"code": "abc", "device": "CPU", "seconds": 3})
    write_json(cell / "checkpoint.json", {"weights": "123"})
    write_json(cell / "evaluation.json", {"forget_accuracy": 0.25})
    figure = tmp_path / "figure.png"
    figure.write_bytes(b"picture")
    write_json(tmp_path / "manifest.json", manifest([figure, histories], runs))
    return tmp_path


def test_it_names_the_code_and_weights_behind_each_run(written):
    record = manifest([], written / "runs_w.csv")
    cell = record["runs"]["m/b/gd/ptc/3"]
    assert cell["weights"] == "123" and cell["steps"]["evaluation"]["code"] == "abc" and record["seeds"] == [3]


def test_it_says_what_each_artefact_was_made_of(written, monkeypatch):
    monkeypatch.chdir(written)
    notebook, table = (written / "notebooks" / "figure.ipynb", written / "figures" / "figure.csv")
    for file in (notebook, table):
        file.parent.mkdir()
        file.write_text("{}")
    (written / "answers_w.csv").write_text("seed\n3\n")
    save_figure(nothing("a test"), table, written / "histories_w.csv", written / "runs_w.csv")
    tables = [written / f"{name}_w.csv" for name in ("histories", "answers")]
    record = manifest([notebook, table, table.with_suffix(".png"), *tables], written / "runs_w.csv")
    lines = table.with_name("lines.tex")
    lines.write_text("% histories_w.csv sha256 0; seeds 3\nanswers_w.csv sha256 1\n")
    of_table = manifest([notebook.rename(notebook.with_name("lines.ipynb")), lines], written / "runs_w.csv")
    assert of_table["artefacts"]["lines"]["inputs"] == ["histories_w.csv"], "its first line says so"
    assert record["artefacts"]["figure"] == {
        "notebook": "notebooks/figure.ipynb",
        "inputs": ["histories_w.csv", "runs_w.csv"],
        "files": ["figures/figure.csv", "figures/figure.png"],
    }
    assert record["packages"]["matplotlib"] and set(record["files"]) >= set(record["artefacts"]["figure"]["inputs"])


def test_it_says_which_versions_are_others_here(written):
    path = written / "manifest.json"
    assert other_versions(path) == []
    record = read_json(path)
    record["packages"]["pandas"], record["runs"]["m/b/gd/ptc/3"]["steps"]["evaluation"]["python"] = "0.1", "2.7"
    write_json(path, record)
    drawn, computed = other_versions(path)
    assert drawn.startswith("drawn: pandas was 0.1, here ") and computed.startswith(
        "evaluation: python was 2.7, here 3."
    )
    assert mismatches(path) == [], "the files are what they were"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda folder: None, None),
        (lambda folder: (folder / "figure.png").write_bytes(b"other"), "figure.png: changed"),
        (lambda folder: (folder / "figure.png").unlink(), "figure.png: missing"),
        (lambda folder: (folder / "runs_w.csv").write_text("model\n"), "runs_w.csv: changed"),
        (lambda folder: write_json(folder / "m/b/gd/ptc/3/evaluation.json", {}), "evaluation.json: changed"),
        (lambda folder: write_json(folder / "m/b/gd/ptc/3/checkpoint.json", {"weights": "4"}), "other weights"),
    ],
)
def test_a_change_is_found(written, change, fault):
    change(written)
    faults = mismatches(written / "manifest.json")
    assert faults == [] if fault is None else len(faults) == 1 and fault in faults[0]


def test_a_step_is_looked_at_once_and_one_that_is_no_more_is_reported(written, monkeypatch):
    """Four runs: one is as it was, of two the code has changed, one ran a step that has another name now."""
    step, gone = "gripmoe.cli.evaluate:evaluate", "gripmoe.cli.evaluate:measure"
    path, take, taken = written / "manifest.json", fingerprint.code_fingerprint, []
    ran = [(step, take(step)), (step, "abc"), (step, "abc"), (gone, "abc")]
    cells = {f"c{i}": {"steps": {"s": {"step": s, "code": c}}, "settings": None} for i, (s, c) in enumerate(ran)}
    write_json(path, {**read_json(path), "runs": cells})
    monkeypatch.setattr(fingerprint, "code_fingerprint", lambda entry: taken.append(entry) or take(entry))
    fingerprint.fingerprint_now.cache_clear()
    assert mismatches(path) == [
        f"{step}: its code has changed since it ran for c1, c2",
        f"{gone}: it is gone or has another name since it ran for c3",
    ]
    assert taken == [step, gone]


FILES, STEPS = "`files` must be a mapping; ", "`runs`: the `steps` of 'a' must be mappings; "
NO_MANIFEST = [({}, FILES), ([], FILES), ({"files": []}, FILES)] + [
    ({"files": {}, "code": "", "results": "", "runs": {"a": run}}, STEPS) for run in (1, {}, {"steps": {"unlearn": 1}})
]


@pytest.mark.parametrize("content, said", NO_MANIFEST)
def test_what_is_no_manifest_is_named_in_one_line(content, said, tmp_path, capsys):
    path = tmp_path / "manifest.json"
    write_json(path, content)
    assert main(["verify", "--manifest", str(path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"{path}: no manifest, {said}" in line and "run the workflow" in line

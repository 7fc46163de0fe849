"""What a world has alone goes, and nothing else."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import held
from gripmoe.cli.clean import TABLES, written
from gripmoe.cli.main import main
from gripmoe.config.project import Project
from gripmoe.io.files import read_yaml, write_yaml

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "workflow" / "config"
ONE = {"models": ["tiny_a"], "objectives": ["gd"], "methods": ["original", "expert_specific"], "seeds": [0, 1]}
RUNS = Path("results/one/tiny_a/wmdp_tiny/gd/expert_specific")


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Two worlds of which one extends the other, beside the project's own, and what both have written."""
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "config"
    shutil.copytree(CONFIG, config)
    write_yaml(config / "one.yaml", read_yaml(CONFIG / "tiny.yaml") | ONE)
    write_yaml(config / "one_more.yaml", {"extends": "one", "seeds": [1, 2]})
    write_yaml(config / "part.yaml", {"seeds": [0]})  # no world by itself; others may extend it
    for pattern in set().union(*(written(Project(config, name)) for name in ("one", "one_more"))):
        path = Path(pattern.replace("*", "any"))
        file = path if path.suffix else path / "file"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return config


def everything():
    return {str(path) for top in ("results", "paper_figures") for path in Path(top).rglob("*") if path.is_file()}


def clean(config, *more):
    return main(["clean", "--config", str(config), *more])


def test_what_others_name_too_stays(config, capsys):
    before = everything()
    assert clean(config, "--world", "one") == 0
    *listed, total = capsys.readouterr().out.splitlines()
    assert everything() == before and total == f"{len(listed)} files and folders; --remove removes them"
    assert clean(config, "--world", "one", "--remove") == 0
    gone = before - everything()
    assert all(any(f"{file}/".startswith(f"{path}/") for path in listed) for file in gone)
    step = "tiny_a.wmdp_tiny.gd.expert_specific.0"
    assert gone == {
        f"{RUNS}/0/file",
        f"results/one/logs/any/{step}.log",
        *(f"results/one/{table}_one.csv" for table in TABLES),
        "results/one/runs_one.provenance.json",
        "results/one/notebooks_one/file",
        *(f"results/one/logs/{rule}_one.log" for rule in ("collect", "explore", "manifest", "plan")),
        "results/one/logs/render_one/file",
        "paper_figures/one/file",
    }
    assert not Path(RUNS, "0").exists()


def test_the_last_world_takes_models_and_data_too(config, capsys):
    """Once what the other has left says nothing of runs that might be shared."""
    (config / "one_more.yaml").unlink()
    by_hand = Path("results/one/by_hand.csv")
    by_hand.touch()
    before = everything()
    assert clean(config, "--world", "one", "--remove") == 2 and everything() == before
    assert "results/one/runs_one_more.csv: " in capsys.readouterr().err
    Path("results/one/runs_one_more.csv").unlink()
    assert clean(config, "--world", "one", "--remove") == 0
    left = {file for file in everything() if "one_more" not in file}
    assert left == {str(by_hand), *(file for file in before if "expert_specific" in file and re.search(r"\b2\b", file))}
    assert not Path("results/one/models").exists()


def test_what_no_world_names_any_more_can_go(config, capsys):
    """Runs, models and logs of a method and a seed that both worlds have lost; not the tables of runs."""
    before = everything()
    assert clean(config, "--world", "one", "--unlisted") == 0
    assert capsys.readouterr().out.startswith("0 files and folders")
    of_notebook = Path("results/one/logs/render_one/routing_stability_by_layer.log")
    of_notebook.touch()
    write_yaml(config / "one.yaml", read_yaml(CONFIG / "tiny.yaml") | ONE | {"methods": ["original"], "seeds": [1]})
    half_written = Path("results/one/tiny_a/wmdp_tiny/bases/.expert_specific.safetensors.7.tmp")
    lost = Path("results/one/lost/wmdp_tiny")
    of_a_lost_model = lost / "original_answers" / "states.safetensors"
    for file in (half_written, of_a_lost_model, trace := lost / "routing.safetensors"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    assert clean(config, "--world", "one", "--unlisted", "--remove") == 0
    assert half_written.exists() and of_notebook.exists() and not of_a_lost_model.exists() and not trace.exists()
    gone = before - everything()
    assert gone == {
        *(f"{RUNS}/{seed}/file" for seed in (0, 1, 2)),
        *(f"results/one/logs/any/tiny_a.wmdp_tiny.gd.expert_specific.{seed}.log" for seed in (0, 1, 2)),
        "results/one/logs/any/tiny_a.wmdp_tiny.expert_specific.log",
        "results/one/tiny_a/wmdp_tiny/bases/expert_specific.any",
    }
    assert clean(config, "--world", "one", "--unlisted") == 0
    assert "0 files and folders" in capsys.readouterr().out


def test_nothing_goes_while_somebody_works_on_it(config, capsys):
    before = everything()
    with held(RUNS / "0") as owner:
        assert clean(config, "--world", "one", "--remove") == 2
    assert f"process {owner} on" in capsys.readouterr().err and before <= everything()


def test_a_world_without_a_name_is_refused(config):
    before = everything()
    assert clean(config, "--world", "", "--remove") == 2
    assert everything() == before


@pytest.mark.parametrize("world", ["tiny", ""])
def test_make_clean_leaves_it_to_the_command(world):
    dry = subprocess.run(
        ["make", "-n", "clean", f"WORLD={world}"], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert f'gripmoe clean --world "{world}" --remove' in dry.stdout and "rm " not in dry.stdout


def test_all_that_rules_write_is_known(tmp_path):
    """Each output, log and benchmark of a dry run, of letters and of news."""
    command = [sys.executable, "-m", "snakemake", "-n", "-s", ROOT / "Snakefile", "--directory", tmp_path]
    for world in ("tiny", "tiny_muse"):
        asked = [*command, "--config", f"world={world}"]
        dry = subprocess.run(asked, capture_output=True, text=True, cwd=ROOT, check=True)
        said = re.findall(r"^ +(?:output|log|benchmark): (.*)", dry.stdout, re.M)
        files = {Path(file) for line in said for file in line.split(", ")}
        patterns = written(Project(CONFIG, world))
        unknown = {f for f in files if not any(path.match(pattern) for path in (f, *f.parents) for pattern in patterns)}
        assert len(files) > 150 and not unknown


def test_a_world_with_a_mistake_may_share_files_so_nothing_is_removed(config, capsys):
    """The control: a world of results of its own."""
    before = everything()
    write_yaml(config / "other.yaml", read_yaml(CONFIG / "tiny.yaml") | {"sedes": [0]})
    assert clean(config, "--world", "one") == 0
    write_yaml(config / "one_more.yaml", {"extends": "one", "sedes": [1, 2]})
    assert clean(config, "--world", "one", "--remove") == 2
    said = capsys.readouterr().err
    assert "sedes" in said and "This world shares results with one; mend it first" in said and everything() == before

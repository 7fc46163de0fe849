"""Every table and figure, drawn by its notebook from two models of the record, with invented histories, answers and
layers."""

import itertools
import json
import re
from pathlib import Path

import pandas as pd
import pytest
import torch

from gripmoe.geometry.nullspace import RetainBasis
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import read_yaml
from gripmoe.moe.bases import save_bases
from gripmoe.reporting import RENDERING, names
from gripmoe.reporting.manifest import manifest
from gripmoe.reporting.specifications import description, notebook_of, specification

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
ARTEFACTS = read_yaml(ROOT / "workflow" / "config" / "artefacts.yaml")
CELL = ["model", "benchmark", "objective", "method", "seed"]
OF_CORRECTION = [
    *(
        f"holdout_{form}_{tokens}_{where}"
        for form in ("paper", "sound")
        for tokens in (64, 128)
        for where in ("fit", "other")
    ),
    *("violation_after_1", "violation_after_100", "violation_exact"),
]
OF_METHOD_A = ("stage_2_rate", "rank_layer_0", "rank_layer_1")
PER_LAYER = (
    "restored_experts",
    "restored_router",
    "routing_stability",
    "routing_stability_router_only",
    "routing_stability_representation_only",
)
# With these every column of every table has a value, and every panel a point.
OBJECTIVES = ("none", "gd", "rmu", "unlikelihood")
OF_TWINS = ("original", "retrained", "unconstrained", "frozen_router", "expert_specific", "anchored_adversary")
OF_NEWS = ("verbmem", "knowmem_forget", "knowmem_retain")
OF_LETTERS = ("forget_accuracy", "retain_accuracy")
OF_BOTH = ("router_gradient", "expert_gradient", "forget_loss", "retain_loss", "seconds")


def test_what_notebooks_call_is_in_the_fingerprint_of_their_rules():
    """Or a change there would render nothing again."""
    called = {
        f"{module}:{name}"
        for notebook in NOTEBOOKS
        for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        for module, names in re.findall(r"(?m)^from (gripmoe\S+) import (.+)$", "".join(cell["source"]))
        for name in re.findall(r"(\w+)(?: as \w+)?(?:,|$)", names)
    }
    inside = {entry for entry in called if entry.partition(":")[0] in RENDERING}
    assert len(called) > 20 and called - inside <= {"gripmoe.geometry:example"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The table of runs; what notebooks find beside it lies beside it."""
    folder = tmp_path_factory.mktemp("results")
    parts = [pd.read_csv(ROOT / "docs" / "record" / part / "runs.csv") for part in (".", "further", "erasure")]
    record = pd.concat(parts).replace({"benchmark": {"wmdp_tiny_erasure": "wmdp_tiny"}})  # one group of panels
    record = record.drop_duplicates([*CELL, "metric"])
    record = record[(record.seed == 0) & record.model.isin(["tiny_a", "tiny_news_a"])]
    of_letters = record[record.model == "tiny_a"]
    of_gd = of_letters[of_letters.objective.isin(["none", "gd"]) & of_letters.method.isin(OF_TWINS)]
    others = [of_gd.assign(model=model) for model in ("tiny_shared", "tiny_dense")]  # these have no runs
    record = pd.concat([record[record.objective.isin(OBJECTIVES)], *others])
    cells = record[CELL].drop_duplicates()

    def invented(columns: dict) -> pd.DataFrame:
        """Every cell with every combination of the columns' values, and a number."""
        combinations = pd.DataFrame(itertools.product(*columns.values()), columns=list(columns))
        table = cells.merge(combinations, how="cross")
        return table.assign(value=[(7 * number % 10) / 10 for number in range(len(table))])

    layers = invented({"metric": [f"{name}_layer_{layer}" for name in PER_LAYER for layer in range(4)]})
    corrected = invented({"metric": OF_CORRECTION})
    pd.concat([record, layers, corrected]).to_csv(folder / "runs_record.csv", index=False, na_rep="nan")
    histories = invented({"step": [0, 10, 20], "metric": [*OF_NEWS, *OF_LETTERS, *OF_BOTH, *OF_METHOD_A]})
    of_the_other = histories.metric.isin(OF_LETTERS).where(
        histories.benchmark == "muse_tiny", histories.metric.isin(OF_NEWS)
    )
    histories[~of_the_other].to_csv(folder / "histories_record.csv", index=False)
    answers = invented({"metric": [*OF_NEWS, *OF_LETTERS], "fact": ["a", "b", "c"], "order": [0, 1]})
    answers = answers[answers.metric.isin(OF_NEWS) == (answers.benchmark == "muse_tiny")]
    news = answers.metric.isin(OF_NEWS)
    answers["id"] = answers.fact + answers.order.astype(str) + answers.metric
    answers["chosen"] = (10 * answers.value).astype(int).mod(4).mask(news)
    answers["score"] = (100 * answers.value).where(news, (answers.value > 0.4).astype(float))
    answers[[*CELL, "id", "fact", "metric", "chosen", "score"]].to_csv(folder / "answers_record.csv", index=False)
    attacked = []
    for matrix, of_kind in (("attack_matrix", answers[~news]), ("muse_attack_matrix", answers[news])):
        attacks = [name for name in specification(matrix)["measured"] if name not in names.MATCHED]
        for own in sorted(names.MATCHED & set(of_kind.metric)):
            items = of_kind[of_kind.metric == own].rename(columns={"score": own}).drop(columns=["metric", "value"])
            scores = {name: (items[own] * (5 + n) / 10 + n) for n, name in enumerate(attacks)}
            attacked.append(items.assign(**scores))
    pd.concat(attacked).to_csv(folder / "attacks_record.csv", index=False)
    bases = {layer: RetainBasis(torch.eye(128)[:, :96].repeat(16, 1, 1)) for layer in range(2)}
    save_bases(folder / "tiny_a" / "wmdp_tiny" / "bases" / "expert_specific.safetensors", bases, {})
    return folder / "runs_record.csv"


def test_every_notebook_renders_a_table_or_figure_that_has_a_description():
    assert {notebook_of(name, FOLDER) for name in ARTEFACTS} == {*NOTEBOOKS}
    for name in ARTEFACTS:
        heading, text = description(name, FOLDER)
        assert heading and text and "#" not in heading
    with pytest.raises(ConfigError, match=r"'other' is no table of .*comparisons.yaml, and has no notebook .*other"):
        notebook_of("other", FOLDER)


@pytest.mark.parametrize("name", ARTEFACTS)
def test_a_notebook_draws_a_table_or_figure(name, runs, tmp_path, monkeypatch):
    notebook, read, read_csv = notebook_of(name, FOLDER), set(), pd.read_csv

    def reading(path, **how):
        read.update({Path(path).name} if "usecols" not in how else ())  # not where only seeds are looked up
        return read_csv(path, **how)

    monkeypatch.setattr(pd, "read_csv", reading)
    output = tmp_path / f"{name}.csv"
    namespace: dict = {}
    for cell in cells_of(notebook):
        is_parameters = "parameters" in cell["metadata"].get("tags", [])
        code = f"runs, output = {str(runs)!r}, {str(output)!r}" if is_parameters else "".join(cell["source"])
        exec(compile(code, notebook.name, "exec"), namespace)
    formats = ARTEFACTS[name]["formats"]
    assert {file.suffix[1:] for file in tmp_path.iterdir()} == set(formats)
    assert "png" not in formats or output.with_suffix(".png").stat().st_size > 5000
    monkeypatch.undo()
    made = manifest([*tmp_path.iterdir(), notebook], runs)["artefacts"][name]
    assert {Path(name).name for name in made["inputs"]} == read, "it names what it was made of"
    figure = namespace.get("figure")
    assert not figure or all(axes.lines or axes.patches or axes.collections for axes in figure.axes), "an empty panel"


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_no_outputs_and_no_logic(notebook):
    cells = cells_of(notebook)
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)
    code = "\n".join("".join(cell["source"]) for cell in cells)
    assert not {"def", "class", "for", "if", "lambda"} & set(code.split())


def cells_of(notebook: Path) -> list[dict]:
    return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]

"""The paper's tables: measured values with intervals, the paper's values beside them, never mixed.

What a table shows stands in comparisons.yaml; nothing here knows a table by name.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import isnan, nan

import pandas as pd

from gripmoe.config.reading import require_known
from gripmoe.config.world import NO_OBJECTIVE
from gripmoe.reporting import names
from gripmoe.reporting.runs import KEYS, apart
from gripmoe.reporting.specifications import specification
from gripmoe.reporting.tables import MISSING, Cell, Row, Table, fixed
from gripmoe.reporting.uncertainty import LEAST, interval, units_of_table

NOT_APPLICABLE = "n/a"
PAPER_MODEL = "qwen3_30b_a3b"
Measured = Callable[[pd.DataFrame, str, bool], Cell]  # the runs of a row, a metric, whether it is about news
# How far test questions may exceed the target that dev questions met.
FORGET_SLACK = {"forget_accuracy": 0.05, "verbmem": 5.0, "knowmem_forget": 5.0}
MARKING = ("reached", "diverged", "corrected_after", *names.COLLAPSED) + tuple(
    f"{measure}{part}" for measure in FORGET_SLACK for part in ("", "_target", "_half_width")
)


def added_to(spec: dict) -> dict[str, str]:
    """Maps each metric of an attack table to the measure of forgetting on its left, to which the attack adds."""
    own, measures = "", {}
    for metric in spec["measured"]:
        measures[metric] = own = metric if metric in names.MATCHED else own
    return measures


def headings(spec: dict) -> dict[str, str]:
    """By measured metric its heading in a table; that of a difference begins with a plus."""
    headings = {metric: names.metric(metric).heading for metric in spec["measured"]}
    if not spec.get("differences"):
        return headings
    measures = added_to(spec)
    alone = headings[spec["measured"][0]] if len(set(measures.values())) == 1 else ""
    return {m: text if m == measures[m] else f"+ {text.removesuffix(alone).rstrip()}" for m, text in headings.items()}


def _mean_of(runs: pd.DataFrame, metric: str, news: bool) -> Cell:
    measured = runs[runs.metric == metric]
    if measured.value.dropna().empty:
        return absent(runs, metric)
    if metric.startswith("setting_"):
        settings = measured.value.dropna().drop_duplicates()
        return Cell(" or ".join(_text(metric, value, news) for value in settings), settings.iloc[0], None)
    mean, half_width = interval(units_of_table(measured))
    text = _text(metric, mean, news)
    if half_width is not None:
        unit = "×" * text.endswith("×")
        text = f"{text.removesuffix(unit)} ± {_text(metric, half_width, news)}"
    valued = int(measured.value.notna().sum())
    return Cell(text + f" (n = {valued})" * (valued < runs.run.nunique()), mean, half_width)


def comparison(runs: pd.DataFrame, name: str, measured: Measured = _mean_of) -> Table:
    """A table of comparisons.yaml from the tidy runs; `measured` gives the cell of a row and metric.

    The best value of a block is marked among runs that reached the forget target, in the rows that cover the same runs
    as the row with most; the labels say how many runs where rows differ in them. The label of a run that missed its
    target, or diverged, has a mark. Rows that are neither measured nor in the paper are left out. Raises ConfigError
    for a metric, method or objective that the package does not name and that no run has.
    """
    runs = runs.assign(run=runs.groupby(KEYS, sort=False).ngroup())  # one number, which is counted faster than KEYS
    spec = specification(name)
    _require_names(spec, name, runs)
    metrics, published, news = spec["measured"], spec["paper"], spec.get("kind") == "news"
    table = Table(list(headings(spec).values()), [names.metric(m).heading for m in published])
    groups = _groups(runs, spec)
    beside_paper = next((kind for kind, of in groups if spec.get("model", PAPER_MODEL) in set(of.model)), groups[0][0])
    shown: list[dict] = []
    counts: set[int] = set()  # of runs, where rows of a block differ in them
    for (kind, group), block in product(groups, _blocks(runs, spec)):
        rows = _rows(block, group, spec, beside_paper=kind == beside_paper)
        compared = "objective" in block
        pairing = ["seed"] if any("model" in row for row, _ in rows) else ["model", "seed"]
        runs_of = [frozenset(of_row[pairing].itertuples(index=False, name=None)) for _, of_row in rows]
        differ = compared and len(set(filter(None, runs_of))) > 1
        entries: list[Row] = []
        for (row, of_row), covered in zip(rows, runs_of, strict=True):
            printed = row.get("paper", [None] * len(published))
            paper = [_published(metric, value, news) for metric, value in zip(published, printed, strict=True)]
            label = row.get("label", names.method_label(row["method"]))
            label += f" (n = {len(covered)})" * bool(differ and covered) + _realigned(of_row) + marks_of(of_row)
            entries.append((label, [measured(of_row, metric, news) for metric in metrics], paper))
        if any(cell.value is not None for _, cells, _ in entries for cell in cells):
            if compared and spec.get("marks_best", True):
                most = max(runs_of, key=len)
                alike = [entry for entry, covered in zip(entries, runs_of, strict=True) if covered == most]
                _mark_best(alike, metrics, 0.0 if news else names.FORGOTTEN)
            table.blocks.append((", ".join(filter(None, [kind, block.get("name")])), entries))
            shown += [row for row, _ in rows]
            counts |= {len(covered) for covered in runs_of} if differ else set()
    if not any(cell.value is not None for *_, paper in table.rows for cell in paper):
        table.paper_columns = []  # the paper has none of the rows that were measured
        table.blocks = [(name, [(label, cells, []) for label, cells, _ in entries]) for name, entries in table.blocks]
    table.notes = _notes(runs, spec, table, counts)
    table.legend = _legend(spec, table, shown, counts)
    return table


def _require_names(spec: dict, table: str, runs: pd.DataFrame) -> None:
    rows = [row for block in spec["blocks"] for row in block["rows"]]
    methods = [row["method"] for row in rows if not names.is_swept(row["method"])]
    objectives = {entry["objective"] for entry in (*spec["blocks"], *rows) if "objective" in entry} - {NO_OBJECTIVE}
    for column, named, known in (
        ("metric", spec["measured"], names.METRICS),
        ("method", methods, names.METHODS),
        ("objective", objectives, names.OBJECTIVES),
    ):
        for value in [value for value in named if value not in known]:
            require_known(value, [*known, *runs[column].unique()], f"comparisons.yaml: {table}: {column}")


def _groups(runs: pd.DataFrame, spec: dict) -> list[tuple[str, pd.DataFrame]]:
    """The runs in groups within which they may be pooled. Models or benchmarks that blocks or rows of the table name
    are apart already."""
    named = {key for block in spec["blocks"] for entry in (block, *block["rows"]) for key in entry}
    return apart(runs, [column for column in ("model", "benchmark") if column not in named])


def _blocks(runs: pd.DataFrame, spec: dict) -> list[dict]:
    """The blocks of a table; if it shows all methods of all benchmarks, also one for each objective not listed, one of
    controls and one of external checkpoints."""
    blocks = spec["blocks"]
    if not spec.get("all_methods") or any("benchmark" in block for block in blocks):
        return blocks
    listed = {block.get("objective") for block in blocks}
    others = [objective for objective in names.objectives_of(runs) if objective not in listed]
    of_objectives = [{"name": names.objective_label(o), "objective": o, "rows": []} for o in others]
    listed = {row["method"] for block in blocks for row in block["rows"] if row.get("objective") == NO_OBJECTIVE}
    others = sorted({*runs.method[runs.objective == NO_OBJECTIVE]} - {*names.NOT_UNLEARNED} - listed)
    of_none = []
    for title, is_ours in (("Control", True), ("External", False)):
        rows = [{"objective": NO_OBJECTIVE, "method": name} for name in others if (name in names.METHODS) == is_ours]
        of_none += [{"name": title, "rows": rows}] * bool(rows)
    return [*blocks, *of_objectives, *of_none]


def _rows(block: dict, runs: pd.DataFrame, spec: dict, beside_paper: bool) -> list[tuple[dict, pd.DataFrame]]:
    """The rows of a block that are measured or in the paper, each with its runs: the listed ones, and every other
    measured method if the table shows all."""
    if "benchmark" in block:
        runs = runs[runs.benchmark == block["benchmark"]]
    rows = block["rows"]
    if not beside_paper:
        rows = [{key: value for key, value in row.items() if key not in ("paper", "line")} for row in rows]
    if spec.get("all_methods") and "objective" in block:
        listed = {row["method"]: row for row in rows}
        methods = names.ordered({*listed, *runs.method[runs.objective == block["objective"]]})
        rows = [listed.get(method, {"method": method}) for method in methods]
    found = []
    for row in rows:
        chosen = (runs.objective == row.get("objective", block.get("objective"))) & (runs.method == row["method"])
        of_row = runs[chosen & (runs.model == row["model"])] if "model" in row else runs[chosen]
        if "paper" in row or not of_row.empty:
            found.append((row, of_row))
    return found


def _text(metric: str, value: float, news: bool) -> str:
    unit = names.metric(metric).unit
    if metric.startswith("setting_"):
        return f"{value:g}"
    if unit == "count":
        return f"{value:.0f}"
    if unit == "million":
        return fixed(value / 1e6, 2)
    return fixed(value, 1 if news and unit != "fraction" else 2) + "×" * (unit == "times")


def _published(metric: str, value: float | None, news: bool) -> Cell:
    if value is None:
        return Cell(MISSING)
    text = _text(metric, value, news and abs(value) >= 1)
    return Cell(text if float(text.rstrip("×")) == value else f"{value:g}", value)  # as the paper prints it


def absent(runs: pd.DataFrame, metric: str) -> Cell:
    """The cell of a metric without a value: not measured, impossible (the routing of a dense model) or NaN."""
    experts = runs.loc[runs.metric == "num_experts", "value"]
    if metric.startswith(tuple(names.NAMES["need_a_router"])) and (experts == 0).any():
        return Cell(NOT_APPLICABLE, reason="a dense model has no router")
    if metric in set(runs.metric):
        found = (text for prefix, text in names.NAMES["reasons"].items() if metric.startswith(prefix))
        return Cell(NOT_APPLICABLE, reason=next(found, "undefined for these runs"))
    return Cell(MISSING)


def marks_of(runs: pd.DataFrame) -> str:
    """The marks of a row, as `names.MARKS` explains them."""
    found = _marking(runs)
    of_runs = found.values()
    diverged = any(run.get("diverged") == 1 for run in of_runs)
    marks = " †" if diverged else " *" * any(map(_missed, of_runs))
    marks += " §" * any(_collapsed(*each) for each in found.items()) + " ¶" * any(map(_overshot, of_runs))
    return marks + " ‡" * any(run.get("corrected_after") == 1 for run in of_runs)


def unforgotten(runs: pd.DataFrame) -> list[tuple]:
    """The runs (KEYS) that missed their target on dev questions, or exceed it on test questions by more than the slack,
    as after a correction that undoes forgetting."""
    return [key for key, run in _marking(runs).items() if _missed(run)]


def collapsed(runs: pd.DataFrame) -> list[tuple]:
    """The unlearned runs (KEYS) that answer retain questions by chance or, of news, hardly any."""
    return [key for key, run in _marking(runs).items() if _collapsed(key, run)]


def _marking(runs: pd.DataFrame) -> dict[tuple, dict[str, float]]:
    """By run (KEYS), the values on which marks depend. In plain Python, because a table has hundreds of rows."""
    found, values = runs[runs.metric.isin(MARKING)], {}
    for key, metric, value in zip(zip(*(found[k] for k in KEYS), strict=True), found.metric, found.value, strict=True):
        values.setdefault(key, {})[metric] = value
    return values


def _missed(run: dict[str, float]) -> bool:
    """Of an unlearned run; the others have no `reached`."""
    exceeds = (run.get(m, nan) > run.get(f"{m}_target", nan) + slack for m, slack in FORGET_SLACK.items())
    return run.get("reached") == 0 or (run.get("reached") == 1 and any(exceeds))


def _collapsed(key: tuple, run: dict[str, float]) -> bool:
    poor = any(run.get(measure, nan) <= level for measure, level in names.COLLAPSED.items())
    return poor and key[KEYS.index("method")] not in names.NOT_UNLEARNED


def _overshot(run: dict[str, float]) -> bool:
    """Whether a run ended with all of its measures below target by more than their half-widths, or the slack where
    these were not kept. Runs stop when the last of the measures is met, so one alone may be far below."""
    if run.get("reached") != 1:
        return False
    targets = {m: run[f"{m}_target"] for m in FORGET_SLACK if m in run and not isnan(run.get(f"{m}_target", nan))}
    widths = {m: run.get(f"{m}_half_width", nan) for m in targets}
    room = {m: FORGET_SLACK[m] if isnan(width) else width for m, width in widths.items()}
    return bool(targets) and all(run[m] + room[m] < target for m, target in targets.items())


def _realigned(runs: pd.DataFrame) -> str:
    """In how many layers Method B has accepted its own router; empty if in all."""
    accepted = runs.value[runs.metric.str.fullmatch(r"accepted_layer_\d+")]
    if accepted.all():
        return ""
    number = len(runs[KEYS].drop_duplicates())
    return f" ({accepted.sum() / number:.3g} of {len(accepted) / number:.3g} layers)"


def _mark_best(rows: list[Row], metrics: list[str], chance: float) -> None:
    """Marks the best value per column. Rows marked * or † have not forgotten as much, those marked § have kept nothing:
    they do not compete. Neither do the measures of forgetting, which are matched by design."""
    for column, metric in enumerate(metrics):
        better = names.metric(metric).better
        cells = [measured[column] for label, measured, _ in rows if not set("*†§") & set(label)]
        cells = [cell for cell in cells if cell.value is not None]
        if metric in names.MATCHED or better == "neither" or len(cells) < 2:
            continue
        merits = [round(cell.value, 2) for cell in cells]
        if better == "nearest zero":
            merits = [-abs(value) for value in merits]
        elif better != "higher":
            merits = [-max(value, chance if better == "lower accuracy" else 0.0) for value in merits]
        for cell, merit in zip(cells, merits, strict=True):
            cell.best = merit == max(merits) > min(merits)


def _notes(runs: pd.DataFrame, spec: dict, table: Table, counts: set[int]) -> list[str]:
    of_cells = runs[runs.objective != NO_OBJECTIVE].groupby(["model", "objective"]).seed.nunique()
    seeds, alike = int(of_cells.max()) if len(of_cells) else 0, of_cells.nunique() < 2
    of_one_model = any("model" in row for block in spec["blocks"] for row in block["rows"])
    groups = _groups(runs, spec)
    models = max(group.model[~group.method.isin(names.NOT_UNLEARNED)].nunique() for _, group in groups) or 1
    runs_in_row = seeds * (1 if of_one_model else models)
    spread = {1: "", 2: " ± half the range,"}.get(runs_in_row, " ± 95 % t-interval,")
    spread += " where n = 2 half the range," if runs_in_row > 2 and 2 in counts else ""
    if models > 1 and not of_one_model:
        of_many = " ± 95 % t-interval over base models (of two: half their range),"
        spread = of_many if models >= LEAST else " ± half the range of two base models,"
    cells = [cell for _, measured, _ in table.rows for cell in measured if cell.value is not None]
    spread += " a value without ± is of one run," if spread and any(cell.half_width is None for cell in cells) else ""
    of_seeds = f"{'up to ' * (bool(counts) or not alike)}{seeds} unlearning seed{'s' * (seeds > 1)}, " if seeds else ""
    notes = [
        f"Mean over {of_seeds}{models} base model{'s' * (models > 1)}{' per block' * (len(groups) > 1)},{spread} test"
        f" questions, held-out retain tokens. {spec['title']}."
    ]
    most_steps = " or ".join(f"{steps:.0f}" for steps in sorted(set(runs.value[runs.metric == "setting_max_steps"])))
    if most_steps and any("*" in label for label, *_ in table.rows):
        notes.append(f"Runs stop after {most_steps} steps at most.")
    return [*notes, spec["note"]] if "note" in spec else notes


def _legend(spec: dict, table: Table, rows: list[dict], counts: set[int]) -> list[str]:
    """What headings, marks and names in a table stand for."""
    labels = " ".join(label for label, *_ in table.rows)
    explained = [f"{text}: {names.metric(m).note}" for m, text in headings(spec).items() if names.metric(m).note]
    explained += [note for mark, note in names.MARKS.items() if mark in labels]
    if " layers)" in labels:
        explained.append(
            "(... of ... layers): layers in which Method B's acceptance test accepts its router, mean over runs"
        )
    cells = [cell for _, measured, paper in table.rows for cell in (*measured, *paper)]
    if counts or any(" (n = " in cell.text for cell in cells):
        explained.append(
            "(n = ...) runs of a row, if rows of the block have different numbers of runs; in a cell, runs with a value"
        )
    if any(cell.best for cell in cells):
        fewer = ", nor rows over fewer runs" * bool(counts)
        alike = f", and accuracies up to {names.FORGOTTEN} and recoveries up to 0 are equal" * (
            spec.get("kind") != "news"
        )
        explained.append(f"bold: best in its block; rows that have not forgotten do not compete{fewer}{alike}")
    if table.paper_columns:
        explained.append("right: the paper's own values")
    if any(cell.text == MISSING for cell in cells):
        explained.append("– not measured here, or not in the paper")
    reasons = dict.fromkeys(cell.reason for cell in cells if cell.reason)
    explained += [f"{NOT_APPLICABLE}: {' or '.join(reasons)}"] * bool(reasons)
    methods = {row["method"] for row in rows}
    published = {row["method"] for row in rows if "paper" in row and table.paper_columns}
    explained += [method.note for name, method in names.METHODS.items() if name in methods]
    explained += [method.paper_note for name, method in names.METHODS.items() if name in published]
    return list(filter(None, explained))

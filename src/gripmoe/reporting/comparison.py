"""The paper's tables: measured cells with intervals, the paper's values beside them, never mixed.

What a table shows stands in comparisons.yaml; nothing here knows a table by name.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from itertools import product

import pandas as pd
import yaml

from gripmoe.config.grid import NO_OBJECTIVE
from gripmoe.config.training import OBJECTIVES
from gripmoe.reporting import names
from gripmoe.reporting.collect import KEYS, apart
from gripmoe.reporting.tables import MISSING, Cell, Table, interval, without_zeros

NOT_APPLICABLE = "n/a"
PAPER_MODEL = "qwen3_30b_a3b"
Measured = Callable[[pd.DataFrame, str, bool], Cell]  # the runs of a row, a metric, whether it is about news
# From the dev split, on which runs stop, to the test split.
FORGET_SLACK = {"forget_accuracy": 0.05, "verbmem": 5.0, "knowmem_forget": 5.0}


def specification(name: str) -> dict:
    """The entry of a table in comparisons.yaml. Raises ValueError for an unknown name."""
    text = (resources.files("gripmoe.reporting") / "comparisons.yaml").read_text(encoding="utf-8")
    tables = yaml.safe_load(text)
    if name not in tables:
        raise ValueError(f"comparisons.yaml: no table {name!r}; one of {', '.join(tables)}")
    return tables[name]


def added_to(spec: dict) -> dict[str, str]:
    """By metric of a table whose attacks stand right of the measure that they add to: that measure."""
    own, measures = "", {}
    for metric in spec["measured"]:
        measures[metric] = own = metric if metric in names.MATCHED else own
    return measures


def headings(spec: dict) -> dict[str, str]:
    """What the measured metrics of a table are called there; of a difference with a plus, so that nobody takes it for
    the accuracy of another table."""
    headings = {metric: names.metric_label(metric) for metric in spec["measured"]}
    if spec.get("differences"):
        measures = added_to(spec)
        alone = names.metric_label(spec["measured"][0]) if len(set(measures.values())) == 1 else ""
        headings = {
            m: text if m == measures[m] else f"+ {text.removesuffix(alone).rstrip()}" for m, text in headings.items()
        }
    return headings


def comparison(runs: pd.DataFrame, name: str, measured: Measured | None = None) -> Table:
    """A table of comparisons.yaml from the tidy runs; `measured` says what stands for a metric of a row, if not the
    mean over its runs.

    The best value of a block is marked among the runs that reached the forget target, and among the rows over the same
    runs as the one with most; how many these are stands beside the names where rows differ in them. A run that did not
    reach the target, or diverged, carries a note, and its values are those of where it ended. Rows that are neither
    measured nor in the paper are left out.
    """
    spec = specification(name)
    metrics, published = spec["measured"], spec["paper"]
    news = spec.get("kind") == "news"
    table = Table(list(headings(spec).values()), [names.metric_label(m) for m in published])
    groups = _groups(runs, spec)
    beside_paper = next((kind for kind, of in groups if spec.get("model", PAPER_MODEL) in set(of.model)), groups[0][0])
    shown: list[dict] = []
    counts: set[int] = set()  # of runs, where rows of a block differ in them
    for (kind, group), block in product(groups, _blocks(runs, spec)):
        rows = _rows(block, group, spec, beside_paper=kind == beside_paper)
        compared = "objective" in block
        pairing = ["seed"] if any("model" in row for row, _ in rows) else ["model", "seed"]
        runs_of = [frozenset(cells[pairing].itertuples(index=False, name=None)) for _, cells in rows]
        differ = compared and len({of_row for of_row in runs_of if of_row}) > 1
        entries = []
        for (row, cells), of_row in zip(rows, runs_of, strict=True):
            printed = row.get("paper", [None] * len(published))
            paper = [_published(metric, value, news) for metric, value in zip(published, printed, strict=True)]
            count = f" (n = {len(of_row)})" if differ and of_row else ""
            label = row.get("label", names.method_label(row["method"])) + count + _realigned(cells) + marks_of(cells)
            entries.append((label, [(measured or _measured)(cells, metric, news) for metric in metrics], paper))
        if any(cell.value is not None for _, measured, _ in entries for cell in measured):
            if compared and spec.get("marks_best", True):
                most = max(runs_of, key=len)
                alike = [entry for entry, of_row in zip(entries, runs_of, strict=True) if of_row == most]
                _mark_best(alike, metrics, 0.0 if news else names.CHANCE)
            table.blocks.append((", ".join(filter(None, [kind, block.get("name")])), entries))
            shown += [row for row, _ in rows]
            counts |= {len(of_row) for of_row in runs_of} if differ else set()
    if not any(cell.value is not None for _, entries in table.blocks for _, _, paper in entries for cell in paper):
        table.paper_columns = []  # the paper has none of the rows that were measured
        table.blocks = [(name, [(label, cells, []) for label, cells, _ in entries]) for name, entries in table.blocks]
    table.notes = _notes(runs, spec, table, shown, counts)
    return table


def intervals(runs: pd.DataFrame, name: str) -> pd.DataFrame:
    """The measured numbers of a table, a row each: mean, half-width of its interval, how many runs and their marks, by
    kind of base model, benchmark, objective, method and metric. Not those of a sweep."""
    rows = []
    runs = runs[~runs.method.map(names.is_swept).astype(bool)]
    for key, cells in runs.groupby([runs.model.map(names.model_label), "benchmark", "objective", "method"]):
        marks = marks_of(cells).replace(" ", "")
        for metric in specification(name)["measured"]:
            values = cells.loc[cells.metric == metric, "value"].dropna()
            if len(values):
                rows.append([*key, metric, *interval(values), len(values), marks])
    table = pd.DataFrame(rows, columns=[*KEYS[:-1], "metric", "mean", "half_width", "n", "mark"])
    return table.astype({"half_width": float})


def _groups(runs: pd.DataFrame, spec: dict) -> list[tuple[str, pd.DataFrame]]:
    """What must not be pooled, apart; where blocks or rows name benchmarks or models they say themselves."""
    named = {key for block in spec["blocks"] for entry in (block, *block["rows"]) for key in entry}
    return apart(runs, [column for column in ("model", "benchmark") if column not in named])


def _blocks(runs: pd.DataFrame, spec: dict) -> list[dict]:
    """Those of a table; if it shows all methods also one for each objective that it does not list, unless its blocks
    are of one benchmark each."""
    blocks = spec["blocks"]
    if not spec.get("all_methods") or any("benchmark" in block for block in blocks):
        return blocks
    others = set(runs.objective) - {NO_OBJECTIVE} - {block.get("objective") for block in blocks}
    of_others = names.ordered(others, OBJECTIVES)
    return blocks + [{"name": names.objective_label(o), "objective": o, "rows": []} for o in of_others]


def _rows(block: dict, runs: pd.DataFrame, spec: dict, beside_paper: bool) -> list[tuple[dict, pd.DataFrame]]:
    """The rows of a block that are measured or in the paper, each with its runs; if the table shows all methods, the
    listed ones and every other measured method, in the usual order."""
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
        cells = runs[(runs.objective == row.get("objective", block.get("objective"))) & (runs.method == row["method"])]
        if "model" in row:
            cells = cells[cells.model == row["model"]]
        if "paper" in row or not cells.empty:
            found.append((row, cells))
    return found


def _text(metric: str, value: float, news: bool) -> str:
    if metric.startswith("setting_"):
        return f"{value:g}"
    if metric in names.COUNTS:
        return f"{value:.0f}"
    decimals = 1 if news and metric not in names.FRACTIONS else 2
    return f"{round(value, decimals) + 0.0:.{decimals}f}" + (
        "×" if metric in names.TIMES else ""
    )  # + 0.0: no negative zero


def _published(metric: str, value: float | None, news: bool) -> Cell:
    if value is None:
        return Cell(MISSING)
    text = _text(metric, value, news and abs(value) >= 1)
    return Cell(text if float(text.rstrip("×")) == value else f"{value:g}", value)  # as it prints them


def absent(runs: pd.DataFrame, metric: str) -> Cell:
    """In place of a value: not measured, or what cannot be, such as the routing of a dense model, or what was asked of
    these runs and has no value (NaN)."""
    experts = runs.loc[runs.metric == "num_experts", "value"]
    if metric.startswith(names.NEED_A_ROUTER) and (experts == 0).any():
        return Cell(NOT_APPLICABLE, reason="a dense model has no router")
    if metric in set(runs.metric):
        found = (text for prefix, text in names.REASONS.items() if metric.startswith(prefix))
        return Cell(NOT_APPLICABLE, reason=next(found, "undefined for these runs"))
    return Cell(MISSING)


def _measured(runs: pd.DataFrame, metric: str, news: bool) -> Cell:
    values = runs.loc[runs.metric == metric, "value"]
    if values.dropna().empty:
        return absent(runs, metric)
    mean, half_width = (values.iloc[0], None) if metric.startswith("setting_") else interval(values)
    text = _text(metric, mean, news)
    if half_width is not None:
        unit = "×" if text.endswith("×") else ""
        half = _text(metric, half_width, news).removesuffix(unit)
        text = f"{text.removesuffix(unit)} ± {without_zeros(half)}{unit}"
    return Cell(text, mean, half_width)


def marks_of(cells: pd.DataFrame) -> str:
    """The notes of a row: † a run diverged; * a run has not forgotten, on the way or after a correction; § a run was
    destroyed and answers by chance; ¶ a run forgot more than it had to; ‡ corrected afterwards."""

    def any_is(metric: str) -> bool:
        return bool((cells.value[cells.metric == metric] == 1).any())

    marks = " †" if any_is("diverged") else " *" * bool(len(unforgotten(cells)))
    marks += " §" * (not collapsed(cells).empty) + " ¶" * _overshot(cells)
    return marks + " ‡" * any_is("corrected_after")


def unforgotten(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs (columns KEYS) of unlearned models that missed their target on dev questions, or exceed it on test
    questions by more than the slack: as a correction may that undoes what training has reached."""
    wide = _wide(runs)
    if "reached" not in wide:
        return pd.DataFrame(columns=KEYS)
    missed = wide["reached"] == 0
    for measure, slack in FORGET_SLACK.items():
        if {measure, f"{measure}_target"} <= set(wide):
            missed |= wide["reached"].notna() & (wide[measure] > wide[f"{measure}_target"] + slack)
    return wide.index[missed].to_frame(index=False)


def _wide(runs: pd.DataFrame) -> pd.DataFrame:
    return runs.pivot_table(index=KEYS, columns="metric", values="value")


def _realigned(cells: pd.DataFrame) -> str:
    """Of how many layers Method B has accepted its own router, where not of all."""
    accepted = cells.value[cells.metric.str.fullmatch(r"accepted_layer_\d+")]
    runs = max(1, len(cells[KEYS].drop_duplicates()))
    return (
        ""
        if accepted.empty or accepted.all()
        else f" ({accepted.sum() / runs:.3g} of {len(accepted) / runs:.3g} layers)"
    )


def collapsed(runs: pd.DataFrame) -> pd.DataFrame:
    """The retain accuracies of unlearned models that answer retain questions by chance."""
    return runs[(runs.objective != NO_OBJECTIVE) & (runs.metric == "retain_accuracy") & (runs.value <= names.COLLAPSED)]


def _overshot(cells: pd.DataFrame) -> bool:
    """Whether a run ended with all that it had to forget below target by more than the half-widths of the scores (the
    slack, where these were not kept). Runs stop when the last of the measures is met, so another may be far below."""
    runs = _wide(cells)
    runs = runs[runs["reached"] == 1] if "reached" in runs else runs[:0]
    below = [
        runs[measure] + runs.reindex(columns=[f"{measure}_half_width"]).iloc[:, 0].fillna(slack)
        < runs[f"{measure}_target"]
        for measure, slack in FORGET_SLACK.items()
        if {measure, f"{measure}_target"} <= set(runs)
    ]
    return bool(below) and bool(pd.concat(below, axis=1).all(axis=1).any())


def _mark_best(block: list, metrics: list[str], chance: float) -> None:
    """Marks the best value per column; rows with a note * or † have not forgotten as much, those with § nothing else,
    and do not compete. Neither do the measures of forgetting, which are matched by design."""
    for column, metric in enumerate(metrics):
        if metric in names.MATCHED | names.NEITHER_IS_BETTER:
            continue
        competing = [cells[column] for label, cells, _ in block if not set("*†§") & set(label)]
        competing = [cell for cell in competing if cell.value is not None]
        if len(competing) < 2:
            continue
        lower = metric in names.LOWER_IS_BETTER | names.BEST_AT_ZERO
        floor = float("-inf") if not lower or metric in names.BEST_AT_ZERO else chance
        floor = 0.0 if metric in names.SHARES else floor
        values = [max(round(cell.value, 2), floor) for cell in competing]
        if metric in names.BEST_AT_ZERO:
            values = [abs(value) for value in values]
        if len(set(values)) == 1:
            continue  # nothing to choose
        best = (min if lower else max)(values)
        for cell, value in zip(competing, values, strict=True):
            cell.best = value == best


def _notes(runs: pd.DataFrame, spec: dict, table: Table, rows: list[dict], counts: set[int]) -> list[str]:
    seeds = runs.loc[runs.objective != NO_OBJECTIVE, "seed"].nunique()
    of_one_model = any("model" in row for block in spec["blocks"] for row in block["rows"])
    groups = _groups(runs, spec)
    models = max(group.model.nunique() for _, group in groups)
    runs_in_row = seeds * (1 if of_one_model else models)
    each = " per block" if len(groups) > 1 else ""
    spread = {1: "", 2: " ± half the range,"}.get(runs_in_row, " ± 95 % t-interval,")
    shown = {heading: names.METRIC_NOTES.get(metric) for metric, heading in headings(spec).items()}
    alone = any(
        cell.half_width is None and cell.value is not None
        for _, entries in table.blocks
        for _, measured, _ in entries
        for cell in measured
    )
    spread += " where n = 2 half the range," if runs_in_row > 2 and 2 in counts else ""
    spread += " without ± one run," if spread and alone else ""
    notes = [
        f"Mean over {'up to ' if counts else ''}{seeds} unlearning seed{'s' if seeds > 1 else ''},"
        f" {models} base model{'s' if models > 1 else ''}{each},{spread} test questions, held-out retain tokens."
        f" {spec['title']}.",
        "; ".join(f"{label}: {note}" for label, note in shown.items() if note) + ".",
    ]
    notes += [spec["note"]] if "note" in spec else []
    explained = _explained(runs, spec, table, rows, counts)
    return [*notes, *["; ".join(explained) + "."] * bool(explained)]


def _explained(runs: pd.DataFrame, spec: dict, table: Table, rows: list[dict], counts: set[int]) -> list[str]:
    """What signs and names in a table stand for."""
    texts = " ".join(label for _, entries in table.blocks for label, _, _ in entries)
    explained = [note for sign, note in names.MARKS.items() if sign in texts]
    most_steps = sorted(set(runs.loc[runs.metric == "setting_max_steps", "value"]))
    if "*" in texts and most_steps:
        explained.append(f"runs stop after {' or '.join(f'{steps:.0f}' for steps in most_steps)} steps at most")
    if " layers)" in texts:
        explained.append("(... of ... layers): those where Method B's own test accepts its router, on average of runs")
    if counts:
        explained.append("(n = ...) runs of a row, by base model and seed, where rows of its block differ in them")
    alike = "" if spec.get("kind") == "news" else f", accuracies up to {names.CHANCE} and recoveries up to 0 alike"
    same = ", of rows over the same runs as the one with most" if counts else ""
    cells = [cell for _, entries in table.blocks for _, measured, paper in entries for cell in (*measured, *paper)]
    if any(cell.best for cell in cells):
        explained.append(f"bold: best in its block among runs that forgot enough{same}{alike}")
    if table.paper_columns:
        explained.append("right: the paper's own values")
    if any(cell.text == MISSING for cell in cells):
        explained.append("– not measured here, or not in the paper")
    reasons = dict.fromkeys(cell.reason for cell in cells if cell.reason)
    explained += [f"{NOT_APPLICABLE}: {' or '.join(reasons)}"] * bool(reasons)
    methods = {row["method"] for row in rows}
    published = {row["method"] for row in rows if "paper" in row and table.paper_columns}
    explained += [note for method, note in names.METHOD_NOTES.items() if method in methods]
    return explained + [note for method, note in names.PAPER_NOTES.items() if method in published]

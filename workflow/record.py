"""Writes a record of measured runs: their numbers as one compact CSV, their tables as Markdown, the main tables and the
statements as CSV too, checks, answers and attacked items compressed, the time of each step, and what the runs were
computed with. Draws the README's pictures for docs/record, and those of docs/erasure.md from runs of its worlds. A
record can be drawn again from its own CSV.

python workflow/record.py results/tiny/runs_record.csv results/tiny/runs_tiny_shared.csv [more tables of runs]
"""

from __future__ import annotations

import argparse
import platform
import subprocess
from collections import Counter
from functools import cache, partial
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from shared import CONFIG, ROOT, under_every_objective

from gripmoe.config.fingerprint import code_fingerprint
from gripmoe.config.project import Project
from gripmoe.config.provenance import package_versions, step_seconds
from gripmoe.config.world import NO_OBJECTIVE
from gripmoe.io.files import atomic_path, file_digest, read_json, write_json, write_text
from gripmoe.reporting import RENDERING, TABLES, names
from gripmoe.reporting.attacks import attack_matrix, forcing_vulnerability
from gripmoe.reporting.claims import claims_table, load_claims, replication_table
from gripmoe.reporting.collect import base_models, computed_with, with_shares
from gripmoe.reporting.comparison import comparison, marks_of
from gripmoe.reporting.erasure import ATTACK_METRICS, HARMLESS, attack_quality, harmless
from gripmoe.reporting.erasure_goals import MEASURED, erasure_frontier, goals, goals_table
from gripmoe.reporting.figures import forget_utility_tradeoff, routing_stability_by_layer, save_picture
from gripmoe.reporting.overview import overview
from gripmoe.reporting.paired import paired_table
from gripmoe.reporting.runs import (
    KEYS,
    beside,
    load_answers,
    load_attacks,
    load_histories,
    load_runs,
    of_kind,
    read_items,
)
from gripmoe.reporting.specifications import description, specification, specifications
from gripmoe.reporting.tables import MISSING, Table, as_markdown
from gripmoe.reporting.uncertainty import interval, units_of_table

OUTPUT = ROOT / "docs" / "record"
PICTURES = OUTPUT.with_name("images")
OVERVIEW = (
    *("retrained", "unconstrained", "frozen_router", "expert_specific", "expert_specific_paper"),
    *("ptc", "ptc_paper", "anchored"),
    *("unconstrained_router_x10", "expert_specific_paper_router_x10", "expert_specific_router_x10"),
)
SHOWN = (
    "main_results",
    "drift_decomposition",
    "expert_forcing",
    "router_rate",
    "attack_matrix",
    "attack_controls",
    "paired_tests",
    "blackbox_attacks",
    "threshold_sensitivity",
    "per_band_threshold",
    "constraint_ablation",
    "factorial",
    "constraint_surface",
    "cost_and_memory",
    "general_utility",
    "retain_data",
    "muse_results",
    "muse_attack_matrix",
    "muse_paired_tests",
    "seuf_comparison",
    "dense_baseline",
    "erasure",
    "erasure_goals",
    "attack_quality",
)
OF_ERASURE = (
    "tiny_erasure",
    "tiny_erasure_averaged",
    "tiny_erasure_further",
    "tiny_erasure_held_out",
    "tiny_erasure_objectives",
)
OF_ABLATIONS = ("threshold_sensitivity", "per_band_threshold", "constraint_ablation", "factorial", "constraint_surface")
WORLDS_OF_TABLE = {
    "router_rate": ("record_rates", "tiny_wide"),
    "seuf_comparison": ("tiny_shared",),
    "dense_baseline": ("tiny_dense",),
    "retain_data": ("tiny_retain",),
    "erasure": (*OF_ERASURE, "tiny_routed"),
    "erasure_goals": OF_ERASURE,
    "attack_quality": ("tiny_erasure",),
}
WITHOUT_SPECIFICATION = {"attack_quality": attack_quality, "erasure_goals": goals_table}
ITEMS = TABLES[1:]
OF_MANY_MODELS, OF_ONE_MODEL = ("record_main", "record_matched", "record_replication"), ("tiny", "tiny_all")
OF_CLAIMS = (*OF_MANY_MODELS, *OF_ONE_MODEL, "record_rates", "record", "record_muse", "tiny_erasure")
COMPARED_WITH = {("tiny_a", "wmdp_tiny")}  # what worlds of further tables list only to compare with
OF_MARKS = {"reached", "diverged", "corrected_after", "steps", "setting_max_steps", "num_experts", "top_k"} | {
    f"{measure}_{part}" for measure in names.MATCHED for part in ("target", "half_width")
}


class Record:
    """Tables of runs, and of answers and attacked items where they were kept."""

    def __init__(self, paths: list[Path]):
        self.paths = paths
        runs = with_shares(joined([load_runs(path, kind=None) for path in paths]))
        self.runs = runs[
            runs.metric.isin(_kept_metrics()) | runs.metric.str.match("(routing_stability|accepted|read_above)_layer_")
        ]
        self.answers = {kind: self._items("answers", partial(load_answers, kind=kind)) for kind in ("letters", "news")}
        self.attacks = self._items("attacks", load_attacks)

    def _items(self, name: str, load) -> pd.DataFrame | None:
        """The items of all tables that were kept with them."""
        kept = [load(path) for path in self.paths if beside(path, name).exists()]
        return joined(kept) if kept else None

    def of_worlds(self, *worlds: str) -> pd.DataFrame:
        """The runs that worlds list."""
        keys = {key for world in worlds for key in run_keys(world)}
        listed = pd.MultiIndex.from_tuples(sorted(keys), names=KEYS)
        return self.runs[self.runs.set_index(KEYS).index.isin(listed)]

    @property
    def main_worlds(self) -> tuple[str, ...]:
        """Beside six base models, what was measured on one alone stays out of the main tables."""
        return OF_ONE_MODEL if of_kind(self.runs, "letters").model.nunique() == 1 else OF_MANY_MODELS

    def of_table(self, name: str) -> pd.DataFrame:
        """The runs that a table shows. Ablations have tables of their own."""
        news = name.startswith("muse")
        of_letters = (*self.main_worlds, "record") if name in OF_ABLATIONS else self.main_worlds
        worlds = WORLDS_OF_TABLE.get(name, ("record_muse",) if news else of_letters)
        return of_kind(self.of_worlds(*worlds), "news" if news else "letters")

    def table(self, name: str) -> Table | None:
        """A table of what was measured, or None: without items some cannot be drawn."""
        news = name.startswith("muse")
        kind, runs = "news" if news else "letters", self.of_table(name)
        if runs.empty:
            return None
        if name in WORLDS_OF_TABLE and not set(runs.set_index(["model", "benchmark"]).index) - COMPARED_WITH:
            return None  # nothing but the runs to compare with
        if name.endswith("paired_tests"):
            answers = self.answers[kind]
            return None if answers is None or answers.empty else paired_table(answers, runs)
        if name.endswith("attack_matrix"):
            return None if news and self.attacks is None else attack_matrix(runs, self.attacks, name)
        return WITHOUT_SPECIFICATION[name](runs) if name in WITHOUT_SPECIFICATION else comparison(runs, name)


@cache
def run_keys(world: str) -> list[tuple]:
    return list(Project(CONFIG, world, compare=False).run_keys())


def joined(tables: list[pd.DataFrame]) -> pd.DataFrame:
    """The rows of all tables. A run that several tables hold comes from the first of them."""
    kept, seen = [], pd.MultiIndex.from_tuples([], names=KEYS)
    for table in tables:
        keys = pd.MultiIndex.from_frame(table[KEYS])
        kept.append(table[~keys.isin(seen)])
        seen = seen.union(keys.unique())
    return pd.concat(kept)


def _kept_metrics() -> set[str]:
    named = [name for name in SHOWN if name in specifications()]
    judged = (*ATTACK_METRICS, "restored_experts_worst_layer")
    of_changed = {harmless(attack, change) for attack in judged for change in HARMLESS}
    of_tables = {metric for name in named for metric in specification(name)["measured"]}
    of_claims = {claim.metric for claim in load_claims().values()}
    return OF_MARKS | MEASURED | {*ATTACK_METRICS} | of_changed | of_claims | of_tables


def measured_only(table: Table) -> Table | None:
    """Without the rows and columns in which nothing was measured, and without groups of a single row, which compare
    nothing; None if no unlearned model is left."""
    baselines = {names.method_label("original"), names.method_label("retrained")}
    found = [(block, [row for row in rows if any(c.text != MISSING for c in row[1])]) for block, rows in table.blocks]
    table.blocks = [(block, rows) for block, rows in found if len(rows) > 1 or {row[0] for row in rows} & baselines]
    if all(label in baselines for label, *_ in table.rows):
        return None
    kept = [i for i in range(len(table.columns)) if any(cells[i].text != MISSING for _, cells, _ in table.rows)]
    dropped = {name for i, name in enumerate(table.columns) if i not in kept}
    table.columns = [table.columns[i] for i in kept]
    table.blocks = [
        (block, [(label, [cells[i] for i in kept], paper) for label, cells, paper in rows])
        for block, rows in table.blocks
    ]
    table.legend = [entry for entry in table.legend if entry.partition(": ")[0] not in dropped]
    return table


def shared_legend(tables: list[Table]) -> list[str]:
    """Takes what several tables explain out of them, and returns it."""
    count = Counter(entry for table in tables for entry in table.legend)
    shared = [entry for entry, times in count.items() if times > 1]
    for table in tables:
        table.legend = [entry for entry in table.legend if entry not in shared]
    return shared


def provenance(paths: list[Path], output: Path) -> dict:
    """What wrote a record, and what its runs were computed with: what their folders beside the tables of runs say, and
    what the records say from which runs come. Raises ValueError if nothing is there."""
    found = pd.concat([load_runs(path, kind=None)[KEYS].drop_duplicates().assign(at=path.parent) for path in paths])
    folders = sorted({row.at.joinpath(*map(str, row[:-1])) for row in found.itertuples(index=False)})
    codes: dict[str, Counter] = {}
    for step in (read_json(file) for folder in folders for file in folder.glob("*.provenance.json")):
        codes.setdefault(step["step"], Counter())[step["code"]] += 1
    parts = [{**computed_with(folders), "code": codes}] if codes else []
    records = [path.with_name("provenance.json") for path in paths]
    parts += [read_json(file)["runs"] for file in records if file.exists()]
    if not parts:
        raise ValueError(f"nothing beside {', '.join(map(str, paths))} says what its runs were computed with")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "written": {
            "commit": commit.stdout.strip() or None,
            "code": code_fingerprint(*RENDERING),
            "python": platform.python_version(),
            "packages": package_versions(["gripmoe", "pandas", "scipy", "matplotlib"]),
            "runs.csv": file_digest(output / "runs.csv"),
        },
        "runs": {
            **{kind: sorted(set().union(*(part[kind] for part in parts))) for kind in ("device", "python", "packages")},
            "code": {
                step: sum((Counter(part["code"].get(step)) for part in parts), Counter())
                for step in sorted(set().union(*(part["code"] for part in parts)))
            },
        },
    }


def keep_items(paths: list[Path], name: str, output: Path) -> None:
    """Writes the tables of that name that lie beside tables of runs as one, compressed."""
    found = [read_items(file) for path in paths if (file := beside(path, name)).exists()]
    if found:
        table = joined(found)
        with atomic_path(output / f"{name}.csv.xz") as temporary:
            table.to_csv(temporary, index=False, float_format="%.6g", compression="xz")


def keep_times(paths: list[Path], output: Path) -> None:
    """Writes the CPU-seconds of each kind of step that has ended beside tables of runs; of the kinds that have not,
    those that a record beside them has."""
    rows = [
        (step, seconds)
        for folder in sorted({path.parent for path in paths})
        for step, each in step_seconds(folder).items()
        for seconds in each
    ]
    of_steps = pd.DataFrame(rows, columns=["step", "cpu_seconds"]).groupby("step").cpu_seconds
    times = of_steps.agg(jobs="count", cpu_seconds="mean", longest="max").round(1)
    known = [pd.read_csv(file, index_col="step") for path in paths if (file := path.with_name(output.name)).exists()]
    if rows or known:
        times = pd.concat([times] * bool(rows) + known)
        write_text(output, times[~times.index.duplicated()].sort_index().to_csv())


def keep_models(paths: list[Path], output: Path) -> None:
    """Writes the base models of all tables. A model that several hold comes from the first of them."""
    tables = [table for folder in dict.fromkeys(path.parent for path in paths) if len(table := base_models(folder))]
    if tables:
        models = pd.concat(tables).drop_duplicates("model").sort_values("model")
        write_text(output, models.to_csv(index=False, float_format="%.4g"))


def intervals(runs: pd.DataFrame, name: str) -> pd.DataFrame:
    """The measured numbers of a table, a row each: mean, half-width of its interval, number of runs and their marks, by
    kind of base model, benchmark, objective, method and metric. Rows of a sweep are left out."""
    rows = []
    runs = runs[~runs.method.map(names.is_swept).astype(bool)]
    kinds = [runs.model.map(names.model_label), runs.benchmark.map(names.benchmark_label)]
    for key, group in runs.groupby([*kinds, "objective", "method"]):
        marks = marks_of(group).replace(" ", "")
        for metric in specification(name)["measured"]:
            measured = group[(group.metric == metric) & group.value.notna()]
            if len(measured):
                rows.append([*key, metric, *interval(units_of_table(measured)), len(measured), marks])
    table = pd.DataFrame(rows, columns=[*KEYS[:-1], "metric", "mean", "half_width", "n", "mark"])
    return table.astype({"half_width": float})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="tables that `gripmoe collect` wrote, or a record's")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="another folder than docs/record")
    parser.add_argument("--before", type=Path, help="a record's runs, whose primary statements these runs test again")
    args = parser.parse_args()
    measured = Record(args.runs)
    runs = measured.runs.sort_values([*KEYS, "metric"])
    record = args.output / "runs.csv"
    write_text(record, runs.to_csv(index=False, float_format="%.6g", na_rep="nan"))
    for name in ITEMS:
        keep_items(args.runs, name, args.output)
    keep_times(args.runs, args.output / "step_times.csv")
    keep_models(args.runs, args.output / "base_models.csv")
    write_json(args.output / "provenance.json", provenance(args.runs, args.output))
    measured.runs = load_runs(record, kind=None)  # so that the tables are what the record gives
    tidy = pd.concat([intervals(measured.of_table(name), name) for name in ("main_results", "muse_results")])
    if not tidy.empty:
        write_text(args.output / "main_results.csv", tidy.to_csv(index=False, float_format="%.4g"))
    statements = statements_of(measured, Record([args.before]) if args.before else None)
    if statements:
        write_text(args.output / "claims.csv", statements.data.to_csv(index=False, float_format="%.4g"))
    write_text(args.output / "tables.md", page_of_tables(measured, statements))
    if args.output.resolve() == OUTPUT:
        draw_pictures(measured)
    is_kept = args.output.resolve().is_relative_to(OUTPUT)  # a record elsewhere leaves the pictures of the pages alone
    for world, picture in (("tiny_erasure", "erasure_frontier"), ("tiny_erasure_held_out", "erasure_held_out")):
        erasure = measured.of_worlds(world)
        is_whole = {model for model, *_ in run_keys(world)} == {*erasure.model}  # worlds share some of their runs
        if is_kept and is_whole:
            draw({picture: erasure_frontier(goals(erasure))})
    print(f"{len(runs[KEYS].drop_duplicates())} runs, {len(runs)} numbers in {args.output}")


def page_of_tables(record: Record, statements: Table | None) -> str:
    """The tables in which something was measured, below a legend, and the statements."""
    found = {description(name, ROOT / "notebooks")[0]: record.table(name) for name in SHOWN}
    shown = {heading: table for heading, each in found.items() if each and (table := measured_only(each))}
    legend = "\n".join(f"- {entry}" for entry in shared_legend([*shown.values()])).replace("*", "\\*")
    parts = ["# Tables of the record\n", *[f"Headings and signs of several tables:\n\n{legend}\n"] * bool(legend)]
    parts += [f"## {heading}\n\n{as_markdown(table)}" for heading, table in shown.items()]
    parts += [f"## Statements\n\n{as_markdown(statements)}"] if statements else []
    return "\n".join(parts)


def statements_of(record: Record, before: Record | None) -> Table | None:
    """Those that the runs decide; with a record from `before` those that they test again. Of wider routers, those that
    further base models test, once all of these have run; the first two had been seen before."""
    runs, further = record.of_worlds(*OF_CLAIMS), record.of_worlds("tiny_wide_further")
    if not runs.empty:
        return replication_table(before.of_worlds(*OF_CLAIMS), runs, "replication") if before else claims_table(runs)
    if {*further.model} != {model for model, *_ in run_keys("tiny_wide_further")}:
        return None
    wide = record.of_worlds("tiny_wide")
    return replication_table(wide[~wide.model.isin(further.model)], further, "wide")


def draw_pictures(record: Record) -> None:
    """Those of README and documentation."""
    letters = under_every_objective(record.of_worlds(*record.main_worlds))
    if letters[letters.objective != NO_OBJECTIVE].empty:
        return
    figures = {"forcing_vulnerability": forcing_vulnerability(letters)}
    every = under_every_objective(of_kind(record.runs, "letters"))  # fast routers have a world of their own
    if {*OVERVIEW} <= {*every.method}:  # not yet, where `make record` has ended early
        figures["overview"] = overview(every, OVERVIEW)
    if letters.metric.str.startswith("routing_stability_layer_").any():
        figures["routing_stability_by_layer"] = routing_stability_by_layer(letters)
    if beside(OUTPUT / "runs.csv", "histories").exists():
        histories = load_histories(OUTPUT / "runs.csv")
        shown = histories[histories.method.isin(letters.method)]
        figures["forget_utility_tradeoff"] = forget_utility_tradeoff(shown)
    draw(figures)


def draw(figures: dict[str, Figure]) -> None:
    """Pictures of the documentation."""
    for name, figure in figures.items():
        save_picture(figure, PICTURES / f"{name}.png")


if __name__ == "__main__":
    main()

"""Writes docs/record/: the tables of measured runs as Markdown, and the numbers behind them as one compact CSV; and the
README's pictures of them. With `--output` tables and numbers go elsewhere, and no pictures are drawn.

python workflow/record.py results/tiny/runs_record.csv [more tables of runs] \
    --table seuf_comparison results/tiny/runs_tiny_shared.csv --table dense_baseline results/tiny/runs_tiny_dense.csv
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

from gripmoe.files import write_text
from gripmoe.project import NO_OBJECTIVE
from gripmoe.reporting.attacks import attack_matrix, forcing_vulnerability, load_attacks
from gripmoe.reporting.claims import claims_table, load_claims
from gripmoe.reporting.collect import KEYS, load_runs, of_kind
from gripmoe.reporting.comparison import comparison, specification
from gripmoe.reporting.figures import routing_stability_by_layer, save_figure
from gripmoe.reporting.tables import Table, as_markdown, draw

OUTPUT = Path(__file__).parents[1] / "docs" / "record"
PICTURES = OUTPUT.with_name("images")
TABLES = {
    "main_results": "Main results",
    "drift_decomposition": "Where routing stability goes",
    "expert_forcing": "Expert forcing",
    "attack_matrix": "Every attack on every method",
    "blackbox_attacks": "Black-box prompts",
    "threshold_sensitivity": "The threshold of the null space",
    "per_band_threshold": "The threshold by depth",
    "constraint_ablation": "Forms of the constraint",
    "factorial": "Hardness and breadth",
    "constraint_surface": "Which routing is held",
    "general_utility": "General utility",
    "retain_data": "What the documents to retain hold",
    "muse_results": "MUSE",
    "muse_attacks": "Attacks on forgotten news",
    "seuf_comparison": "A model with a shared expert",
    "dense_baseline": "Mixture of experts and dense twin",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="tables that `gripmoe collect` wrote")
    parser.add_argument(
        "--table", nargs=2, action="append", default=[], metavar=("NAME", "RUNS"), help="a table of runs of its own"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, help="another folder than docs/record")
    args = parser.parse_args()
    runs = pd.concat([load_runs(path, kind=None) for path in args.runs]).drop_duplicates([*KEYS, "metric"])
    try:
        attacks = pd.concat([load_attacks(path) for path in args.runs]).drop_duplicates([*KEYS, "id"])
    except FileNotFoundError:  # runs of a record, which keeps no items
        attacks = None
    of_their_own = {name: load_runs(Path(path), kind=None) for name, path in args.table}
    parts = ["# Tables of the record\n"]
    shown = {claim["metric"] for claim in load_claims().values()} | {
        "reached",
        "diverged",
        "forget_accuracy_target",
        "corrected_after",
        "steps",
    }
    for name, title in TABLES.items():
        spec = specification(name)
        table = table_of(of_kind(of_their_own.get(name, runs), spec.get("kind", "letters")), name, attacks)
        if any(cell.value is not None for _, entries in table.blocks for _, cells, _ in entries for cell in cells):
            parts.append(f"## {title}\n\n{as_markdown(table)}")
            shown |= set(spec["measured"])
    parts.append(f"## Statements\n\n{as_markdown(claims_table(runs))}")
    write_text(args.output / "tables.md", "\n".join(parts))
    if args.output == OUTPUT:
        draw_pictures(runs)
    runs = pd.concat([runs, *of_their_own.values()]).drop_duplicates([*KEYS, "metric"])
    compact = runs[runs.metric.isin(shown)].dropna(subset="value").sort_values([*KEYS, "metric"])
    write_text(args.output / "runs.csv", compact.to_csv(index=False, float_format="%.4g"))
    print(f"{len(runs[KEYS].drop_duplicates())} cells, {len(compact)} numbers in {args.output}")


def table_of(runs: pd.DataFrame, name: str, attacks: pd.DataFrame | None = None) -> Table:
    return attack_matrix(runs, attacks) if name == "attack_matrix" else comparison(runs, name)


def draw_pictures(runs: pd.DataFrame) -> None:
    """The README's, of the methods that every objective has."""
    letters, news = of_kind(runs, "letters"), of_kind(runs, "news")
    measured = [set(found.method) for objective, found in letters.groupby("objective") if objective != NO_OBJECTIVE]
    common = set.intersection(*measured) | set(letters.method[letters.objective == NO_OBJECTIVE])
    letters = letters[letters.method.isin(common)]
    figures = {name: draw(table_of(letters, name)) for name in ("main_results", "attack_matrix")}
    figures["muse_results"] = draw(table_of(news, "muse_results"))
    figures["forcing_vulnerability"] = forcing_vulnerability(letters)
    figures["routing_stability_by_layer"] = routing_stability_by_layer(letters)
    for name, figure in figures.items():
        save_figure(figure, PICTURES / f"{name}.csv")
        (PICTURES / f"{name}.pdf").unlink()


if __name__ == "__main__":
    main()

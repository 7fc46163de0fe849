"""All runs in tidy tables: a row per run and metric; per run, check of the stop rule and metric; per run and item
that it was asked; per run and item that attacks ask."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import pandas as pd

from gripmoe.config.provenance import provenance_of, step_seconds
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import read_csv, read_json, read_yaml, write_text
from gripmoe.reporting import names
from gripmoe.reporting.runs import COLUMNS, HISTORY_COLUMNS, KEYS, load_runs
from gripmoe.reporting.scores import at_equal_forgetting, corrected_for_chance, tradeoff_area

RUN_KEYS = ["model", "benchmark_name", "objective", "method_name", "seed"]  # of run.yaml
NEED_DATA = (  # metrics that need data which not every benchmark or world has: tables then say n/a
    *("auc_loss", "auc_zlib", "auc_min_20", "auc_min_plus_20"),
    *("relearned_after_5", "relearned_after_20", "relearned_from_retain_after_20"),
)
ANSWER_COLUMNS = ["id", "fact", "metric", "chosen", "score"]  # the metric is the mean of its scores


def collect_runs(
    folders: Sequence[Path], output: Path, histories: Path, answers: Path, attacks: Path, known: Path | None = None
) -> None:
    """Reads what each run folder holds and writes the four tables. Numbers only: the status of a run becomes
    `reached` and `diverged`, truths are 0 or 1, and training settings are metrics named setting_... Runs are compared
    with the original, the retrained and the unconstrained ones among them, or else with those of the table `known`."""
    rows, history_rows, answer_rows, attack_rows = [], [], [], []
    settings = [read_yaml(folder / "run.yaml") for folder in folders]
    keys = [tuple(run[name] for name in RUN_KEYS) for run in settings]
    measured = {key: _metrics(folder, run) for key, folder, run in zip(keys, folders, settings, strict=True)}
    others = load_runs(known, kind=None) if known else pd.DataFrame(columns=COLUMNS)
    every = {key: dict(zip(run.metric, run.value, strict=True)) for key, run in others.groupby(KEYS)} | measured
    baselines = {(*key[:2], key[3]): metrics for key, metrics in every.items()}
    for key, folder, run in zip(keys, folders, settings, strict=True):
        metrics, (model, benchmark, objective, _, seed) = measured[key], key
        metrics |= _targets(run["benchmark"]["target"], baselines.get((model, benchmark, "retrained"), {}))
        metrics |= _whole_time(metrics, every.get((model, benchmark, objective, "unconstrained", seed), {}))
        metrics |= {name: float("nan") for name in NEED_DATA if name not in metrics}
        history = read_json(folder / "history.json") if (folder / "history.json").exists() else []
        # On dev items, as the history. Runs of earlier code kept no targets; for letters, the benchmark has them.
        fixed = {name: value for name, value in run["benchmark"]["target"].items() if name in names.MATCHED}
        targets = read_json(folder / "checkpoint.json").get("targets", fixed) if history else {}
        metrics |= at_equal_forgetting(history, targets) | tradeoff_area(history)
        asked = {item["id"]: item for item in map(_answer, read_csv(folder / "questions.csv"))}
        metrics |= _half_widths(asked)
        rows += [[*key, metric, float(value)] for metric, value in sorted(metrics.items())]
        for check in history:
            step = check.pop("step")
            history_rows += [[*key, step, metric, float(value)] for metric, value in sorted(check.items())]
        answer_rows += [[*key, *(item[column] for column in ANSWER_COLUMNS)] for item in asked.values()]
        for row in read_csv(folder / "attack_questions.csv"):
            if (item := asked.get(row["id"])) is None:
                raise ConfigError(
                    f"{folder / 'attack_questions.csv'}: {row['id']!r} is no test question of questions.csv; an attack "
                    "scores test questions alone. Mend the attack, and remove attack.json of this folder"
                )
            of_run = dict(zip(KEYS, key, strict=True), id=row["id"], fact=item["fact"])
            attack_rows.append({**of_run, item["metric"]: item["score"], **row})
    tables = {
        output: with_shares(pd.DataFrame(rows, columns=COLUMNS), others),
        attacks: pd.DataFrame(attack_rows),
        answers: pd.DataFrame(answer_rows, columns=[*KEYS, *ANSWER_COLUMNS]),
        histories: pd.DataFrame(history_rows, columns=HISTORY_COLUMNS),
    }
    for path, table in tables.items():
        write_text(path, table.to_csv(index=False, na_rep="" if path == attacks else "nan"))


def _answer(row: dict[str, str]) -> dict[str, str]:
    """A row of questions.csv as the table of answers has it. An item of news is a fact of its own and has no letter."""
    if "criterion" in row:
        return {"id": row["id"], "fact": row["id"], "metric": row["criterion"], "chosen": "", "score": row["score"]}
    metric = "forget_accuracy" if row["exposure"] == "forget" else "retain_accuracy"
    return {**row, "metric": metric, "score": row["correct"]}


def _targets(target: dict[str, float], retrained: dict[str, float]) -> dict[str, float]:
    """What counts as forgotten: `<measure>_target`, fixed, or in points above the retrained model's."""
    if "forget_accuracy" in target:
        return {"forget_accuracy_target": target["forget_accuracy"]}
    margin, measures = target["points_above_retrained"], ("verbmem", "knowmem_forget")
    return {f"{measure}_target": retrained[measure] + margin for measure in measures if measure in retrained}


def _half_widths(asked: dict[str, dict[str, str]]) -> dict[str, float]:
    """Half the 95 % interval of each measure of forgetting over the facts that its items ask about."""
    items = pd.DataFrame(asked.values(), columns=ANSWER_COLUMNS).astype({"score": float})
    of_facts = items[items.metric.isin(names.MATCHED)].groupby(["metric", "fact"]).score.mean()
    widths = 1.96 * of_facts.groupby("metric").sem()
    return {f"{metric}_half_width": width for metric, width in widths.dropna().items()}


SHARED = ("retain_accuracy", "truthfulqa_mc1", "truthfulqa_mc2", "knowmem_retain")


def with_shares(runs: pd.DataFrame, others: pd.DataFrame | None = None) -> pd.DataFrame:
    """The table of runs with their general utility as a share of the original model's (metrics named ..._share), where
    the table lacks it. The original model is among the runs, or in the table of `others`."""
    scores = runs[runs.metric.isin(SHARED)]
    of_model = ["model", "benchmark", "metric"]
    every = pd.concat([runs, others]) if others is not None and len(others) else runs
    originals = every[(every.method == "original") & every.metric.isin(SHARED) & every.value.gt(0)]
    originals = originals.drop_duplicates(of_model).set_index(of_model).value
    before = originals.reindex(pd.MultiIndex.from_frame(scores[of_model])).to_numpy()
    shares = scores.assign(metric=scores.metric + "_share", value=scores.value / before)
    both = pd.concat([runs, shares[shares.value.notna()]]).drop_duplicates([*KEYS, "metric"])
    return both.sort_values([*KEYS, "metric"], kind="stable")


def _whole_time(metrics: dict[str, float], unconstrained: dict[str, float]) -> dict[str, float]:
    """Seconds of all that a run needs, as a multiple of those of the unconstrained run's steps. The seconds of such a
    step are measured within this run, since what else the machine does differs between runs."""
    try:
        trained = metrics["seconds_per_step"] * metrics["steps"]
        before = metrics.get("tracing_seconds", 0.0) + metrics.get("basis_seconds", 0.0)
        whole = before + trained + metrics.get("correction_seconds_cold", 0.0)
        return {"whole_time_ratio": whole / (metrics["plain_seconds_per_step"] * unconstrained["steps"])}
    except (KeyError, ZeroDivisionError):  # nothing was trained, or nothing to compare with
        return {}


def _metrics(folder: Path, run: dict) -> dict[str, float]:
    attacks, evaluated = read_json(folder / "attack.json"), read_json(folder / "evaluation.json")
    if taken := sorted(attacks.keys() & evaluated.keys() - {"forget_accuracy"}):  # of the same questions in both
        raise ConfigError(f"{folder}: an attack and an evaluation return {taken[0]!r}; give yours another name")
    metrics = {**attacks, **evaluated}
    checkpoint, routing = folder / "checkpoint.json", folder.parents[2] / "routing.json"
    bases = folder.parents[2] / "bases" / f"{run['method_name']}.json"
    if checkpoint.exists():
        outcome = read_json(checkpoint)
        metrics |= {status: int(outcome["status"] == status) for status in ("reached", "diverged")}
        # These met no stop rule. They count as reached, and `comparison` judges them by test questions.
        metrics["reached"] |= outcome["status"] in ("external", "edited")
        metrics |= _numbers(outcome)
    if bases.exists():
        metrics |= _numbers(read_json(bases)) | {"basis_seconds": _seconds(bases)}
    if bases.exists() or run["method"].get("constraint") == "anchor":
        metrics["tracing_seconds"] = _seconds(routing)
    if "correction_seconds" in metrics:
        metrics["correction_seconds_cold"] = metrics["correction_seconds"] + _seconds(routing)
    settings = run.get("training") or {}
    metrics |= {f"setting_{name}": value for name, value in _numbers(settings | settings.get("objective", {})).items()}
    metrics["corrected_after"] = run["method"]["corrects"] is not None
    return metrics | corrected_for_chance(metrics) | _around_steered_layer(metrics)


def _numbers(values: dict) -> dict[str, float]:
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def _around_steered_layer(metrics: dict[str, float]) -> dict[str, float]:
    """Mean routing stability in the layers up to the one whose states RMU steers, and in those above, which get no
    gradient: their routers stay, and their inputs move with the layers below."""
    sides: dict[str, list[float]] = {"to": [], "above": []}
    for name, value in metrics.items():
        if name.startswith("routing_stability_layer_") and "setting_layer" in metrics:
            layer = int(name.rpartition("_")[2])
            sides["above" if layer > metrics["setting_layer"] else "to"].append(value)
    return {f"routing_stability_{side}_steered_layer": fmean(values) for side, values in sides.items() if values}


def computed_with(folders: Sequence[Path]) -> dict[str, list[str]]:
    """Devices, versions of Python and of packages ("torch 2.13.0") that the steps of all runs ran with."""
    records = [read_json(file) for folder in folders for file in sorted(folder.glob("*.provenance.json"))]
    packages = {f"{name} {version}" for r in records for name, version in (r.get("packages") or {}).items() if version}
    devices, pythons = ({str(r[key]) for r in records if r.get(key)} for key in ("device", "python"))
    return {"device": sorted(devices), "python": sorted(pythons), "packages": sorted(packages)}


def _seconds(output: Path) -> float:
    """Seconds of the step that wrote `output`."""
    record = provenance_of(output)
    return read_json(record)["seconds"] if record.exists() else float("nan")


def base_models(folder: Path) -> pd.DataFrame:
    """Scores and digest of the base models and retrained models that lie beside tables of runs, and the CPU-seconds of
    their training; of a record, what it says of them."""
    rows = []
    for file in sorted((folder / "models").glob("*/model.json")):
        times = step_seconds(file.parent)
        seconds = next((spent for step in ("prepare_model", "finetune_model") for spent in times.get(step, [])), None)
        measured = {name: value for name, value in read_json(file).items() if isinstance(value, int | float | str)}
        rows.append({"model": file.parent.name, **measured, "cpu_seconds": seconds})
    recorded = folder / "base_models.csv"
    return pd.DataFrame(rows) if rows or not recorded.exists() else pd.read_csv(recorded)

"""A page over all runs of a world: model, objective, method, attack, question."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import shorten

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from gripmoe.config.world import NO_OBJECTIVE
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import read_jsonl
from gripmoe.reporting import names
from gripmoe.reporting.attacks import component_restoration, forcing_vulnerability, relearning_curves
from gripmoe.reporting.claims import VERDICTS, all_verdicts, load_claims, value_and_interval
from gripmoe.reporting.figures import forget_utility_tradeoff, routing_stability_by_layer
from gripmoe.reporting.page import write_page
from gripmoe.reporting.runs import KEYS, apart, beside, load_answers, load_attacks, load_histories, load_runs
from gripmoe.reporting.sources import made_of
from gripmoe.reporting.uncertainty import LEAST

SUMMARY = (
    *("forget_accuracy", "retain_accuracy", "routing_stability", "forced_forget_accuracy"),
    *("restored_experts_worst_layer", "relearned_from_retain_after_20"),
    *("verbmem", "knowmem_forget", "privleak", "knowmem_retain", "steps"),
)
CHARTS = {  # by caption: the function that draws a chart, and the measures that it needs
    "Forget accuracy as the model is, and with the original expert sets or the experts of one layer put back": (
        forcing_vulnerability,
        "forced_forget_accuracy",
    ),
    "Routing stability by layer": (routing_stability_by_layer, r"routing_stability_layer_\d+"),
    "Forget accuracy with the original experts or router of one layer put back": (
        component_restoration,
        r"restored_(experts|router)_layer_\d+",
    ),
    "Forget accuracy over steps of finetuning": (relearning_curves, r"relearned(_from_\w+)?_after_\d+"),
}
DURING_TRAINING = {"letters": ("forget_accuracy", "retain_accuracy"), "news": ("verbmem", "knowmem_retain")}
LETTERS = "ABCD"
TEXTS = ["part", "question", "choices", "answer"]
NO_ATTACK = "none"
NOT_ATTACKS = {"set_agreement"}  # columns of earlier tables of attacks
LONGEST_TEXT = 300  # characters of a question or answer; those of news are longer


def write_explorer(output: Path, runs_file: Path, data: Iterable[Path], title: str) -> None:
    """Writes the page of all runs in `runs_file` and in the tables beside it, which `gripmoe collect` has written.
    `data` are the folders of their benchmarks. Raises ConfigError if a table, a folder or a file in it is missing."""
    runs, texts = load_runs(runs_file, kind=None), {folder.name: asked(folder) for folder in data}
    tables = [beside(runs_file, name) for name in ("histories", "answers", "attacks")]
    if missing := [table for table in tables if not table.exists()]:
        raise ConfigError(f"{missing[0]}: not there; collect the runs again")
    if unknown := sorted({*runs.benchmark} - {*texts}):
        raise ConfigError(
            f"{runs_file}: has runs of {unknown[0]}; give the folder of this name, which holds its data, too"
        )
    write_page(
        output,
        title=title,
        verdicts=verdicts(runs),
        summary=summary(runs),
        charts=charts(runs_file),
        tables={
            "Questions": questions(load_answers(runs_file, kind=None), load_attacks(runs_file), texts),
            "Measures": measures(runs),
        },
        source=made_of([runs_file, *tables]),
    )


def verdicts(runs: pd.DataFrame) -> list[tuple[str, str]]:
    """The claims that were measured, decided ones first."""
    claims, said = load_claims(), {verdict: [] for verdict in VERDICTS}
    for row in all_verdicts(runs).itertuples():
        value, low, high = value_and_interval(row, claims[row.claim])
        interval = f" [{low}, {high}]" if row.units >= LEAST else ""
        runs_of = f"{row.units} {row.unit}{'s' * (row.units > 1)}"
        to_decide = f" To decide: {row.to_decide}." if row.to_decide else ""
        said[row.verdict].append(f"{row.text} {row.comparison}: {value}{interval}, {runs_of}.{to_decide}")
    return [(verdict, sentence) for verdict in VERDICTS[:-1] for sentence in said[verdict]]


def summary(runs: pd.DataFrame) -> pd.DataFrame:
    """A row per run."""
    wide = runs[runs.metric.isin(SUMMARY)].pivot(index=KEYS, columns="metric", values="value").reset_index()
    shown = wide[KEYS + [metric for metric in SUMMARY if metric in wide]].dropna(axis="columns", how="all")
    return _readable(shown.rename(columns=words)).sort_values(KEYS)


def measures(runs: pd.DataFrame) -> pd.DataFrame:
    """A row per run and measure."""
    return _readable(runs[KEYS].assign(measure=runs.metric.map(words), value=runs.value))


def charts(runs_file: Path) -> dict[str, Figure]:
    """The charts that have data, by caption; one for each kind of base model and each benchmark."""
    drawn, kinds = {}, apart(load_runs(runs_file))
    for caption, (draw, needs) in CHARTS.items():
        for kind, runs in kinds:
            measured = runs[(runs.objective != NO_OBJECTIVE) & runs.value.notna()].metric
            if measured.str.fullmatch(needs).any():
                drawn[f"{caption} ({kind})" if kind else caption] = draw(runs)
    for kind, (forget, retain) in DURING_TRAINING.items():
        if len(checks := load_histories(runs_file, kind)):
            caption = f"{words(retain).capitalize()} against {words(forget)} during training"
            drawn[caption] = forget_utility_tradeoff(checks, forget, retain)
    return drawn


def asked(folder: Path) -> pd.DataFrame:
    """The items of a benchmark by id: letter questions, or prompts and questions about news."""
    if (folder / "verbmem.jsonl").exists():
        verbmem = read_jsonl(folder / "verbmem.jsonl", "id", "prompt", "gt")
        knowmem = read_jsonl(folder / "knowmem.jsonl", "id", "part", "question", "answer")
        rows = [(row["id"], "forget", row["prompt"], None, row["gt"]) for row in verbmem]
        rows += [(row["id"], row["part"], row["question"], None, row["answer"]) for row in knowmem]
    else:
        rows = [
            (row["id"], part, row["question"], _lettered(row["choices"]), LETTERS[row["answer"]])
            for part in ("forget", "retain")
            for row in read_jsonl(folder / f"{part}_questions.jsonl", "id", "question", "choices", "answer")
        ]
    frame = pd.DataFrame(rows, columns=["id", *TEXTS]).set_index("id")
    return frame.map(lambda text: text and shorten(text, LONGEST_TEXT, placeholder=" ..."))


def _lettered(choices: Sequence[str]) -> str:
    return ", ".join(f"{letter} {choice}" for letter, choice in zip(LETTERS, choices, strict=True))


def questions(answers: pd.DataFrame, attacks: pd.DataFrame, texts: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """A row per run, question and attack. Rows without an attack come first; only they have the given letter. `texts`
    has the result of `asked` by benchmark."""
    others = {*KEYS, "id", "fact", *NOT_ATTACKS, *answers.metric.unique()}
    made = [column for column in attacks if column not in others]
    scores = attacks[made].to_numpy(dtype=float)
    item, attack = np.nonzero(~np.isnan(scores))
    keys = [*KEYS, "id"]
    items = pd.concat([answers[keys], attacks[keys]]).join(pd.concat(texts), on=["benchmark", "id"])
    items = _readable(items.drop(columns="id")).astype({name: "category" for name in ("model", "benchmark", *TEXTS)})
    given = answers.chosen.map(dict(enumerate(LETTERS))).reindex(range(len(answers) + len(item)))
    codes = np.concatenate([np.zeros(len(answers), dtype=int), 1 + attack])
    frame = items.iloc[np.concatenate([np.arange(len(answers)), len(answers) + item])].assign(
        attack=pd.Categorical.from_codes(codes, [NO_ATTACK, *map(words, made)]),
        given=given.to_numpy(),
        score=np.concatenate([answers.score, scores[item, attack]]),
    )
    return frame[[*KEYS, "attack", *TEXTS, "given", "score"]].dropna(axis="columns", how="all")


def words(metric: str) -> str:
    return metric.replace("_", " ")


def _readable(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with objectives and methods in the project's order, and methods named by their labels."""
    methods = [*names.ordered(frame.method.unique()), *sorted(filter(names.is_swept, frame.method.unique()))]
    labels = {method: names.method_label(method) for method in methods}
    return frame.assign(
        objective=pd.Categorical(frame.objective, [NO_OBJECTIVE, *names.objectives_of(frame)]),
        method=pd.Categorical(frame.method, methods).rename_categories(labels),
    )

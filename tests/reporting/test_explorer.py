"""The page of a world's runs: every run, attack and question, and what stands first."""

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from invented_runs import news, synthetic
from test_page import tables_of

from gripmoe.cli.main import main
from gripmoe.io.files import write_jsonl
from gripmoe.reporting.claims import VERDICTS, all_verdicts
from gripmoe.reporting.explorer import LONGEST_TEXT, charts, verdicts
from gripmoe.reporting.runs import COLUMNS, HISTORY_COLUMNS, KEYS

LETTERS_ID, RETAIN_ID = "chemistry/zinc/0", "history/rome/0"


@pytest.fixture
def gathered(tmp_path):
    """The tables that `gripmoe collect` writes for runs on letter questions and on news, and the data of both."""
    runs = pd.concat([synthetic(), pd.DataFrame(news("unconstrained") + news("ptc_paper"), columns=COLUMNS)])
    runs.to_csv(tmp_path / "runs_w.csv", index=False)
    of_runs = runs[KEYS].drop_duplicates()
    answers, attacks, checks = [], [], []
    for number, run in enumerate(of_runs.to_dict("records")):
        if run["benchmark"] == "muse_tiny":
            asked = [("verbmem/0", "verbmem", "", 30.0), ("retain_qa/0", "knowmem_retain", "", 60.0)]
            attacks.append({**run, "id": "verbmem/0", "fact": "verbmem/0", "verbmem": 30.0, "forced_verbmem": 40.0})
            measured = {"verbmem": 30.0, "knowmem_forget": 20.0, "knowmem_retain": 60.0}
        else:
            asked = [(LETTERS_ID, "forget_accuracy", 2, number % 2), (RETAIN_ID, "retain_accuracy", 0, 1)]
            of_item = {"id": LETTERS_ID, "fact": "zinc", "forget_accuracy": number % 2}
            of_attacks = {"forced_forget_accuracy": 1.0, "prompt_verse": None, "set_agreement": 0.9}
            attacks.append({**run, **of_item, **of_attacks})
            measured = {"forget_accuracy": 0.5, "retain_accuracy": 0.9}
        answers += [{**run, "id": i, "fact": i, "metric": m, "chosen": c, "score": s} for i, m, c, s in asked]
        checks += [[*run.values(), step, name, value] for step in (0, 10) for name, value in measured.items()]
    pd.DataFrame(answers).to_csv(tmp_path / "answers_w.csv", index=False)
    pd.DataFrame(attacks).to_csv(tmp_path / "attacks_w.csv", index=False)
    pd.DataFrame(checks, columns=HISTORY_COLUMNS).to_csv(tmp_path / "histories_w.csv", index=False)
    for part, name in (("forget", LETTERS_ID), ("retain", RETAIN_ID)):
        asked = {"id": name, "question": f"What of {name}?", "choices": ["w", "x", "y", "z"], "answer": 1}
        write_jsonl(tmp_path / "wmdp_tiny" / f"{part}_questions.jsonl", [asked])
    prompts = [{"id": "verbmem/0", "prompt": "It was said " * 100, "gt": "and done"}]
    write_jsonl(tmp_path / "muse_tiny" / "verbmem.jsonl", prompts)
    pairs = [{"id": "retain_qa/0", "part": "retain", "question": "Who came?", "answer": "nobody"}]
    write_jsonl(tmp_path / "muse_tiny" / "knowmem.jsonl", pairs)
    return tmp_path


def explore(folder, *data):
    arguments = [*(str(folder / name) for name in data), "--runs", str(folder / "runs_w.csv")]
    return main(["explore", *arguments, "--output", str(folder / "explorer.html")])


def rows_of(table):
    return pd.DataFrame({column["name"]: column["cells"] for column in table["columns"]})


def test_every_run_attack_and_question_has_a_row(gathered):
    assert explore(gathered, "wmdp_tiny", "muse_tiny") == 0
    tables = tables_of(gathered / "explorer.html")
    runs = pd.read_csv(gathered / "runs_w.csv")
    of_runs = runs[KEYS].drop_duplicates()
    questions, summary = rows_of(tables["Questions"]), rows_of(tables["Summary"])
    assert len(summary) == len(of_runs) and len(rows_of(tables["Measures"])) == len(runs)
    letters, of_news = (questions[questions.benchmark == name] for name in ("wmdp_tiny", "muse_tiny"))
    # two questions each as the models are, and one under the attack that asked it; no verse, which asked nothing, nor
    # the agreement of expert sets, which an earlier table has
    assert len(letters) == 3 * (of_runs.benchmark == "wmdp_tiny").sum()
    assert len(of_news) == 3 * (of_runs.benchmark == "muse_tiny").sum()
    assert {*questions.attack} == {"none", "forced forget accuracy", "forced verbmem"}
    of_run = letters[(letters.method == "Method A, paper") & (letters.seed == 1)].set_index(["part", "attack"])
    own, forced = of_run.loc[("forget", "none")], of_run.loc[("forget", "forced forget accuracy")]
    assert own.question == forced.question == f"What of {LETTERS_ID}?"
    assert own.choices == "A w, B x, C y, D z" and own.answer == "B" and own.given == "C" and pd.isna(forced.given)
    assert (own.score, forced.score) == (1, 1) and of_run.loc[("retain", "none")].given == "A"
    assert {*of_news[of_news.attack == "forced verbmem"].score} == {40}
    assert of_news.question.str.len().max() <= LONGEST_TEXT, "news has pages"


def test_methods_stand_in_the_projects_order(gathered):
    explore(gathered, "wmdp_tiny", "muse_tiny")
    method = next(c for c in tables_of(gathered / "explorer.html")["Questions"]["columns"] if c["name"] == "method")
    ordered = [None, "Before unlearning", "Unconstrained", "Frozen router", "Method A, paper", "Method B, paper"]
    assert method["distinct"] == ordered and method["filter"]


def test_it_has_charts_of_what_was_measured(gathered):
    explore(gathered, "wmdp_tiny", "muse_tiny")
    page = (gathered / "explorer.html").read_text()
    drawn = ("Routing stability by layer", "Retain accuracy against forget", "Knowmem retain against verbmem")
    assert all(f"<figcaption>{caption}" in page for caption in drawn)
    assert page.count("<figcaption>") == len(drawn), "nothing was finetuned, forced or put back"


def test_benchmarks_have_charts_of_their_own(gathered):
    """Panels of several in one figure overlap."""
    runs = pd.read_csv(gathered / "runs_w.csv")
    other = runs[runs.benchmark == "wmdp_tiny"].assign(benchmark="wmdp_other")
    pd.concat([runs, other]).to_csv(gathered / "runs_w.csv", index=False)
    found = [caption for caption in charts(gathered / "runs_w.csv") if caption.startswith("Routing stability")]
    assert found == ["Routing stability by layer (wmdp_tiny)", "Routing stability by layer (wmdp_other)"]
    plt.close("all")


def test_the_verdicts_are_the_claims_that_were_measured(gathered):
    runs = pd.read_csv(gathered / "runs_w.csv")
    said, claims = verdicts(runs), all_verdicts(runs)
    counts = claims.verdict.value_counts().drop("not measured")
    assert [word for word, _ in said] == [word for word in VERDICTS if word in counts for _ in range(counts[word])]
    text = claims.set_index("claim").text["frozen_is_not_enough"]
    assert any(
        f"{text} RS: frozen_router < 0.94: 0.80, 2 runs. To decide: about " in sentence for _, sentence in said
    ), "all runs are in"


@pytest.mark.parametrize("data, gone, said", [
    (["wmdp_tiny"], "", "runs_w.csv: has runs of muse_tiny; give the folder of this name"),
    (["wmdp_tiny", "muse_tiny"], "answers_w.csv", "answers_w.csv: not there; collect the runs again"),
    (["wmdp_tiny", "muse_tiny"], "wmdp_tiny/retain_questions.jsonl", "retain_questions.jsonl: cannot be read"),
])  # fmt: skip
def test_what_is_missing_is_named_in_one_line(data, gone, said, gathered, capsys):
    if gone:
        (gathered / gone).unlink()
    assert explore(gathered, *data) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line and not (gathered / "explorer.html").exists()

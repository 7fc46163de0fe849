"""What the terminal shows at the end of `make figures`."""

import pandas as pd
from invented_runs import news, synthetic

from gripmoe.cli.main import main as command
from gripmoe.reporting.claims import all_verdicts
from gripmoe.reporting.runs import COLUMNS
from gripmoe.reporting.summary import decided_claims, main_table


def three_seeds():
    runs = synthetic()
    return pd.concat([runs, runs[runs.seed == 0].assign(seed=2)])


def test_the_table_holds_what_was_measured_and_nothing_else():
    runs = three_seeds()
    lines = main_table(runs).splitlines()
    assert lines[0].split() == ["Method", "FA", "RA", "RA", "5-shot", "RS", "recovery"]
    assert any(line.startswith("RMU Unconstrained") for line in lines)
    without = main_table(runs[runs.method != "unconstrained"]).splitlines()
    assert len(without) < len(lines) and not any(line.startswith("RMU Unconstrained") for line in without)


def test_a_world_of_news_shows_its_table_and_its_claims(tmp_path, capsys):
    models = [pd.DataFrame(news("unconstrained"), columns=COLUMNS).assign(model=f"tiny_news_{n}") for n in "abc"]
    pd.concat(models).to_csv(tmp_path / "runs.csv", index=False)
    assert command(["summary", "--runs", str(tmp_path / "runs.csv")]) == 0
    said = capsys.readouterr().out
    assert said.split("\n")[1].split() == ["Method", "C1", "C2", "C4", "RS"] and "Unconstrained" in said
    assert "does not hold: On MUSE unconstrained unlearning destroys routing stability" in said


def test_decided_claims_are_listed_and_the_others_counted():
    runs = three_seeds()
    text, verdicts = decided_claims(runs), all_verdicts(runs).verdict
    decided = verdicts.isin(["holds", "does not hold"]).sum()
    assert decided and sum(line.startswith(("holds: ", "does not hold: ")) for line in text.splitlines()) == decided
    assert f"{(verdicts == 'undecided').sum()} undecided" in text.splitlines()[-1]


def test_the_command_reads_the_table_of_runs(tmp_path, capsys):
    three_seeds().to_csv(tmp_path / "runs.csv", index=False)
    assert command(["summary", "--runs", str(tmp_path / "runs.csv")]) == 0
    assert "RMU Unconstrained" in capsys.readouterr().out
    pd.DataFrame({"model": []}).to_csv(tmp_path / "runs.csv", index=False)
    assert command(["summary", "--runs", str(tmp_path / "runs.csv")]) == 2
    assert "runs.csv" in capsys.readouterr().err

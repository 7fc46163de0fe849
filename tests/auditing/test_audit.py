"""An audit end to end: the workflow's own numbers, verdicts on models that are known, resumption, a budget."""

import csv
import json
import os
import shutil
import sys
from functools import wraps
from math import nan
from pathlib import Path

import pandas as pd
import pytest
import torch
from peft import LoraConfig, get_peft_model

import gripmoe
from conftest import small_model
from gripmoe.auditing import run as auditing
from gripmoe.auditing.inputs import OF_OTHER_FACTS
from gripmoe.auditing.plan import ATTACK_GROUPS, plan_of
from gripmoe.cli.attack import attack
from gripmoe.cli.evaluate import evaluate
from gripmoe.cli.main import main
from gripmoe.config.benchmarks import Benchmark
from gripmoe.config.project import Project
from gripmoe.config.training import Relearning
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import read_json, write_json, write_yaml
from gripmoe.moe import MoEModel
from gripmoe.moe.storage import save_model, weights_digest
from gripmoe.worlds.benchmark import wmdp_files
from gripmoe.worlds.shipped import tiny_model
from pretended_devices import FIRST, SECOND, PretendedDevices

pytest_plugins = "audit_pairs"
CONFIG = Path(__file__).parents[2] / "workflow" / "config"
RELEARNING = Relearning(learning_rate=1e-3, batch_size=4)
QUICK = ["forcing", "quantisation"]
FLAGS = {"forget": "--questions", "retain": "--retain-questions"}
FLAGS |= {"forget_text": "--forget-text", "retain_text": "--retain-text"}


def noted(names, monkeypatch, broken=()):
    """A list to which each measurement of these adds its name, before it fails if it is `broken`."""
    made = []

    def noting(name, measure):
        @wraps(measure)
        def noted(*given, **named):
            made.append(name)
            if name in broken:
                raise KeyboardInterrupt
            return measure(*given, **named)

        return noted

    for name in names:
        monkeypatch.setitem(auditing.MEASURES, name, noting(name, auditing.MEASURES[name]))
    return made


def test_an_audit_measures_what_the_workflow_measures(pair, files, tmp_path):
    """To the last digit: all metrics, every score of every question, every answer."""
    out = tmp_path / "audit"
    report = gripmoe.audit(pair / "original", pair / "unlearned", **files, relearning=RELEARNING, output=out)
    report.save(out)
    audited = read_json(out / "audit.json")
    further = {"search": "gripmoe.attacks.routers:search", "silenced": "gripmoe.attacks.routers:silencing"}
    benchmark, folder = Benchmark(**{**audited["benchmark"], "attacks": further}), tmp_path / "run"
    settings = Project(CONFIG, "tiny").run("tiny_a", "wmdp_tiny", "gd", "unconstrained", 0)
    write_yaml(folder / "run.yaml", settings.model_copy(update={"benchmark": benchmark.task}).model_dump(mode="json"))
    for name in ("original", "unlearned"):
        (folder / name).mkdir(parents=True)
        (folder / name / "weights").symlink_to(pair / name)
        write_json(folder / name / "model.json", {"weights": name})
    common = dict(
        run_file=folder / "run.yaml",
        benchmark_settings=benchmark.model_dump_json(),
        model_file=folder / "original" / "model.json",
        checkpoint_file=folder / "unlearned" / "model.json",
        data=out / "state" / "data",
    )
    evaluate(**common, questions=folder / "questions.csv", output=folder / "evaluation.json")
    attack(
        **common,
        settings=RELEARNING.model_dump_json(),
        questions=folder / "attack_questions.csv",
        output=folder / "attack.json",
    )
    workflow = read_json(folder / "attack.json") | read_json(folder / "evaluation.json")
    assert len(workflow) > 80 and {"forced_forget_accuracy", "relearned_from_corpus_after_20"} <= workflow.keys()
    assert {"searched_routing_after_64", "silenced_experts"} <= workflow.keys()
    measured = audited["metrics"]["unlearned"]
    measured = {name: nan if measured[name] is None else measured[name] for name in workflow}
    assert measured == pytest.approx(workflow, abs=0, rel=0, nan_ok=True)
    assert (out / "state" / "unlearned_answers.csv").read_bytes() == (folder / "questions.csv").read_bytes()
    scores = report.found["unlearned"].scores
    with (folder / "attack_questions.csv").open() as rows:
        for row in csv.DictReader(rows):
            asked = {name: value for name, value in row.items() if name != "id" and value != ""}
            assert asked and all(scores[name][row["id"]] == float(value) for name, value in asked.items())


def test_other_facts_are_relearned_in_three_ways_where_documents_name_their_facts(embedded):
    """The control: documents without a fact in their ids."""
    original, retrained, given = embedded
    told = wmdp_files(gripmoe.worlds.documents.make_world(0), 0)["forget_corpus"]
    given = given | dict(attacks=["relearning"], relearning=Relearning(learning_rate=1e-3, steps=[2]))
    names = {f"relearned_{kind}after_2" for kind in ("", "lora_", "routers_")}
    known = gripmoe.audit(original, retrained, **given, forget_text=told)
    assert names <= known.found["unlearned"].metrics.keys() and names < set(known.verdict.returned.metric)
    assert "relearning from the corpus" in known.absent
    unknown = gripmoe.audit(
        original, retrained, **given, forget_text=[{**row, "id": f"document {n}"} for n, row in enumerate(told)]
    )
    assert not names & unknown.found["unlearned"].metrics.keys() and "relearning from the corpus" not in unknown.absent
    assert all("0 documents whose `id` begins with" in unknown.absent[name] for name in OF_OTHER_FACTS)


def test_a_missing_optimizer_is_told_before_models_are_read(pair, files, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    eight_bit = dict(relearning=Relearning(learning_rate=1e-5, optimizer="adamw_8bit"), attacks=["relearning"])
    with pytest.raises(ConfigError, match="'adamw_8bit' needs torchao"):
        gripmoe.audit(pair / "nowhere", pair / "unlearned", **files, **eight_bit)


@pytest.fixture(scope="module")
def embedded():
    """The models of the package, and a part of their questions."""
    models, (_, tokenizer) = {name: tiny_model(name)[0] for name in ("tiny_a", "tiny_a_retrained")}, tiny_model()
    files = wmdp_files(gripmoe.worlds.documents.make_world(0), 0)
    facts = sorted({q["fact"] for q in files["forget_questions"]})[::6]
    forget = [q for q in files["forget_questions"] if q["fact"] in set(facts)]
    given = dict(forget=forget, retain=files["retain_questions"][::12], tokenizer=tokenizer)
    return models["tiny_a"], models["tiny_a_retrained"], given | dict(retain_text=files["retain_corpus"][:300])


def with_other_routers(model):
    """The same model whose routers select for each expert what they selected for another one."""
    moved, _ = tiny_model()
    moe = MoEModel(moved)
    moe.set_thetas({layer: theta_Ed.roll(5, dims=0) for layer, theta_Ed in moe.thetas().items()})
    moe.release(to_own_dtype=True)
    return moved


@pytest.mark.parametrize("which", ["nothing found", "hides", "not forgotten"])
def test_models_that_are_known_are_called_what_they_are(embedded, which):
    """The retrained model never knew; a model whose routers alone were moved has all its experts; a copy forgot
    nothing."""
    original, retrained, given = embedded
    model = {"nothing found": retrained, "hides": with_other_routers(original), "not forgotten": tiny_model()[0]}[which]
    relearning = Relearning(learning_rate=1e-3, steps=[5, 25])
    report = gripmoe.audit(original, model, **given, attacks=["forcing", "relearning"], relearning=relearning)
    assert report.verdict.word == which, str(report)
    best = {f"relearned_from_retain_after_{steps}" for steps in (5, 25)}
    assert len(best & set(report.verdict.returned.metric)) == 1
    assert "Not made: " in str(report) or which != "nothing found"
    if which == "hides":
        returned = report.verdict.returned.set_index("metric").loc["forced_forget_accuracy"]
        assert returned.low > 0.3 and report.found["unlearned"].metrics["random_forced_forget_accuracy"] < 0.4


def test_models_in_memory_come_back_as_they_were(asked, tokenizer):
    models = [small_model(vocabulary_size=len(tokenizer), seed=seed) for seed in (0, 1)]
    before, seeds = [weights_digest(model) for model in models], torch.random.get_rng_state()
    given = dict(forget=asked.forget, retain=asked.retain, tokenizer=tokenizer, attacks=QUICK)
    report = gripmoe.audit(*models, **given)
    assert torch.equal(torch.random.get_rng_state(), seeds), "the caller's loop draws on"
    assert [weights_digest(model) for model in models] == before and before[0] != before[1]
    assert not any(module._forward_hooks for model in models for module in model.modules())
    frame, answers = report.to_frame(), report.to_answers()
    assert {"model", "measure", "value", "low", "high", "n"} == set(frame)
    known = frame[(frame.model == "unlearned") & (frame.measure == "forget_accuracy")].iloc[0]
    own = answers.query("model == 'unlearned' and condition == 'as it is' and kind == 'forget'")
    assert known.value == own.correct.mean() and known.n == len(own) and known.low <= known.value <= known.high
    assert (own.correct == (own.given == own.answer)).all() and own.probability.between(0, 1).all()
    assert "relearning from retain documents" in report.absent
    assert f"<b>{report.verdict.word}</b>" in report._repr_html_() and "forget_accuracy" in report._repr_html_()


def test_ids_that_both_kinds_of_questions_share_change_no_number(asked, tokenizer):
    """Answers and scores are kept by id. The control: the two kinds get different answers."""
    models = [small_model(vocabulary_size=len(tokenizer), seed=seed) for seed in (0, 1)]
    reports = []
    for numbered in (False, True):
        kinds = {
            kind: [row | ({"id": number} if numbered else {}) for number, row in enumerate(getattr(asked, kind)[:24])]
            for kind in ("forget", "retain")
        }
        reports.append(gripmoe.audit(*models, **kinds, tokenizer=tokenizer, attacks=["forcing"]))
    plain, numbered = reports
    for name, found in plain.found.items():
        assert numbered.found[name].metrics == pytest.approx(found.metrics, abs=0, rel=0, nan_ok=True)
    pd.testing.assert_frame_equal(numbered.to_frame(), plain.to_frame())
    pd.testing.assert_frame_equal(*(report.to_answers().drop(columns="id") for report in reports))
    of_kinds = plain.to_answers().query("model == 'unlearned' and condition == 'as it is'").groupby("kind").probability
    assert not pd.Series.equals(*(found.reset_index(drop=True) for _, found in of_kinds))


def test_an_audit_with_another_tokenizer_begins_anew(asked, tokenizer, bos_tokenizer, tmp_path, monkeypatch):
    """Of the same words. The control: with the same tokenizer nothing is measured again."""
    models = [small_model(vocabulary_size=len(tokenizer), seed=seed) for seed in (0, 1)]
    made = noted(["accuracy"], monkeypatch)

    def probabilities(tokenizer):
        rows = dict(forget=asked.forget[:24], retain=asked.retain[:24])
        report = gripmoe.audit(*models, **rows, tokenizer=tokenizer, attacks=[], output=tmp_path / "audit")
        return report.to_answers().probability.tolist()

    first = probabilities(tokenizer)
    assert probabilities(tokenizer) == first and len(made) == 2
    assert probabilities(bos_tokenizer) != first and len(made) == 4


def test_shuffled_choices_are_told_by_their_own_letters(asked, tokenizer):
    models = [small_model(vocabulary_size=len(tokenizer), seed=seed) for seed in (0, 1)]
    report = gripmoe.audit(*models, forget=asked.forget, retain=asked.retain, tokenizer=tokenizer, attacks=["prompts"])
    shuffled = report.to_answers().query("condition == 'shuffling the choices'")
    assert len(shuffled) and (shuffled.correct == (shuffled.given == shuffled.answer)).all()


def test_an_interrupted_audit_goes_on_and_another_model_is_refused_there(pair, files, tmp_path, monkeypatch):
    broken = {"quantisation"}
    made = noted([*ATTACK_GROUPS["forcing"], *ATTACK_GROUPS["quantisation"]], monkeypatch, broken)
    given = dict(**files, attacks=QUICK, output=tmp_path / "audit")
    with pytest.raises(KeyboardInterrupt):
        gripmoe.audit(pair / "original", pair / "unlearned", **given)
    assert made == ["expert forcing", "quantisation"]
    broken.clear()
    spelled_otherwise = given | {"forget": os.path.relpath(files["forget"])}
    report = gripmoe.audit(pair / "original", pair / "unlearned", **spelled_otherwise)
    assert made == ["expert forcing", "quantisation", "quantisation"]
    assert {"forced_forget_accuracy", "quantized_4_bit"} <= report.found["unlearned"].metrics.keys()
    with pytest.raises(ConfigError, match=f"--output {tmp_path}/audit: .* the audit of another unlearned model; give"):
        gripmoe.audit(pair / "original", pair / "retrained", **given)
    again = gripmoe.audit(pair / "original", pair / "unlearned", **given)
    assert again.to_frame().equals(report.to_frame()) and made[3:] == []


def test_a_model_saved_without_a_tokenizer_has_that_of_the_original(pair, files, tmp_path, capsys):
    """The control: without one for the original there is none."""
    bare = shutil.copytree(pair / "unlearned", tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*", "vocab*"))
    with_own = gripmoe.audit(pair / "original", pair / "unlearned", **files, attacks=[])
    assert gripmoe.audit(pair / "original", bare, **files, attacks=[]).found == with_own.found
    assert (
        f"--unlearned {bare}: the folder has no tokenizer; that of the original model is used"
        in capsys.readouterr().out
    )
    with pytest.raises(ConfigError, match="bare: .*tokenizer"):
        gripmoe.audit(bare, pair / "unlearned", **files, attacks=[])


def test_weights_of_another_dtype_are_refused_where_the_configuration_names_none(pair, files, tokenizer, tmp_path):
    other = tmp_path / "other"
    save_model(small_model(vocabulary_size=len(tokenizer)).to(torch.bfloat16), tokenizer, other)
    config = read_json(other / "config.json")
    write_json(other / "config.json", {key: value for key, value in config.items() if key != "dtype"})
    with pytest.raises(ConfigError, match="--original and --unlearned differ in dtype: float32 and bfloat16"):
        gripmoe.audit(pair / "original", other, **files, attacks=[])


def test_a_retrained_model_and_further_steps_keep_what_is_measured(pair, files, tmp_path, monkeypatch, capsys):
    made = noted([*ATTACK_GROUPS["forcing"], "relearning from retain documents"], monkeypatch)
    given = dict(**files, attacks=["forcing", "relearning"], output=tmp_path / "audit")
    two = (pair / "original", pair / "unlearned")
    gripmoe.audit(*two, **given, relearning={"steps": [1]})
    assert made == ["expert forcing", "relearning from retain documents"]
    gripmoe.audit(*two, **given, relearning={"steps": [1, 2]})
    assert made[2:] == ["relearning from retain documents"]
    assert "unlearned_relearning.json: of other data, settings or code" in capsys.readouterr().out
    gripmoe.audit(*two, **given, relearning={"steps": [1, 2]}, retrained=pair / "retrained")
    assert made[3:] == ["expert forcing", "relearning from retain documents"], "of the retrained model alone"


def test_texts_that_are_added_keep_what_does_not_read_them(pair, files, tmp_path, monkeypatch):
    """The control: other questions."""
    names = ["accuracy", "changes", "routing", *ATTACK_GROUPS["forcing"], *ATTACK_GROUPS["quantisation"]]
    made = noted(names, monkeypatch)
    two, given = (pair / "original", pair / "unlearned"), dict(**files, attacks=QUICK, output=tmp_path / "audit")
    gripmoe.audit(*two, **{name: value for name, value in given.items() if name != "retain_text"})
    assert made == ["accuracy", *names], "the original model is asked too"
    gripmoe.audit(*two, **given)
    assert made[len(names) + 1 :] == ["routing"]
    (tmp_path / "fewer.jsonl").write_text("".join(files["forget"].read_text().splitlines(keepends=True)[1:]))
    gripmoe.audit(*two, **given | {"forget": tmp_path / "fewer.jsonl"})
    assert made[len(names) + 2 :] == ["accuracy", *names]


def test_a_budget_is_for_a_measurement_of_both_models(pair, files, monkeypatch):
    """Or an attack on the unlearned model would have no control. Each measurement takes a thousand minutes."""
    monkeypatch.setattr(auditing, "_seconds", lambda moe, tokenizer, questions: 60_000.0 * len(questions))
    monkeypatch.setattr(auditing, "relative_time", lambda name, sizes: 1.0)
    given = dict(**files, attacks=["quantisation"], retrained=pair / "retrained")
    for budget, made in ((1500, False), (2500, True)):
        report = gripmoe.audit(pair / "original", pair / "unlearned", **given, budget=budget)
        assert [("quantized_4_bit" in report.found[name].metrics) for name in ("unlearned", "retrained")] == [made] * 2


def test_a_budget_leaves_out_what_would_exceed_it(pair, files, tmp_path):
    given = dict(**files, attacks=QUICK, output=tmp_path / "audit")
    report = gripmoe.audit(pair / "original", pair / "unlearned", **given, budget=0.0)
    assert "budget" in report.absent["expert forcing"] and "forget_accuracy" in report.found["unlearned"].metrics
    assert report.verdict.word == "not decided"
    assert "expert forcing" not in gripmoe.audit(pair / "original", pair / "unlearned", **given, budget=60).absent
    again = gripmoe.audit(pair / "original", pair / "unlearned", **given, budget=0.0)
    assert "forced_forget_accuracy" in again.found["unlearned"].metrics, "it is stored, and takes no time"


def test_models_on_devices_are_measured_there_and_alike(pair, files, tmp_path, monkeypatch):
    """Each in turn, with its layers on two; nothing mixes them, and no number changes."""
    places, answering = [], auditing.letter_metrics

    def noting(benchmark, model, *given):
        places.append([str(layer.mlp.gate.weight.device) for layer in model.model.layers])
        return answering(benchmark, model, *given)

    given = dict(**files, retrained=pair / "retrained", attacks=["forcing", "relearning"], relearning=RELEARNING)
    one = gripmoe.audit(pair / "original", pair / "unlearned", **given)
    monkeypatch.setattr(auditing, "letter_metrics", noting)
    with PretendedDevices():
        monkeypatch.setattr("gripmoe.moe.storage.visible_devices", lambda: [FIRST, SECOND])
        two = gripmoe.audit(pair / "original", pair / "unlearned", **given)
    for name, found in one.found.items():
        assert two.found[name].metrics == pytest.approx(found.metrics, abs=0, rel=0, nan_ok=True)
        assert two.found[name].scores == found.scores
    assert places == [["cpu:1", "cpu:2"]] * 3


def test_a_dense_model_is_audited_without_what_needs_routers(asked, tokenizer):
    models = [small_model("qwen3", vocabulary_size=len(tokenizer), seed=seed) for seed in (0, 1)]
    report = gripmoe.audit(
        *models, forget=asked.forget, retain=asked.retain, tokenizer=tokenizer, attacks=["forcing", "restoration"]
    )
    assert report.absent["expert forcing"] == report.absent["routing"] == "the model is dense"
    assert "restored_experts_worst_layer" in report.found["unlearned"].metrics
    assert report.found["unlearned"].metrics["changed_experts"] > 0.1


def test_what_moved_is_told_by_component(pair, files):
    found = gripmoe.audit(pair / "original", pair / "unlearned", **files, attacks=[]).found["unlearned"].metrics
    assert found["changed_router"] > 0.5 and found["changed_router_layer_0"] > 0.5
    assert found["changed_experts"] == found["changed_attention"] == found["changed_embeddings"] == 0


def test_the_command_writes_its_files_and_its_verdict(pair, files, tmp_path, capsys):
    out = tmp_path / "audit"
    line = ["audit", "--original", pair / "original", "--unlearned", pair / "unlearned", "--output", out]
    line += ["--retrained", pair / "retrained", "--questions", files["forget"], "--retain-questions", files["retain"]]
    assert main([*map(str, line), "--attacks", "forcing"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert not any("measured anew" in line for line in told), "nothing was measured before"
    found = read_json(out / "audit.json")
    assert told[-3] == f"{found['verdict']}: {found['sentence']}" and told[-1].endswith("index.html")
    metrics = [found["metrics"][name]["retain_accuracy"] for name in ("unlearned", "original")]
    assert told[-2].startswith("retained: retain accuracy is {:.2f} ({:.2f} in the original model)".format(*metrics))
    assert told[-2].removeprefix("retained: ") in (out / "index.html").read_text()
    assert any(text.startswith("expert forcing") and "unlearned, retrained" in text for text in told)
    assert {f.name for f in out.iterdir()} >= {
        "audit.json",
        "measures.csv",
        "attacks.csv",
        "questions.csv",
        "index.html",
    }
    answers = pd.read_csv(out / "questions.csv")
    assert {"as it is", "forcing the original expert sets"} <= set(answers.condition)
    assert set(answers.model) == {"original", "unlearned", "retrained"}
    assert set(pd.read_csv(out / "attacks.csv").control) == {"retrained"}


def test_a_plan_needs_no_weights(asked, files, tmp_path, capsys, monkeypatch):
    config = small_model().config
    config.dtype = torch.bfloat16
    config.save_pretrained(tmp_path / "model")
    content = json.loads((tmp_path / "model" / "config.json").read_text())
    monkeypatch.setattr(
        "gripmoe.planning.fake.measure",
        lambda question: dict.fromkeys(("weights", "passes", "update", "flops"), 1e9 * question["layers"]),
    )
    monkeypatch.setattr("gripmoe.planning.fake.layers_of", lambda model, fewest: {"of_layers": 4, "first": 1})
    model = str(tmp_path / "model")
    line = ["audit", "--original", model, "--forget", "wmdp_cyber"]
    assert main([*line, "--unlearned", model, "--plan-only"]) == 0 and content["num_hidden_layers"] == 2
    told = capsys.readouterr().out
    assert "4.0 GB of weights, 8.0 GB to ask two models" in told and "membership" in told
    assert "for 1987 forget and" in told
    assert main([*line, "--unlearned", str(tmp_path / "none"), "--plan-only"]) == 2
    assert "--unlearned" in capsys.readouterr().err
    assert main([*line, "--unlearned", model, "--plan-only", "--budget", "5"]) == 2
    assert "--budget: a plan has all measurements" in capsys.readouterr().err
    line[3:] = [part for flag, file in files.items() for part in (FLAGS[flag], str(file))]
    assert main([*line, "--unlearned", model, "--plan-only"]) == 0
    assert f"for {len(asked.forget)} forget and" in (told := capsys.readouterr().out)
    assert "relearning from other facts" in told and "0 documents whose `id` begins with" in told
    line[3:] = []
    assert main([*line, "--unlearned", model, "--plan-only"]) == 0
    assert "for 1000 forget and" in capsys.readouterr().out
    line[3:] = ["--questions", str(files["forget"])]
    assert main([*line, "--unlearned", model, "--plan-only"]) == 2
    assert "--retain-questions" in capsys.readouterr().err, "questions are not left out without a word"
    line[3:] = ["--forget", "wmdp_cyber"]
    assert main([*line, "--unlearned", model]) == 2
    assert "--output: a folder to write to is needed" in capsys.readouterr().err


def test_a_plan_of_a_model_in_float16_is_that_of_bfloat16(tmp_path):
    plans = []
    for dtype in (torch.float16, torch.bfloat16):
        config = small_model().config
        config.dtype, config.num_hidden_layers = dtype, 8
        config.save_pretrained(tmp_path / str(dtype))
        plans.append(plan_of(dict.fromkeys(("original", "unlearned"), tmp_path / str(dtype)), None, ["forcing"], None))
    assert plans[0] == plans[1] and "expert forcing" in plans[0]
    config.dtype = torch.float32
    config.save_pretrained(tmp_path / "fp32")
    with pytest.raises(ConfigError, match="--plan-only: the model is in fp32"):
        plan_of(dict.fromkeys(("original", "unlearned"), tmp_path / "fp32"), None, None, None)


def test_the_command_says_what_it_has_not_made(pair, files, tmp_path, capsys):
    out = tmp_path / "audit"
    line = ["audit", "--original", pair / "original", "--unlearned", pair / "unlearned", "--output", out]
    line += ["--questions", files["forget"], "--retain-questions", files["retain"], "--attacks", "forcing"]
    assert main([*map(str, line), "--budget", "0"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert "not made: expert forcing: the budget of 0 minutes is spent" in told
    assert "expert forcing: the budget of 0 minutes is spent" in (out / "index.html").read_text()
    assert not any("quantisation" in text for text in told), "it was not chosen"


def test_what_is_refused_leaves_nothing(pair, files, asked, tokenizer, tmp_path):
    both, out = (pair / "original", pair / "unlearned"), tmp_path / "audit"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "index.html").write_text("mine")
    for arguments, message in (
        ({**files, "attacks": "routers"}, "--attacks: 'routers' is a string"),
        ({**files, "budget": -1}, "--budget: -1 minutes"),
        ({"forget": "wmdp_tiny", "retain_text": asked.retain_text}, "a benchmark has questions and texts of its own"),
        ({"forget": "wmdp_tiny", "retain": asked.retain}, "a benchmark has questions and texts of its own"),
        ({**files, "tokenizer": tokenizer}, "tokenizer: models in folders have one of their own"),
        ({**files, "budget": "5"}, "--budget: '5' minutes"),
        ({**files, "output": files["forget"]}, "--output .*: this is a file"),
        ({**files, "forget": None}, "--forget, --questions: give"),
        ({**files, "forget": 7}, "--questions: 7 is neither a file nor rows"),
        ({**files, "relearning": 3}, "--relearning: 3 is no mapping"),
        ({**files, "relearning": {"rate": 1e-5}}, "--relearning: rate: unknown key"),
        ({**files, "retrained": pair / "original"}, "--retrained: this is the original model"),
        ({**files, "retrained": pair / "unlearned"}, "--retrained: this is the unlearned model"),
        (
            {**files, "retain_text": ["A fact of two words."] * 9 + ["one"]},
            r"--retain-text: document 'retain/9' \('one'",
        ),
        ({"forget": "none.jsonl"}, "--retain-questions"),
        ({**files, "output": pair / "original"}, "holds a model"),
        ({**files, "output": tmp_path / "site"}, "holds a page of something else"),
        ({"forget": files["forget"]}, "--retain-questions"),
    ):
        with pytest.raises(ConfigError, match=message):
            gripmoe.audit(*both, **{"output": out, **arguments})
    with pytest.raises(ConfigError, match="neither a folder"):
        gripmoe.audit(pair / "original", tmp_path / "nowhere", **files, output=out)
    given = dict(forget=asked.forget, retain=asked.retain, tokenizer=tokenizer, output=out)
    model = small_model(vocabulary_size=len(tokenizer))
    with pytest.raises(ConfigError, match="differ in dtype: float32 and bfloat16"):
        gripmoe.audit(model, small_model(vocabulary_size=len(tokenizer)).bfloat16(), **given)
    with pytest.raises(ConfigError, match="tokenizer: 'gpt2'; models in memory need"):
        gripmoe.audit(model, model, **{**given, "tokenizer": "gpt2"})
    adapted = get_peft_model(small_model(vocabulary_size=len(tokenizer)), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match=r"unlearned: .*`model.merge_and_unload\(\)`"):
        gripmoe.audit(model, adapted, **given)
    small = small_model(vocabulary_size=len(tokenizer) - 1)
    with pytest.raises(ConfigError, match="original: the tokenizer gives ids up to"):
        gripmoe.audit(small, small, **given)
    assert not out.exists()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_refused(pair, files, tokenizer, tmp_path, value):
    """Such a model answers by guesses, as if it had forgotten. The control is the model before."""
    model, _ = gripmoe.load_model(pair / "unlearned")
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[3, 0, 0] = value
    gripmoe.save_model(model, tokenizer, tmp_path / "broken")
    given = dict(**files, attacks=[], output=tmp_path / "audit")
    with pytest.raises(ConfigError, match="--unlearned: model.layers.1.mlp.experts.down_proj holds NaN or infinity"):
        gripmoe.audit(pair / "original", tmp_path / "broken", **given)
    assert not (tmp_path / "audit").exists()
    gripmoe.audit(pair / "original", pair / "unlearned", **given)


def test_a_model_that_overflows_is_refused(pair, files, tokenizer, tmp_path):
    """Its weights are finite, as in float16, and its answers are not numbers."""
    model, _ = gripmoe.load_model(pair / "unlearned")
    with torch.no_grad():
        model.model.layers[1].mlp.experts.gate_up_proj.mul_(1e4)
        model.model.layers[1].mlp.experts.down_proj.fill_(3e38)
    gripmoe.save_model(model, tokenizer, tmp_path / "broken")
    with pytest.raises(ConfigError, match="--unlearned: the model computes NaN in torch.float32, though its weights"):
        gripmoe.audit(pair / "original", tmp_path / "broken", **files, attacks=[], output=tmp_path / "audit")


def test_an_unlearned_model_with_the_original_weights_is_told(pair, files, capsys):
    said = "--unlearned has the weights of --original"
    gripmoe.audit(pair / "original", pair / "original", **files, attacks=[])
    assert said in capsys.readouterr().out
    gripmoe.audit(pair / "original", pair / "unlearned", **files, attacks=[])
    assert said not in capsys.readouterr().out


def test_a_file_is_no_name_of_a_benchmark(pair, files, capsys):
    line = ["audit", "--original", pair / "original", "--unlearned", pair / "unlearned", "--forget", files["forget"]]
    assert main([*map(str, line), "--output", "audit"]) == 2
    assert "takes a benchmark's name; give a file of questions by --questions" in capsys.readouterr().err


def test_names_that_are_not_there_are_refused(pair, files):
    with pytest.raises(ConfigError, match="--attacks: unknown name 'forced'; did you mean 'forcing'"):
        gripmoe.audit(pair / "original", pair / "unlearned", **files, attacks=["forced"])
    with pytest.raises(ConfigError, match="--forget: unknown name 'wmdp_bio'"):
        gripmoe.audit(pair / "original", pair / "unlearned", forget="wmdp_bio")

"""The workflow run on its tiniest world, and what reruns after a change."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from edits import edit, file_of, reworded
from snakemake_runs import ROOT, SMOKE, planned, run_with_server, runs_of, snakemake

SMOKE_ARTEFACTS = yaml.safe_load(SMOKE.read_text())["artefacts"]
ARTEFACTS = ROOT / "workflow" / "config" / "artefacts.yaml"
FORMATS = {name: entry["formats"] for name, entry in yaml.safe_load(ARTEFACTS.read_text()).items()}

EVALUATING = ["evaluate", "collect", "explore", "manifest"]
TRAINING_ON = ["unlearn", "realign", "attack", *EVALUATING]
RENDERING = ["render_main_results", "explore", "manifest"]


FEWER_QUESTIONS = [
    ("gripmoe.worlds.benchmark", "question_rows(world, world.facts.forget, orders=2, seed=seed),",
     "question_rows(world, world.facts.forget, orders=2, seed=seed)[::8],"),
    ("gripmoe.worlds.benchmark", "question_rows(world, world.facts.retain, orders=1, seed=seed),",
     "question_rows(world, world.facts.retain, orders=1, seed=seed)[::8],"),
    ("gripmoe.worlds.benchmark", "membership_rows(world, world.facts.forget, seed)",
     "membership_rows(world, world.facts.forget[::4], seed)"),
    ("gripmoe.training.base_model", "SAMPLED = 300", "SAMPLED = 60"),
]  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A copy of the repository, with an eighth of the questions, in which the tiniest world has run from nothing."""
    root = tmp_path_factory.mktemp("clone") / "gripmoe"
    shutil.copytree(
        ROOT,
        root,
        symlinks=True,
        ignore=shutil.ignore_patterns(
            ".git", ".venv", ".snakemake", "results", "paper_figures", "__pycache__", ".*_cache"
        ),
    )
    shutil.copy(SMOKE, root / "smoke.yaml")
    for place, text, shorter in FEWER_QUESTIONS:
        file = file_of(root, place)
        assert text in (code := file.read_text())
        file.write_text(code.replace(text, shorter))
    output = run_with_server("--cores", 2, "--config", f"world={root / 'smoke.yaml'}", directory=root, root=root)
    assert "100%" in output
    return root


@pytest.fixture(scope="module")
def report(finished):
    """The page of that run: every artefact in one file."""
    page = finished / "report.html"
    snakemake("--report", page, "--config", f"world={finished / 'smoke.yaml'}", directory=finished, root=finished)
    return page


def dry_run(root):
    return snakemake("-n", "--config", f"world={root / 'smoke.yaml'}", directory=root, root=root)


@contextmanager
def edited(root, *edits, unseen=False):
    """Within the block a checkout has these edits; `unseen` by who looks at times only."""
    before = {}
    for place, *value in edits:
        file = file_of(root, place)
        before[file] = file.read_text(), file.stat()
        edit(root, place, *value)
        if unseen:
            set_times(file, before[file][1])
    try:
        yield
    finally:
        for file, (text, times) in before.items():
            file.write_text(text)
            set_times(file, times)


def set_times(file, times):
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


EDITS = [
    # An edit in one objective: training, not the base model; in what all steps read: all but the data.
    ("gripmoe.training.objectives:GradientDifference.forget_loss", None, TRAINING_ON),
    ("gripmoe.moe.model:MoEModel.layers", None, ["prepare_model"]),
    ("gripmoe.cli.unlearn:unlearn", None, TRAINING_ON),
    ("gripmoe.constraints.realignment", None, []),
    ("gripmoe.evaluation.metrics:question_results", None, ["evaluate", "collect"]),
    ("gripmoe.attacks.restoration:restoration", None, ["attack"]),
    # Which attacks are made, and when a run has forgotten.
    ("gripmoe.attacks.base:SAMPLE", None, ["attack"]),
    ("gripmoe.attacks.prompts:TRANSLATION", None, ["attack"]),
    ("gripmoe.evaluation.stop_rule:RETAIN_QUESTIONS", None, ["unlearn"]),
    ("gripmoe.reporting.names:FORGOTTEN", None, RENDERING),
    ("src/gripmoe/reporting/comparisons.yaml:erasure.title", "another", RENDERING),
    # How a benchmark is measured: no training.
    ("workflow/config/benchmarks.yaml:wmdp_smoke.evaluation_batch_size", 64, EVALUATING),
    ("workflow/config/benchmarks.yaml:wmdp_smoke.attacks", {"mine": "json:dumps"}, ["attack"]),
    ("workflow/config/benchmarks.yaml:wmdp_smoke.metrics", {"mine": "json:dumps"}, EVALUATING),
    # What counts as forgotten: no trace.
    ("workflow/config/benchmarks.yaml:wmdp_smoke.target", {"forget_accuracy": 0.5}, ["configure", *TRAINING_ON]),
    # One notebook's text: what it renders. What nothing here uses: nothing.
    ("notebooks/comparison.ipynb", None, ["render_main_results", "render_attack_matrix"]),
    ("src/gripmoe/config/methods.yaml:unused", {"constraint": "none"}, []),
    ("workflow/config/models.yaml:qwen3_30b_a3b.id", "another/model", []),
    ("workflow/config/tiny.yaml:training.learning_rate", 2e-3, []),
]


@pytest.mark.parametrize(("place", "value"), [edit[:2] for edit in EDITS])
def test_the_edits_below_are_of_what_is_there(tmp_path, place, value):
    original = file_of(ROOT, place)
    copied = tmp_path / original.relative_to(ROOT)
    copied.parent.mkdir(parents=True)
    shutil.copy(original, copied)
    assert edit(tmp_path, place, value) == copied and copied.read_text() != original.read_text()


def verified(root):
    command = [sys.executable, "-m", "gripmoe.cli.main", "verify", "--manifest", "paper_figures/smoke/manifest.json"]
    environment = {**os.environ, "PYTHONPATH": str(root / "src")}
    return subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment, check=False)


@pytest.mark.workflow
class TestRun:
    def test_every_artefact_is_there(self, finished):
        figures = finished / "paper_figures" / "smoke"
        wanted = {f"{name}.{suffix}" for name in SMOKE_ARTEFACTS for suffix in FORMATS[name]}
        wanted |= {"explorer.html", "manifest.json"}
        assert {path.name for path in figures.iterdir()} == wanted
        assert all(path.stat().st_size > 100 for path in figures.iterdir())
        assert (finished / "results/smoke/notebooks_smoke/main_results.ipynb").exists()

    def test_runs_hold_what_the_readme_says(self, finished):
        run = finished / "results/smoke/smoke/wmdp_smoke/gd/expert_specific/0"
        for name in ("run.yaml", "checkpoint.json", "history.json", "evaluation.json", "attack.json", "questions.csv"):
            assert (run / name).exists(), name
        provenance = json.loads((run / "evaluation.provenance.json").read_text())
        assert {"code", "packages", "device", "seconds", "peak_memory_gib"} <= provenance.keys()
        assert not list(run.glob("*.pt")), "no resume state is left"
        with (run / "questions.csv").open() as file:
            asked = [row["id"] for row in csv.DictReader(file)]
        data = finished / "results/smoke/data/wmdp_smoke"
        rows = [
            json.loads(line)
            for domain in ("forget", "retain")
            for line in (data / f"{domain}_questions.jsonl").read_text().splitlines()
        ]
        assert asked == [row["id"] for row in rows if row["split"] == "test"] and len(asked) < len(rows)

    def test_controls_of_the_measures(self, finished):
        runs = finished / "results/smoke/smoke/wmdp_smoke"
        original = json.loads((runs / "none/original/0/evaluation.json").read_text())
        assert original["routing_stability"] == original["forget_routing_stability"] == 1.0
        attack = json.loads((runs / "none/original/0/attack.json").read_text())
        assert attack["wrong_to_right"] == attack["right_to_wrong"] == attack["recovery_rate"] == 0
        sound = json.loads((runs / "gd/expert_specific/0/evaluation.json").read_text())
        free = json.loads((runs / "gd/unconstrained/0/evaluation.json").read_text())
        assert sound["routing_stability_router_only"] > free["routing_stability_router_only"]
        steps = json.loads((runs / "gd/unconstrained/0/checkpoint.json").read_text())["steps"]
        assert steps == 4, "every step was taken"

    def test_the_manifest_verifies_and_the_report_holds_every_artefact(self, finished, report):
        result = verified(finished)
        assert result.returncode == 0, result.stderr
        html = report.read_text()
        shown = [f"{name}.html" if "html" in FORMATS[name] else f"{name}.png" for name in SMOKE_ARTEFACTS]
        assert all(name in html for name in [*shown, "manifest.json"])

    def test_the_report_shows_an_artefact_and_where_it_comes_from_in_a_browser(self, report, chromium):
        """From the file alone: it loads nothing else."""
        page, asked, errors = chromium
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(report.as_uri())
        page.get_by_text("Tables", exact=True).first.click()
        show, explain = page.locator("tr", has_text="main results").locator("a").all()
        show.click()
        page.frame_locator("iframe").get_by_text("Unconstrained").first.wait_for()
        explain.click()
        page.get_by_text("runs_smoke.csv").wait_for()
        assert "comparison.ipynb" in page.inner_text("body")
        picture = report.with_suffix(".png")
        page.screenshot(path=picture)
        assert picture.stat().st_size > 50_000
        assert not errors and not [url for url in asked if not url.startswith(("file:", "data:", "blob:"))]

    def test_the_explorer_finds_what_an_attack_asked_of_a_run(self, finished, chromium):
        page, asked, errors = chromium
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto((finished / "paper_figures/smoke/explorer.html").as_uri())
        questions = page.locator("section.table", has=page.get_by_role("heading", name="Questions"))
        questions.scroll_into_view_if_needed()
        chosen = {"method": "Unconstrained", "attack": "forced forget accuracy"}
        for name, value in chosen.items():
            questions.get_by_role("combobox", name=name).select_option(label=value)
        with (finished / "results/smoke/smoke/wmdp_smoke/gd/unconstrained/0/attack_questions.csv").open() as file:
            scores = [float(row["forced_forget_accuracy"]) for row in csv.DictReader(file)]
        assert f" of {len(scores)} " in questions.locator(".dt-info").inner_text()
        assert f"found: {sum(scores) / len(scores):.3f}." in questions.locator(".found").inner_text()
        assert not errors and not [url for url in asked if not url.startswith(("file:", "data:", "blob:"))]

    def test_nothing_is_left_to_do(self, finished):
        assert planned(dry_run(finished)) == {}

    def test_one_runs_learning_rate_reruns_that_run_and_what_follows(self, finished):
        file = finished / "smoke.yaml"
        before = file.read_text()
        file.write_text(before + "\noverrides: {gd/expert_specific: {learning_rate: 1.0e-2}}\n")
        output = dry_run(finished)
        file.write_text(before)
        rules = ("configure", *TRAINING_ON, *(f"render_{name}" for name in SMOKE_ARTEFACTS))
        assert planned(output) == dict.fromkeys({*rules} - {"realign"}, 1)
        for rule in ("configure", "unlearn", "evaluate", "attack"):
            runs = runs_of(output, rule)
            assert runs and all("method=expert_specific, " in run for run in runs)

    def test_a_budget_counts_runs_that_are_out_of_date(self, finished):
        """Their outputs are there. The control: without a change nothing exceeds it."""
        call = ["--cores", 1, "--config", f"world={finished / 'smoke.yaml'}", "budget=0.001"]
        only = dict(directory=finished, root=finished)
        assert "Nothing to be done" in snakemake(*call, **only)
        with edited(finished, ("./smoke.yaml:overrides", {"gd/unconstrained": {"learning_rate": 1e-2}})):
            output = snakemake(*call, check=False, **only)
        listed = output.partition("hours exceed the budget of 0.001. Most expensive: ")[2].splitlines()[0]
        assert "smoke.wmdp_smoke.gd." in listed and "expert_specific" not in listed

    def test_status_and_why_know_the_runs(self, finished):
        def run(*arguments):
            command = [sys.executable, "-m", "gripmoe.cli.main", *arguments, "--world", str(finished / "smoke.yaml")]
            environment = {**os.environ, "PYTHONPATH": str(finished / "src")}
            environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
            return subprocess.run(
                command, capture_output=True, text=True, cwd=finished, env=environment, check=True
            ).stdout

        count = len(list((finished / "results").glob("smoke/smoke/*/*/*/*/run.yaml")))
        status = run("status")  # in four steps nothing is forgotten
        assert (
            status.endswith(f"\n{count - 2} done, 2 missed\n") and status.count(" missed    all 4 steps taken: ") == 2
        )
        key = "smoke.wmdp_smoke.gd.unconstrained.0"
        assert run("why", key) == f"nothing of {key} would run\n"
        evaluation = finished / "results/smoke" / key.replace(".", "/") / "evaluation.json"
        kept = evaluation.rename(evaluation.with_suffix(".kept"))
        try:
            assert f"{key:<48} evaluate" in run("status") and f"{count - 2} done" in run("status")
        finally:
            kept.rename(evaluation)
        file = finished / "smoke.yaml"
        before = file.read_text()
        file.write_text(before + "\noverrides: {gd/unconstrained: {learning_rate: 1.0e-2}}\n")
        reasons, status = run("why", key), run("status")
        file.write_text(before)
        assert re.search(rf"{key} +outdated +training.learning_rate is 0.01, was ", status)
        assert f"{count - 2} done" in status and "1 outdated" in status and "1 missed" in status
        assert sorted(reasons.split(": ")[1].split(" would")[0].split(", ")) == sorted(
            ["configure", "unlearn", "evaluate", "attack"]
        )
        assert reasons.endswith(" would run, because training.learning_rate is 0.01, was 0.005\n")

    @pytest.mark.nightly
    def test_news_takes_every_rule_too(self, finished):
        """A model finetuned on articles and one on those to retain, each by two processes, as its runs are unlearned;
        evaluated, attacked and rendered."""
        world = finished / "news.yaml"
        world.write_text(
            f"extends: {finished / 'smoke.yaml'}\nmodels: [smoke_news]\nbenchmarks: [muse_smoke]\n"
            "methods: [original, retrained, unconstrained, expert_specific]\n"
            "overrides: {unconstrained: &seldom {check_every: 4, checkpoint_every: 4}, expert_specific: *seldom}\n"
            "gpus: {smoke_news: 2}\n"
            "artefacts: [muse_results, muse_attack_matrix, muse_paired_tests, muse_tradeoff]\n"
        )
        run_with_server("--cores", 2, "--config", f"world={world}", directory=finished, root=finished)
        log = finished / "results/smoke/logs/finetune_model/smoke_news_retrained.log"
        assert log.read_text().count("finetune:   0%") == 1, "of two processes one shows progress"
        run = finished / "results/smoke/smoke_news/muse_smoke/gd/unconstrained/0"
        files = ("evaluation.json", "attack.json")
        measured = {name: value for file in files for name, value in json.loads((run / file).read_text()).items()}
        assert {"verbmem", "knowmem_forget", "knowmem_retain", "privleak", "routing_stability"} <= set(measured)
        assert "forced_knowmem_forget" in measured and "relearned_from_retain_after_20" in measured
        assert (run / "attack_questions.csv").stat().st_size > 100
        figures = finished / "paper_figures/news"
        for name in ("muse_results.tex", "muse_paired_tests.html", "muse_attack_matrix.md", "muse_tradeoff.pdf"):
            assert (figures / name).stat().st_size > 500
        assert re.search(r"Method A, sound & (\+|\$-\$)\d", (figures / "muse_paired_tests.tex").read_text())

    def test_an_external_checkpoint_stands_beside_the_methods(self, finished):
        """Here the weights of a run, so measured alike; its files and its path are what it depends on."""
        runs, mine = finished / "results/smoke/smoke/wmdp_smoke", finished / "mine"
        shutil.copytree(runs / "gd/unconstrained/0/weights", mine)
        world = finished / "others.yaml"
        world.write_text(
            f"extends: {finished / 'smoke.yaml'}\nmethods: [original, retrained, unconstrained]\n"
            f"external: {{graddiff: {mine}}}\nartefacts: [main_results, attack_matrix]\n"
        )
        only = dict(directory=finished, root=finished)
        run_with_server("--cores", 2, "--config", f"world={world}", **only)
        for name in ("evaluation.json", "attack.json"):
            found = [json.loads((runs / run / name).read_text()) for run in ("gd/unconstrained/0", "none/graddiff/0")]
            assert found[0] == found[1] and len(found[0]) > 10
        for baseline, model in (("original", "smoke"), ("retrained", "smoke_retrained")):
            trained = json.loads((finished / f"results/smoke/models/{model}/model.json").read_text())["tokens"]
            assert json.loads((runs / f"none/{baseline}/0/evaluation.json").read_text())["tokens"] == trained > 0
        for table in ("main_results", "attack_matrix"):
            assert "graddiff" in (finished / f"paper_figures/others/{table}.md").read_text()
        assert planned(snakemake("-n", "--config", f"world={world}", **only)) == {}
        tables = (f"render_{name}" for name in ("main_results", "attack_matrix"))
        affected = {"import_checkpoint", "attack", *EVALUATING, *tables}
        weights = mine / "model.safetensors"
        weights.touch()
        assert planned(snakemake("-n", "--config", f"world={world}", **only)) == {}
        weights.write_bytes(weights.read_bytes()[:-4] + b"abcd")
        output = snakemake("-n", "--config", f"world={world}", **only)
        assert planned(output) == dict.fromkeys(affected, 1)
        weights.parent.rename(finished / "gone")
        output = snakemake("-n", "--config", f"world={world}", check=False, **only)
        assert f"others.yaml: external.graddiff: no folder {mine}; correct it, or give a hub id" in output
        world.write_text(world.read_text().replace(str(mine), "results/mine"))  # beside what is there
        output = snakemake("-n", "--config", f"world={world}", check=False, **only)
        assert "others.yaml: external.graddiff: no folder results/mine; correct it, or give a hub id" in output

    def test_corrected_runs_follow_the_run_they_correct(self, finished):
        file = finished / "smoke.yaml"
        before = file.read_text()
        file.write_text(before + "\noverrides: {unconstrained: {learning_rate: 1.0e-2}}\n")
        output = dry_run(finished)
        file.write_text(before)
        assert planned(output)["realign"] == 2 and planned(output)["unlearn"] == 1

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("place", "value", "rules"),
        EDITS,
        ids=lambda value: value if isinstance(value, str) else None,
    )
    def test_an_edit_reruns_what_it_affects(self, finished, place, value, rules):
        with edited(finished, (place, value)):
            plan = planned(dry_run(finished))
        assert set(rules) <= set(plan) and bool(rules) == bool(plan)
        if set(TRAINING_ON) <= set(rules):
            assert "prepare_model" not in plan and "trace_routing" not in plan
        elif rules == EVALUATING:
            assert not {"configure", "trace_routing", "unlearn", "realign", "attack"} & set(plan)
        elif rules == ["attack"]:
            assert not {"unlearn", "evaluate"} & set(plan)
        elif rules == RENDERING:
            assert {rule.split("_")[0] for rule in plan} == {"render", "explore", "manifest"}
        elif "render_attack_matrix" in rules:
            assert set(plan) == {*rules, "manifest"}

    def test_what_another_world_has_measured_again_is_collected(self, finished):
        """It shares runs, and repeats training whose measures end alike: seconds and the history do not."""
        run = finished / "results/smoke/smoke/wmdp_smoke/gd/unconstrained/0"
        for name in ("history.json", "checkpoint.json"):
            before, times = (run / name).read_text(), (run / name).stat()
            (run / name).write_text(f"{before}\n")
            plan = planned(dry_run(finished))
            (run / name).write_text(before)
            set_times(run / name, times)
            assert {"collect", "manifest"} <= set(plan) and "unlearn" not in plan

    @pytest.mark.slow
    def test_lost_metadata_hides_no_change_from_verify(self, finished):
        """Without Snakemake's own records it sees no changed parameter; the manifest still does: in the code that
        draws, in that of the runs, in their settings."""
        records = finished / ".snakemake" / "metadata"
        aside = records.rename(records.with_name("aside"))
        edits = [
            ("gripmoe.reporting.names:FORGOTTEN",),
            ("gripmoe.training.objectives:GradientDifference.forget_loss",),
            ("results/smoke/smoke/wmdp_smoke/gd/unconstrained/0/run.yaml:seed", 1),
        ]
        with edited(finished, *edits[:2], unseen=True):
            plan = planned(dry_run(finished))
        with edited(finished, *edits, unseen=True):
            result = verified(finished)
        shutil.rmtree(records, ignore_errors=True)
        aside.rename(records)
        assert plan == {} and result.returncode == 2
        faults = result.stderr
        assert "the code that draws and judges has changed" in faults
        assert "gripmoe.cli.unlearn:unlearn: its code has changed since it ran for smoke/" in faults
        assert "gd/unconstrained/0/run.yaml: changed since" in faults and "evaluate:evaluate" not in faults

    @pytest.mark.slow
    @pytest.mark.parametrize("edit", ["comment", "order", "touch", "docstring", "checkpoints"])
    def test_harmless_edits_rerun_nothing(self, finished, edit):
        file = finished / "smoke.yaml"
        module = file_of(finished, "gripmoe.training.objectives")
        before, code = file.read_text(), module.read_text()
        if edit == "comment":
            file.write_text("# a remark\n" + before)
        elif edit == "order":
            file.write_text(yaml.safe_dump(dict(reversed(yaml.safe_load(before).items()))))
        elif edit == "checkpoints":
            with edited(finished, (f"{finished}/smoke.yaml:training.checkpoint_every", 4)):
                assert planned(dry_run(finished)) == {}
        elif edit == "touch":
            for path in (*(finished / "workflow").rglob("*.smk"), *(finished / "src").rglob("*.py"), file):
                path.touch()
        else:
            module.write_text(reworded(code))
        output = dry_run(finished)
        file.write_text(before)
        module.write_text(code)
        assert planned(output) == {}

    @pytest.mark.skipif(not shutil.which("git"), reason="not run: no git")
    def test_a_fresh_checkout_beside_copied_results_reruns_nothing(self, finished, tmp_path):
        """A clone is new in every file and lies elsewhere; with the control, an edit there."""
        fresh = tmp_path / "fresh"
        as_someone = ["git", "-c", "user.name=someone", "-c", "user.email=someone@localhost", "-C", finished]
        try:
            for command in (
                ["init", "-q"],
                ["add", "-A"],
                ["commit", "-qm", "everything"],
                ["clone", "-q", ".", fresh],
            ):
                subprocess.run([*as_someone, *command], check=True, capture_output=True)
        finally:
            shutil.rmtree(finished / ".git", ignore_errors=True)
        for kept in ("results", "paper_figures", ".snakemake"):
            shutil.copytree(finished / kept, fresh / kept, dirs_exist_ok=True)
        checked_out = (fresh / "notebooks" / "comparison.ipynb").stat().st_mtime
        assert checked_out > (fresh / "paper_figures" / "smoke" / "main_results.html").stat().st_mtime
        assert planned(dry_run(fresh)) == {}
        edit(fresh, "gripmoe.training.objectives:GradientDifference.forget_loss")
        assert set(TRAINING_ON) <= planned(dry_run(fresh)).keys()

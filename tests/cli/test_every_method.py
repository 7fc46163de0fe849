"""Every row of the catalogue through the commands that the rules call, and what each must change."""

import csv
import gc
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from conftest import HANGS, SMALL
from gripmoe.attacks import run as suite
from gripmoe.cli import fit_basis as fitting
from gripmoe.cli import unlearn as commands
from gripmoe.cli.attack import attack
from gripmoe.cli.common import identity_of, run_and_benchmark
from gripmoe.cli.evaluate import evaluate
from gripmoe.cli.fit_basis import fit_basis
from gripmoe.cli.main import main as command
from gripmoe.cli.realign import realign
from gripmoe.cli.trace_routing import trace_routing
from gripmoe.cli.unlearn import unlearn
from gripmoe.config.benchmarks import Benchmark
from gripmoe.config.methods import Method
from gripmoe.config.project import Project
from gripmoe.config.training import Training
from gripmoe.config.world import OwnClass, load_run
from gripmoe.constraints.build import build
from gripmoe.data.corpora import in_batches, load_corpus
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import read_json, read_jsonl, read_yaml, write_json, write_jsonl, write_yaml
from gripmoe.library import constrain as constraining
from gripmoe.library.constrain import methods_of_loops
from gripmoe.moe import MoEModel
from gripmoe.moe.storage import load_model, save_model
from gripmoe.training import loop as unlearning
from gripmoe.worlds.benchmark import wmdp_files
from gripmoe.worlds.models import make_model

CONFIG = Path(__file__).parents[2] / "workflow" / "config"
PROJECT = Project(CONFIG, "tiny")


def distinct(names):
    """Of methods that differ in a number alone, the first."""
    return list({re.sub(r"\d[\d.e-]*", "0", PROJECT.methods[n].model_dump_json()): n for n in reversed(names)}.values())


TRAINED = distinct([name for name, method in PROJECT.methods.items() if method.trains])
CORRECTED = [name for name, method in PROJECT.methods.items() if method.corrects]
OBJECTIVES = {
    "gd": {"alpha": 1.0},
    "kl": {"alpha": 1.0},
    "npo": {"alpha": 1.0, "beta": 0.1},
    "rmu": {"alpha": 1.0, "layer": 1, "kappa": 2.0},
}
TRAINING = Training(
    **{**PROJECT.world.training.model_dump(), "max_steps": 2, "check_every": 2, "checkpoint_every": 2}
    | {"forget_batch_size": 4, "retain_batch_size": 4}
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, world, tokenizer):
    return prepare("qwen3_moe", world, tokenizer, tmp_path_factory.mktemp("prepared"))


def prepare(family, world, tokenizer, root, dtype=torch.float32):
    """A random model, a few documents and questions, and the original routing of them."""
    model = make_model(family, len(tokenizer), seed=0, **SMALL).to(dtype)
    write_json(root / "model" / "model.json", {"weights": save_model(model, tokenizer, root / "model" / "weights")})
    for name, rows in wmdp_files(world, 0).items():
        kept = [row for row in rows if row.get("split", "dev") == "dev"][:24]
        write_jsonl(root / "data" / f"{name}.jsonl", kept)
    settings = PROJECT.benchmarks["wmdp_smoke"].model_copy(update={"retain_documents": 20})
    files = dict(trace_file=root / "routing.safetensors", forget_trace_file=root / "forget.safetensors")
    trace_routing(
        settings=settings.documents.model_dump_json(), model_file=root / "model" / "model.json",
        digest=root / "routing.json", output=files["trace_file"], forget_output=files["forget_trace_file"],
        retain_corpus=root / "data" / "retain_corpus.jsonl", forget_corpus=root / "data" / "forget_corpus.jsonl",
    )  # fmt: skip
    return root, settings, files


def run_steps(
    prepared, method_name, objective, folder, checkpoint=None, original_answers=None, bases_in=(1.0, 0.0), **changes
):
    """Trains a run, or corrects that of `checkpoint`; without one the original model."""
    root, benchmark, files = prepared
    method = PROJECT.methods[method_name]
    run = PROJECT.run("tiny_a", "wmdp_tiny", "gd", method_name, 0)
    changed = {"objective": OBJECTIVES[objective], **changes}
    training = TRAINING.model_copy(update=changed) if method.trains else None
    run = run.model_copy(update={"benchmark": benchmark.task, "objective": objective, "training": training})
    write_yaml(folder / "run.yaml", run.model_dump(mode="json"))
    common = dict(
        run_file=folder / "run.yaml", model_file=root / "model" / "model.json", output=folder / "checkpoint.json"
    )
    if method.corrects:
        corpus = root / "data" / "retain_corpus.jsonl"
        finished = checkpoint or common["model_file"]
        realign(**common, checkpoint_file=finished, retain_corpus=corpus, trace_file=files["trace_file"])
        return read_json(folder / "checkpoint.json")
    bases = None
    if method.has_bases:
        bases = folder / "bases.safetensors"
        settings, digest = method.model_dump_json(), folder / "bases.json"
        fit_basis(settings=settings, model_file=common["model_file"], digest=digest, output=bases, **files)
    where = dict(original_answers=original_answers, original_memory=0.0)
    where |= dict(zip(("basis_memory", "basis_host_memory"), bases_in, strict=True))
    unlearn(**common, **files, **where, data=root / "data", bases_file=bases)
    return read_json(folder / "checkpoint.json")


def test_outputs_that_code_of_ones_own_has_stored_are_for_that_code_alone(prepared, tmp_path, monkeypatch):
    """The second class is the first one, edited."""
    plain, found = PROJECT.run("tiny_a", "wmdp_tiny", "gd", "unconstrained", 0), []
    for digest in ("first", "second"):
        own = OwnClass(path="gripmoe.training.objectives:KullbackLeibler", sha256=digest)
        run = plain.model_copy(update={"own_objective": own})
        monkeypatch.setattr(PROJECT, "run", lambda *_, run=run: run)
        (tmp_path / digest).mkdir()
        run_steps(prepared, "unconstrained", "kl", tmp_path / digest, original_answers=tmp_path / "store")
        found.append({file.name for file in (tmp_path / "store" / "own").glob("*.safetensors")})
        gc.collect()  # the run has ended
    assert found[0] and found[1] and not found[0] & found[1]
    assert not [*(tmp_path / "store").glob("*.safetensors")]


def test_what_had_forgotten_before_its_first_step_is_corrected(prepared, tmp_path):
    """And takes no multiple of the time of no step."""
    root, *_ = prepared
    finished = tmp_path / "finished" / "checkpoint.json"
    shutil.copytree(root / "model" / "weights", finished.parent / "weights")
    write_json(
        finished, read_json(root / "model" / "model.json") | {"status": "reached", "steps": 0, "seconds_per_step": 1.0}
    )
    outcome = run_steps(prepared, "ptc", "gd", tmp_path, checkpoint=finished)
    assert outcome["status"] == "reached" and "time_ratio" not in outcome


def changed_experts(prepared, folder):
    """Per layer, how many experts differ from the original's, and whether the router does."""
    before, after = (MoEModel(load_model(f / "weights")[0]) for f in (prepared[0] / "model", folder))
    experts, routers = {}, {}
    for layer in before.layers:
        pairs = zip(before.expert_parameters(layer), after.expert_parameters(layer), strict=True)
        differ = torch.stack([(a != b).flatten(1).any(dim=1) for a, b in pairs]).any(dim=0)
        experts[layer], routers[layer] = int(differ.sum()), not torch.equal(before.theta(layer), after.theta(layer))
    return experts, routers


def test_bases_are_fitted_on_all_threads_that_there_are(prepared, tmp_path, monkeypatch):
    """Those of the machine, if a person starts the command."""
    before, threads = torch.get_num_threads(), []

    def fit(*given):
        threads.append(torch.get_num_threads())
        raise KeyboardInterrupt

    monkeypatch.setattr(fitting, "fit_bases", fit)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(2)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_steps(prepared, "expert_specific", "gd", tmp_path)
    finally:
        torch.set_num_threads(before)
    assert threads == [2]


def noted(monkeypatch, module):
    """What `build` gives to a module from here on, as it is before training."""
    built = []

    def noting(*given, **named):
        made = build(*given, **named)
        built.append((described(made.constraint), made.scope))
        return made

    monkeypatch.setattr(module, "build", noting)
    return built


def described(thing):
    """An object as its class and attributes, down to numbers and strings."""
    if isinstance(thing, torch.Tensor):
        return thing.tolist()  # numbers: the bases of a file are in fp64 at once, others from `start` on
    if isinstance(thing, torch.Generator):
        return thing.get_state().tolist()
    if isinstance(thing, Mapping):
        return {key: described(thing[key]) for key in thing}
    if isinstance(thing, Method):  # the optimizer of a loop of one's own is made by its owner
        return described({key: value for key, value in vars(thing).items() if key != "training"})
    if type(thing).__module__.startswith("gripmoe."):
        return type(thing).__name__, described(vars(thing))
    return thing


@pytest.mark.parametrize("method", distinct(methods_of_loops()))
def test_a_loop_of_ones_own_has_the_constraint_that_the_workflow_has(method, prepared, tmp_path, monkeypatch):
    """Of the same class, with the same attributes and for the same experts, from the same tokens; not from others."""
    root, benchmark, _ = prepared
    monkeypatch.setattr(
        commands, "run_unlearning", lambda moe, *_, **__: unlearning.Outcome("not_reached", 0, [], None, {}, 0, 0)
    )
    of_workflow, of_library = noted(monkeypatch, commands), noted(monkeypatch, constraining)
    run_steps(prepared, method, "gd", tmp_path)
    model, tokenizer = load_model(root / "model" / "weights")
    reading = {"limit": benchmark.retain_documents, **benchmark.task.reading}
    retain, forget = (
        in_batches(load_corpus(root / "data" / f"{name}_corpus.jsonl", tokenizer, **reading), tokenizer.pad_token_id)
        for name in ("retain", "forget")
    )
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    for documents in (retain, forget):
        constraining.constrain(model, optimizer, documents, forget=forget, method=method).close()
    ([workflow], [library, other]) = of_workflow, of_library
    assert library == workflow
    if PROJECT.methods[method].has_bases and PROJECT.methods[method].surface != "forget":
        assert other != workflow


@pytest.mark.parametrize("method", TRAINED)
def test_every_trained_method(method, prepared, tmp_path):
    outcome = run_steps(prepared, method, "gd", tmp_path)
    assert (outcome["status"], outcome["steps"]) == ("not_reached", 2)
    assert outcome["time_ratio"] == outcome["seconds_per_step"] / outcome["plain_seconds_per_step"]
    history = read_json(tmp_path / "history.json")
    assert {"forget_accuracy", "retain_accuracy", "router_gradient"} <= set(history[-1])
    experts, routers = changed_experts(prepared, tmp_path)
    assert (sum(experts.values()) == 1) == (PROJECT.methods[method].experts == "top_attributed")
    if method == "seuf":
        assert all(bool(count) == routers[layer] for layer, count in experts.items()), "its router alone"
    if method in ("frozen_router", "anchored"):
        assert not any(routers.values())
    if method == "unconstrained":
        assert all(routers.values()), "the control"


def test_one_expert_is_among_the_layers_that_train(prepared, tmp_path):
    """Under RMU at the last layer. The control: if all layers train, the expert is of the first."""
    experts = {}
    for count in (None, 1):
        run_steps(prepared, "router_l2_single", "rmu", tmp_path / str(count), trained_layers=count)
        experts[count], routers = changed_experts(prepared, tmp_path / str(count))
        assert routers[1], "the penalty has a router to move"
    assert experts == {None: {0: 1, 1: 0}, 1: {0: 0, 1: 1}}


def test_a_run_that_cannot_train_is_refused(prepared, tmp_path, capsys):
    """One line, before the model is read, and no file is left. The control is the run itself."""
    root, _, files = prepared
    run_steps(prepared, "unconstrained", "gd", tmp_path / "run")
    run = read_yaml(tmp_path / "run" / "run.yaml")
    run["method"], run["method_name"] = PROJECT.methods["expert_specific"].model_dump(mode="json"), "expert_specific"
    flags = dict(model=root / "model/model.json", data=root / "data", trace=files["trace_file"])
    flags |= {"forget-trace": files["forget_trace_file"], "output": tmp_path / "refused" / "checkpoint.json"}
    for change, said in (
        ({}, "--bases is required: the file that `gripmoe fit-basis` writes for 'expert_specific'"),
        ({"training": None}, "'expert_specific' does not train; give the run.yaml of a method that does"),
        ({"processes": 2}, "asks for 2, and its batch sizes are of each process"),
    ):
        write_yaml(tmp_path / "run.yaml", run | change)
        bases = [f"--bases={files['trace_file']}"] if "processes" in change else []
        named = [f"--{name}={value}" for name, value in flags.items()]
        assert command(["unlearn", f"--run={tmp_path / 'run.yaml'}", *named, *bases]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "refused").exists()


def test_bases_of_another_method_or_corpus_are_refused(prepared, tmp_path):
    run_steps(prepared, "expert_specific", "gd", tmp_path / "own")
    root, benchmark, files = prepared
    other = PROJECT.methods["expert_specific_eps_1em1"].model_dump_json()
    fit_basis(
        settings=other, model_file=root / "model" / "model.json", digest=tmp_path / "bases.json",
        output=tmp_path / "own" / "bases.safetensors", **files,
    )  # fmt: skip
    given = dict(run_file=tmp_path / "own" / "run.yaml", model_file=root / "model" / "model.json", data=root / "data")
    given |= dict(bases_file=tmp_path / "own" / "bases.safetensors", output=tmp_path / "other" / "checkpoint.json")
    with pytest.raises(ConfigError, match="fitted_with is .*0.1.*; give the file of this run, or repeat the step"):
        unlearn(**given, **files)


def test_a_run_that_corrects_nothing_is_not_realigned(prepared, tmp_path, capsys):
    root, _, files = prepared
    run_steps(prepared, "unconstrained", "gd", tmp_path / "run")
    run_steps(prepared, "ptc", "gd", tmp_path / "ptc", checkpoint=tmp_path / "run" / "checkpoint.json")
    flags = {"model": root / "model/model.json", "retain-corpus": root / "data/retain_corpus.jsonl"}
    flags |= {"trace": files["trace_file"], "output": tmp_path / "refused" / "checkpoint.json"}
    for run, checkpoint, said in (
        ("run", tmp_path / "run" / "checkpoint.json", "'unconstrained' corrects no finished run"),
        ("ptc", root / "model" / "model.json", "model.json: lacks status, steps; give the checkpoint.json of"),
        ("ptc", tmp_path / "list.json", "list.json: lacks status, steps; give the checkpoint.json of"),
    ):
        (tmp_path / "list.json").write_text("[1]")
        named = [f"--{name}={value}" for name, value in flags.items()]
        named += [f"--run={tmp_path / run / 'run.yaml'}", f"--checkpoint={checkpoint}"]
        assert command(["realign", *named]) == 2 and said in capsys.readouterr().err
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize(("method", "refused"), [("frozen_router", True), ("unconstrained", False)])
def test_a_dense_model_has_no_routers_to_constrain(prepared, tmp_path, method, refused):
    root, benchmark, files = prepared
    _, tokenizer = load_model(root / "model" / "weights")
    dense = make_model("qwen3", vocabulary_size=len(tokenizer), seed=0)
    weights = save_model(dense, tokenizer, tmp_path / "model" / "weights")
    write_json(tmp_path / "model" / "model.json", {"weights": weights})
    run = PROJECT.run("tiny_a", "wmdp_tiny", "gd", method, 0)
    training = TRAINING.model_copy(update={"objective": OBJECTIVES["gd"]})
    run = run.model_copy(update={"benchmark": benchmark.task, "training": training})
    write_yaml(tmp_path / "run" / "run.yaml", run.model_dump(mode="json"))
    given = dict(run_file=tmp_path / "run" / "run.yaml", model_file=tmp_path / "model" / "model.json")
    given |= dict(data=root / "data", output=tmp_path / "run" / "checkpoint.json", **files)
    told = "'frozen_router' acts on routers; leave the method out" if refused else "routing.safetensors: model is"
    with pytest.raises(ConfigError, match=told):  # the traces are those of another model
        unlearn(**given)


OWN = """
from gripmoe.training.objectives import GradientDifference

class Mine(GradientDifference):
    def __init__(self, alpha, beta, seed):
        super().__init__(alpha)
        self.beta, self.monitor = beta, {"seed": seed}

    def forget_loss(self, model, batch):
        return self.beta * super().forget_loss(model, batch)
"""


def test_an_objective_and_a_method_of_a_folder_train(prepared, tmp_path, monkeypatch):
    """A file, a row of each kind and a world; the losses are those of the class."""
    (tmp_path / "my_losses.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    config = Path(shutil.copytree(CONFIG, tmp_path / "config"))
    write_yaml(config / "objectives.yaml", {"mine": {"class": "my_losses:Mine", "settings": ["alpha", "beta"]}})
    write_yaml(config / "methods.yaml", {"weaker": {"constraint": "router_l2", "weight": 3.0}})
    steps = {"max_steps": 2, "check_every": 2, "checkpoint_every": 2, "forget_batch_size": 4, "retain_batch_size": 4}
    of_mine = {"objective": {"alpha": 1.0, "beta": 3.0}}
    world = {"extends": "tiny", "objectives": ["gd", "mine"], "methods": ["weaker"], "extra_methods": {}}
    of_gd = read_yaml(CONFIG / "tiny.yaml")["objective_training"]["gd"]["objective"]
    training = read_yaml(CONFIG / "tiny.yaml")["training"] | steps
    write_yaml(
        config / "own.yaml",
        world | {"training": training, "objective_training": {"gd": {"objective": of_gd}, "mine": of_mine}},
    )
    project, root, files = Project(config, "own"), prepared[0], prepared[2]
    rows = {}
    for objective in ("gd", "mine"):
        folder = tmp_path / objective
        run = project.run("tiny_a", "wmdp_tiny", objective, "weaker", 7)
        run = run.model_copy(update={"benchmark": prepared[1].task})
        write_yaml(folder / "run.yaml", run.model_dump(mode="json"))
        where = dict(run_file=folder / "run.yaml", model_file=root / "model" / "model.json", data=root / "data")
        unlearn(**where, **files, output=folder / "checkpoint.json")
        assert read_json(folder / "checkpoint.json")["steps"] == 2
        rows[objective] = read_json(folder / "history.json")[-1]
    assert rows["mine"]["seed"] == 7 and "seed" not in rows["gd"]
    assert rows["mine"]["forget_loss"] == pytest.approx(3 * rows["gd"]["forget_loss"], rel=0.05)


@pytest.mark.parametrize("objective", ["kl", "npo", "rmu"])
@pytest.mark.parametrize("method", ["expert_specific", "expert_specific_paper", "anchored_replay", "seuf"])
def test_methods_do_not_care_which_objective(method, objective, prepared, tmp_path):
    assert run_steps(prepared, method, objective, tmp_path)["status"] == "not_reached"


@pytest.mark.parametrize(
    ("method", "objective", "files"),
    [("anchored", "gd", 1), ("unconstrained", "kl", 1), ("unconstrained", "rmu", 1), ("anchored_replay", "rmu", 3)],
)
def test_original_answers_on_disk_change_no_bit_and_serve_the_next_run(
    prepared, tmp_path, monkeypatch, method, objective, files
):
    store = tmp_path / "original_answers"
    weights = [
        run_steps(prepared, method, objective, tmp_path / name, original_answers=where)["weights"]
        for name, where in (("memory", None), ("first", store), ("second", store))
    ]
    assert weights[0] == weights[1] == weights[2]
    before = set(store.glob("*.safetensors"))
    assert len(before) == files
    gc.collect()  # the runs before have ended
    monkeypatch.setattr(commands, "code_fingerprint", lambda entry: "edited since")
    run_steps(prepared, method, objective, tmp_path / "edited", original_answers=store)
    after = set(store.glob("*.safetensors"))
    assert len(after) == files and not after & before, "what other code has kept is not taken, and does not stay"


def tuning_script():
    spec = importlib.util.spec_from_file_location("tune", CONFIG.parent / "tune.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("method", ["expert_specific", "unconstrained"])
def test_hyperparameters_are_tried_as_runs_are_trained(prepared, tmp_path, method):
    """One trial of workflow/tune.py, beside the results of a world."""
    root, benchmark, files = prepared
    project = Project(CONFIG, "tiny")
    project.benchmarks["wmdp_tiny"] = benchmark
    routing = tmp_path / "tiny_a" / "wmdp_tiny" / "routing.safetensors"
    there = {routing: files["trace_file"], routing.with_name("routing_forget.safetensors"): files["forget_trace_file"]}
    there |= {tmp_path / "models" / "tiny_a": root / "model", tmp_path / "data" / "wmdp_tiny": root / "data"}
    for link, target in there.items():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)
    (tmp_path / "models" / "tiny_a_retrained").symlink_to(root / "model")
    change = {"learning_rate": 2e-3, "max_steps": 2, "check_every": 2, "checkpoint_every": 2}
    row = tuning_script().trial(project, tmp_path, "tiny_a", "wmdp_tiny", "gd", method, 1000, change)
    assert (row["status"], row["steps"]) == ("not_reached", 2) and 0 <= row["forget_accuracy"] <= 1
    run = load_run(next(tmp_path.glob("tuning/**/run.yaml")))
    assert (run.seed, run.training.learning_rate) == (1000, 2e-3)
    trained = list(tmp_path.glob("tuning/**/checkpoint.json"))[0]
    before = trained.stat().st_mtime_ns
    for rate, same in ((1.0, True), (0.5, False)):  # a world's hyperparameters name no folder
        training = project.world.training.model_copy(update={"clip_norm": rate})
        project.world = project.world.model_copy(update={"training": training})
        tuning_script().trial(project, tmp_path, "tiny_a", "wmdp_tiny", "gd", method, 1000, change)
        assert (trained.stat().st_mtime_ns == before) is same


def test_bases_that_are_read_in_every_step_change_no_bit(prepared, tmp_path):
    tiers = {"device": (1.0, 0.0), "host": (0.0, 1.0), "disk": (0.0, 0.0)}
    kept, copied, read = (
        run_steps(prepared, "expert_specific", "gd", tmp_path / name, bases_in=tier) for name, tier in tiers.items()
    )
    assert kept["weights"] == copied["weights"] == read["weights"]
    held = [outcome["constraint_megabytes"] for outcome in (kept, copied, read)]
    assert min(held[:2]) > held[2] > 0, "what is read in every step is not held"


def test_two_processes_train_what_one_does_and_leave_nothing_else(prepared, tmp_path):
    """Documents differ in length, so a mean over each process's tokens weighs them a little differently."""
    alone = run_steps(prepared, "expert_specific_paper", "gd", tmp_path)
    root, _, files = prepared
    (tmp_path / "two").mkdir()
    run = read_yaml(tmp_path / "run.yaml")
    run["training"] |= {"forget_batch_size": 2, "retain_batch_size": 2}
    run["processes"] = 2
    write_yaml(tmp_path / "two.yaml", run)
    flags = dict(run=tmp_path / "two.yaml", model=root / "model/model.json", data=root / "data", processes=2)
    flags |= {"trace": files["trace_file"], "forget-trace": files["forget_trace_file"]}
    flags |= {"output": tmp_path / "two" / "checkpoint.json"}
    line = [sys.executable, "-m", "gripmoe.cli.main", "unlearn", *(f"--{name}={flags[name]}" for name in flags)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(line, capture_output=True, text=True, env=environment, timeout=HANGS, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    together = read_json(tmp_path / "two" / "checkpoint.json")
    assert together["weights"] != alone["weights"]
    assert together["effective_forget_batch"] == alone["effective_forget_batch"] == 4
    assert (together["steps"], together["status"]) == (alone["steps"], alone["status"])
    (_, one), (_, two) = (read_json(folder / "history.json") for folder in (tmp_path, tmp_path / "two"))
    assert two["retain_loss"] == pytest.approx(one["retain_loss"], rel=0.02)
    kept = {".lock", "checkpoint.json", "checkpoint.provenance.json", "history.json", "weights"}
    assert {file.name for file in (tmp_path / "two").iterdir()} == kept
    before, after = (MoEModel(load_model(f / "weights")[0]).thetas() for f in (root / "model", tmp_path / "two"))
    assert all(not torch.equal(before[layer], after[layer]) for layer in before)


@pytest.mark.parametrize("method", CORRECTED)
def test_a_correction_reads_the_originals_routers_and_no_other_weight_of_it(method, world, tokenizer, tmp_path):
    """With its recorded routing, a finished run is corrected to the same bytes when the original model is gone."""
    prepared, trained = prepare("qwen3_moe", world, tokenizer, tmp_path), tmp_path / "trained"
    run_steps(prepared, "unconstrained", "gd", trained)
    whole = run_steps(prepared, method, "gd", tmp_path / "whole", checkpoint=trained / "checkpoint.json")
    original = tmp_path / "model" / "weights"
    for file in original.glob("model*.safetensors"):
        file.unlink()
    with pytest.raises(ConfigError, match="model.safetensors"):
        load_model(original)
    without = run_steps(prepared, method, "gd", tmp_path / "without", checkpoint=trained / "checkpoint.json")
    assert without["weights"] == whole["weights"] != read_json(trained / "checkpoint.json")["weights"]
    (original / "routers.safetensors").unlink()
    with pytest.raises(ValueError, match="routers.safetensors is missing; save the model with"):
        run_steps(prepared, method, "gd", tmp_path / "neither", checkpoint=trained / "checkpoint.json")


def interrupted(*_):
    raise KeyboardInterrupt


def test_what_another_configuration_has_left_is_not_resumed(prepared, tmp_path, monkeypatch, capsys):
    """The control: with the same one it is."""
    changes = {"max_steps": 4}

    def stop(name, **others):
        """A run that ends after its first checkpoint."""
        save = unlearning.save_state
        monkeypatch.setattr(unlearning, "save_state", lambda *a, **k: (save(*a, **k), interrupted()))
        with pytest.raises(KeyboardInterrupt):
            run_steps(prepared, "unconstrained", "gd", tmp_path / name, **changes, **others)
        monkeypatch.undo()
        assert (tmp_path / name / "state.pt").exists()

    loaded = []
    load = unlearning.load_state
    for name, rate in (("same", 1e-3), ("other", 1e-4)):
        stop(name, learning_rate=1e-3)
        monkeypatch.setattr(unlearning, "load_state", lambda *a: loaded.append(load(*a)) or loaded[-1])
        again = run_steps(prepared, "unconstrained", "gd", tmp_path / name, **changes, learning_rate=rate)
        monkeypatch.undo()
        whole = run_steps(prepared, "unconstrained", "gd", tmp_path / f"{name} whole", **changes, learning_rate=rate)
        assert again["weights"] == whole["weights"]
        assert {file.name for file in (tmp_path / name).iterdir()} == {
            file.name for file in (tmp_path / f"{name} whole").iterdir()
        }
    assert loaded[0]["step"] == 2 and loaded[1] is None
    said = capsys.readouterr().err
    assert said.count("resumes at step 2") == 1 and said.count("left by a run with another configuration") == 1


def with_questions(folder, world):
    """Questions of the test split, and held-out documents, for what is evaluated and attacked."""
    for name in ("forget", "retain"):
        rows = [row for row in wmdp_files(world, 0)[f"{name}_questions"] if row["split"] == "test"][:8]
        kept = read_jsonl(folder / "data" / f"{name}_questions.jsonl")
        write_jsonl(folder / "data" / f"{name}_questions.jsonl", kept + rows)
    write_jsonl(folder / "data" / "held_out_corpus.jsonl", read_jsonl(folder / "data" / "retain_corpus.jsonl"))


def evaluated(root, folder, **benchmark):
    """Evaluates a run, and returns what `attack` is to be called with."""
    task = read_yaml(folder / "run.yaml")["benchmark"] | benchmark
    common = dict(
        run_file=folder / "run.yaml", model_file=root / "model" / "model.json",
        checkpoint_file=folder / "checkpoint.json", data=root / "data",
        benchmark_settings=Benchmark(**task, evaluation_batch_size=64).model_dump_json(),
    )  # fmt: skip
    evaluate(**common, questions=folder / "answers.csv", output=folder / "metrics.json")
    return dict(
        **common,
        settings='{"learning_rate": 1e-3}',
        questions=folder / "forced.csv",
        output=folder / "attacks.json",
    )


OWN_MEASURES = """
from functools import partial

from gripmoe.attacks.base import Found

def halved(setting):
    (setting.data / "halved.txt").open("a").write("once ")
    with_half = setting.after.theta(0).data
    with_half *= 0.5
    found = setting.found({"halved_router": setting.scores_of(setting.after)}, asked=len(setting.ids))
    with_half *= 2
    return found

def seconded(setting):
    return Found({"files": 1.0})

other = partial(lambda setting, number: Found({"files": number}), number=2.0)

def number_of_files(model, tokenizer, data):
    return len(list(data.glob("*.jsonl")))

def breaking(model, tokenizer, data):
    for parameter in model.parameters():
        parameter.data.zero_()
    return 1

def no_number(model, tokenizer, data):
    return None
"""


def test_an_attack_and_a_metric_of_a_folder_are_measured(prepared, world, tmp_path, monkeypatch):
    """A file and a row of each kind; an attack that is not there is named."""
    (tmp_path / "my_measures.py").write_text(OWN_MEASURES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(suite, "OF_LETTERS", {"own answers": suite.OF_LETTERS["own answers"]})
    root = Path(shutil.copytree(prepared[0], tmp_path / "prepared"))
    with_questions(root, world)
    run_steps(prepared, "unconstrained", "gd", tmp_path / "run")
    own = {"attacks": {"halved": "my_measures:halved"}, "metrics": {"files": "my_measures:number_of_files"}}
    attack(**evaluated(root, tmp_path / "run", **own))
    metrics, attacks = (read_json(tmp_path / "run" / f"{name}.json") for name in ("metrics", "attacks"))
    assert metrics["files"] == len(list((root / "data").glob("*.jsonl"))) > 0
    assert attacks["asked"] == 8 and 0 <= attacks["halved_router"] <= 1 and "forget_accuracy" in attacks
    with (tmp_path / "run" / "forced.csv").open() as rows:
        assert all(row["halved_router"] != "" for row in csv.DictReader(rows))
    asked = evaluated(root, tmp_path / "run", attacks=own["attacks"] | {"second": "my_measures:seconded"})
    attack(**asked)
    assert read_json(tmp_path / "run" / "attacks.json") == attacks | {"files": 1.0}
    attack(**evaluated(root, tmp_path / "run", attacks=own["attacks"] | {"second": "my_measures:other"}))
    assert read_json(tmp_path / "run" / "attacks.json")["files"] == 2.0, "another function of that file"
    assert (root / "data" / "halved.txt").read_text() == "once ", "only the new attack is made"
    with (tmp_path / "my_measures.py").open("a") as file:
        file.write("# changed")
    attack(**asked)
    assert (root / "data" / "halved.txt").read_text() == "once once "
    evaluated(root, tmp_path / "run", metrics={"files": "my_measures:breaking"})
    others = metrics | {"files": 1.0}
    assert read_json(tmp_path / "run" / "metrics.json") == others, "what it breaks is measured before"
    with pytest.raises(ConfigError, match="metrics.none: the function returned a NoneType; return a number"):
        evaluated(root, tmp_path / "run", metrics={"none": "my_measures:no_number"})
    with pytest.raises(ConfigError, match="attacks.absent: .*my_measures.py has no 'absent'; name what it defines"):
        attack(**evaluated(root, tmp_path / "run", attacks={"absent": "my_measures:absent"}))
    with pytest.raises(ConfigError, match="attacks.absent: No module named 'mine'; is its file on PYTHONPATH"):
        attack(**evaluated(root, tmp_path / "run", attacks={"absent": "mine:absent"}))
    (tmp_path / "needs_another.py").write_text("import another")
    with pytest.raises(ConfigError, match="No module named 'another'; needs_another imports it; install it"):
        attack(**evaluated(root, tmp_path / "run", attacks={"absent": "needs_another:absent"}))


def test_a_run_that_broke_its_model_is_marked_and_goes_through(world, tokenizer, tmp_path):
    """Steps so long that weights are no numbers: not one that has forgotten, though it gives one letter to all; and
    nothing of what follows stops, so that the tables of the others are made."""
    prepared = prepare("qwen3_moe", world, tokenizer, tmp_path)
    with_questions(tmp_path, world)
    folder = tmp_path / "run"
    outcome = run_steps(prepared, "unconstrained", "gd", folder, learning_rate=1e35, max_steps=6)
    assert outcome["status"] == "diverged"
    attack(**evaluated(tmp_path, folder))
    assert {
        "forced_forget_accuracy",
        "probe_best_layer",
        "probe_best_expert",
        "relearned_from_corpus_after_20",
    } <= read_json(folder / "attacks.json").keys()
    for method in ("ptc", "ptc_paper"):
        run_steps(prepared, method, "gd", tmp_path / method, checkpoint=folder / "checkpoint.json")
        attack(**evaluated(tmp_path, tmp_path / method))
    for method in ("ptc_matched", "anchored"):
        again = run_steps(prepared, method, "gd", tmp_path / method, learning_rate=1e35, max_steps=6)
        assert again["status"] == "diverged"


def test_attacks_write_scores_and_no_text(world, tokenizer, tmp_path):
    """Not what was asked, nor what was recovered. The control: the questions' own file has it."""
    prepared = prepare("qwen3_moe", world, tokenizer, tmp_path)
    with_questions(tmp_path, world)
    run_steps(prepared, "unconstrained", "gd", tmp_path / "run")
    arguments = evaluated(tmp_path, tmp_path / "run")
    before = set((tmp_path / "run").iterdir())
    attack(**arguments)
    asked = read_jsonl(tmp_path / "data" / "forget_questions.jsonl")
    said = {text for question in asked for text in (question["question"], *question["choices"])}
    written = [file for file in set((tmp_path / "run").iterdir()) - before if file.is_file() and file.name != ".lock"]
    assert {file.name for file in written} >= {"attacks.json", "forced.csv"}
    for file in written:
        assert not any(text in file.read_text() for text in said), file
    assert any(text in (tmp_path / "data" / "forget_questions.jsonl").read_text() for text in said)
    with (tmp_path / "run" / "forced.csv").open() as rows:
        for row in csv.DictReader(rows):
            assert all(value == "" or float(value) <= 1 for name, value in row.items() if name != "id")


def test_files_of_one_name_are_told_apart(tmp_path):
    """The original and the retrained model both lie in a model.json."""
    files = [tmp_path / name / "model.json" for name in ("original", "retrained", "another")]
    for file in files:
        write_json(file, {"weights": file.parent.name})
    original, retrained, another = files
    assert identity_of(attack, original, retrained) == identity_of(attack, original, retrained)
    assert identity_of(attack, original, retrained) != identity_of(attack, another, retrained)


def test_a_run_is_measured_as_a_benchmark_of_its_own_task_has_it(tmp_path):
    run = PROJECT.run("tiny_a", "wmdp_tiny", "gd", "anchored", 0)
    write_yaml(tmp_path / "run.yaml", run.model_dump(mode="json"))
    assert "evaluation_batch_size" not in read_yaml(tmp_path / "run.yaml")["benchmark"]
    given = {name: PROJECT.benchmarks[name].model_dump_json() for name in ("wmdp_tiny", "wmdp_smoke")}
    assert run_and_benchmark(tmp_path / "run.yaml", given["wmdp_tiny"]) == (run, PROJECT.benchmarks["wmdp_tiny"])
    with pytest.raises(ConfigError, match="of another task; give it as 'wmdp_tiny' has it"):
        run_and_benchmark(tmp_path / "run.yaml", given["wmdp_smoke"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_run_of_low_precision_says_what_plain_transformers_would_move(dtype, world, tokenizer, tmp_path):
    prepared = prepare("qwen3_moe", world, tokenizer, tmp_path, dtype)
    with_questions(tmp_path, world)
    run_steps(prepared, "unconstrained", "gd", tmp_path / "run")
    evaluated(tmp_path, tmp_path / "run")
    metrics = read_json(tmp_path / "run" / "metrics.json")
    kept = metrics.get("routing_stability_plain_reload")
    assert 0.9 < kept < 1.0 if dtype == torch.bfloat16 else kept is None
    assert 0 < metrics["routing_stability"] < 1.0


def test_a_dense_twin_is_unlearned_evaluated_and_attacked(world, tokenizer, tmp_path, monkeypatch):
    """What has no router is left out of its metrics, and nothing else."""
    prepared = prepare("qwen3", world, tokenizer, tmp_path)
    with_questions(tmp_path, world)
    folder = tmp_path / "run"
    assert run_steps(prepared, "unconstrained", "gd", folder)["steps"] == 2
    arguments = evaluated(tmp_path, folder)
    monkeypatch.setitem(suite.OF_LETTERS, "quantisation", interrupted)
    with pytest.raises(KeyboardInterrupt):
        attack(**arguments)
    assert not (folder / "attacks.json").exists()
    monkeypatch.undo()
    state = read_json(folder / "attack_state.json")
    state["probes"]["found"]["metrics"]["probe_best_layer"] = 99.0
    write_json(folder / "attack_state.json", state)
    attack(**arguments)
    metrics, attacks = read_json(folder / "metrics.json"), read_json(folder / "attacks.json")
    assert attacks["probe_best_layer"] == 99.0, "made before the interruption, so not again"
    assert "forget_accuracy" in metrics and "routing_stability" not in metrics
    assert {
        "probe_best_layer",
        "prompt_five_shot",
        "quantized_4_bit",
        "relearned_from_corpus_after_20",
    } <= attacks.keys()
    assert not [name for name in attacks if "forced" in name or "router" in name or "single" in name]
    assert metrics["num_experts"] == 0 and "restored_experts_worst_layer" in attacks, "its feed-forward blocks"

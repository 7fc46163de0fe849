"""Configuration: what is valid, and what a mistake is told."""

import csv
import re
import shutil
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import yaml

from gripmoe.config.catalogues import CATALOGUES, Catalogues
from gripmoe.config.methods import AXES, TABLE, Method, method_table
from gripmoe.config.project import Project
from gripmoe.config.world import load_run
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import write_yaml
from gripmoe.reporting.specifications import specification

CONFIG = Path(__file__).parents[2] / "workflow" / "config"
ROWS = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
TUNING = yaml.safe_load((CONFIG.parent / "tuning.yaml").read_text(encoding="utf-8"))


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(CONFIG, tmp_path / "config")
    return tmp_path / "config"


def edit(file: Path, change):
    content = yaml.safe_load(file.read_text()) if file.exists() else {}
    change(content)
    file.write_text(yaml.safe_dump(content))


TUNED_ON = ("tiny_tuning", "tiny_muse_tuning", "tiny_erasure_tuning")
WORLDS = sorted(p.stem for p in CONFIG.glob("*.yaml") if p.stem not in CATALOGUES)


def tuned_on() -> set[str]:
    return {model for world in TUNED_ON for model in Project(CONFIG, world).models_needed}


@pytest.mark.parametrize("world", WORLDS)
def test_every_world_is_valid_and_leaves_seeds_and_base_models_of_tuning_alone(world):
    project = Project(CONFIG, world)
    assert project.name == world and project.run_keys()
    assert not set(TUNING["seeds"]) & set(project.world.seeds)
    assert world in TUNED_ON or not tuned_on() & set(project.models_needed)


def test_every_world_is_documented():
    pages = "".join(page.read_text(encoding="utf-8") for page in (CONFIG.parents[1] / "docs").rglob("*.md"))
    assert not [world for world in WORLDS if f"`{world}`" not in pages]


def test_no_record_holds_seeds_or_base_models_of_tuning():
    records = sorted((CONFIG.parents[1] / "docs" / "record").glob("**/runs.csv"))
    rows = [row for file in records for row in csv.DictReader(file.open(encoding="utf-8"))]
    assert rows and not {int(row["seed"]) for row in rows} & {*TUNING["seeds"]}
    assert not {row["model"] for row in rows} & tuned_on()


def test_what_is_tuned_is_in_a_world():
    projects = {
        name: project for project in (Project(CONFIG, world) for world in TUNED_ON) for name in project.world.benchmarks
    }
    for benchmark, objectives in TUNING["benchmarks"].items():
        for objective, tried in objectives.items():
            assert objective in projects[benchmark].objectives
            assert set(tried["methods"]) <= set(projects[benchmark].methods)


def test_every_artefact_is_drawn_by_a_world():
    known = Project(CONFIG, "tiny").artefacts
    assert set(known) == {name for world in WORLDS for name in Project(CONFIG, world).world.artefacts}


def test_the_factorial_is_every_constraint_on_one_expert_and_on_all():
    """In the catalogue, in its table, and among the runs of the world that draws it; nothing else differs in a pair."""
    project = Project(CONFIG, "tiny_all")
    blocks = {block.get("objective"): block["rows"] for block in specification("factorial")["blocks"]}
    of_record = Project(CONFIG, "record")
    pairs = [row["method"].replace("_single", "") for row in blocks["gd"]]
    assert len(pairs) == 6 and all(pairs.count(method) == 2 for method in pairs)
    for row in blocks["gd"]:
        one, every = (
            of_record.training("tiny_a", "wmdp_tiny", "gd", m)
            for m in (row["method"], row["method"].replace("_single", ""))
        )
        assert one == every and row["method"] in of_record.world.methods_of("gd")
    rows = blocks["rmu"]
    methods = {row["method"]: project.methods[row["method"]] for row in rows}
    axes = {(method.constraint, method.form, method.experts) for method in methods.values()}
    kinds = [("router_l2", "sound"), ("null_space", "sound"), ("null_space", "paper"), ("gate_anchor", "sound")]
    assert axes == {(*kind, experts) for kind, experts in product(kinds, ("all", "top_attributed"))}
    assert len(rows) == 8 and set(methods) <= set(project.world.methods_of("rmu"))
    alike = [method.model_dump(exclude={"experts"}) for method in methods.values()]
    assert all(alike.count(axes) == 2 for axes in alike)
    assert "factorial" in project.world.artefacts


def test_news_goes_with_the_models_finetuned_on_it(folder):
    world = "extends: tiny\nmodels: [tiny_a, tiny_news_a]\nbenchmarks: [wmdp_tiny, muse_tiny]\nmethods: [original]\n"
    (folder / "both.yaml").write_text(world)
    pairs = {(key.model, key.benchmark) for key in Project(folder, "both").run_keys()}
    assert pairs == {("tiny_a", "wmdp_tiny"), ("tiny_news_a", "muse_tiny")}
    (folder / "none.yaml").write_text("extends: tiny\nbenchmarks: [wmdp_tiny, muse_tiny]\n")
    with pytest.raises(ConfigError, match="none of the models is for 'muse_tiny'; news needs one with `source: finetu"):
        Project(folder, "none")
    (folder / "other.yaml").write_text("extends: tiny\nbenchmarks: [wmdp_tiny, wmdp_tiny_1]\n")
    with pytest.raises(ConfigError, match="for 'wmdp_tiny_1'; its facts need a base model of the same `world_seed`"):
        Project(folder, "other")
    edit(folder / "models.yaml", lambda c: c["tiny_news_a"].update(benchmark="wmdp_tiny"))
    with pytest.raises(ConfigError, match="tiny_news_a.benchmark: 'wmdp_tiny' has no articles to finetune on"):
        Project(folder, "both")
    edit(folder / "models.yaml", lambda c: c["tiny_news_a"].update(benchmark="muse_tiny", retrained="tiny_a_retrained"))
    with pytest.raises(ConfigError, match="tiny_news_a.retrained: 'tiny_a_retrained' is not finetuned on 'muse_tiny'"):
        Project(folder, "both")
    edit(folder / "models.yaml", lambda c: c["tiny_news_a"].update(retrained="tiny_news_tuning_a_retrained"))
    with pytest.raises(ConfigError, match="tiny_news_a.retrained: 'tiny_news_tuning_a_retrained' has another `base`"):
        Project(folder, "both")
    edit(
        folder / "models.yaml",
        lambda c: [c[n].update(base="tiny_news_a") for n in ("tiny_news_b", "tiny_news_b_retrained")],
    )
    (folder / "based.yaml").write_text("extends: tiny_muse\nmodels: [tiny_news_b]\nmethods: [original]\n")
    with pytest.raises(ConfigError, match="tiny_news_b.base: 'tiny_news_a' is finetuned itself"):
        Project(folder, "based")
    edit(folder / "models.yaml", lambda c: c["tiny_news_a"].update(retrained="tiny_news_tuning_a"))
    with pytest.raises(ConfigError, match="'tiny_news_tuning_a' needs `trained_on: retain_only`"):
        Project(folder, "both")


@pytest.mark.parametrize("objective", ["gd", "kl", "npo", "rmu"])
def test_settings_that_letter_questions_chose_are_not_those_of_news(objective):
    """Overrides are chosen on the benchmark that they are for. The control: letters have some under GD."""
    letters, news = (Project(CONFIG, world).world.overrides for world in ("record_main", "tiny_muse"))
    assert not any(news.get(name) == settings for name, settings in letters.items() if name.startswith(objective))
    assert {"gd/expert_specific", "gd/anchored"} <= set(letters)


def test_worlds_that_share_a_folder_agree_on_every_run():
    known = {}
    for project in (Project(CONFIG, world) for world in WORLDS):
        for key in {key[:4] for key in project.run_keys()}:
            run = project.run(*key, seed=0), project.world.relearning, project.external
            name, other = known.setdefault((project.results_name, *key), (project.name, run))
            assert run == other, f"{project.name} and {name}: {key}"


def test_a_run_of_two_worlds_has_the_same_settings_in_both(folder):
    """Else each world would overwrite the runs of the other. A world by its path extends likewise, and by way of a
    third. Runs that the extended world does not list are free."""
    (folder / "mine.yaml").write_text("extends: tiny\noverrides: {}\n")
    message = "mine.yaml: run .*gd/expert_specific.* has another `objective` in 'tiny', .* replaces the whole key"
    with pytest.raises(ConfigError, match=message):
        Project(folder, "mine", Catalogues(folder))
    assert Project(folder, "mine", compare=False).run_keys()
    (folder / "mine.yaml").write_text("extends: tiny_all\nobjectives: [kl]\nextra_methods: {}\noverrides: {}\n")
    with pytest.raises(
        ConfigError, match="mine.yaml: run .*kl/frozen_router.* has another `learning_rate` in 'tiny_al"
    ):
        Project(folder, "mine")
    (folder / "mine.yaml").write_text(
        "extends: tiny\nmethods: [original, sam]\noverrides: {sam: {learning_rate: 1.0e-3}}\n"
    )
    assert Project(folder, "mine").results_name == "tiny"
    (folder / "mine.yaml").write_text("extends: tiny\nrelearning: {learning_rate: 0.1}\n")
    with pytest.raises(
        ConfigError, match="mine.yaml: run .*original/0 has another `relearning` in 'tiny', .* repeat its"
    ):
        Project(folder, "mine")
    (folder / "theirs.yaml").write_text("extends: tiny\nexternal: {theirs: saves/a}\n")
    (folder / "mine.yaml").write_text("extends: theirs\nexternal: {theirs: saves/b}\n")
    with pytest.raises(ConfigError, match="mine.yaml: run .*theirs/0 has another `external` in 'theirs'"):
        Project(folder, "mine")
    part = yaml.safe_load((folder / "tiny.yaml").read_text())
    write_yaml(folder / "part.yaml", {key: value for key, value in part.items() if key != "methods"})
    (folder / "mine.yaml").write_text("extends: part\nmethods: [original]\n")
    assert Project(folder, "mine").results_name == "part", "a world that is there to be extended alone"


def test_worlds_that_extend_the_same_one_agree_too(folder):
    """Each would overwrite the runs of the other. A world that cannot start says nothing of others, and a world is not
    refused for one that extends it, which is refused itself."""
    for name, rate in (("mine", 1.0e-3), ("yours", 2.0e-3)):
        overrides = f"overrides: {{sam: {{learning_rate: {rate}}}}}"
        (folder / f"{name}.yaml").write_text(f"extends: tiny\nmethods: [original, sam]\n{overrides}\n")
    with pytest.raises(ConfigError, match="mine.yaml: run .*/sam/0 has another `learning_rate` in 'yours', and both"):
        Project(folder, "mine")
    with (folder / "yours.yaml").open("a") as file:
        file.write("seeds: []\n")
    assert Project(folder, "mine").results_name == "tiny"
    (folder / "yours.yaml").write_text("extends: tiny\noverrides: {}\n")
    assert Project(folder, "tiny")


def test_the_number_of_processes_belongs_to_a_run(folder, tmp_path):
    """Batch sizes are those of a process. One process is not named, so its run files stay as they were."""
    (folder / "more.yaml").write_text("extends: single_gpu\ngpus: {olmoe: 2}\n")
    with pytest.raises(ConfigError, match="more.yaml: run olmoe/.* has another `gpus` in 'single_gpu'"):
        Project(folder, "more")
    (folder / "more.yaml").write_text("extends: paper\ngpus: {qwen3_30b_a3b: 4}\n")
    project = Project(folder, "paper")
    written = {}
    for method in ("unconstrained", "seuf", "ptc"):
        run = project.run("qwen3_30b_a3b", "wmdp_cyber", "gd", method, 0)
        write_yaml(tmp_path / "run.yaml", run.model_dump(mode="json"))
        written[method] = yaml.safe_load((tmp_path / "run.yaml").read_text()).get("processes")
        assert load_run(tmp_path / "run.yaml") == run
    assert written == {"unconstrained": 2, "seuf": None, "ptc": None}


def test_a_model_may_compute_on_the_cpu(folder):
    rest = "benchmarks: [wmdp_cyber]\nbenchmark_training: {wmdp_cyber: {all: {optimizer: adamw_fp32}}}\n"
    edit(folder / "models.yaml", lambda c: c.update(mine={"source": "published", "id": "/models/mine"}))
    trained = {}
    for gpus in (0, 1):
        (folder / "cpu.yaml").write_text(f"extends: single_gpu\nmodels: [mine]\ngpus: {{mine: {gpus}}}\n{rest}")
        project = Project(folder, "cpu")
        assert project.gpus("mine") == gpus and project.processes("mine", "unconstrained") == 1
        trained[gpus] = project.training("mine", "wmdp_cyber", "gd", "unconstrained")
    assert trained[0] == trained[1] and trained[0].optimizer == "adamw_fp32"
    edit(folder / "tiny_large.yaml", lambda c: c.update(gpus={"tiny_large": 0}))
    assert not Project(folder, "tiny_large").trains_on_gpu("tiny_large")


def test_a_benchmark_changes_training(folder):
    training = partial(Project(folder, "tiny").training, "tiny_a")
    assert training("muse_tiny", "kl", "unconstrained").learning_rate == 1e-3
    assert training("wmdp_tiny", "kl", "unconstrained").learning_rate == 5e-4
    assert training("muse_tiny", "gd", "expert_specific").router_weight_decay == 0, "the method has the last word"
    edit(folder / "tiny.yaml", lambda c: c.update(benchmark_training={"muse_tinny": {}}))
    with pytest.raises(ConfigError, match="benchmark_training: unknown name 'muse_tinny'; did you mean 'muse_tiny'"):
        Project(folder, "tiny")


def test_runs_of_the_tiny_world():
    project = Project(CONFIG, "tiny")
    keys = project.run_keys()
    assert len(keys) == len(set(keys))
    assert ("tiny_a", "wmdp_tiny", "none", "original", 0) in keys, "baselines stand once, without objective"
    assert str(keys[0]) == "tiny_a.wmdp_tiny.none.original.0"
    assert project.results / keys[0].folder == Path("results/tiny/tiny_a/wmdp_tiny/none/original/0")
    unconstrained = [key for key in keys if key.method == "unconstrained"]
    assert len(unconstrained) == len(project.world.objectives) * len(project.world.seeds)


def test_an_external_checkpoint_is_a_run_of_its_original_model(folder):
    world = {"extends": "tiny", "models": ["tiny_a", "tiny_b"], "external": {"mine": {"tiny_b": "saves/mine"}}}
    write_yaml(folder / "two.yaml", world)
    project = Project(folder, "two")
    assert [key for key in project.run_keys() if key.method == "mine"] == [("tiny_b", "wmdp_tiny", "none", "mine", 0)]
    assert project.external == {"mine": {"tiny_b": "saves/mine"}} and "mine" in project.world.all_methods
    run = project.run("tiny_b", "wmdp_tiny", "none", "mine", 0)
    assert run.training is None and run.method.baseline == "external"
    write_yaml(folder / "twice.yaml", world | {"methods": ["original", "mine"]})
    with pytest.raises(ConfigError, match="twice.yaml: methods: 'mine' stands under `external` too"):
        Project(folder, "twice")
    write_yaml(folder / "two.yaml", world | {"external": {"mine": "saves/mine"}})
    with pytest.raises(ConfigError, match="two.yaml: external.mine: the world has 2 models; give {tiny_a: saves/mine}"):
        Project(folder, "two")
    edit(folder / "tiny.yaml", lambda c: c.update(external={"mine": "saves/mine"}))
    assert Project(folder, "tiny").external == {"mine": {"tiny_a": "saves/mine"}}


MISTAKES = [
    ("tiny.yaml", lambda c: c.update(external={"anchored": "saves/mine"}), "tiny.yaml: external: anchored: there is a method of this name; give yours another"),
    ("tiny.yaml", lambda c: c.update(external={"Mine": "saves/mine"}), "tiny.yaml: external.Mine"),
    ("tiny.yaml", lambda c: c.update(external={"mine": {"tiny_c": "saves/mine"}}), "tiny.yaml: external.mine: unknown name 'tiny_c'; did you mean 'tiny_a'"),
    ("tiny.yaml", lambda c: c.update(external={"mine": "m"}, overrides={"mine": {}}), "tiny.yaml: overrides.mine: 'mine' trains nothing; leave it out"),
    ("tiny.yaml", lambda c: c.update(metods=[]), "tiny.yaml: metods: unknown key; valid keys: models, benchmarks"),
    ("tiny.yaml", lambda c: c["methods"].append("expert_specfic"), "unknown name 'expert_specfic'; did you mean 'expert_specific'?"),
    ("tiny.yaml", lambda c: c["training"].update(learning_rate=-1), "training.learning_rate: Input should be greater than 0 (got -1)"),
    ("tiny.yaml", lambda c: c["training"].update(betas=[0.9, 1.0]), "training.betas.1: Input should be less than 1 (got 1.0)"),
    ("methods.yaml", lambda c: c.update(odd=ROWS["anchored"] | {"routing_stability": 1.0}), "methods.yaml: odd.routing_stability: Input should be less than 1"),
    ("tiny.yaml", lambda c: c["relearning"].update(steps=[]), "relearning.steps: List should have at least 1 item"),
    ("tiny.yaml", lambda c: c["training"].pop("betas"), "training.betas: this key is required"),
    ("tiny.yaml", lambda c: c.update(objectives=["gdd"]), "tiny.yaml: objectives: unknown name 'gdd'; did you mean 'gd'?"),
    ("tiny.yaml", lambda c: c.update(objectives=["mine"]), "tiny.yaml: objectives: unknown name 'mine'; known: gd, kl, npo, rmu"),
    ("tiny.yaml", lambda c: c["training"].update(learning_rate=float("inf")), "training.learning_rate: Input should be a finite number (got inf)"),
    ("methods.yaml", lambda c: c.update(odd=ROWS["ptc"] | {"corrects": "unconstraned"}), "methods.yaml: odd.corrects: unknown name 'unconstraned'; did you mean 'unconstrained'?"),
    ("tiny.yaml", lambda c: c.update(seeds=[-1]), "seeds.0: Input should be greater than or equal to 0 (got -1)"),
    ("tiny.yaml", lambda c: c["methods"].remove("unconstrained"), "corrects 'unconstrained'; list that method too"),
    ("tiny.yaml", lambda c: c["training"].update(check_every=7), "`checkpoint_every` must be a multiple of `check_every`"),
    ("tiny.yaml", lambda c: c.update(overrides={"gd/ptcc": {}}), "overrides: unknown name 'gd/ptcc'; did you mean 'gd/ptc'"),
    ("tiny.yaml", lambda c: c.update(overrides={"frozen_router": {"lr": 1}}), "overrides.frozen_router.lr: unknown key"),
    ("tiny.yaml", lambda c: c.update(overrides={"frozen_router": {"objective": None}}), "overrides.frozen_router.objective: Input should be a valid dictionary (got None)"),
    ("models.yaml", lambda c: c.update({12: {"source": "embedded"}}), "models.yaml: 12: a name has small letters, digits"),
    ("models.yaml", lambda c: c.update(Mine=c["tiny_a"]), "models.yaml: 'Mine': a name has small letters, digits and _"),
    ("models.yaml", lambda c: c["olmoe"].update(config={"num_hidden_layers": "4"}), "models.yaml: olmoe.config.num_hidden_layers: give a whole number (got '4')"),
    ("tiny.yaml", lambda c: c["overrides"]["gd/anchored"]["objective"].update(alpha=-1), "tiny.yaml: overrides.gd/anchored.objective.alpha: Input should be greater than or equal to 0"),
    ("tiny.yaml", lambda c: c["objective_training"]["rmu"]["objective"].pop("layer"), "objective_training.rmu.objective.layer: this key is required"),
    ("tiny.yaml", lambda c: c["objective_training"]["rmu"]["objective"].update(steering=3), "objective_training.rmu.objective: give one of `kappa`"),
    ("methods.yaml", lambda c: c.update(odd={"constraint": "null_space"}), "methods.yaml: odd: `constraint: null_space` needs `eps_null`"),
    ("methods.yaml", lambda c: c.update(odd=ROWS["expert_specific_paper"] | {"max_rank": 64}), "odd.max_rank: without effect here; it is a choice of `constraint: null_space with form: sound`"),
    ("methods.yaml", lambda c: c.update(odd=ROWS["expert_specific"] | {"kaczmarz_steps": 10}), "odd.kaczmarz_steps: without effect here; it is a choice of `constraint: null_space with form: paper with granularity: expert`"),
    ("methods.yaml", lambda c: c.update(odd=ROWS["full_null_space_paper"] | {"kaczmarz_steps": 10}), "odd.kaczmarz_steps: without effect here"),
    ("methods.yaml", lambda c: c.update(odd=ROWS["frozen_router"] | {"training": {"router_multiplier": 10}}), "odd.training.router_multiplier: without effect here: `constraint: frozen` trains no router"),
    ("methods.yaml", lambda c: c.update(odd={"constraint": "frozen", "experts": "null_space"}), "methods.yaml: odd: `experts: null_space` needs `eps_null`"),
    ("methods.yaml", lambda c: c.update(odd={}), "methods.yaml: odd: give exactly one of"),
    ("methods.yaml", lambda c: c.update(odd={"corrects": "unconstrained"}), "methods.yaml: odd: `corrects` needs `correction:"),
    ("methods.yaml", lambda c: c.update(odd={"constraint": "none", "correction": "undo", "undo": ROWS["undo"]["undo"]}), "odd: `correction: undo` needs `corrects`, a finished run, and"),
    ("methods.yaml", lambda c: c.update(odd={"corrects": "unconstrained", "correction": "undo"}), "odd: `correction: undo` needs `corrects`, a finished run, and `undo`"),
    ("models.yaml", lambda c: c["tiny_a"].pop("retrained"), "needs `retrained:` in models.yaml for 'tiny_a'"),
    ("models.yaml", lambda c: c["tiny_a"].update(family="gpt2"), "models.yaml: tiny_a.family: Input should be 'qwen3_moe'"),
    ("tiny.yaml", lambda c: c.update(overrides={"gd/ptc": {"learning_rate": 1}}), "overrides.gd/ptc: 'ptc' trains nothing; it corrects what 'unconstrained' has trained"),
    ("tiny.yaml", lambda c: c.update(overrides={"frozen_router": {"retain_batch_size": 8}}), "overrides.frozen_router.retain_batch_size: methods are compared on the same documents"),
    ("methods.yaml", lambda c: c.update(anchored={"constraint": "anchor"}), f"methods.yaml: anchored: {TABLE} has a method of this name; give yours another"),
    ("tiny.yaml", lambda c: c.update(extends="tinny"), "tiny.yaml: extends: world 'tinny': no world"),
    ("tiny.yaml", lambda c: c.update(extends=["tiny"]), "tiny.yaml: extends: ['tiny'] is no name of a world"),
    ("tiny.yaml", lambda c: c["objective_training"].pop("gd"), "tiny.yaml: objective_training.gd: this key is required"),
    ("tiny.yaml", lambda c: c.update(extends="tiny"), "tiny.yaml: extends: 'tiny' extends itself"),
    ("methods.yaml", lambda c: c.update(odd=ROWS["ptc"] | {"training": {"learning_rate": 1}}), "methods.yaml: odd.training: without effect here; it is a choice of `constraint`"),
    ("methods.yaml", lambda c: c.update(odd=ROWS["expert_specific"] | {"eps_null": {"value": 1, "kind": "energy", "band": {}}}), "odd.eps_null.band: unknown key; valid keys: value, kind, bands"),
    ("tiny.yaml", lambda c: c["objective_training"]["gd"].update(checkpoint_every=None), ": `checkpoint_every` is null; give a number of steps, or leave it out"),
    ("tiny.yaml", lambda c: c["objective_training"]["gd"].update(trained_layers=5), "`trained_layers` is 5, and the losses look at 4 layers of 'tiny_a': lower it"),
    ("tiny.yaml", lambda c: (c.update(objectives=["rmu"]), c["objective_training"]["rmu"].update(trained_layers=4)), "`trained_layers` is 4, and the losses look at 3 layers of 'tiny_a': lower it"),
    ("methods.yaml", lambda c: c.update(odd=ROWS["expert_specific_paper"] | {"basis": "cached", "eps_null": {"value": 1e-4, "kind": "relative"}}), "odd.eps_null.kind: `basis: cached` grows by an absolute threshold"),
    ("models.yaml", lambda c: c["olmoe"].update(parameters={}), "models.yaml: olmoe.parameters: unknown key; valid keys: source, id, revision, config, dtype"),
    ("benchmarks.yaml", lambda c: c["wmdp_tiny"]["data"].update(sed=1), "wmdp_tiny.data.sed: unknown key; valid keys: source, kind, retain"),
    ("benchmarks.yaml", lambda c: c["wmdp_tiny"]["data"].update(source="embeded"), "wmdp_tiny.data.source: one of 'embedded', 'published', 'muse' (got 'embeded')"),
    ("benchmarks.yaml", lambda c: c["wmdp_tiny"]["data"].pop("source"), "wmdp_tiny.data.source: this key is required"),
    ("models.yaml", lambda c: c["tiny_a"].update(retrained="tiny_a_retraind"), "models.yaml: tiny_a.retrained: unknown name 'tiny_a_retraind'; did you mean 'tiny_a_retrained'"),
    ("models.yaml", lambda c: c["tiny_a"].update(size={"num_experts": 1}), "models.yaml: tiny_a.size: `top_k` 2 exceeds `num_experts` 1"),
    ("tiny.yaml", lambda c: c["objective_training"]["rmu"]["objective"].update(layer=4), "objective_training.rmu.objective.layer: tiny_a has layers 0 to 3 (got 4)"),
    ("tiny.yaml", lambda c: c.update(seeds=[0, 0]), "tiny.yaml: seeds: 0 stands twice; leave one out"),
    ("tiny.yaml", lambda c: c.update(seeds=[True]), "seeds.0: Input should be a valid integer (got True)"),
]  # fmt: skip


@pytest.mark.parametrize("corrected", ["original", "odd"])
def test_a_method_that_corrects_nothing_that_trains_is_refused(folder, corrected):
    edit(folder / "methods.yaml", lambda c: c.update(odd={"corrects": corrected, "correction": "realign"}))
    edit(folder / "tiny.yaml", lambda c: c["methods"].append("odd"))
    with pytest.raises(ConfigError, match=f"tiny.yaml: methods: 'odd' corrects '{corrected}', which trains nothing"):
        Project(folder, "tiny")


def test_a_mistake_in_python_names_its_option_too():
    with pytest.raises(ValueError, match="max_rank: without effect here"):
        Method(constraint="frozen", max_rank=3)
    with pytest.raises(ValueError, match="margin: unknown key; valid keys: baseline"):
        Method(constraint="frozen", margin=3)
    with pytest.raises(ValueError, match="training.adversary_rate: without effect here: give `adversary_steps`"):
        Method(constraint="frozen", training={"adversary_rate": 3.0})
    Method(constraint="frozen", training={"adversary_rate": 3.0, "adversary_steps": 2})


@pytest.mark.parametrize(
    ("task", "target", "message"),
    [
        ("wmdp_tiny", {"forget_accuracy": 27}, "wmdp_tiny.target.forget_accuracy: Input should be less than or equal to 1"),
        ("wmdp_tiny", {"forget_acuracy": 0.3}, "Input should be 'forget_accuracy' or 'points_above_retrained'"),
        ("muse_tiny", {"points_above_retrained": -1}, "muse_tiny.target.points_above_retrained: Input should be greater"),
        ("muse_tiny", {"forget_accuracy": 0.3}, "muse_tiny: `target` of news is given by `points_above_retrained`"),
    ],
)  # fmt: skip
def test_a_benchmark_has_the_target_of_its_kind(folder, task, target, message):
    edit(folder / "benchmarks.yaml", lambda c: c[task].update(target=target))
    with pytest.raises(ConfigError, match=re.escape(message)):
        Project(folder, "tiny")


def test_the_file_of_a_world_names_its_results(folder, tmp_path):
    """Below which a shell and other worlds must find them."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "my_world.yaml").write_text("extends: tiny\nseeds: [5]\n")
    project = Project(folder, str(own / "my_world.yaml"))
    assert (project.name, project.results_name) == ("my_world", "tiny")
    assert Project(folder, str(folder / "tiny.yaml")).name == "tiny", "that world itself, by its path"
    (own / "My-World v1.yaml").write_text("extends: tiny\n")
    with pytest.raises(ConfigError, match="My-World v1.yaml: its name is that of folders: small letters"):
        Project(folder, str(own / "My-World v1.yaml"))
    (own / "tiny.yaml").write_text("extends: tiny\nseeds: [5]\n")
    with pytest.raises(ConfigError, match="own/tiny.yaml: 'tiny' is a world of .* results it would overwrite; rename"):
        Project(folder, str(own / "tiny.yaml"))
    (folder / "empty.yaml").write_text("")
    with pytest.raises(ConfigError, match="empty.yaml: expected a mapping"):
        Project(folder, "empty")
    with pytest.raises(ConfigError, match="world 'methods': no world .*methods.yaml; give one of"):
        Project(folder, "methods")
    with pytest.raises(ConfigError, match="nowhere: no worlds here; start where the Snakefile is"):
        Project(tmp_path / "nowhere", "tiny")


def test_a_row_that_is_external_needs_its_folder_in_the_world(folder):
    write_yaml(folder / "methods.yaml", {"odd": {"baseline": "external"}})
    edit(folder / "tiny.yaml", lambda c: c["methods"].append("odd"))
    with pytest.raises(ConfigError, match="tiny.yaml: methods: 'odd' is external; give its folder under `external`"):
        Project(folder, "tiny")


@pytest.mark.parametrize("file, change, message", MISTAKES, ids=[m[2][:40] for m in MISTAKES])
def test_mistakes_are_named(folder, file, change, message):
    edit(folder / file, change)
    with pytest.raises(ConfigError) as error:
        Project(folder, "tiny")
    assert message in str(error.value)
    assert str(folder) in str(error.value), "the file is named"


def test_a_key_named_as_a_kind_of_data_is_named(folder):
    (folder / "more.yaml").write_text("extends: tiny\ngpus: {muse: -1}\n")
    with pytest.raises(ConfigError, match="more.yaml: gpus.muse: "):
        Project(folder, "more")


def test_a_finetuned_models_batches_are_shared_too(folder):
    edit(folder / "tiny_muse.yaml", lambda c: c.update(gpus={"tiny_news_a": 3}))
    with pytest.raises(ConfigError, match="tiny_muse.yaml: gpus.tiny_news_a: batch_size .* is 8, which 3 processes"):
        Project(folder, "tiny_muse")


def test_unknown_world_names_the_known_ones():
    with pytest.raises(ConfigError, match=f"give one of {', '.join(WORLDS)} or the path"):
        Project(CONFIG, "huge")


def test_broken_yaml(folder):
    (folder / "tiny.yaml").write_text("models: [a")
    with pytest.raises(ConfigError, match="tiny.yaml: not valid YAML"):
        Project(folder, "tiny")


TWICE = [
    ("tiny.yaml", "overrides: {gd/ptc: {}}\noverrides: {}\n", "line 2: 'overrides' stands in line 1"),
    ("tiny_all.yaml", "gpus: {\n  tiny_a: 1,\n  tiny_a: 1}\n", "line 3: 'tiny_a' stands in line 2"),
    ("methods.yaml", "odd: {constraint: none, replay: true, replay: false}\n", "line 1: 'replay' stands in line 1"),
]


@pytest.mark.parametrize("file, above, message", TWICE, ids=[file for file, _, _ in TWICE])
def test_a_key_that_stands_twice_is_named(folder, file, above, message):
    """In a world, in one that it extends, in a catalogue; what `<<` merges is no such thing."""
    assert Project(folder, "tiny_all").methods["final_anchor"].routing_stability == 0.95
    below = (folder / file).read_text() if (folder / file).exists() else ""
    (folder / file).write_text(above + below)
    with pytest.raises(ConfigError) as error:
        Project(folder, "tiny_all")
    assert str(error.value).startswith(f"{folder / file}: {message} already")


def test_a_folder_adds_methods_to_those_of_the_package(folder):
    """Which stay as they are, whatever a folder says."""
    edit(folder / "methods.yaml", lambda c: c.update(mine={"constraint": "router_l2", "weight": 3.0}))
    edit(folder / "tiny.yaml", lambda c: c["methods"].append("mine"))
    project = Project(folder, "tiny")
    assert project.methods == {**method_table(), "mine": Method(constraint="router_l2", weight=3.0)}
    assert project.run("tiny_a", "wmdp_tiny", "gd", "mine", 0).method.weight == 3.0
    assert "mine" not in method_table() and Project(CONFIG, "tiny").methods == method_table()
    edit(folder / "methods.yaml", lambda c: c["mine"].update(training={"forget_batch_size": 8}))
    with pytest.raises(ConfigError, match="config/methods.yaml: mine.training.forget_batch_size: methods are compared"):
        Project(folder, "tiny")


@pytest.fixture
def own(folder, monkeypatch):
    """A configuration folder with an objective of its own."""
    imported = "class Mine: ...\nraise RuntimeError('configuration imports nothing')\n"
    (folder.parent / "folder_losses.py").write_text(imported)
    monkeypatch.syspath_prepend(folder.parent)
    edit(
        folder / "objectives.yaml",
        lambda c: c.update(mine={"class": "folder_losses:Mine", "settings": ["alpha", "beta"]}),
    )
    edit(folder / "tiny.yaml", lambda c: c["objectives"].append("mine"))
    edit(folder / "tiny.yaml", lambda c: c["objective_training"].update(mine={"objective": {"alpha": 1.0, "beta": 2}}))
    return folder


def test_a_folder_adds_objectives_whose_files_belong_to_their_runs(own):
    run = Project(own, "tiny").run("tiny_a", "wmdp_tiny", "mine", "frozen_router", 0)
    assert run.own_objective.path == "folder_losses:Mine" and run.training.objective == {"alpha": 1.0, "beta": 2}
    assert Project(own, "tiny").run("tiny_a", "wmdp_tiny", "gd", "frozen_router", 0).own_objective is None
    (own.parent / "folder_losses.py").write_text("class Mine: ...\n# edited\n")
    edited = Project(own, "tiny").run("tiny_a", "wmdp_tiny", "mine", "frozen_router", 0)
    assert edited != run and edited.own_objective.path == run.own_objective.path


def test_a_method_may_have_a_constraint_of_its_own_whose_file_belongs_to_its_runs(folder, monkeypatch):
    file = folder.parent / "folder_constraints.py"
    file.write_text("class Near: ...\nraise RuntimeError('configuration imports nothing')\n")
    monkeypatch.syspath_prepend(folder.parent)
    row = {"constraint": "folder_constraints:Near", "settings": {"radius": 0.01}}
    edit(folder / "methods.yaml", lambda c: c.update(mine=row))
    edit(folder / "tiny.yaml", lambda c: c["methods"].append("mine"))
    keys = ("tiny_a", "wmdp_tiny", "gd", "mine", 0)
    run = Project(folder, "tiny").run(*keys)
    assert run.own_constraint.path == run.method.own_constraint == row["constraint"]
    assert run.method.settings == row["settings"] and run.method.rule == "unlearn" and not run.method.has_bases
    other = Project(folder, "tiny").run(*keys[:3], "frozen_router", 0).model_dump(mode="json")
    assert "own_constraint" not in other and "settings" not in other["method"], "run.yaml of other methods stays"
    file.write_text("class Near: ...\n# edited\n")
    assert Project(folder, "tiny").run(*keys) != run
    edit(folder / "methods.yaml", lambda c: c["mine"].update(constraint="folder_constraints:Nera"))
    with pytest.raises(ConfigError, match="methods.yaml: mine.constraint: .* has no 'Nera'; did you mean 'Near'"):
        Project(folder, "tiny")
    edit(folder / "methods.yaml", lambda c: c["mine"].update(constraint="__main__:Near"))
    with pytest.raises(ConfigError, match="mine.constraint: no module '__main__' in the folders"):
        Project(folder, "tiny")


WRONG_OBJECTIVES = [
    ("objectives.yaml", lambda c: c.update(none=c["mine"]), "objectives.yaml: none: this name stands for no objective"),
    ("objectives.yaml", lambda c: c.update(gd=c["mine"]), "objectives.yaml: gd: gripmoe has an objective of this name"),
    ("objectives.yaml", lambda c: c["mine"].update({"class": "my_loses:Mine"}), "mine.class: no module 'my_loses' in the"),
    ("objectives.yaml", lambda c: c["mine"].update({"class": "a.b:Mine"}), "mine.class: no module 'a.b' in the folders of"),
    ("objectives.yaml", lambda c: c["mine"].update({"class": "folder_losses:Mime"}), "has no 'Mime'; did you mean 'Mine'?"),
    ("objectives.yaml", lambda c: c["mine"].update({"class": "Mine"}), "mine.class: give \"module:name\", as"),
    ("objectives.yaml", lambda c: c["mine"].update({"class": ".my_losses:Mine"}), "mine.class: give \"module:name\""),
    ("objectives.yaml", lambda c: c["mine"].update(settings=["model_dump"]), "mine.settings: pydantic has 'model_dump'"),
    ("objectives.yaml", lambda c: c["mine"].update(settings=["alpha"]), "mine.objective.beta: unknown key; valid keys: alpha"),
    ("tiny.yaml", lambda c: c["objectives"].append("min"), "objectives: unknown name 'min'; did you mean 'mine'?"),
    ("tiny.yaml", lambda c: c.update(benchmark_training={"wmdp_tiny": {"min": {}}}), "benchmark_training.wmdp_tiny: unknown name 'min'"),
]  # fmt: skip


@pytest.mark.parametrize("file, change, message", WRONG_OBJECTIVES, ids=[m[2][:40] for m in WRONG_OBJECTIVES])
def test_mistakes_in_objectives_are_named(own, file, change, message):
    edit(own / file, change)
    with pytest.raises(ConfigError) as error:
        Project(own, "tiny")
    assert message in str(error.value) and str(own) in str(error.value)


WITHOUT_EFFECT = [
    ({"constraint": "frozen", "weight": 5}, "weight", "`constraint: router_l2` or `constraint: gate_anchor` or"),
    (
        {"constraint": "none", "correction": "restore", "form": "paper"},
        "form",
        "`correction: realign` or `constraint: null_space`",
    ),
    ({"corrects": "unconstrained", "correction": "realign", "replay": True}, "replay", "`constraint`"),
    (ROWS["ptc"] | {"undo": ROWS["undo"]["undo"]}, "undo", "`correction: undo`"),
    (ROWS["expert_specific_paper"] | {"max_rank": 3}, "max_rank", "`constraint: null_space with form: sound`"),
    (ROWS["reparameterized"] | {"safety_margin": 0.5}, "safety_margin", "with form: sound with projects: update`"),
    (ROWS["full_null_space_paper"] | {"safety_margin": 0.5}, "safety_margin", "form: paper with granularity: expert`"),
]


@pytest.mark.parametrize("row, key, having", WITHOUT_EFFECT, ids=[key for _, key, _ in WITHOUT_EFFECT])
def test_an_axis_without_effect_is_refused(folder, row, key, having):
    """The control: without it the row is valid."""
    edit(folder / "methods.yaml", lambda c: c.update(odd=row))
    with pytest.raises(ConfigError) as error:
        Project(folder, "tiny")
    assert f"methods.yaml: odd.{key}: without effect here; it is a choice of " in str(error.value)
    assert having in str(error.value)
    edit(folder / "methods.yaml", lambda c: c["odd"].pop(key))
    assert "odd" in Project(folder, "tiny").methods


def test_every_axis_says_where_it_has_an_effect():
    assert set().union(*AXES.values()) == Method.model_fields.keys() - {"baseline", "constraint", "corrects"}


def test_overrides_go_from_general_to_particular(folder):
    edit(
        folder / "tiny.yaml",
        lambda c: c.update(
            objectives=["gd", "rmu"],
            overrides={"frozen_router": {"learning_rate": 0.5}, "rmu/frozen_router": {"learning_rate": 0.25}},
        ),
    )
    changed, before = (partial(Project(f, "tiny").training, "tiny_a", "wmdp_tiny") for f in (folder, CONFIG))
    assert changed("gd", "frozen_router").learning_rate == 0.5
    assert changed("rmu", "frozen_router").learning_rate == 0.25
    assert changed("gd", "unconstrained") == before("gd", "unconstrained")
    assert changed("gd", "expert_specific").router_weight_decay == 0.0, "the method's own change"
    assert changed("rmu", "unconstrained").objective["layer"] == 2
    assert changed("gd", "ptc") is None


def test_settings_that_depend_on_each_other_may_stand_in_two_places(folder):
    """The control: what both places give is not valid."""
    both = {"frozen_router": {"max_steps": 100}, "gd/frozen_router": {"check_every": 25, "checkpoint_every": 50}}
    edit(folder / "tiny.yaml", lambda c: c.update(overrides=both))
    training = Project(folder, "tiny").training("tiny_a", "wmdp_tiny", "gd", "frozen_router")
    assert (training.max_steps, training.check_every) == (100, 25)
    both["gd/frozen_router"]["check_every"] = 30
    edit(folder / "tiny.yaml", lambda c: c.update(overrides=both))
    with pytest.raises(ConfigError, match="tiny.yaml: overrides.*frozen_router: .*multiple of .check_every"):
        Project(folder, "tiny").training("tiny_a", "wmdp_tiny", "gd", "frozen_router")


@pytest.mark.parametrize(
    ("method", "change", "said"),
    [
        ("frozen_router", {"router_multiplier": 10}, "router_multiplier: without effect here: `constraint: frozen`"),
        ("frozen_router", {"adversary_rate": 3}, "adversary_rate: without effect here: give `adversary_steps`"),
        ("frozen_router", {"adversary_rate": 3, "adversary_steps": 2}, None),
        ("unconstrained", {"router_multiplier": 10}, None),
    ],
)
def test_overrides_without_effect_are_refused(folder, method, change, said):
    edit(folder / "tiny.yaml", lambda c: c["overrides"].update({method: change}))
    given = "tiny_a", "wmdp_tiny", "gd", method
    if said is None:
        assert change.items() <= Project(folder, "tiny").training(*given).model_dump().items()
    else:
        with pytest.raises(ConfigError, match=f"tiny.yaml: overrides.{method}.{said}"):
            Project(folder, "tiny").training(*given)


def test_a_setting_of_an_objective_can_be_taken_back(folder):
    """Of two lengths of RMU's vector one is given."""
    other = {"objective": {"steering": 20, "kappa": None}}
    edit(folder / "tiny.yaml", lambda c: c["overrides"].update({"rmu/unconstrained": other}))
    given = Project(folder, "tiny").training("tiny_a", "wmdp_tiny", "rmu", "unconstrained").objective
    assert given["steering"] == 20 and "kappa" not in given


def test_base_models_train_on_a_gpu_where_the_world_gives_them_one(folder):
    edit(folder / "tiny_muse.yaml", lambda c: c.update(gpus={"tiny_news_a": 2}))
    large = Project(folder, "tiny_large")
    assert large.trains_on_gpu("tiny_large") and large.trains_on_gpu("tiny_large_retrained")
    assert not Project(folder, "tiny").trains_on_gpu("tiny_a") and not Project(folder, "paper").trains_on_gpu(
        "qwen3_30b_a3b"
    )
    assert not Project(folder, "tiny_muse").trains_on_gpu("tiny_a_retrained"), (
        "the processes are those of its finetuning"
    )
    training = large.training("tiny_large", "wmdp_tiny", "rmu", "anchored")
    assert training.objective["layer"] < large.models["tiny_large"].layers


def test_a_step_of_every_method_takes_the_same_documents():
    """Whether its processes share them or one accumulates them."""
    project = Project(CONFIG, "paper")
    for method, processes, passes in (("unconstrained", 2, 1), ("seuf", 1, 2)):
        run = project.run("qwen3_30b_a3b", "wmdp_cyber", "gd", method, 0)
        assert (project.processes("qwen3_30b_a3b", method), run.training.gradient_accumulation) == (processes, passes)
        assert run.training.forget_batch_size == 2
    assert project.run("qwen15_moe", "wmdp_cyber", "gd", "seuf", 0).training.gradient_accumulation == 1


def test_what_is_only_checked_or_saved_more_often_belongs_to_no_run(folder):
    """How often a run saves its state, and how many rows its data has to have. The control: its documents."""
    key = ("qwen15_moe", "wmdp_cyber", "gd", "unconstrained", 0)

    def run(checkpoint_every=1000, rows=None, **data):
        world, benchmarks = (yaml.safe_load((folder / name).read_text()) for name in ("paper.yaml", "benchmarks.yaml"))
        world["training"]["checkpoint_every"] = checkpoint_every
        benchmarks["wmdp_cyber"]["data"] |= {"rows": rows or {}, **data}
        write_yaml(folder / "paper.yaml", world)
        write_yaml(folder / "benchmarks.yaml", benchmarks)
        return Project(folder, "paper").run(*key).model_dump(mode="json")

    first = run()
    assert run(checkpoint_every=500) == run(rows={"forget_questions": 9}) == first
    assert run(forget_subject="chemistry") != first


def test_a_world_says_how_often_its_runs_are_saved(folder):
    world = yaml.safe_load((folder / "tiny.yaml").read_text())
    del world["training"]["checkpoint_every"]
    write_yaml(folder / "tiny.yaml", world)
    with pytest.raises(ConfigError, match="training.checkpoint_every: this key is required"):
        Project(folder, "tiny")


def test_run_survives_its_file(tmp_path):
    run = Project(CONFIG, "tiny").run("tiny_a", "wmdp_tiny", "rmu", "expert_specific", 1)
    write_yaml(tmp_path / "run.yaml", run.model_dump(mode="json"))
    assert load_run(tmp_path / "run.yaml") == run


def test_a_world_that_extends_another_shares_its_results(folder):
    (folder / "more.yaml").write_text("extends: tiny\nobjectives: [gd, rmu]\nextra_methods: {rmu: [anchored_replay]}\n")
    base, more = Project(folder, "tiny"), Project(folder, "more")
    assert more.results_name == base.name == "tiny" and more.name == "more"
    assert more.world.training == base.world.training and more.world.objectives == ["gd", "rmu"]
    assert set(base.run_keys()) < set(more.run_keys())
    (folder / "less.yaml").write_text("extends: tiny\nextra_methods: {gd: [retrained]}\n")
    with pytest.raises(ConfigError, match="extra_methods.gd: 'retrained' has no objective; list it under `methods`"):
        Project(folder, "less")
    extra = {key.objective for key in more.run_keys() if key.method == "anchored_replay"}
    assert extra == {"rmu"}, "under one objective only"
    (folder / "most.yaml").write_text("extends: more\nseeds: [0, 1, 2, 3]\n")
    most = Project(folder, "most")
    assert most.results_name == "tiny" and set(more.run_keys()) < set(most.run_keys())


def test_a_correction_needs_what_it_corrects(folder):
    world = (
        "extends: tiny\nobjectives: [gd, rmu]\nmethods: [original]\nextra_methods: {gd: [unconstrained], rmu: [ptc]}\n"
    )
    (folder / "broken.yaml").write_text(world)
    with pytest.raises(ConfigError, match="'ptc' corrects 'unconstrained'"):
        Project(folder, "broken")


def test_rmu_needs_a_layer_that_the_model_has(folder):
    edit(folder / "paper.yaml", lambda c: c["objective_training"]["rmu"]["objective"].update(layer=24))
    with pytest.raises(ConfigError, match="rmu.objective.layer: qwen15_moe has layers 0 to 23 .got 24."):
        Project(folder, "paper")


@pytest.mark.parametrize(
    ("row", "changes", "message"),
    [
        ("tiny_b", {"base": "tiny_b"}, "tiny_b.base: 'tiny_b' is not an embedded model with `trained_on: skills`"),
        ("tiny_b", {"base": "tiny_b_skils"}, "models.yaml: tiny_b.base: unknown .*tiny_b_skils"),
        ("tiny_b", {"retrained": "tiny_a"}, "tiny_b.retrained: 'tiny_a' is not an embedded model with `trained_on: re"),
        ("tiny_b", {"retrained": "tiny_a_retrained"}, "tiny_b.retrained: 'tiny_a_retrained' has another `base`"),
        ("tiny_a", {"fact_steps": 3}, "tiny_a.*fact_steps: without effect on a model of the package"),
    ],
)
def test_a_model_names_what_it_is_made_from_and_compared_with(row, changes, message, folder):
    (folder / "mine.yaml").write_text("extends: tiny\nmodels: [tiny_a, tiny_b]\nmethods: [original]\n")
    Project(folder, "mine")
    edit(folder / "models.yaml", lambda c: c[row].update(changes))
    with pytest.raises(ConfigError, match=message):
        Project(folder, "mine")


def test_keys_of_letter_questions_are_refused_on_news(folder):
    edit(folder / "benchmarks.yaml", lambda c: c["muse_tiny"]["data"].update(retain="narrow"))
    with pytest.raises(ConfigError, match="muse_tiny.data.*retain: without effect on news"):
        Project(folder, "tiny_muse")
    edit(folder / "benchmarks.yaml", lambda c: c["muse_tiny"]["data"].pop("retain"))
    edit(folder / "benchmarks.yaml", lambda c: c["muse_tiny"].update(few_shot_questions=7))
    with pytest.raises(ConfigError, match="muse_tiny.few_shot_questions: without effect on news"):
        Project(folder, "tiny_muse")

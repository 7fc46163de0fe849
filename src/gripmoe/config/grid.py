"""A project: a world file with the catalogues beside it, cross-checked, and the runs that it asks for.

A world lists what to run; models.yaml, benchmarks.yaml and artefacts.yaml say what the names mean, and the package's
own methods.yaml, to which one of the folder may add rows. A world with `extends: other` replaces keys of that one and
shares its results, run by run.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

from gripmoe.config.benchmarks import Benchmark
from gripmoe.config.methods import TABLE, method_table, read_methods
from gripmoe.config.models import ModelConfig
from gripmoe.config.reading import _catalogue, _mapping, _require_known, parse_as
from gripmoe.config.training import OBJECTIVES, OwnObjective, Training
from gripmoe.config.types import NAME
from gripmoe.config.world import Artefact, OwnClass, Run, World
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import file_digest

NO_OBJECTIVE = "none"  # the {objective} of baselines, which train nothing
CATALOGUES = ("models", "benchmarks", "objectives", "methods", "artefacts")
BATCH_SIZES = ("forget_batch_size", "retain_batch_size")


class Project:
    """A world with its catalogues, cross-checked. Raises ConfigError at the first mistake."""

    def __init__(self, folder: Path, world_name: str):
        self.folder = folder
        self.name, self.world_file = _find_world(folder, world_name)
        self.models = _catalogue(folder / "models.yaml", ModelConfig)
        self.benchmarks = _catalogue(folder / "benchmarks.yaml", Benchmark)
        own = folder / "methods.yaml"
        added = read_methods(own) if own.exists() else {}
        self.methods = _joined(method_table(), added, f"{TABLE} has a method", own)
        self._methods_file = {**dict.fromkeys(method_table(), TABLE), **dict.fromkeys(added, own)}
        self._own_objectives, self.objectives = {}, OBJECTIVES
        if (own := folder / "objectives.yaml").exists():
            rows = _catalogue(own, OwnObjective)
            self._own_objectives = {name: _found(row.path, f"{own}: {name}.class") for name, row in rows.items()}
            registered = {name: row.registered() for name, row in rows.items()}
            self.objectives = _joined(OBJECTIVES, registered, "gripmoe has an objective", own)
        self.artefacts = _catalogue(folder / "artefacts.yaml", Artefact)
        content, self.results_name = _world_content(folder, self.name, self.world_file)
        self.world = parse_as(World, content, self.world_file)
        self._check_names()
        for objective in self.world.objectives:
            for method in self.world.methods_of(objective):
                for benchmark in self.world.benchmarks:
                    self.training(objective, method, benchmark)

    def _check_names(self) -> None:
        world, file = self.world, self.world_file
        for key in CATALOGUES:
            for name in getattr(world, key):
                _require_known(name, getattr(self, key), f"{file}: {key}")
        for objective, training in world.objective_training.items():
            self._check_objective(objective, training.get("objective", {}))
        for objective, names in world.extra_methods.items():
            _require_known(objective, world.objectives, f"{file}: extra_methods")
            for name in names:
                _require_known(name, self.methods, f"{file}: extra_methods.{objective}")
        for objective in world.objectives:
            _require_known(objective, world.objective_training, f"{file}: objective_training")
            for name in world.methods_of(objective):
                corrected = self.methods[name].corrects
                if corrected and corrected not in world.methods_of(objective):
                    raise ConfigError(f"{file}: methods: {name!r} corrects {corrected!r}; list that method too")
        keys = [f"{objective}/{method}" for objective in world.objectives for method in world.methods_of(objective)]
        for key, change in world.overrides.items():
            _require_known(key, [*self.methods, *keys], f"{file}: overrides")  # of methods that others may list too
            method = key.split("/")[-1]
            if not self.methods[method].trains:
                of = self.methods[method].corrects
                remedy = f"it corrects what {of!r} has trained" if of else "leave it out"
                raise ConfigError(f"{file}: overrides.{key}: {method!r} trains nothing; {remedy}")
            parse_as(Training, {**world.training.model_dump(), **change}, file, prefix=f"overrides.{key}")
        for name in world.gpus:
            _require_known(name, world.models, f"{file}: gpus")
            self._check_processes(name)
        for name, nodes in world.nodes.items():
            _require_known(name, world.models, f"{file}: nodes")
            if self.gpus(name) % nodes:
                raise ConfigError(f"{file}: nodes.{name}: {nodes} do not divide its `gpus`, {self.gpus(name)}")
        for name in world.benchmark_training:
            _require_known(name, self.benchmarks, f"{file}: benchmark_training")
            for objective in world.benchmark_training[name]:
                _require_known(objective, ["all", *self.objectives], f"{file}: benchmark_training.{name}")
        for name in world.models:
            model = self.models[name]
            if model.retrained:
                _require_known(model.retrained, self.models, f"{self.folder / 'models.yaml'}: {name}.retrained")
            elif "retrained" in self.baseline_kinds:
                raise ConfigError(f"{file}: method 'retrained' needs `retrained:` in models.yaml for {name!r}")
            if model.source == "finetuned":
                self._check_finetuned(name)
            if not any(self.fits(name, benchmark) for benchmark in world.benchmarks):
                raise ConfigError(f"{file}: models: none of the benchmarks is for {name!r}")
        for name in world.benchmarks:
            if not any(self.fits(model, name) for model in world.models):
                raise ConfigError(
                    f"{file}: benchmarks: none of the models is for {name!r}; news needs one with `source: finetuned`"
                )

    def _check_objective(self, objective: str, settings: dict) -> None:
        where = f"objective_training.{objective}.objective"
        _require_known(objective, self.objectives, f"{self.world_file}: objective_training")
        checked = parse_as(self.objectives[objective].settings, settings, self.world_file, prefix=where)
        for name in self.world.models if "layer" in settings else []:
            layers = self.trained_from(name).layers
            if layers and checked.layer >= layers:
                raise ConfigError(
                    f"{self.world_file}: {where}.layer: {name} has layers 0 to {layers - 1} (got {checked.layer})"
                )

    def _check_processes(self, model: str) -> None:
        config, processes = self.models[model], self.processes(model)
        if config.source == "finetuned" and config.batch_size % processes:
            raise ConfigError(
                f"{self.world_file}: gpus.{model}: batch_size of the model in models.yaml is {config.batch_size}, "
                f"which {processes} processes cannot share"
            )
        for name, benchmark, objective, method, _ in self.run_keys():
            training = self.training(objective, method, benchmark) if name == model else None
            alone = self.processes(model, method) == 1
            if training and "layer" in training.objective and training.idle_layers == "host" and not alone:
                raise ConfigError(
                    f"{self.world_file}: gpus.{model}: {self.processes(model, method)} processes train "
                    f"{objective}/{method}, whose `idle_layers: host` needs a single one; leave out one of the two"
                )
            for key in BATCH_SIZES if training else ():
                if getattr(training, key) % self.processes(model, method):
                    raise ConfigError(
                        f"{self.world_file}: gpus.{model}: {key} of {objective}/{method} is "
                        f"{getattr(training, key)}, which {self.processes(model, method)} processes cannot share"
                    )

    def _check_finetuned(self, name: str) -> None:
        model, file = self.models[name], self.folder / "models.yaml"
        _require_known(model.base, self.models, f"{file}: {name}.base")
        _require_known(model.benchmark, self.benchmarks, f"{file}: {name}.benchmark")
        if not self.benchmarks[model.benchmark].is_news:
            raise ConfigError(f"{file}: {name}.benchmark: {model.benchmark!r} has no articles to finetune on")
        if not model.retrained:
            raise ConfigError(f"{file}: {name}: `retrained` is required; the model to compare leakage with")
        retrained = self.models[model.retrained]
        if retrained.source != "finetuned" or retrained.benchmark != model.benchmark:
            raise ConfigError(f"{file}: {name}.retrained: {model.retrained!r} is not finetuned on {model.benchmark!r}")

    def fits(self, model: str, benchmark: str) -> bool:
        """News is for the models that were finetuned on it, and nothing else is for them."""
        config = self.models[model]
        if config.source == "finetuned":
            return config.benchmark == benchmark
        return not self.benchmarks[benchmark].is_news

    @property
    def baseline_kinds(self) -> set[str]:
        return {self.methods[name].baseline for name in self.world.all_methods if self.methods[name].baseline}

    @property
    def models_needed(self) -> list[str]:
        """Those of the world, their retrained models, and what these are finetuned from."""
        named = [*self.world.models, *(m.retrained for m in map(self.models.get, self.world.models) if m.retrained)]
        return list(dict.fromkeys([*named, *(m.base for m in map(self.models.get, named) if m.source == "finetuned")]))

    def trained_from(self, model: str) -> Any:
        """The configuration of a model, or of the base that it is finetuned from."""
        config = self.models[model]
        return self.models[config.base] if config.source == "finetuned" else config

    def gpus(self, model: str) -> int:
        """How many a model takes, and its retrained model as many: one, if the world does not say. Processes that train the
        model share its experts; in a single process its layers are split over those of one node."""
        return self.world.gpus.get(self._named(model), 1)

    def trains_on_gpu(self, model: str) -> bool:
        """Whether an embedded base model trains on a GPU, if there is one: if the world gives it any. Else it trains on
        a CPU, where every machine of a kind makes the same one."""
        return self.models[model].source == "embedded" and self._named(model) in self.world.gpus

    def gpus_per_node(self, model: str) -> int:
        return self.gpus(model) // self.world.nodes.get(self._named(model), 1)

    def nodes(self, model: str, method: str | None = None) -> int:
        """Over how many the processes are spread that train a run, or finetune a model."""
        return self.processes(model, method) // min(self.processes(model, method), self.gpus_per_node(model))

    def _named(self, model: str) -> str:
        """The model of the world whose retrained model this is, or the model itself."""
        return next((name for name in self.world.models if self.models[name].retrained == model), model)

    def processes(self, model: str, method: str | None = None) -> int:
        """How many train a run together, or finetune a model: one on each of its GPUs, or a single one if one expert
        trains."""
        return 1 if method and self.methods[method].experts == "top_attributed" else self.gpus(model)

    def training(self, objective: str, method_name: str, benchmark: str) -> Training | None:
        """Training of a run: the world's, changed by its objective, benchmark, method, and the overrides, in that
        order."""
        method = self.methods[method_name]
        if not method.trains:
            return None
        changes = (
            (self.world_file, f"objective_training.{objective}", self.world.objective_training[objective]),
            *(
                (
                    self.world_file,
                    f"benchmark_training.{benchmark}.{key}",
                    self.world.benchmark_training.get(benchmark, {}).get(key, {}),
                )
                for key in ("all", objective)
            ),
            (self._methods_file[method_name], f"{method_name}.training", method.training),
            (self.world_file, f"overrides.{method_name}", self.world.overrides.get(method_name, {})),
            (
                self.world_file,
                f"overrides.{objective}/{method_name}",
                self.world.overrides.get(f"{objective}/{method_name}", {}),
            ),
        )
        for file, key, change in changes[-3:]:  # the method's own
            for size in change.keys() & BATCH_SIZES:
                raise ConfigError(
                    f"{file}: {key}.{size}: methods are compared on the same documents in the same order; change it "
                    "for all, in `training`, `objective_training` or `benchmark_training`"
                )
        resolved = self.world.training.model_dump()
        training = self.world.training
        for file, key, change in changes:
            settings = {**resolved["objective"], **change.get("objective", {})}
            resolved.update({**change, "objective": settings})
            training = parse_as(Training, resolved, file, prefix=key)
            if change.get("idle_layers") == "host" and "layer" not in settings:
                raise ConfigError(f"{file}: {key}.idle_layers: {objective} runs every layer; leave it out")
        self._check_objective(objective, training.objective)
        return training

    def run(self, model: str, benchmark: str, objective: str, method: str, seed: int) -> Run:
        return Run(
            model=model,
            benchmark_name=benchmark,
            benchmark=self.benchmarks[benchmark].task,
            objective=objective,
            own_objective=self._own_objectives.get(objective),
            method_name=method,
            method=self.methods[method],
            seed=seed,
            training=self.training(objective, method, benchmark),
        )

    def run_keys(self) -> list[tuple[str, str, str, str, int]]:
        """All (model, benchmark, objective, method, seed); baselines once per model and benchmark."""
        keys = []
        for model in self.world.models:
            for benchmark in self.world.benchmarks:
                if not self.fits(model, benchmark):
                    continue
                for method in self.world.methods:
                    if self.methods[method].baseline:
                        keys.append((model, benchmark, NO_OBJECTIVE, method, 0))
                for objective in self.world.objectives:
                    for method in self.world.methods_of(objective):
                        if not self.methods[method].baseline:
                            keys += [(model, benchmark, objective, method, seed) for seed in self.world.seeds]
        return keys


def _joined(table: dict, added: dict, taken: str, file: Path) -> dict:
    """The package's rows and those of a configuration folder, which have other names."""
    for name in added.keys() & table.keys():
        raise ConfigError(f"{file}: {name}: {taken} of this name; give yours another")
    return {**table, **added}


def _found(path: str, where: str) -> OwnClass:
    """A class of the user by its path, with the digest of the module's file, which is not imported here."""
    module = path.partition(":")[0]
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # of a package above it
        spec = None
    if spec is None or not spec.has_location:
        raise ConfigError(f"{where}: no module {module!r} in the folders of PYTHONPATH; add the one that it lies in")
    return OwnClass(path=path, sha256=file_digest(Path(spec.origin)))


def world_files(folder: Path) -> list[Path]:
    """Of all worlds of a configuration folder."""
    return sorted(path for path in folder.glob("*.yaml") if path.stem not in CATALOGUES)


def _find_world(folder: Path, world: str) -> tuple[str, Path]:
    """A name of a file in the configuration folder, or the path of a YAML file."""
    path = Path(world) if world.endswith((".yaml", ".yml")) else folder / f"{world}.yaml"
    known = [file.stem for file in world_files(folder)]
    if not known:
        raise ConfigError(f"{folder}: no worlds here; start where the Snakefile is, or name the folder of the worlds")
    if not path.is_file() or path.parent.resolve() == folder.resolve() and path.stem in CATALOGUES:
        raise ConfigError(
            f"world {world!r}: no world {path}; give one of {', '.join(known)} or the path of a YAML file"
        )
    if not re.fullmatch(NAME, path.stem):
        raise ConfigError(f"{path}: its name is that of folders: small letters, digits and _, and a letter first")
    if path.stem in known and path.resolve() != (folder / path.name).resolve():
        raise ConfigError(
            f"{path}: {path.stem!r} is a world of {folder} too, whose results it would overwrite; rename it"
        )
    return path.stem, path


def _world_content(folder: Path, name: str, file: Path) -> tuple[dict, str]:
    """What a world file says, over what those that it extends say; and the name of the last of these."""
    content, files = _mapping(file), [file.resolve()]
    while "extends" in content:
        name, base_file = _find_world(folder, str(content.pop("extends")))
        if base_file.resolve() in files:
            raise ConfigError(f"{file}: extends: {name!r} extends itself")
        content = {**_mapping(base_file), **content}
        files.append(base_file.resolve())
    return content, name

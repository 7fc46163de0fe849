"""A project: a world file, cross-checked with the catalogues beside it, and the runs that it asks for.

A world with `extends: other` replaces keys of that one and shares its results, so a run of both has the same settings
in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gripmoe.config.catalogues import Catalogues, joined
from gripmoe.config.checks import check
from gripmoe.config.methods import TABLE, Method, method_table
from gripmoe.config.reading import parse_as, require_known
from gripmoe.config.training import Training
from gripmoe.config.world import NO_OBJECTIVE, Run, RunKey, World
from gripmoe.config.world_files import find_world, world_content, world_files
from gripmoe.io.errors import ConfigError

BATCH_SIZES = ("forget_batch_size", "retain_batch_size", "gradient_accumulation")


class Project:
    """A world with the catalogues of its folder, cross-checked; with `compare`, compared with the worlds that share its
    results. `catalogues` are those of the folder, if they have been read. Raises ConfigError at the first mistake."""

    def __init__(self, folder: Path, world_name: str, catalogues: Catalogues | None = None, *, compare: bool = True):
        self.name, self.world_file = find_world(folder, world_name)
        self.folder, self._catalogues = folder, catalogues or Catalogues(folder)
        self.models_file, self._methods_file = self._catalogues.models_file, self._catalogues.methods_file
        self.models, self.benchmarks = self._catalogues.models, self._catalogues.benchmarks
        self.objectives, self.artefacts = self._catalogues.objectives, self._catalogues.artefacts
        content, self._files = world_content(folder, self.world_file)
        self.results_name = self._files[-1].stem
        self.world = parse_as(World, content, self.world_file)
        self.external = self._external()
        external = dict.fromkeys(self.external, Method(baseline="external"))
        self.methods = joined(self._catalogues.methods, external, "there is a method", f"{self.world_file}: external")
        check(self)
        if compare:
            self._check_shared_runs()

    @property
    def results(self) -> Path:
        """The folder of the runs, below the folder that Snakemake starts in."""
        return Path("results", self.results_name)

    def _external(self) -> dict[str, dict[str, str]]:
        """Folder or hub id of every external checkpoint, by its name and its original model."""
        found, models = {}, self.world.models
        for name, given in self.world.external.items():
            where = f"{self.world_file}: external.{name}"
            if isinstance(given, str) and len(models) > 1:
                raise ConfigError(f"{where}: the world has {len(models)} models; give {{{models[0]}: {given}}}")
            found[name] = {models[0]: given} if isinstance(given, str) else given
            for model in found[name]:
                require_known(model, models, where)
        return found

    def _check_shared_runs(self) -> None:
        known = set(self.run_keys())
        for other in self._beside():
            for key in filter(known.__contains__, other.run_keys()):
                if (mine := self._settings(key)) != (theirs := other._settings(key)):
                    names = ", ".join(f"`{name}`" for name in mine if mine[name] != theirs[name])
                    raise ConfigError(
                        f"{self.world_file}: run {key.folder} has another {names} in {other.name!r}, and "
                        f"both keep it in the results of {self.results_name!r}. A key such as `overrides` or `gpus` "
                        "replaces the whole key of the world that is extended: repeat its entries, give a method of "
                        "your own its `training`, or write a world without `extends`"
                    )

    def _beside(self) -> Iterator[Project]:
        """Worlds with the same results and one of the same models. Those that extend this one are left out: they are
        compared when they start."""
        for file in dict.fromkeys([*self._files, *world_files(self.folder)]):
            try:
                content, files = world_content(self.folder, file)
                names = [each.stem for each in files]
                if names[-1] != self.results_name or self.name in names:
                    continue
                if not set(self.world.models).isdisjoint(parse_as(World, content, file).models):
                    yield Project(self.folder, str(file), self._catalogues, compare=False)
            except ConfigError:  # a world that cannot start has no runs, such as one that is there to be extended
                continue

    def _settings(self, key: RunKey) -> dict[str, Any]:
        """What a run depends on of this world alone, for every seed; on catalogues it depends in every world."""
        training = self.training(key.model, key.benchmark, key.objective, key.method)
        external = self.external.get(key.method, {}).get(key.model)
        return {
            **(training.model_dump(exclude={"checkpoint_every"}) if training else {}),
            "external": external,
            "gpus": self.gpus(key.model) if training else None,
            "relearning": self.world.relearning,
        }

    def check_objective(self, objective: str, settings: dict, file: Path, where: str) -> None:
        """Raises ConfigError if the objective does not take these settings, or if a model lacks their `layer`."""
        checked = parse_as(self.objectives[objective].settings, settings, file, prefix=where)
        for name in self.world.models if "layer" in settings else []:
            layers = self.trained_from(name).layers
            if layers and checked.layer >= layers:
                valid = f"{name} has layers 0 to {layers - 1} (got {checked.layer})"
                raise ConfigError(f"{file}: {where}.layer: {valid}")

    def fits(self, model: str, benchmark: str) -> bool:
        """News is for the models that were finetuned on it; every other benchmark is for all other models. The facts of
        an embedded world are for the models that were trained on them."""
        config, data = self.models[model], self.benchmarks[benchmark].data
        if config.source == "finetuned":
            return config.benchmark == benchmark
        of_another_world = config.source == data.source == "embedded" and config.world_seed != data.world_seed
        return not self.benchmarks[benchmark].is_news and not of_another_world

    @property
    def models_needed(self) -> list[str]:
        """The models of the world, their retrained models, and what these are trained from."""
        named = [*self.world.models, *(m.retrained for m in map(self.models.get, self.world.models) if m.retrained)]
        for name in named:  # it grows
            base = self.models[name].made_from
            if base and base not in named:
                require_known(base, self.models, f"{self.models_file}: {name}.base")
                named.append(base)
        return list(dict.fromkeys(named))

    def trained_from(self, model: str) -> Any:
        """The configuration of a model, or of the base that it is finetuned from."""
        config = self.models[model]
        return self.models[config.base] if config.source == "finetuned" else config

    def gpus(self, model: str) -> int:
        """How many GPUs a model takes, and its retrained model too: one, if the world does not say; 0 if it asks for
        none. Processes that train the model share its experts; a single process splits its layers over all of them."""
        return self.world.gpus.get(self._named(model), 1)

    def trains_on_gpu(self, model: str) -> bool:
        """Whether an embedded base model trains on a GPU, if there is one: if the world gives the model any. On a CPU,
        every machine of a kind trains the same base model."""
        return self.models[model].source == "embedded" and self.world.gpus.get(self._named(model), 0) > 0

    def _named(self, model: str) -> str:
        """The world's model that has `model` as its retrained model or base; else `model` itself."""

        def owns(row) -> bool:
            return row.retrained == model or (row.source == "embedded" and row.base == model)

        return next((name for name in self.world.models if owns(self.models[name])), model)

    def processes(self, model: str, method: str | None = None) -> int:
        """How many processes train a run together, or finetune a model: one on each GPU, or a single one if the method
        trains one expert, or projects the updates of all."""
        return 1 if method and self.methods[method].experts != "all" else max(1, self.gpus(model))

    def training(self, model: str, benchmark: str, objective: str, method: str) -> Training | None:
        """Training of a run: the world's, changed by its objective, benchmark, method, and the overrides, in that
        order. A method that trains in one process accumulates what the processes of others share, so that a step of
        every method takes the same documents. None for a method that trains nothing."""
        world, file, row = self.world, self.world_file, self.methods[method]
        if not row.trains:
            return None
        of_benchmark = world.benchmark_training.get(benchmark, {})
        keys, names = ("all", objective), (method, f"{objective}/{method}")
        shared = [(file, f"objective_training.{objective}", world.objective_training[objective])]
        shared += [(file, f"benchmark_training.{benchmark}.{key}", of_benchmark.get(key, {})) for key in keys]
        table = TABLE if method in method_table() else self._methods_file
        own = [(table, f"{method}.training", row.training)]
        own += [(file, f"overrides.{name}", world.overrides.get(name, {})) for name in names]
        for where, key, change in own:
            for size in change.keys() & BATCH_SIZES:
                raise ConfigError(
                    f"{where}: {key}.{size}: methods are compared on the same documents in the same order; change it "
                    "for all, in `training`, `objective_training` or `benchmark_training`"
                )
        changed, layers = world.training.model_dump(), []
        for where, key, change in [*shared, *own]:
            own_objective = parse_as(dict, change.get("objective", {}), where, prefix=f"{key}.objective")
            both = {**changed["objective"], **own_objective}
            settings = {name: value for name, value in both.items() if value is not None}  # null takes a key back
            changed = {**changed, **change, "objective": settings}
            self.check_objective(objective, settings, where, f"{key}.objective")
            layers.append((where, key, changed))
        try:  # the whole first: settings that depend on each other may stand in two places
            training = parse_as(Training, changed, where, prefix=key)
        except ConfigError:
            for where, key, changed in layers:
                parse_as(Training, changed, where, prefix=key)
            raise
        for where, key, change in own:
            if found := row.without_effect(change, training.adversary_steps):
                raise ConfigError(f"{where}: {key}.{found[0]}: {found[1]}")
        passes = training.gradient_accumulation * self.processes(model) // self.processes(model, method)
        return training.model_copy(update={"gradient_accumulation": passes})

    def run(self, model: str, benchmark: str, objective: str, method: str, seed: int) -> Run:
        training = self.training(model, benchmark, objective, method)
        if training:
            training = training.model_copy(update={"checkpoint_every": None})
        return Run(
            model=model,
            benchmark_name=benchmark,
            benchmark=self.benchmarks[benchmark].task,
            objective=objective,
            own_objective=self._catalogues.own_objectives.get(objective),
            method_name=method,
            method=self.methods[method],
            own_constraint=self._catalogues.own_constraints.get(method),
            seed=seed,
            training=training,
            processes=self.processes(model, method) if training else 1,
        )

    def run_keys(self) -> list[RunKey]:
        """The key of every run; what trains nothing stands once per model and benchmark."""
        world, keys = self.world, []
        for model in world.models:
            for benchmark in (name for name in world.benchmarks if self.fits(model, name)):
                baselines = [name for name in world.methods if self.methods[name].baseline]
                baselines += [name for name, folders in self.external.items() if model in folders]
                keys += [RunKey(model, benchmark, NO_OBJECTIVE, name, 0) for name in baselines]
                for objective in world.objectives:
                    others = [name for name in world.methods_of(objective) if not self.methods[name].baseline]
                    keys += [RunKey(model, benchmark, objective, name, seed) for name in others for seed in world.seeds]
        return keys

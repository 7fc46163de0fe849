"""A project: a world file, cross-checked with the catalogues beside it, and the runs that it asks for.

A world with `extends: other` replaces keys of that one and shares its results, so a run of both has the same settings
in both.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from gripmoe.config.catalogues import CATALOGUES, Catalogues, joined
from gripmoe.config.methods import TABLE, Method, method_table
from gripmoe.config.reading import NAME, parse_as, read_mapping, require_known
from gripmoe.config.training import Training
from gripmoe.config.world import Run, World
from gripmoe.io.errors import ConfigError

NO_OBJECTIVE = "none"  # the {objective} of baselines, which train nothing
BATCH_SIZES = ("forget_batch_size", "retain_batch_size", "gradient_accumulation")


class Project:
    """A world with the catalogues of its folder, cross-checked, and compared with the worlds that share its results.
    With `catalogues`, those of the folder, it is not compared. Raises ConfigError at the first mistake."""

    def __init__(self, folder: Path, world_name: str, catalogues: Catalogues | None = None):
        self.name, self.world_file = _find_world(folder, world_name)
        self.folder, self._catalogues = folder, catalogues or Catalogues(folder)
        self._models_file, self._methods_file = self._catalogues.models_file, self._catalogues.methods_file
        self.models, self.benchmarks = self._catalogues.models, self._catalogues.benchmarks
        self.objectives, self.artefacts = self._catalogues.objectives, self._catalogues.artefacts
        content, self._extended = _world_content(folder, self.world_file)
        self.results_name = self._extended[-1].stem if self._extended else self.name
        self.world = parse_as(World, content, self.world_file)
        self.external = self._external()
        external = dict.fromkeys(self.external, Method(baseline="external"))
        self.methods = joined(self._catalogues.methods, external, "there is a method", f"{self.world_file}: external")
        for names, known, where in self._references():
            for name in names:
                require_known(name, known, where)
        self._check_methods()
        self._check_models()
        self._check_training()
        if not catalogues:
            self._check_shared_runs()

    def _references(self) -> Iterator[tuple[Collection[str], Collection[str], str]]:
        """Names, those that are known, and where the names stand."""
        world, file, models = self.world, self.world_file, self._models_file
        for key in CATALOGUES:
            yield getattr(world, key), getattr(self, key), f"{file}: {key}"
        yield world.objective_training, self.objectives, f"{file}: objective_training"
        yield world.extra_methods, world.objectives, f"{file}: extra_methods"
        for objective, methods in world.extra_methods.items():
            yield methods, self.methods, f"{file}: extra_methods.{objective}"
        runs = [f"{objective}/{name}" for objective in self.objectives for name in self.methods]
        yield world.overrides, [*self.methods, *runs], f"{file}: overrides"  # of worlds that extend this one too
        yield world.gpus, world.models, f"{file}: gpus"
        yield world.benchmark_training, self.benchmarks, f"{file}: benchmark_training"
        for benchmark, changes in world.benchmark_training.items():
            yield changes, ["all", *self.objectives], f"{file}: benchmark_training.{benchmark}"
        for name in world.models:
            config = self.models[name]
            yield [config.retrained] if config.retrained else [], self.models, f"{models}: {name}.retrained"
            if config.source == "finetuned":
                yield [config.base], self.models, f"{models}: {name}.base"
                yield [config.benchmark], self.benchmarks, f"{models}: {name}.benchmark"

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

    def _check_methods(self) -> None:
        for name in self.world.all_methods:
            if self.methods[name].baseline == "external" and name not in self.external:
                raise ConfigError(f"{self.world_file}: methods: {name!r} is external; give its folder under `external`")
        if twice := sorted({*self.world.methods} & {*self.world.external}):
            raise ConfigError(
                f"{self.world_file}: methods: {twice[0]!r} stands under `external` too; leave it out here"
            )
        for objective in self.world.objectives:
            listed = self.world.methods_of(objective)
            for name in self.world.extra_methods.get(objective, []):
                if self.methods[name].baseline:
                    where = f"{self.world_file}: extra_methods.{objective}"
                    raise ConfigError(f"{where}: {name!r} has no objective; list it under `methods`")
            for name in listed:
                corrected = self.methods[name].corrects
                if corrected in self.methods and not self.methods[corrected].trains:
                    where = f"{self.world_file}: methods: {name!r} corrects {corrected!r}"
                    raise ConfigError(f"{where}, which trains nothing; let it correct a method that does")
                if corrected and corrected not in listed:
                    raise ConfigError(
                        f"{self.world_file}: methods: {name!r} corrects {corrected!r}; list that method too"
                    )
        for key in self.world.overrides:
            name = key.split("/")[-1]
            if not self.methods[name].trains:
                corrected = self.methods[name].corrects
                remedy = f"it corrects what {corrected!r} has trained" if corrected else "leave it out"
                raise ConfigError(f"{self.world_file}: overrides.{key}: {name!r} trains nothing; {remedy}")

    def _check_models(self) -> None:
        world = self.world
        baselines = {self.methods[name].baseline for name in world.all_methods}
        needs = {"retrained": "retrained", "remove_experts": "forget_experts"}  # keys of models.yaml
        for name in world.models:
            model = self.models[name]
            for baseline, key in needs.items():
                if baseline in baselines and not getattr(model, key, None):
                    needed = f"needs `{key}:` in models.yaml for {name!r}"
                    raise ConfigError(f"{self.world_file}: method {baseline!r} {needed}")
            if model.source == "finetuned":
                self._check_finetuned(name)
        for name in self.models_needed:
            self._check_base(name)
        for name in world.models:
            if self.models[name].source == "embedded" and self.models[name].retrained:
                self._check_retrained(name)
            if not any(self.fits(name, benchmark) for benchmark in world.benchmarks):
                raise ConfigError(f"{self.world_file}: models: none of the benchmarks is for {name!r}")
        for name in world.benchmarks:
            if not any(self.fits(model, name) for model in world.models):
                remedy = "news needs one with `source: finetuned`"
                raise ConfigError(f"{self.world_file}: benchmarks: none of the models is for {name!r}; {remedy}")

    def _check_retrained(self, name: str) -> None:
        model, where = self.models[name], f"{self._models_file}: {name}.retrained"
        retrained = self.models[model.retrained]
        if retrained.source != "embedded" or retrained.trained_on != "retain_only":
            raise ConfigError(f"{where}: {model.retrained!r} is not an embedded model with `trained_on: retain_only`")
        alike = ("family", "size", "world_seed", "base")
        if differing := [key for key in alike if getattr(retrained, key) != getattr(model, key)]:
            raise ConfigError(f"{where}: {model.retrained!r} has another `{differing[0]}`")

    def _check_finetuned(self, name: str) -> None:
        model, where = self.models[name], f"{self._models_file}: {name}"
        if not self.benchmarks[model.benchmark].is_news:
            raise ConfigError(f"{where}.benchmark: {model.benchmark!r} has no articles to finetune on")
        if not model.retrained:
            raise ConfigError(f"{where}: `retrained` is required; the model to compare leakage with")
        retrained = self.models[model.retrained]
        if retrained.source != "finetuned" or retrained.benchmark != model.benchmark:
            raise ConfigError(f"{where}.retrained: {model.retrained!r} is not finetuned on {model.benchmark!r}")
        if retrained.trained_on != "retain_only":
            raise ConfigError(f"{where}.retrained: {model.retrained!r} needs `trained_on: retain_only`")
        alike = (key for key in type(model).model_fields if key not in ("trained_on", "retrained"))
        if differing := [key for key in alike if getattr(retrained, key) != getattr(model, key)]:
            raise ConfigError(f"{where}.retrained: {model.retrained!r} has another `{differing[0]}`")
        if model.batch_size % (processes := self.processes(name)):
            raise ConfigError(
                f"{self.world_file}: gpus.{name}: batch_size of the model in models.yaml is {model.batch_size}, which "
                f"{processes} processes cannot share"
            )

    def _check_training(self) -> None:
        for objective in self.world.objectives:
            if objective not in self.world.objective_training:
                raise ConfigError(f"{self.world_file}: objective_training.{objective}: this key is required")
        for objective, training in self.world.objective_training.items():
            where = f"objective_training.{objective}.objective"
            self._check_objective(objective, training.get("objective", {}), self.world_file, where)
        for benchmark, objective, method in dict.fromkeys(key[1:4] for key in self.run_keys()):
            if objective != NO_OBJECTIVE:
                self.training(objective, method, benchmark)

    def _check_shared_runs(self) -> None:
        known = set(self.run_keys())
        for other in self._beside():
            for key in filter(known.__contains__, other.run_keys()):
                if (mine := self._settings(*key)) != (theirs := other._settings(*key)):
                    names = ", ".join(f"`{name}`" for name in mine if mine[name] != theirs[name])
                    raise ConfigError(
                        f"{self.world_file}: run {'/'.join(map(str, key))} has another {names} in {other.name!r}, and "
                        f"both keep it in the results of {self.results_name!r}. A key such as `overrides` or `gpus` "
                        "replaces the whole key of the world that is extended: repeat its entries, give a method of "
                        "your own its `training`, or write a world without `extends`"
                    )

    def _beside(self) -> Iterator[Project]:
        """Worlds with the same results and one of the same models. Those that extend this one are left out: they are
        compared when they start."""
        for file in dict.fromkeys([*self._extended, *world_files(self.folder)]):
            try:
                content, extended = _world_content(self.folder, file)
                names = [each.stem for each in (file, *extended)]
                if names[-1] != self.results_name or self.name in names:
                    continue
                if not set(self.world.models).isdisjoint(parse_as(World, content, file).models):
                    yield Project(self.folder, str(file), self._catalogues)
            except ConfigError:  # a world that cannot start has no runs, such as one that is there to be extended
                continue

    def _settings(self, model: str, benchmark: str, objective: str, method: str, seed: int) -> dict[str, Any]:
        """What a run depends on of this world alone; on catalogues it depends in every world."""
        training = self.training_of(model, objective, method, benchmark)
        external = self.external.get(method, {}).get(model)
        return {
            **(training.model_dump() if training else {}),
            "external": external,
            "gpus": self.gpus(model) if training else None,
            "relearning": self.world.relearning,
        }

    def _check_base(self, name: str) -> None:
        model, where = self.models[name], f"{self._models_file}: {name}.base"
        if model.source == "finetuned" and self.models[model.base].source == "finetuned":
            raise ConfigError(f"{where}: {model.base!r} is finetuned itself; give a published or an embedded model")
        if model.source == "embedded" and model.base:
            require_known(model.base, self.models, where)
            base = self.models[model.base]
            alike = ("source", "family", "size", "world_seed")
            if base.source != "embedded" or base.trained_on != "skills":
                raise ConfigError(f"{where}: {model.base!r} is not an embedded model with `trained_on: skills`")
            if differing := [key for key in alike if getattr(base, key) != getattr(model, key)]:
                raise ConfigError(f"{where}: {model.base!r} has another `{differing[0]}`")

    def _check_objective(self, objective: str, settings: dict, file: Path, where: str) -> None:
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
                require_known(base, self.models, f"{self._models_file}: {name}.base")
                named.append(base)
        return list(dict.fromkeys(named))

    def trained_from(self, model: str) -> Any:
        """The configuration of a model, or of the base that it is finetuned from."""
        config = self.models[model]
        return self.models[config.base] if config.source == "finetuned" else config

    def gpus(self, model: str) -> int:
        """How many GPUs a model takes, and its retrained model too: one, if the world does not say. Processes that
        train the model share its experts; a single process splits its layers over all of them."""
        return self.world.gpus.get(self._named(model), 1)

    def trains_on_gpu(self, model: str) -> bool:
        """Whether an embedded base model trains on a GPU, if there is one: if the world gives the model any. On a CPU,
        every machine of a kind trains the same base model."""
        return self.models[model].source == "embedded" and self._named(model) in self.world.gpus

    def _named(self, model: str) -> str:
        """The world's model that has `model` as its retrained model or base; else `model` itself."""

        def owns(row) -> bool:
            return row.retrained == model or (row.source == "embedded" and row.base == model)

        return next((name for name in self.world.models if owns(self.models[name])), model)

    def processes(self, model: str, method: str | None = None) -> int:
        """How many processes train a run together, or finetune a model: one on each GPU, or a single one if the method
        trains one expert, or projects the updates of all."""
        return 1 if method and self.methods[method].experts != "all" else self.gpus(model)

    def training(self, objective: str, method_name: str, benchmark: str) -> Training | None:
        """Training of a run: the world's, changed by its objective, benchmark, method, and the overrides, in that
        order. None for a method that trains nothing."""
        method, world, file = self.methods[method_name], self.world, self.world_file
        if not method.trains:
            return None
        of_benchmark = world.benchmark_training.get(benchmark, {})
        keys, names = ("all", objective), (method_name, f"{objective}/{method_name}")
        shared = [(file, f"objective_training.{objective}", world.objective_training[objective])]
        shared += [(file, f"benchmark_training.{benchmark}.{key}", of_benchmark.get(key, {})) for key in keys]
        table = TABLE if method_name in method_table() else self._methods_file
        own = [(table, f"{method_name}.training", method.training)]
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
            settings = {**changed["objective"], **own_objective}
            changed = {**changed, **change, "objective": settings}
            self._check_objective(objective, settings, where, f"{key}.objective")
            layers.append((where, key, changed))
        try:  # the whole first: settings that depend on each other may stand in two places
            return parse_as(Training, changed, where, prefix=key)
        except ConfigError:
            for where, key, changed in layers:
                parse_as(Training, changed, where, prefix=key)
            raise

    def training_of(self, model: str, objective: str, method: str, benchmark: str) -> Training | None:
        """Training of a run on a model: a method that trains in one process accumulates what the others share, so that
        a step of every method takes the same documents."""
        training = self.training(objective, method, benchmark)
        if training is None or (alone := self.gpus(model) // self.processes(model, method)) == 1:
            return training
        return training.model_copy(update={"gradient_accumulation": alone * training.gradient_accumulation})

    def run(self, model: str, benchmark: str, objective: str, method: str, seed: int) -> Run:
        training = self.training_of(model, objective, method, benchmark)
        return Run(
            model=model,
            benchmark_name=benchmark,
            benchmark=self.benchmarks[benchmark].task,
            objective=objective,
            own_objective=self._catalogues.own_objectives.get(objective),
            method_name=method,
            method=self.methods[method],
            seed=seed,
            training=training,
            processes=self.processes(model, method) if training else 1,
        )

    def run_keys(self) -> list[tuple[str, str, str, str, int]]:
        """All (model, benchmark, objective, method, seed); what trains nothing stands once per model and benchmark."""
        world, keys = self.world, []
        for model in world.models:
            for benchmark in (name for name in world.benchmarks if self.fits(model, name)):
                baselines = [name for name in world.methods if self.methods[name].baseline]
                baselines += [name for name, folders in self.external.items() if model in folders]
                keys += [(model, benchmark, NO_OBJECTIVE, name, 0) for name in baselines]
                for objective in world.objectives:
                    others = [name for name in world.methods_of(objective) if not self.methods[name].baseline]
                    keys += [(model, benchmark, objective, name, seed) for name in others for seed in world.seeds]
        return keys


def world_files(folder: Path) -> list[Path]:
    """The files of all worlds of a configuration folder."""
    return sorted(path for path in folder.glob("*.yaml") if path.stem not in CATALOGUES)


def results_of(folder: Path, file: Path) -> str:
    """The name of the results of a world: that of the world that it extends in the end, or its own."""
    return [file, *_world_content(folder, file)[1]][-1].stem


def _find_world(folder: Path, world: str) -> tuple[str, Path]:
    """Name and file of a world, given by its name in the configuration folder or by the path of a YAML file."""
    path = Path(world) if world.endswith((".yaml", ".yml")) else folder / f"{world}.yaml"
    known = [file.stem for file in world_files(folder)]
    inside = path.resolve() == (folder / path.name).resolve()
    if not known:
        raise ConfigError(f"{folder}: no worlds here; start where the Snakefile is, or name the folder of the worlds")
    if not path.is_file() or (inside and path.stem in CATALOGUES):
        raise ConfigError(
            f"world {world!r}: no world {path}; give one of {', '.join(known)} or the path of a YAML file"
        )
    if not re.fullmatch(NAME, path.stem):
        raise ConfigError(f"{path}: its name is that of folders: small letters, digits and _, and a letter first")
    if path.stem in known and not inside:
        raise ConfigError(
            f"{path}: {path.stem!r} is a world of {folder} too, whose results it would overwrite; rename it"
        )
    return path.stem, path


def _world_content(folder: Path, file: Path) -> tuple[dict, list[Path]]:
    """The content of a world file over that of the worlds that it extends, and the files of these."""
    content, files = read_mapping(file), [file]
    while "extends" in content:
        extended, where = content.pop("extends"), f"{files[-1]}: extends"
        if not isinstance(extended, str):
            raise ConfigError(f"{where}: {extended!r} is no name of a world; give one, or leave the key out")
        try:
            name, base_file = _find_world(folder, extended)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        if base_file.resolve() in [each.resolve() for each in files]:
            raise ConfigError(f"{file}: extends: {name!r} extends itself")
        content = {**read_mapping(base_file), **content}
        files.append(base_file)
    return content, files[1:]

"""Checks of a project: names that are known, and rows that fit together. Each raises ConfigError with file, key and
remedy."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from gripmoe.config.catalogues import CATALOGUES
from gripmoe.config.reading import require_known
from gripmoe.config.world import NO_OBJECTIVE
from gripmoe.io.errors import ConfigError

if TYPE_CHECKING:
    from gripmoe.config.models import ModelConfig
    from gripmoe.config.project import Project
    from gripmoe.config.training import Training


def check(project: Project) -> None:
    """Raises ConfigError at the first mistake of a world and the catalogues that it names."""
    for names, known, where in _references(project):
        for name in names:
            require_known(name, known, where)
    _check_methods(project)
    _check_models(project)
    _check_training(project)


def _check_methods(project: Project) -> None:
    for name in project.world.all_methods:
        if project.methods[name].baseline == "external" and name not in project.external:
            raise ConfigError(f"{project.world_file}: methods: {name!r} is external; give its folder under `external`")
    if twice := sorted({*project.world.methods} & {*project.world.external}):
        raise ConfigError(f"{project.world_file}: methods: {twice[0]!r} stands under `external` too; leave it out here")
    for objective in project.world.objectives:
        listed = project.world.methods_of(objective)
        for name in project.world.extra_methods.get(objective, []):
            if project.methods[name].baseline:
                where = f"{project.world_file}: extra_methods.{objective}"
                raise ConfigError(f"{where}: {name!r} has no objective; list it under `methods`")
        for name in listed:
            corrected = project.methods[name].corrects
            if corrected in project.methods and not project.methods[corrected].trains:
                where = f"{project.world_file}: methods: {name!r} corrects {corrected!r}"
                raise ConfigError(f"{where}, which trains nothing; let it correct a method that does")
            if corrected and corrected not in listed:
                raise ConfigError(
                    f"{project.world_file}: methods: {name!r} corrects {corrected!r}; list that method too"
                )
    for key in project.world.overrides:
        name = key.split("/")[-1]
        if not project.methods[name].trains:
            corrected = project.methods[name].corrects
            remedy = f"it corrects what {corrected!r} has trained" if corrected else "leave it out"
            raise ConfigError(f"{project.world_file}: overrides.{key}: {name!r} trains nothing; {remedy}")


def _check_models(project: Project) -> None:
    world = project.world
    baselines = {project.methods[name].baseline: name for name in world.all_methods}
    needs = {"retrained": "retrained", "remove_experts": "forget_experts"}  # keys of models.yaml
    for name in world.models:
        model = project.models[name]
        for baseline, key in needs.items():
            if baseline in baselines and not getattr(model, key, None):
                needed = f"needs `{key}:` in models.yaml for {name!r}"
                raise ConfigError(f"{project.world_file}: method {baselines[baseline]!r} {needed}")
        if model.source == "finetuned":
            _check_finetuned(project, name)
    for name in project.models_needed:
        _check_base(project, name)
    for name in world.models:
        if project.models[name].source == "embedded" and project.models[name].retrained:
            _check_retrained(project, name)
        if not any(project.fits(name, benchmark) for benchmark in world.benchmarks):
            raise ConfigError(f"{project.world_file}: models: none of the benchmarks is for {name!r}")
    for name in world.benchmarks:
        if not any(project.fits(model, name) for model in world.models):
            remedy = "its facts need a base model of the same `world_seed`"
            if project.benchmarks[name].is_news:
                remedy = "news needs one with `source: finetuned`"
            raise ConfigError(f"{project.world_file}: benchmarks: none of the models is for {name!r}; {remedy}")


def _check_retrained(project: Project, name: str) -> None:
    model, where = project.models[name], f"{project.models_file}: {name}.retrained"
    retrained = project.models[model.retrained]
    if retrained.source != "embedded" or retrained.trained_on != "retain_only":
        raise ConfigError(f"{where}: {model.retrained!r} is not an embedded model with `trained_on: retain_only`")
    _require_alike(model, retrained, ("family", "size", "world_seed", "base"), f"{where}: {model.retrained!r}")


def _check_finetuned(project: Project, name: str) -> None:
    model, where = project.models[name], f"{project.models_file}: {name}"
    if not project.benchmarks[model.benchmark].is_news:
        raise ConfigError(f"{where}.benchmark: {model.benchmark!r} has no articles to finetune on")
    if not model.retrained:
        raise ConfigError(f"{where}: `retrained` is required; the model to compare leakage with")
    retrained = project.models[model.retrained]
    if retrained.source != "finetuned" or retrained.benchmark != model.benchmark:
        raise ConfigError(f"{where}.retrained: {model.retrained!r} is not finetuned on {model.benchmark!r}")
    if retrained.trained_on != "retain_only":
        raise ConfigError(f"{where}.retrained: {model.retrained!r} needs `trained_on: retain_only`")
    alike = [key for key in type(model).model_fields if key not in ("trained_on", "retrained")]
    _require_alike(model, retrained, alike, f"{where}.retrained: {model.retrained!r}")
    if model.batch_size % (processes := project.processes(name)):
        raise ConfigError(
            f"{project.world_file}: gpus.{name}: batch_size of the model in models.yaml is {model.batch_size}, which "
            f"{processes} processes cannot share"
        )


def _check_base(project: Project, name: str) -> None:
    model, where = project.models[name], f"{project.models_file}: {name}.base"
    if model.source == "finetuned" and project.models[model.base].source == "finetuned":
        raise ConfigError(f"{where}: {model.base!r} is finetuned itself; give a published or an embedded model")
    if model.source == "embedded" and model.base:
        require_known(model.base, project.models, where)
        base = project.models[model.base]
        if base.source != "embedded" or base.trained_on != "skills":
            raise ConfigError(f"{where}: {model.base!r} is not an embedded model with `trained_on: skills`")
        _require_alike(model, base, ("family", "size", "world_seed"), f"{where}: {model.base!r}")


def _require_alike(model: ModelConfig, other: ModelConfig, keys: Iterable[str], where: str) -> None:
    if differing := [key for key in keys if getattr(other, key) != getattr(model, key)]:
        raise ConfigError(f"{where} has another `{differing[0]}`")


def _check_training(project: Project) -> None:
    if project.world.training.checkpoint_every is None:
        raise ConfigError(f"{project.world_file}: training.checkpoint_every: this key is required")
    for objective in project.world.objectives:
        if objective not in project.world.objective_training:
            raise ConfigError(f"{project.world_file}: objective_training.{objective}: this key is required")
    for objective, training in project.world.objective_training.items():
        where = f"objective_training.{objective}.objective"
        project.check_objective(objective, training.get("objective", {}), project.world_file, where)
    runs = {(key.benchmark, key.objective, key.method): key for key in project.run_keys()}  # models change no error
    for key in runs.values():
        if key.objective != NO_OBJECTIVE:
            training = project.training(key.model, key.benchmark, key.objective, key.method)
            if training and training.checkpoint_every is None:
                where = f"{project.world_file}: {key.objective}/{key.method}"
                raise ConfigError(f"{where}: `checkpoint_every` is null; give a number of steps, or leave it out")
            if training and training.trained_layers:
                _check_trained_layers(project, training, f"{project.world_file}: {key.objective}/{key.method}")


def _check_trained_layers(project: Project, training: Training, where: str) -> None:
    for name in project.world.models:
        layers = project.trained_from(name).layers
        reached = layers and min(layers, training.objective.get("layer", layers - 1) + 1)
        if reached and training.trained_layers > reached:
            asked = f"`trained_layers` is {training.trained_layers}"
            raise ConfigError(f"{where}: {asked}, and the losses look at {reached} layers of {name!r}: lower it")


def _references(project: Project) -> Iterator[tuple[Collection[str], Collection[str], str]]:
    """Names, those that are known, and where the names stand."""
    world, file, models = project.world, project.world_file, project.models_file
    for key in CATALOGUES:
        yield getattr(world, key), getattr(project, key), f"{file}: {key}"
    yield world.objective_training, project.objectives, f"{file}: objective_training"
    yield world.extra_methods, world.objectives, f"{file}: extra_methods"
    for objective, methods in world.extra_methods.items():
        yield methods, project.methods, f"{file}: extra_methods.{objective}"
    runs = [f"{objective}/{name}" for objective in project.objectives for name in project.methods]
    yield world.overrides, [*project.methods, *runs], f"{file}: overrides"  # of worlds that extend this one too
    yield world.gpus, world.models, f"{file}: gpus"
    yield world.benchmark_training, project.benchmarks, f"{file}: benchmark_training"
    for benchmark, changes in world.benchmark_training.items():
        yield changes, ["all", *project.objectives], f"{file}: benchmark_training.{benchmark}"
    for name in world.models:
        config = project.models[name]
        yield [config.retrained] if config.retrained else [], project.models, f"{models}: {name}.retrained"
        if config.source == "finetuned":
            yield [config.base], project.models, f"{models}: {name}.base"
            yield [config.benchmark], project.benchmarks, f"{models}: {name}.benchmark"

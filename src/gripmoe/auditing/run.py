"""`audit`: measures what a model forgot, retains and hides; resumable, and within a time budget."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from functools import cache, partial
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from tqdm import tqdm

from gripmoe.attacks import restoration
from gripmoe.attacks.base import Found, QuestionScores, QuestionSetting
from gripmoe.attacks.identity import identities_of, with_texts
from gripmoe.attacks.run import FURTHER_OF_LETTERS, OF_LETTERS, made_once, stored
from gripmoe.auditing import models
from gripmoe.auditing.inputs import Inputs, benchmark_inputs, own_inputs, settings_named
from gripmoe.auditing.own_data import Source
from gripmoe.auditing.plan import ATTACK_GROUPS, Sizes, measures_of, plan_lines, relative_time, turns_of
from gripmoe.config.fingerprint import code_fingerprint
from gripmoe.config.training import Relearning
from gripmoe.evaluation.letters import letter_metrics
from gripmoe.evaluation.metrics import load_answers
from gripmoe.evaluation.questions import direct_answers, load_questions
from gripmoe.evaluation.routing_stability import routing_metrics
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import read_json, remove_halves, write_csv
from gripmoe.io.imports import require_extras
from gripmoe.io.locks import exclusive
from gripmoe.moe import MoEModel
from gripmoe.moe.adapters import unwrapped
from gripmoe.moe.placement import devices_of, place
from gripmoe.moe.storage import weights_digest, with_pad_token
from gripmoe.training.optimizers import require_optimizer

if TYPE_CHECKING:
    from gripmoe.auditing.report import AuditReport

TIMED = 32  # questions of the timed batch

Model = str | Path | nn.Module


def audit(
    original: Model,
    unlearned: Model,
    *,
    forget: Source,
    retain: Source | None = None,
    forget_text: Source | None = None,
    retain_text: Source | None = None,
    holdout_text: Source | None = None,
    retrained: Model | None = None,
    tokenizer: Any = None,
    attacks: Sequence[str] | None = None,
    relearning: Relearning | Mapping[str, Any] | None = None,
    budget: float | None = None,
    output: Path | str | None = None,
    trust_remote_code: bool = False,
) -> AuditReport:
    """Audits an unlearned model: what it forgot, what it retains, and what attacks bring back (ours).

    Models are folders, hub ids or models in memory. Models in memory need their `tokenizer`, and are left unchanged.
    `forget` is the name of a benchmark ("wmdp_cyber"), or a file of questions, or its rows; then give `retain`
    questions too. The texts are files of documents, or their rows. `attacks` are keys of ATTACK_GROUPS (default: all).
    `relearning` has the settings that are to differ from the audit's own. `budget` is in minutes. Measurements are
    stored in `output`; a later audit of the same models continues there. Messages name the flags of `gripmoe audit`.

    Raises ConfigError, a ValueError, for unusable inputs, for models that differ in more than weights, and for weights
    that are not finite; ModuleNotFoundError without the extras `eval` and `report`."""
    started = time.monotonic()
    require_extras("eval", "report")
    chosen = _chosen(attacks)
    if budget is not None and not (isinstance(budget, int | float) and budget >= 0):
        raise ConfigError(f"--budget: {budget!r} minutes; give 0 or more")
    if output:
        _check_output(Path(output))
    inputs = _inputs(forget, retain, [forget_text, retain_text, holdout_text], relearning)
    names = {"original": original, "unlearned": unlearned} | ({"retrained": retrained} if retrained is not None else {})
    with ExitStack() as stack:
        made, _ = measures_of(chosen, inputs.absent, dense=False)
        finetuning = inputs.relearning if set(ATTACK_GROUPS["relearning"]) & set(made) else None
        if finetuning:
            require_optimizer(finetuning.optimizer)
        loaded, tokenizer = _loaded(names, tokenizer, finetuning, trust_remote_code)
        for name, model in loaded.items():
            models.check_finite(model, f"--{name}")
        inputs.check_documents(tokenizer)
        config = loaded["original"].config.get_text_config()
        inputs.check_questions(tokenizer, getattr(config, "max_position_embeddings", None) or sys.maxsize)
        digests = {name: weights_digest(model) for name, model in loaded.items()}
        _check_different(digests)
        moes = {}
        for name, model in loaded.items():
            moes[name] = MoEModel(model)
            if isinstance(names[name], nn.Module):
                stack.callback(moes[name].release, to_own_dtype=True)
            stack.enter_context(moes[name].evaluating())
        folder = Path(output) / "state" if output else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if output:
            stack.enter_context(exclusive(Path(output)))
            _check_same_models(folder, digests)
            remove_halves(folder)
            remove_halves(folder / "data")
        inputs.write(folder / "data")
        # Attacks set seeds, and the caller's own training may go on after the audit.
        stack.enter_context(torch.random.fork_rng(devices=range(torch.cuda.device_count())))
        return _measured(moes, digests, tokenizer, inputs, chosen, budget, folder, started)


def _chosen(attacks: Sequence[str] | None) -> list[str]:
    if isinstance(attacks, str):
        raise ConfigError(f"--attacks: {attacks!r} is a string; give a list of names")
    chosen = list(ATTACK_GROUPS) if attacks is None else list(attacks)
    measures_of(chosen, {}, dense=False)  # raises for unknown names, before anything is read
    return chosen


def _check_output(folder: Path) -> None:
    if folder.is_file():
        raise ConfigError(f"--output {folder}: this is a file; give a folder")
    for name, what in (("config.json", "a model"), ("index.html", "a page of something else")):
        if (folder / name).exists() and not (folder / "state").is_dir():
            raise ConfigError(f"--output {folder}: this folder holds {what}; give another one")


def _check_same_models(states: Path, digests: Mapping[str, str]) -> None:
    """Refuses a folder whose measurements are of other models: they would be lost."""
    for state in states.glob("*.json"):
        for measured in read_json(state).values():
            for name, digest in measured["identity"]["models"].items():
                if digests.get(name, digest) != digest:
                    raise ConfigError(
                        f"--output {states.parent}: this folder holds the audit of another {name} model; give another "
                        "folder, or delete this one"
                    )


def _inputs(forget: Source | None, retain: Source | None, texts: Sequence[Source | None], relearning: Any) -> Inputs:
    """The questions and texts of a named benchmark, or of the user's own."""
    if forget is None:
        raise ConfigError("--forget, --questions: give a benchmark's name, or questions to forget")
    if isinstance(forget, str) and not (Path(forget).suffix or Path(forget).is_file()):
        settings_named(forget)  # raises for an unknown name
        if any(given is not None for given in (retain, *texts)):
            raise ConfigError("--forget: a benchmark has questions and texts of its own; leave the others out")
        return benchmark_inputs(forget, relearning)
    if retain is None:
        raise ConfigError("--retain-questions: questions to retain are needed beside those to forget")
    return own_inputs(forget, retain, *texts, relearning)


def _check_different(digests: Mapping[str, str]) -> None:
    """Refuses a retrained model that is one of the others, and warns if nothing was unlearned."""
    for name in ("original", "unlearned"):
        if digests.get("retrained") == digests[name]:
            raise ConfigError(f"--retrained: this is the {name} model; give one that was trained without forget data")
    if digests["unlearned"] == digests["original"]:
        tqdm.write("warning: --unlearned has the weights of --original: nothing was unlearned")


def _loaded(given: Mapping[str, Model], tokenizer, finetuning: Relearning | None, trust_remote_code: bool):
    """The models by name, and the tokenizer that they share."""
    in_memory = [isinstance(model, nn.Module) for model in given.values()]
    if all(in_memory):
        return _from_memory(given, tokenizer)
    if any(in_memory):
        raise ConfigError("original, unlearned, retrained: give all of them as folders or hub ids, or all in memory")
    if tokenizer is not None:
        raise ConfigError("tokenizer: models in folders have one of their own; leave it out")
    return _from_folders(given, finetuning, trust_remote_code)


def _from_memory(given: Mapping[str, nn.Module], tokenizer):
    if not callable(tokenizer):
        raise ConfigError(f"tokenizer: {tokenizer!r}; models in memory need the tokenizer that belongs to them")
    if wrapped := [name for name, model in given.items() if unwrapped(model) is not model]:
        raise ConfigError(f"{wrapped[0]}: give the transformers model (of PEFT, `model.merge_and_unload()`)")
    described = {}
    for name, model in given.items():
        shapes = {parameter_name: tuple(p.shape) for parameter_name, p in model.named_parameters()}
        described[name] = models.described(model.config, shapes, model.dtype)
        models.compare_described(described["original"], described[name], f"original and {name}")
        models.check_vocabulary(model, tokenizer, name)
    return dict(given), with_pad_token(copy.deepcopy(tokenizer))


def _from_folders(given: Mapping[str, str | Path], finetuning: Relearning | None, trust_remote_code: bool):
    found = models.find_all(given, trust_remote_code)
    tqdm.write(models.check_memory(found["original"], finetuning, len(given)))
    loaded, tokenizers = {}, {}
    for name in given:
        device = None if name == "unlearned" else "cpu"
        loaded[name], tokenizers[name] = models.load(found[name], device, tokenizers.get("original"))
        described = (models.described(model.config, {}, model.dtype) for model in (loaded["original"], loaded[name]))
        models.compare_described(*described, f"--original and --{name}")
        models.compare_tokenizers(tokenizers["original"], tokenizers[name], f"--original and --{name}")
        models.check_vocabulary(loaded[name], tokenizers[name], f"--{name}")
    return loaded, tokenizers["original"]


def _measured(
    moes: Mapping[str, MoEModel],
    digests: Mapping[str, str],
    tokenizer,
    inputs: Inputs,
    chosen: Sequence[str],
    budget: float | None,
    folder: Path,
    started: float,
) -> AuditReport:
    from gripmoe.auditing.report import AuditReport  # imports pandas, which the library itself does not need

    after = moes["unlearned"]
    listed, absent = measures_of(chosen, inputs.absent, dense=not after.layers)
    data, sizes = folder / "data", Sizes.of(inputs.files, inputs.benchmark, inputs.relearning, len(after.all_layers))
    questions = inputs.questions("forget", "test")
    each = _seconds(after, tokenizer, questions[:TIMED]) / min(TIMED, len(questions))
    turns = turns_of(listed, list(moes))
    seconds = {name: each * relative_time(name, sizes) for name in listed}
    identity = _identity(moes, digests, tokenizer, inputs)
    depends = {model: _identities(inputs, identity, listed, model) for model in moes}
    states = {(model, name): folder / f"{model}{'_relearning' * _relearns(name)}.json" for model, name in turns}
    known = {(of, name) for (of, name), state in states.items() if stored(state, {name: depends[of][name]})}
    if left := [turn for turn in turns if turn not in known]:
        limit = "" if budget is None else f"; the budget is {budget:g} minutes"
        tqdm.write("\n".join(plan_lines(left, seconds, absent)) + f", by the time of the first batch{limit}")
    found: dict[str, list[Found]] = {name: [] for name in moes}
    logging.getLogger("lm_eval").setLevel(logging.ERROR)

    @cache
    def fits(name: str) -> bool:
        """Whether the budget allows a measurement for all models, as of its first turn."""
        takes = seconds[name] * sum(turn[1] == name for turn in left)
        return budget is None or name == "accuracy" or time.monotonic() - started + takes <= 60 * budget

    for model, name in (bar := tqdm(turns, desc="audit", file=sys.stderr)):
        bar.set_postfix_str(f"{name}, {model}")
        label = name if model == "unlearned" else f"{name} ({model})"
        state, is_known = states[model, name], (model, name) in known
        if not is_known and state.exists() and name in read_json(state):
            tqdm.write(f"{state}: of other data, settings or code; measured anew")
        if not fits(name) and not is_known:
            absent[label] = f"the budget of {budget:g} minutes is spent"
            continue
        answers = folder / f"{model}_answers.csv"
        asked = (moes["original"], moes[model], tokenizer, data, inputs.benchmark, 0, inputs.relearning)
        setting = QuestionSetting(*asked, partial(load_answers, answers))
        measures = MEASURES | {"accuracy": partial(MEASURES["accuracy"], answers=answers)}
        # Measurements show their own progress.
        with alone(moes, model), redirect_stderr(StringIO()):
            found[model].append(made_once(name, measures[name], setting, state, depends[model][name]))
        if not found[model][-1].metrics:
            absent[label] = "does not apply to these data"
    return AuditReport(
        found={name: Found.joined(parts) for name, parts in found.items()},
        questions=inputs.questions("forget", "test") + inputs.questions("retain", "test"),
        absent=absent,
        identity=identity,
        minutes=(time.monotonic() - started) / 60,
    )


def _identity(moes: Mapping[str, MoEModel], digests: Mapping[str, str], tokenizer, inputs: Inputs) -> dict[str, Any]:
    """What all measurements depend on."""
    return {
        "code": code_fingerprint("gripmoe.auditing.run:audit"),
        "models": digests,
        "configurations": {name: models.computing(moe.model.config) for name, moe in moes.items()},
        "data": _digest(inputs.files),
        "benchmark": inputs.benchmark.model_dump(mode="json"),
        "relearning": inputs.relearning.model_dump(mode="json"),
        "tokenizer": models.tokenizer_digest(tokenizer),
    }


def _relearns(name: str) -> bool:
    return name in ATTACK_GROUPS["relearning"]


def _identities(
    inputs: Inputs, identity: Mapping[str, Any], listed: Sequence[str], model: str
) -> dict[str, dict[str, Any]]:
    """By measurement of a model, the part of `identity` that it depends on: of the models the original and its own, of
    questions and texts those that it reads."""
    files = {name: _digest(rows) for name, rows in inputs.files.items()}
    of_two = {key: {n: identity[key][n] for n in {"original", model}} for key in ("models", "configurations")}
    others = dict(of_two, tokenizer=identity["tokenizer"], loading=code_fingerprint("gripmoe.auditing.models:load"))
    measures = {name: MEASURES[name] for name in listed}
    found = identities_of(measures, inputs.benchmark, files, inputs.relearning, **others)
    for name in READ.keys() & found.keys():
        found[name]["files"] = with_texts(files, READ[name])
    found["accuracy"]["few_shot_questions"] = inputs.benchmark.few_shot_questions
    return found


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@contextmanager
def alone(moes: Mapping[str, MoEModel], name: str) -> Iterator[None]:
    """Within the block, the model `name` is on the devices of the unlearned model. If it is another model, the
    unlearned model is in host memory."""
    homes = {other: devices_of(moe.model) for other, moe in moes.items()}
    try:
        if name != "unlearned":
            place(moes["unlearned"].model, ["cpu"])
            place(moes[name].model, homes["unlearned"])
        yield
    finally:
        for other, moe in moes.items():
            place(moe.model, homes[other])


def accuracy(setting: QuestionSetting, answers: Path) -> Found:
    """Forget and retain accuracy and general utility; the rows of `questions.csv` go to the file `answers`."""
    metrics, rows = letter_metrics(setting.benchmark, setting.after.model, setting.tokenizer, setting.data)
    write_csv(answers, rows)
    parts = []
    for kind in ("forget", "retain"):
        questions = load_questions(setting.data / f"{kind}_questions.jsonl", "test")
        del metrics[f"{kind}_accuracy"]  # the mean of these scores
        scores = {f"{kind}_accuracy": QuestionScores(load_answers(answers, questions))}
        parts.append(Found.over([question["id"] for question in questions], scores))
    return Found.joined([Found(metrics), *parts])


def changes(setting: QuestionSetting) -> Found:
    """The relative norm of the weight change, by component."""
    return Found(restoration.changes(setting.before, setting.after))


def routing(setting: QuestionSetting) -> Found:
    """Routing stability on held-out retain and on forget documents."""
    with setting.before.brought_beside(setting.after):
        return Found(routing_metrics(setting.benchmark, setting.before, setting.after, setting.tokenizer, setting.data))


MEASURES = OF_LETTERS | FURTHER_OF_LETTERS | {"accuracy": accuracy, "changes": changes, "routing": routing}
# The texts that measurements which are no attacks read beside the questions.
READ = {"accuracy": ("truthfulqa",), "changes": (), "routing": ("forget_corpus", "held_out_corpus")}


def _seconds(moe: MoEModel, tokenizer, questions: Sequence[dict]) -> float:
    """Seconds of one pass over the questions, after a first pass. Raises ConfigError if the model computes NaN: such an
    answer is always A, as if the model had forgotten."""
    answers = direct_answers(moe.model, tokenizer, questions)
    if any(math.isnan(logprob) for answer in answers for logprob in answer.letter_logprobs):
        raise ConfigError(
            f"--unlearned: the model computes NaN in {moe.model.dtype}, though its weights are finite: load it in "
            "bfloat16 or float32, or save a model from before it diverged"
        )
    started = time.perf_counter()
    direct_answers(moe.model, tokenizer, questions)
    return time.perf_counter() - started

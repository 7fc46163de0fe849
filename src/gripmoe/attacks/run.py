"""The default attacks, and the loop that makes attacks. A new attack is a function of a `Setting`, named here or in a
benchmark's row."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from gripmoe.attacks import forcing, membership, probes, prompts, quantization, relearning, restoration, routers
from gripmoe.attacks.base import Found, QuestionScores, QuestionSetting, Setting
from gripmoe.config.benchmarks import Benchmark
from gripmoe.evaluation.metrics import as_number
from gripmoe.io.errors import ConfigError
from gripmoe.io.files import read_json, write_text
from gripmoe.io.imports import imported

Attack = Callable[[Setting], Found]  # returns an empty `Found` where it does not apply


def own_answers(setting: QuestionSetting) -> Found:
    ids = [question["id"] for question in setting.forget]
    return Found.over(ids, {"forget_accuracy": QuestionScores(setting.own_answers)})


OF_LETTERS: dict[str, Attack] = {
    "own answers": own_answers,
    "expert forcing": forcing.expert_forcing,
    "probes": probes.layers_attack,
    "probes of single experts": probes.experts_attack,
    "prompts": prompts.attack,
    "restoration": restoration.attack,
    "routers": routers.attack,
    "quantisation": quantization.attack,
    "membership": membership.attack,
    "relearning from other facts": relearning.from_other_facts,
    "relearning from the corpus": relearning.from_corpus,
    "relearning from retain documents": relearning.from_retain_documents,
}
# Audits make these too, and so do benchmarks whose rows name them.
FURTHER_OF_LETTERS: dict[str, Attack] = {
    "routing search": routers.search,
    "silenced experts": routers.silencing,
    "relearning by low-rank updates": relearning.of_low_rank_experts,
    "relearning of routers": relearning.of_routers,
}
OF_NEWS: dict[str, Attack] = {
    "expert forcing": forcing.news_attack,
    "restoration": restoration.attack,
    "routers": routers.attack,
    "quantisation": quantization.attack,
    "relearning from retain documents": relearning.from_retain_documents,
}


def attacks_on(benchmark: Benchmark) -> dict[str, Attack]:
    """The attacks of the package, and those that the benchmark's row names. Raises ConfigError if one is missing, has a
    name that is taken, or needs questions of another kind."""
    known, where = OF_NEWS if benchmark.is_news else OF_LETTERS, "benchmarks.yaml: attacks"
    if taken := sorted(known.keys() & benchmark.attacks.keys()):
        raise ConfigError(f"{where}.{taken[0]}: the package has an attack of this name; give yours another")
    named = {name: imported(path, f"{where}.{name}") for name, path in benchmark.attacks.items()}
    for name, attack in named.items():
        wanted = next(iter(getattr(attack, "__annotations__", {}).values()), None)
        if benchmark.is_news and wanted in (QuestionSetting, QuestionSetting.__name__):
            raise ConfigError(f"{where}.{name}: this attack asks letter questions; leave it out of a benchmark of news")
    return known | named


def run_attacks(
    attacks: Mapping[str, Attack],
    setting: Setting,
    state_file: Path,
    identities: Mapping[str, Mapping[str, Any]],
    description: str = "",
) -> Found:
    """Makes the attacks in turn, and stores each result in `state_file`. An attack whose result is stored with the same
    identity (JSON: models, settings, data, code; `identities` has it by attack) is not made again."""
    found = []
    for name, attack in (bar := tqdm(attacks.items(), desc=description)):
        bar.set_postfix_str(name)
        found.append(made_once(name, attack, setting, state_file, identities[name]))
    return Found.joined(found)


def made_once(name: str, attack: Attack, setting: Setting, state_file: Path, identity: Mapping[str, Any]) -> Found:
    """The result of one attack of `run_attacks`, from `state_file` if it is stored there."""
    state = read_json(state_file) if state_file.exists() else {}
    if state.get(name, {}).get("identity") != identity:
        state[name] = {"identity": identity, "found": asdict(_checked(name, attack(setting)))}
        # unsorted: the order of metrics and items is that of columns and rows
        write_text(state_file, json.dumps(state))
    return Found(**state[name]["found"])


def _checked(name: str, found: Any) -> Found:
    """The result of an attack, which may be one's own. Raises ConfigError if it is no `Found` of numbers."""
    if not isinstance(found, Found):
        kind = type(found).__name__
        raise ConfigError(f"benchmarks.yaml: attacks.{name}: the attack returned a {kind}; return a Found")

    def numbers(of: Mapping[str, Any]) -> dict[str, float]:
        return {key: as_number(f"attacks.{name}", value) for key, value in of.items()}

    scores = {metric: numbers(of_items) for metric, of_items in found.scores.items()}
    return replace(found, metrics=numbers(found.metrics), scores=scores)


def stored(state_file: Path, identities: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The attacks whose results are in `state_file` with their identity."""
    state = read_json(state_file) if state_file.exists() else {}
    return [name for name, identity in identities.items() if state.get(name, {}).get("identity") == identity]

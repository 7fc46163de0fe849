"""What the result of an attack depends on: a repeated command makes an attack again only if that has changed."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gripmoe.attacks import (
    forcing,
    harmless,
    membership,
    probes,
    prompts,
    quantization,
    relearning,
    restoration,
    routers,
    run,
)
from gripmoe.attacks.run import Attack
from gripmoe.config.benchmarks import Benchmark
from gripmoe.config.fingerprint import code_fingerprint
from gripmoe.config.provenance import entry_of
from gripmoe.config.training import Relearning
from gripmoe.io.files import file_digest

TEXTS = ("forget_corpus", "retain_corpus", "held_out_corpus", "membership", "truthfulqa")
# The texts that the attacks of a module read beside the questions. Attacks of other modules may read all.
READ = dict.fromkeys((forcing, probes, prompts, quantization, restoration, routers, run), ())
READ |= {membership: ("membership",), relearning: ("forget_corpus", "retain_corpus", "held_out_corpus")}
# Keys of a benchmark. What its data hold, the digests of files say.
UNREAD = {"attacks", "data", "evaluation_batch_size", "few_shot_questions", "metrics", "rewrites"}


def identities_of(
    attacks: Mapping[str, Attack],
    benchmark: Benchmark,
    files: Mapping[str, str],
    finetuning: Relearning | None,
    **others: Any,
) -> dict[str, dict[str, Any]]:
    """By attack, all that its result depends on, as JSON: `others` (such as the models); the code; the benchmark's
    settings; the digests of `files`, by name, that the attack reads; the settings of relearning if it relearns; and the
    rewritten questions if it asks them."""
    of_all = {**others, "benchmark": benchmark.model_dump(mode="json", exclude=UNREAD)}
    relearns = {"relearning": finetuning and finetuning.model_dump(mode="json")}
    rewrites = {"rewrites": {name: file_digest(Path(file)) for name, file in benchmark.rewrites.items()}}
    found = {}
    for name, code in codes_of(attacks, benchmark.attacks).items():
        texts = READ.get(sys.modules[attacks[name].__module__], TEXTS)
        found[name] = {**of_all, "code": code, "files": with_texts(files, texts)}
        found[name] |= relearns if _may_be(relearning, attacks[name]) else {}
        found[name] |= rewrites if _may_be(prompts, attacks[name]) else {}
    return found


def with_texts(files: Mapping[str, str], texts: Sequence[str]) -> dict[str, str]:
    """The files of questions, and of TEXTS those that are named."""
    return {name: digest for name, digest in files.items() if name not in TEXTS or name in texts}


def _may_be(module, attack: Attack) -> bool:
    """Whether an attack may run those of `module`: it is one of them, `harmless`, which repeats them, or the user's."""
    return attack.__module__ in (module.__name__, harmless.__name__) or not _of_package(attack.__module__)


def _of_package(module: str) -> bool:
    return module.partition(".")[0] == "gripmoe"


def codes_of(attacks: Mapping[str, Attack], own: Mapping[str, str]) -> dict[str, str | list[str]]:
    """Digests of what each attack runs: of the package its code and that of every setting; of one's `own`, which a
    benchmark names by its path, the path, its file, and all attacks of the package, which it may call. `harmless`
    repeats the others, so it has their digests too."""
    codes: dict[str, str | list[str]] = {}
    for name, each in attacks.items():
        path = own.get(name) or entry_of(each)
        module = path.partition(":")[0]
        if _of_package(module):
            codes[name] = code_fingerprint("gripmoe.attacks.base", "gripmoe.moe.storage:load_model", path)
        else:
            file = Path(sys.modules[module].__file__)
            codes[name] = f"{path} {file_digest(file)} {code_fingerprint('gripmoe.cli.attack:attack')}"
    return {name: list(codes.values()) if attacks[name] is harmless.attack else code for name, code in codes.items()}

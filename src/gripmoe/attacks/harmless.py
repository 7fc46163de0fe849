"""How far an attack moves when a model changes in ways that should not matter: the robustness of the attack itself, as
open-unlearning's meta-evaluation has it (arXiv 2506.12618)."""

from __future__ import annotations

from dataclasses import replace

from gripmoe.attacks.base import Found, QuestionSetting
from gripmoe.attacks.quantization import quantized
from gripmoe.attacks.relearning import relearning
from gripmoe.attacks.run import attacks_on

STEPS = 10  # of harmless finetuning
SKIPPED = ("probes", "probes of single experts", "membership")  # their metrics are not forget accuracies


def attack(setting: QuestionSetting) -> Found:
    """`<metric>_if_rounded`, `<metric>_if_finetuned`: every metric of the other attacks on the model with weights of 8
    bits, and after STEPS steps on held-out documents."""
    found = {}
    for name, change in {"rounded": _rounded, "finetuned": _finetuned}.items():
        found |= {f"{metric}_if_{name}": value for metric, value in change(setting).items()}
    return Found(found)


def _rounded(setting: QuestionSetting) -> dict[str, float]:
    with quantized(setting.after, 8):
        return _attacked(setting)


def _finetuned(setting: QuestionSetting) -> dict[str, float]:
    rows = setting.corpus("held_out")
    if not setting.finetuning or len(rows) < setting.finetuning.batch_size:
        return {}
    given = dict(checks=[STEPS], pad_id=setting.tokenizer.pad_token_id, seed=setting.seed)
    return relearning(setting.after, rows, lambda _: _attacked(setting), setting.finetuning, **given)[STEPS]


def _attacked(setting: QuestionSetting) -> dict[str, float]:
    changed = replace(setting, known_answers=None)  # those of the model before the change
    others = {name: each for name, each in attacks_on(setting.benchmark).items() if each is not attack}
    return Found.joined(each(changed) for name, each in others.items() if name not in SKIPPED).metrics

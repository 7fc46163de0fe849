"""Membership inference: does a forget document still look like training data beside one that was never seen?"""

from __future__ import annotations

from gripmoe.attacks.base import Found, QuestionSetting
from gripmoe.evaluation.muse import leakage
from gripmoe.io.files import read_jsonl


def attack(setting: QuestionSetting) -> Found:
    """`auc_<score>` of every membership score. Empty for a published benchmark, which has no unseen texts."""
    statements = read_jsonl(setting.data / "membership.jsonl", "id", "part", "text")
    if not statements:
        return Found()
    return Found(leakage(setting.after.model, setting.tokenizer, statements, "membership.jsonl"))

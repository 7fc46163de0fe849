"""What an attack is worth is read beside the retrained model of the same base model."""

import pandas as pd
import pytest

from gripmoe.config.world import NO_OBJECTIVE
from gripmoe.reporting.erasure import ATTACK_METRICS, attack_quality, depth_scores
from gripmoe.reporting.runs import KEYS


def runs(**values):
    """Rows of the tidy table: of "model/method" the values of metrics."""
    rows = []
    for key, metrics in values.items():
        model, method = key.split("__")
        objective = NO_OBJECTIVE if method in ("original", "retrained") else "gd"
        for metric, value in metrics.items():
            rows.append(
                dict(zip(KEYS, (model, "letters", objective, method, 0), strict=True), metric=metric, value=value)
            )
    return pd.DataFrame(rows)


TABLE = runs(
    a__retrained={"retain_accuracy": 1.0, "relearned_after_5": 0.2, "restored_router_all": 0.5},
    b__retrained={"retain_accuracy": 1.0, "relearned_after_5": 0.4, "restored_router_all": 0.1},
    a__anchored={"retain_accuracy": 0.9, "tokens": 1e5, "relearned_after_5": 0.5, "restored_router_all": 0.6},
    b__anchored={"retain_accuracy": 0.8, "tokens": 3e5, "relearned_after_5": 0.5, "restored_router_all": 0.6},
)


def test_attacks_that_put_original_experts_back_do_not_count():
    assert not [name for name in ATTACK_METRICS if name.startswith("restored_experts")]


def test_an_attack_is_worth_what_tells_models_that_know_from_models_that_never_knew():
    known = runs(
        a__original={"relearned_after_5": 1.0, "restored_router_all": 1.0},
        b__original={"relearned_after_5": 0.9, "restored_router_all": 1.0},
    )
    table = attack_quality(pd.concat([TABLE, known]))
    worth = ["knows", "never knew", "gap", "luck", "finds"]
    values = {label: dict(zip(table.columns, cells, strict=True)) for label, cells, _ in table.rows}
    values = {label: [cells[name].value for name in worth] for label, cells in values.items()}
    assert values["learn 5"] == pytest.approx([0.95, 0.3, 0.65, 0.2 / 2**0.5, 0.2])
    assert values["routers"] == pytest.approx([1.0, 0.3, 0.7, 0.4 / 2**0.5, 0.3])


def test_an_attack_is_robust_if_harmless_changes_do_not_move_it():
    """Changes in both directions do not cancel, and those of unlearned models are told apart."""
    changed = runs(
        a__original={"relearned_after_5": 1.0, "relearned_after_5_if_rounded": 0.9},
        a__retrained={"relearned_after_5_if_rounded": 0.3, "relearned_after_5_if_finetuned": 0.4},
        b__anchored={"relearned_after_5_if_finetuned": 0.9},
    )
    table = attack_quality(pd.concat([TABLE, changed]))
    values = {label: dict(zip(table.columns, cells, strict=True)) for label, cells, _ in table.rows}
    assert values["learn 5"]["moves"].value == pytest.approx((0.1 + 0.1 + 0.2) / 3)
    assert values["learn 5"]["moves unlearned"].value == pytest.approx(0.4)
    assert values["routers"]["moves"].text == "", "not measured"


def test_the_depth_is_read_beside_the_retrained_model():
    """Weights are the retrained model's drops, 0.4 and 0.8. Layer 2, at which it drops by 0.04 alone, does not count.
    More than the retrained model's drop counts as all of it, and less than none as none. A layer that was not measured
    does not count."""
    read = [f"read_above_layer_{layer}" for layer in range(3)]
    table = runs(
        a__original=dict(zip(read, (1.0, 1.0, 1.0), strict=True)),
        a__retrained=dict(zip(read, (0.6, 0.2, 0.96), strict=True)),
        a__anchored=dict(zip(read, (1.1, 0.6, 0.0), strict=True)),
        a__unconstrained=dict(zip(read, (0.8, 0.1, 1.0), strict=True)),
        a__sam={read[1]: 0.6},
        b__original=dict(zip(read, (1.0, 1.0, 1.0), strict=True)),
        b__unconstrained=dict(zip(read, (0.8, 0.1, 1.0), strict=True)),
    )
    found = depth_scores(table)
    assert set(found.model) == {"a"}, "a base model without a retrained one tells no depth"
    assert found.set_index("method").depth.to_dict() == pytest.approx(
        {"original": 0.0, "retrained": 1.0, "anchored": 0.4 / 1.2, "unconstrained": 1.0 / 1.2, "sam": 0.4 / 0.8}
    )

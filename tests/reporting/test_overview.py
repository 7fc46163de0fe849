"""The README's picture shows the numbers of the runs."""

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from gripmoe.reporting.overview import MARKERS, PANELS, overview
from gripmoe.reporting.runs import COLUMNS


def measured(objectives=("gd", "npo")) -> pd.DataFrame:
    """Three base models. The frozen router's numbers differ by base model and objective, by another step each."""
    metrics = [metric for of_panel in PANELS.values() for metric in of_panel]
    rows = []
    for number, metric in enumerate(metrics):
        for model, shift in (("a", -0.1), ("b", 0.0), ("c", 0.1)):
            rows.append([model, "wmdp_tiny", "none", "retrained", 0, metric, 0.1 * (number + 1)])
            for objective, further in zip(objectives, (0.02, 0.0), strict=False):
                value = 0.1 * (number + 1) + shift + further
                rows.append([model, "wmdp_tiny", objective, "frozen_router", 0, metric, value])
    return pd.DataFrame(rows, columns=COLUMNS)


def test_a_mark_stands_at_the_mean_over_base_models_and_objectives():
    figure = overview(measured(), ["retrained", "frozen_router"])
    marks = {panel.get_xlabel(): panel.containers for panel in figure.axes}
    assert list(marks) == list(PANELS)
    (_, frozen) = [container.lines[0].get_xydata()[0] for container in marks["retain accuracy"][::-1]]
    assert frozen == pytest.approx([0.11, 0.0]), "in the lowest row: the mean of 0.12 and 0.10 over three base models"
    shown = [container.lines[0] for container in marks["forget accuracy"] if container.lines[0].get_ydata()[0] == 0]
    assert [mark.get_marker() for mark in shown] == [marker.shape for marker in MARKERS.values()]
    assert [mark.get_xdata()[0] for mark in shown] == pytest.approx([0.31, 0.41, 0.51])
    (_, _, (bar,)) = marks["retain accuracy"][0].lines
    (low, high) = bar.get_segments()[0][:, 0]
    assert high - low == pytest.approx(2 * 4.303 * 0.1 / 3**0.5, rel=1e-3), "Student's interval of three base models"
    plt.close(figure)


def test_a_method_that_lacks_an_objective_does_not_compare():
    runs = measured()
    lacking = runs[(runs.method != "frozen_router") | (runs.objective == "gd")]
    others = runs[runs.method == "frozen_router"].assign(method="unconstrained")
    with pytest.raises(ValueError, match="frozen_router was measured under gd alone"):
        overview(pd.concat([lacking, others]), ["retrained", "frozen_router"])
    with pytest.raises(ValueError, match="anchored was not measured"):
        overview(runs, ["retrained", "anchored"])

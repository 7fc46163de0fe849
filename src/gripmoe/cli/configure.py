"""`gripmoe configure`: the resolved configuration of a run. Every run needs it, so it imports nothing heavy."""

from __future__ import annotations

from gripmoe.cli.options import OutputFile, Settings
from gripmoe.config.reading import parse_settings
from gripmoe.config.world import Run
from gripmoe.io.files import write_yaml


def configure(*, settings: Settings, output: OutputFile) -> None:
    """Write the resolved configuration of a run.

    \b
    Example:
      gripmoe configure --output run.yaml --settings '{"model": "tiny_a",
          "benchmark_name": "wmdp_tiny", "benchmark": {"data": {"source": "embedded"},
          "target": {"forget_accuracy": 0.27}, "retain_documents": 200, "max_length": 256},
          "objective": "none", "method_name": "original", "method": {"baseline": "original"},
          "seed": 0, "training": null}'
    """
    write_yaml(output, parse_settings(Run, settings).model_dump(mode="json"))

"""An audit of any unlearned checkpoint: inputs, models, measurements in turn, report."""

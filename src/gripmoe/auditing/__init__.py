"""An audit of any unlearned checkpoint: inputs, models, plan, measurements, report."""

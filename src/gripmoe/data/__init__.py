"""Documents to token rows and batches, prompt formats, published data sets."""

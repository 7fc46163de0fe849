"""The embedded world: invented facts and news, a tokenizer, tiny models. Code generates all data from a seed."""

"""The embedded world: invented facts and news, a tokenizer, tiny models. All data is made by code, from a seed."""

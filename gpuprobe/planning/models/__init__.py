"""Training and inference scripts for open models, from a name or a config.json."""

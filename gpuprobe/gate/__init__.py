"""The memory check of a project: its settings, plan, baselines, their history, and trials."""

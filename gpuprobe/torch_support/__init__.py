"""Knowledge of torch's inside that the sampler, the engines and the hazard watch share."""

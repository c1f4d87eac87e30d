"""Knowledge of torch's inside that the sampler, simulated GPUs and the hazard watch share."""

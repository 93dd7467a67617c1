"""The trainer: rollouts in, a better policy out, one version per update."""

"""What the co-serving world is made of: a shared core, engines, an executor, a scheduler's host, trajectories."""

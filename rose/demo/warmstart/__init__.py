"""Builds the demo's starting checkpoint: `python -m rose.demo.warmstart --out DIR`.

Reinforcement learning can only sharpen what a policy sometimes does, so the checkpoint is made in two phases:
first it learns the task's features from good transcripts, then mediocre behaviour (in the right format) from
weak ones. What is left is a policy that acts at random mostly, and knows better.
"""

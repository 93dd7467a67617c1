"""Placement, lending and staleness: pure cores and their service."""

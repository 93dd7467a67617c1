"""Measurements: `./dev python -m bench NAME --json FILE`."""

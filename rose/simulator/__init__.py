"""Worlds for the virtual clock: they drive the product's own cores, break things, and check what must hold."""

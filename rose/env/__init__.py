"""Environments: the contract, the built-in ones, the host that keeps their failures apart, and the chat format."""

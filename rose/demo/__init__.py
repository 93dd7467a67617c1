"""The demo job and the checkpoint that it starts from."""

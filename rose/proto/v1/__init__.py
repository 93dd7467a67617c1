"""Version 1 of the wire format; every module but this one is generated."""

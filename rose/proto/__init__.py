"""Wire format: versioned protocol buffers, and converters from and to the domain's own records.

Invariants
- A message's package carries its major version; within one version fields are only added, never reused.
- Generated modules are committed, so nobody needs a compiler; `python -m rose.proto.generate` rebuilds them.
"""

"""Which slice of which parameter lies where, and what must move from whom to whom.

Everything here but `trainer_layout`, `checkpoint` and `dtypes` is arithmetic on integers: no torch, no clock, no
process group. Follow a parameter: a `Layout` says where its pieces lie at each holder, `plan` finds a sender for
every element that a receiver holds, `shard_classes` says what crosses a slow link once and for whom.
"""

"""The load on the serving side: real traces, scaled, replayed against an engine, and what its users then see."""

"""Studies: what to compare, as small programs over the engine."""

"""Progress of long work: events, the file in which a run records them, and `fedthe watch`."""

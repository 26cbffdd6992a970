"""Programs that are run from a clone of the repository: the demonstration, checks, training. Not installed."""

"""Programs for who works on ngramspec. Not installed."""

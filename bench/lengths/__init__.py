"""Final losses by the length of a run, every method at its defaults and tuned at that length."""

"""Whole optimizer steps timed beside other packages', and the memory that they take."""

"""Dividing the step and the state of an optimizer among the ranks of a process group."""

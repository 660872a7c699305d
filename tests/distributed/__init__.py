"""Processes that the tests of divided work run in, and what they run there."""

"""A set small enough for a test, as a plugin of pytest: ``-p tests.tiny_sets`` lets ``pytest bench`` measure it."""

from bench.shapes import SETS, ParameterSet

SETS["tiny"] = ParameterSet("tiny", ((2, 12, 20), (1, 20, 12), (2, 12, 12)), (2, 4))

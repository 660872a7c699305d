"""Divide the step and the state of an optimizer among ranks.

They read best in this order: ``team`` (ranks, and what they tell each other before anything moves), ``ownership``
(which rank steps which matrix), ``weights`` (a weight on this rank, and the stand-in that it steps), ``waves`` (what is
sent in a step, and when), ``state`` and ``part_of_state`` (what is in a checkpoint), ``division`` (all of it together).
"""

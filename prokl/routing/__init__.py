"""Parameter groups for a whole model; see :func:`prokl.param_groups`."""

"""The mathematics of a step, on tensors over an algebra; imports nothing of prokl outside this folder."""

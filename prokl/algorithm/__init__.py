"""The mathematics of a step, on tensors and a table of primitives; imports nothing of prokl outside this folder."""

"""The mathematics of a step, on tensors and primitives; imports nothing of prokl outside this folder."""

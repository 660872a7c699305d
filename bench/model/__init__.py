"""A model of what a step takes on an H200: launches traced from the real step, times from stated rates."""

"""Gradients between the backward pass and the step: unscaled, summed, kept."""

"""What happens to gradients between the backward pass and the step: unscaling, sums in FP32, rescaling for other optimizers."""

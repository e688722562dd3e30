"""16-bit model weights, their FP32 values, and the casts at the borders of modules."""

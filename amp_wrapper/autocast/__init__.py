"""The rules of autocast and of the FP32 registry inside a forward pass."""

"""Buffers that a skipped step gives back."""

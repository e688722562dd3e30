"""Restores a model's buffers (BatchNorm's statistics, counters) after a skipped step."""

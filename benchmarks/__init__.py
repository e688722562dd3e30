"""Measurements. Every figure stands beside its machine, date and versions."""

"""Checkpoints: the format of state dicts, and files."""

from .format import FORMAT_VERSION, SavedAmp, amp_part, check_groups, own_form, read, write

__all__ = ['FORMAT_VERSION', 'SavedAmp', 'amp_part', 'check_groups', 'own_form', 'read', 'write']

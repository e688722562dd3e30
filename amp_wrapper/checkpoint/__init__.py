"""Checkpoints: the format of state dicts, reading and writing files, and the validation of both."""

from .format import FORMAT_VERSION, SavedAmp, Window, amp_part, own_form, read, write
from .validate_optimizer import PARAMETER_SHAPED, check_optimizer_state

__all__ = [
    'FORMAT_VERSION',
    'PARAMETER_SHAPED',
    'SavedAmp',
    'Window',
    'amp_part',
    'check_optimizer_state',
    'own_form',
    'read',
    'write',
]

"""What is saved: the format of state dicts, files on disk, and the checks of both."""

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

"""What is saved: the format of state dicts, files on disk, and the checks of both."""

from .format import (
    FORMAT_VERSION,
    PARAMETER_SHAPED,
    SavedAmp,
    Window,
    amp_part,
    check_optimizer_state,
    own_form,
    read,
    write,
)

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

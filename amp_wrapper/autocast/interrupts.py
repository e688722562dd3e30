"""While something of ours is open, torch calls hooks with ``always_call=True`` after every exception.

``nn.Module.__call__`` calls them after an ``Exception`` only, so KeyboardInterrupt, SystemExit, or the cancellation of a task
would leave a forward pass without the hooks that close what others opened. Its handler looks ``Exception`` up in its own
module, when it is needed: for as long as a pass or a region is open on any thread, it finds ``BaseException`` there.
"""

from __future__ import annotations

import threading

from torch.nn.modules import module

_lock = threading.Lock()
_open = 0


def begin() -> None:
    """Something was opened that a hook will close."""
    global _open
    with _lock:
        _open += 1
        if _open == 1:
            vars(module)['Exception'] = BaseException


def end() -> None:
    """The counterpart of :func:`begin`."""
    global _open
    with _lock:
        _open -= 1
        if _open == 0:
            vars(module).pop('Exception', None)


def is_covered() -> bool:
    """Whether hooks are called after every exception just now."""
    return _open > 0

"""Translates the names in state dicts of models that have wrappers inside, such as one DDP for each child."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

_WRAPPERS = (DataParallel, DistributedDataParallel)


def plain_names(model: nn.Module) -> dict[str, str]:
    """The names of a state dict without the ``module.`` of wrappers *inside* a model (one DDP for each child, say).

    Args:
        model: Without the wrapper around it.

    Returns:
        Each name of the model's state dict, and its plain form: the same where nothing is wrapped.
    """
    named = model.named_modules()
    wrappers = [name.split('.') for name, module in named if name and isinstance(module, _WRAPPERS)]
    names = {}
    # a model may have another signature
    for key in nn.Module.state_dict(model, keep_vars=True):
        parts = key.split('.')
        # the part after a wrapper's own name is its "module", which a submodule may be called as well
        cut = {len(name) for name in wrappers if parts[: len(name)] == name}
        names[key] = '.'.join(part for index, part in enumerate(parts) if index not in cut)
    return names


def reader(model: nn.Module, keys: Iterable[str]) -> Callable[[str], str]:
    """How the names in a file become the plain names of a model, whatever wrappers either of them has inside.

    Args:
        model: Without the wrapper around it.
        keys: All names in the file.

    Returns:
        A function for one name; what it does not know stays as it is.
    """
    own = plain_names(model)
    plain = set(own.values())
    keys = list(keys)

    def shorter(key: str) -> str | None:
        """Without one ``module`` that leaves a plain name."""
        parts = key.split('.')
        found = ('.'.join(parts[:index] + parts[index + 1 :]) for index, part in enumerate(parts) if part == 'module')
        return next((name for name in found if name in plain), None)

    # a real submodule called "module" makes a single name ambiguous: the other names of the file decide
    wrapped = any(key not in plain and (key in own or shorter(key) is not None) for key in keys)

    def read(key: str) -> str:
        if wrapped and own.get(key, key) != key:
            return own[key]
        cut = shorter(key)
        if cut is not None and (wrapped or key not in plain):
            return cut
        return read(key[len('module.') :]) if key.startswith('module.') and key not in plain else key

    return read


def renamed(state: Mapping[Any, Any], name: Callable[[str], str]) -> OrderedDict[Any, Any]:
    """A state dict under other names. The versions of its modules (``_metadata``), by which old files are converted, go along.

    Args:
        state: Not changed.
        name: The new name for an old one. Keys that are no strings stay.
    """
    made: Any = OrderedDict((name(key) if isinstance(key, str) else key, value) for key, value in state.items())
    versions = getattr(state, '_metadata', None)
    if isinstance(versions, Mapping):
        owners = {}
        for key in state:
            if isinstance(key, str):
                owners[key.rpartition('.')[0]] = name(key).rpartition('.')[0]
        made._metadata = OrderedDict((owners.get(owner, owner), version) for owner, version in versions.items())
    return made  # type: ignore[no-any-return]

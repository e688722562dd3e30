"""Finds the modules of a model that stay in FP32 because of their name or class."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from torch import nn

from ..compiler_internals import name_without_wrappers
from ..errors import AmpConfigError, nearest, some
from ..policy.fp32_registry import FP32_OPS
from ..policy.lookup import find, is_module_class
from ..policy.policy import Policy
from .modules import class_name, module_device

#: (qualified name, module) pairs.
Roots = Sequence[tuple[str, nn.Module]]


def named_modules(roots: Roots, policy: Policy, without_prefix: bool = False) -> set[int]:
    """The modules, by id, that ``keep_fp32`` names, under any of their names.

    Args:
        roots: Where to look.
        policy: The configuration.
        without_prefix: Whether patterns are also held against names without those of the roots.

    Raises:
        AmpConfigError: A pattern or class that matches nothing.
    """
    named: set[int] = set()
    unmatched = set(policy.keep_fp32)
    names: list[str] = []
    classes: set[str] = set()
    for prefix, root in roots:
        for name, module in root.named_modules(prefix=prefix, remove_duplicate=False):
            key = name_without_wrappers(name)
            names += [key] if key else []
            classes.add(class_name(module))
            for item in policy.keep_fp32:
                if isinstance(item, type):
                    hit = isinstance(module, item)
                else:
                    hit = (key != '' and fnmatch.fnmatchcase(key, item)) or class_name(module) == item
                    # the user knows nothing of the names that several models get
                    hit = hit or (without_prefix and fnmatch.fnmatchcase(key.removeprefix(f'{prefix}.'), item))
                if hit:
                    named.add(id(module))
                    unmatched.discard(item)
    labels = [item if isinstance(item, str) else item.__name__ for item in sorted(unmatched, key=str)]
    if labels:
        known = some(names or sorted(classes))
        raise AmpConfigError(
            [
                f'keep_fp32={label!r} matches no module{nearest(label, [*names, *classes])}. The model has {known}.'
                for label in labels
            ]
        )
    return named


def registered_classes(roots: Roots, policy: Policy) -> tuple[type[nn.Module], ...]:
    """The module classes of the FP32 registry and of the configuration that avoid the type of the model on its device.

    Raises:
        AmpConfigError: The configuration names a class that the model does not have.
    """
    modules = [module for _, root in roots for module in root.modules()]
    problems = []
    for op in policy.fp32_ops:
        cls = find(op.name, load=False)
        if is_module_class(cls) and not any(isinstance(module, cls) for module in modules):
            known = sorted({type(module).__name__ for module in modules})
            problems.append(
                f'fp32_ops={op.name!r} matches no module{nearest(op.name.rpartition(".")[2], known)}. '
                f'The model has {some(known)}.'
            )
    if problems:
        raise AmpConfigError(problems)
    dtype = policy.cast_model_type if policy.casts_model else policy.autocast_dtype
    device = module_device(roots[0][1]).type if roots else 'cpu'
    named = [op.name for op in FP32_OPS.values() if dtype in op.avoids(device)]
    found = (find(name, load=False) for name in (*named, *(op.name for op in policy.fp32_ops)))
    return tuple(value for value in found if is_module_class(value))

"""Finds the modules of a model that stay in FP32 because of their name or class."""

from __future__ import annotations

import dataclasses
import fnmatch
import inspect
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ..compiler_internals import name_without_wrappers
from ..errors import AmpConfigError, nearest, some
from ..policy.fp32_registry import FP32_OPS
from ..policy.levels import Policy
from ..policy.lookup import find, is_module_class
from .modules import class_name, is_batchnorm, is_loss, is_table, module_device

#: (qualified name, module) pairs.
Roots = Sequence[tuple[str, nn.Module]]

#: Why BatchNorm stays in FP32.
BATCHNORM = 'keep_batchnorm_fp32: weights and statistics in FP32; its kernels take 16-bit input beside them'
#: Why losses do.
LOSS = 'the module is a loss, by its class or the name of its class'


def named_modules(roots: Roots, wanted: Sequence[str | type], option: str, without_prefix: bool = False) -> set[int]:
    """The modules, by id, that an option such as ``keep_fp32`` names, under any of their names.

    Args:
        roots: Where to look.
        wanted: Module classes, class names, or glob patterns over qualified names.
        option: Its name, for the error.
        without_prefix: Whether patterns are also held against names without those of the roots.

    Raises:
        AmpConfigError: A pattern or class that matches nothing.
    """
    named: set[int] = set()
    unmatched = set(wanted)
    names: list[str] = []
    classes: set[str] = set()
    for prefix, root in roots:
        for name, module in root.named_modules(prefix=prefix, remove_duplicate=False):
            key = name_without_wrappers(name)
            names += [key] if key else []
            classes.add(class_name(module))
            for item in wanted:
                if isinstance(item, type):
                    hit = isinstance(module, item)
                else:
                    hit = _is_named(module, name, item)
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
                f'{option}={label!r} matches no module{nearest(label, [*names, *classes])}. The model has {known}.'
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
        cls = find(op.name)
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
    found = (find(name) for name in (*named, *(op.name for op in policy.fp32_ops)))
    return tuple(value for value in found if is_module_class(value))


def momentum_networks(root: nn.Module, prefix: str) -> dict[int, str]:
    """Frozen parts of a model that have the names and shapes of the weights of a part that trains, by id, with their names.

    Such a part follows the other one in small steps, which 16-bit weights would lose; a network without the last layers of the
    other one is such a part, too. Inside of a frozen part that is like no other, its larger parts are looked at. Parts of one
    list or ``Sequential`` are none: the layers of a network that is frozen in part. Nor are frozen layers that outnumber those
    they look like.
    """
    trained: Counter[frozenset[Any]] = Counter()
    for module in root.modules():
        if any(parameter.requires_grad for parameter in module.parameters()):
            trained[_signature(module)] += 1
    frozen: dict[Any, list[tuple[int, str]]] = {}

    def descend(module: nn.Module, name: str, is_inside: bool) -> None:
        is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
        for key, child in module.named_children():
            parameters = list(child.parameters())
            is_frozen = bool(parameters) and not any(parameter.requires_grad for parameter in parameters)
            is_large = any(True for _ in child.children())
            signature, path = _signature(child), f'{name}.{key}' if name else key
            if is_frozen and _likes(signature, trained) and not is_list and (is_large or not is_inside):
                if all(parameter.dtype is torch.float32 for parameter in parameters):
                    frozen.setdefault(signature, []).append((id(child), path))
            else:
                descend(child, path, is_frozen)

    descend(root, prefix, False)
    # an online and a target network may have a teacher each
    found = [parts for signature, parts in frozen.items() if len(parts) <= 2 * _likes(signature, trained)]
    return dict(part for parts in found for part in parts)


def _signature(module: nn.Module) -> frozenset[Any]:
    return frozenset((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())


def _likes(signature: frozenset[Any], trained: Counter[frozenset[Any]]) -> int:
    """How many of the parts that train have these weights: a network has others beside them, a layer has none."""
    is_network = any('.' in name for name, _ in signature)
    return sum(count for other, count in trained.items() if signature == other or (is_network and signature < other))


def kept_inputs(module: nn.Module, policy: Policy) -> dict[str, int]:
    """The arguments of ``forward`` that ``keep_inputs`` names, with their places; -1 for those that are given by name alone."""
    if not policy.keep_inputs or type(module).__module__.startswith('torch.nn.'):
        return {}
    found: dict[str, int] = {}
    for place, (name, parameter) in enumerate(inspect.signature(module.forward).parameters.items()):
        if parameter.kind is parameter.VAR_KEYWORD:
            found = {**dict.fromkeys(policy.keep_inputs, -1), **found}
        elif name in policy.keep_inputs and parameter.kind is not parameter.VAR_POSITIONAL:
            found[name] = -1 if parameter.kind is parameter.KEYWORD_ONLY else place
    return found


def check_inputs(roots: Roots, policy: Policy) -> None:
    """Check ``keep_inputs`` against the arguments of the forward methods of a model.

    Raises:
        AmpConfigError: A name that none of them has.
    """
    if not policy.keep_inputs:
        return
    modules = [m for _, root in roots for m in root.modules() if not type(m).__module__.startswith('torch.nn.')]
    parameters = [parameter for m in modules for parameter in inspect.signature(m.forward).parameters.values()]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = list(dict.fromkeys(parameter.name for parameter in parameters))
    problems = [
        f'keep_inputs={name!r} is no argument of a forward of the model{nearest(name, known)}. They have {some(known)}.'
        for name in policy.keep_inputs
        if name not in known
    ]
    if problems:
        raise AmpConfigError(problems)


def check_names(model: nn.Module, policy: Policy) -> None:
    """Check ``keep_fp32`` and ``fp32_ops`` against a model, without touching it.

    Args:
        model: Without wrappers such as DDP.
        policy: The configuration; nothing is checked at O0, which keeps everything in FP32.

    Raises:
        AmpConfigError: A name that the model does not have.
    """
    if policy.runs_16_bit:
        named_modules([('', model)], policy.keep_fp32, 'keep_fp32', without_prefix=True)
        registered_classes([('', model)], policy)


@dataclasses.dataclass(frozen=True)
class Kept:
    """Why a module stays in FP32.

    Attributes:
        rule: 'keep_fp32', 'batchnorm', 'loss', 'registry', 'fp32_ops', 'average', 'table' or 'shared'.
        name: What it was found by: a pattern or class of ``keep_fp32``, or an entry of the registry; '' otherwise.
        reason: In words.
    """

    rule: str
    name: str
    reason: str


def why_kept(module: nn.Module, name: str, policy: Policy) -> Kept:
    """The reason for a module that is known to stay in FP32.

    Args:
        module: A module that a cast left in FP32, by itself and not as a part of such a module.
        name: Its qualified name.
        policy: The configuration of the cast.
    """
    for item in policy.keep_fp32:
        label = item if isinstance(item, str) else item.__name__
        if isinstance(module, item) if isinstance(item, type) else _is_named(module, name, item):
            return Kept('keep_fp32', label, f'named by keep_fp32={label!r}')
    if policy.keep_batchnorm_fp32 and is_batchnorm(module):
        return Kept('batchnorm', '', BATCHNORM)
    for rule, ops in (('fp32_ops', policy.fp32_ops), ('registry', tuple(FP32_OPS.values()))):
        for op in ops:
            cls = find(op.name)
            if is_module_class(cls) and isinstance(module, cls):
                return Kept(rule, op.name, op.reason)
    if is_loss(module):
        return Kept('loss', '', LOSS)
    if isinstance(module, AveragedModel):
        return Kept('average', '', 'an average of weights')
    if is_table(module):
        return Kept('table', '', 'its buffers are a table, and it has no weights')
    parameters = list(module.parameters())
    if parameters and not any(parameter.requires_grad for parameter in parameters):
        return Kept('average', '', 'frozen, with the names and shapes of a part that trains')
    return Kept('shared', '', 'shares a tensor with a module that stays in FP32')


def _is_named(module: nn.Module, name: str, pattern: str) -> bool:
    key = name_without_wrappers(name)
    # 'models[0].fc' is a name, and as a pattern it means something else
    return (key != '' and (key == pattern or fnmatch.fnmatchcase(key, pattern))) or class_name(module) == pattern

"""Decides which modules and inputs of a model stay as they are at a 16-bit level, and why."""

from __future__ import annotations

import dataclasses
import fnmatch
import inspect
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ..compiler_internals import name_without_wrappers
from ..errors import AmpConfigError, nearest, some
from ..policy.fp32_registry import FP32_OPS
from ..policy.levels import Policy
from ..policy.lookup import find, is_class
from .modules import class_name, is_batchnorm, is_loss

#: (qualified name, module) pairs.
Roots = Sequence[tuple[str, nn.Module]]
# names of weights, with their shapes
_Shapes = frozenset[tuple[str, tuple[int, ...]]]


@dataclasses.dataclass(frozen=True)
class Kept:
    """Why a module stays in FP32.

    Attributes:
        rule: 'keep_fp32', 'fp32_ops', 'registry', 'batchnorm', 'loss', 'average' or 'shared'.
        name: What it was found by: a pattern or class of ``keep_fp32``, or an entry of the registry. Of a part that follows
            another one (:data:`FOLLOWS`) its own name; '' otherwise.
        reason: In words.
    """

    rule: str
    name: str
    reason: str


BATCHNORM = Kept(
    'batchnorm', '', 'keep_batchnorm_fp32: FP32 weights and statistics; its kernels take 16-bit input beside them'
)
LOSS = Kept('loss', '', 'the module is a loss, by its class or the name of its class')
AVERAGE = Kept('average', '', 'an average of weights')
SHARED = Kept('shared', '', 'shares a tensor with a module that stays in FP32')
#: The reason for parts that follow others in small steps, such as momentum encoders.
FOLLOWS = 'frozen, with the names and shapes of a part that trains'


def kept_modules(
    roots: Roots, policy: Policy, average: tuple[type, ...] = (), without_prefix: bool = False
) -> dict[int, Kept]:
    """Find the modules that stay in FP32 by their names, classes or weights, by id, with the reasons.

    All modules inside of one of these stay in FP32, too; of those of :data:`BATCHNORM`, the tensors alone do. Modules that
    share tensors with them (:data:`SHARED`) are not looked for.

    Args:
        roots: Where to look. A root is not taken for a loss.
        policy: The configuration; at O0, which keeps everything in FP32, names are checked and nothing is found.
        average: Classes of averaged models beside torch's.
        without_prefix: Whether patterns are also compared with names without those of the roots.

    Raises:
        AmpConfigError: ``keep_fp32`` or ``fp32_ops`` names what the model does not have.
    """
    kept = match(roots, _rules(policy, average), without_prefix)
    if not policy.runs_16_bit:
        return {}
    for module in _modules(roots):
        if policy.keep_batchnorm_fp32 and is_batchnorm(module):
            kept.setdefault(id(module), BATCHNORM)
        elif is_loss(module) and all(module is not root for _, root in roots):
            kept.setdefault(id(module), LOSS)
    for prefix, root in roots if policy.casts_model else ():
        for part, name in momentum_networks(root, prefix).items():
            kept.setdefault(part, Kept('average', name, FOLLOWS))
    return kept


def match(roots: Roots, rules: Sequence[tuple[Kept, str | type]], without_prefix: bool = False) -> dict[int, Kept]:
    """Find modules by their names or classes, by id, with the first reason that matches.

    Args:
        roots: Where to look.
        rules: The reasons, and the class, class name or glob pattern over qualified names that each is about.
        without_prefix: As for :func:`kept_modules`.

    Raises:
        AmpConfigError: What an option names is not there; of the registry and of averages, nothing has to be.
    """
    unmatched = dict.fromkeys(why for why, _ in rules if why.rule not in ('registry', 'average'))
    kept: dict[int, Kept] = {}
    known: dict[str, None] = {}
    for prefix, root in roots:
        for name, module in root.named_modules(prefix=prefix, remove_duplicate=False):
            key = name_without_wrappers(name)
            # the user knows nothing of the names that several models get
            names = {key, key.removeprefix(f'{prefix}.') if without_prefix else key} - {''}
            known.update(dict.fromkeys((*names, class_name(module))))
            for why, item in rules:
                if _is_meant(module, names, item):
                    unmatched.pop(why, None)
                    kept.setdefault(id(module), why)
    if unmatched:
        raise AmpConfigError(
            [
                f'{why.rule}={why.name!r} matches no module{nearest(why.name, known)}. The model has {some(known)}.'
                for why in unmatched
            ]
        )
    return kept


def _rules(policy: Policy, average: tuple[type, ...]) -> list[tuple[Kept, str | type]]:
    """The reasons that are found by a name or class, and the name or class; the first that matches a module counts."""
    rules: list[tuple[Kept, str | type]] = []
    for item in policy.keep_fp32:
        label = item if isinstance(item, str) else item.__name__
        rules.append((Kept('keep_fp32', label, f'named by keep_fp32={label!r}'), item))
    dtype = policy.cast_model_type if policy.casts_model else policy.autocast_dtype
    ops = [('fp32_ops', op) for op in policy.fp32_ops]
    ops += [('registry', op) for op in FP32_OPS.values() if dtype in op.types]
    for rule, op in ops:
        cls = find(op.name)
        if is_class(cls, nn.Module):
            rules.append((Kept(rule, op.name, op.reason), cls))
    # under autocast the weights of averages are FP32 anyway
    return rules + [(AVERAGE, cls) for cls in (AveragedModel, *average) if policy.casts_model]


def _is_meant(module: nn.Module, names: Iterable[str], item: str | type) -> bool:
    if isinstance(item, type):
        return isinstance(module, item)
    # 'models[0].fc' is a name, and as a pattern it means something else
    return class_name(module) == item or any(name == item or fnmatch.fnmatchcase(name, item) for name in names)


def _modules(roots: Roots) -> list[nn.Module]:
    return [module for _, root in roots for module in root.modules()]


def momentum_networks(root: nn.Module, prefix: str) -> dict[int, str]:
    """Find frozen FP32 parts whose weights have the names and shapes of those of a part that trains, by id, with their names.

    Such a part follows the other one in small steps, which 16-bit weights would lose; a network without the last layers of the
    other one is such a part, too. Inside of a frozen part that is like no other, its larger parts are looked at. Parts of one
    list or ``Sequential`` are none: the layers of a network that is frozen in part. Nor are frozen layers that outnumber those
    they look like.
    """
    trained = Counter(_shapes(module) for module in root.modules() if _trains(module))
    frozen: defaultdict[_Shapes, dict[int, str]] = defaultdict(dict)

    def descend(module: nn.Module, name: str, is_inside: bool) -> None:
        is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
        for key, child in module.named_children():
            shapes, path = _shapes(child), f'{name}.{key}' if name else key
            is_frozen = bool(shapes) and not _trains(child)
            may_follow = is_frozen and not is_list and (not is_inside or any(True for _ in child.children()))
            if may_follow and _likes(shapes, trained) and all(p.dtype is torch.float32 for p in child.parameters()):
                frozen[shapes][id(child)] = path
            else:
                descend(child, path, is_frozen)

    descend(root, prefix, False)
    # an online and a target network may have a teacher each
    found = [parts for shapes, parts in frozen.items() if len(parts) <= 2 * _likes(shapes, trained)]
    return {key: name for parts in found for key, name in parts.items()}


def _trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _shapes(module: nn.Module) -> _Shapes:
    return frozenset((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())


def _likes(shapes: _Shapes, trained: Counter[_Shapes]) -> int:
    """How many of the parts that train have these weights: a network has others beside them, a layer has none."""
    is_network = any('.' in name for name, _ in shapes)
    return sum(count for other, count in trained.items() if shapes == other or (is_network and shapes < other))


def kept_inputs(roots: Roots, policy: Policy) -> dict[int, tuple[tuple[str, int], ...]]:
    """Find the arguments of ``forward`` that ``keep_inputs`` names, by id of the module, with their places in ``args``.

    The place is -1 for those that are given by name alone. Modules of torch itself are not looked at.

    Raises:
        AmpConfigError: A name that no ``forward`` of the model has.
    """
    found: dict[int, tuple[tuple[str, int], ...]] = {}
    known: dict[str, None] = {}
    own = [module for module in _modules(roots) if not type(module).__module__.startswith('torch.nn.')]
    for module in own if policy.keep_inputs else ():
        parameters, kept = inspect.signature(module.forward).parameters, dict[str, int]()
        known.update(dict.fromkeys(parameters))
        for place, (name, parameter) in enumerate(parameters.items()):
            if parameter.kind is parameter.VAR_KEYWORD:
                kept = {**dict.fromkeys(policy.keep_inputs, -1), **kept}
            elif name in policy.keep_inputs and parameter.kind is not parameter.VAR_POSITIONAL:
                kept[name] = -1 if parameter.kind is parameter.KEYWORD_ONLY else place
        found[id(module)] = tuple(kept.items())
    missing = set(policy.keep_inputs).difference(name for kept in found.values() for name, _ in kept)
    if missing:
        names = some(known) or 'none'
        text = 'is no argument of a forward of the model'
        raise AmpConfigError(
            [f'keep_inputs={n!r} {text}{nearest(n, known)}. They have {names}.' for n in sorted(missing)]
        )
    return found

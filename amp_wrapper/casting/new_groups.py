"""Which modules of a model make a group of ``fully_shard`` each: blocks, and what has another type than the rest of a block."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import fsdp_internals
from ..errors import AmpAttachError, AmpConfigError, nearest
from ..policy.levels import dtype_name
from .modules import class_name

#: Whether the level computes with a parameter in 16-bit; else its type.
_Kind = tuple[bool, torch.dtype | None]


def find_blocks(model: nn.Module, wanted: tuple[str | type, ...] | None) -> list[nn.Module]:
    """The modules that are gathered one by one, outer ones first, without the model itself."""
    if wanted is None:
        return list(_items(model))
    found: dict[int, nn.Module] = {}
    unmatched = set(wanted)
    names: list[str] = []
    for name, module in model.named_modules():
        names += [name, class_name(module)] if name else []
        for item in wanted:
            if isinstance(item, type):
                hit = isinstance(module, item)
            else:
                hit = class_name(module) == item or (name != '' and fnmatch.fnmatchcase(name, item))
            if hit:
                unmatched.discard(item)
                if module is not model and not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
                    found[id(module)] = module
    if unmatched:
        raise AmpConfigError(
            [
                f"sharding['blocks'] has {item!r}, which no module is called"
                f'{nearest(item if isinstance(item, str) else item.__name__, names)}.'
                for item in sorted(unmatched, key=str)
            ]
        )
    return list(found.values())


def _items(module: nn.Module) -> Iterator[nn.Module]:
    """The items of the outermost lists that have modules inside, such as the layers of a transformer."""
    for child in module.children():
        listed = isinstance(module, (nn.ModuleList, nn.Sequential))
        is_list = isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        if listed and not is_list and any(True for _ in child.children()):
            yield child
        else:
            yield from _items(child)


@dataclasses.dataclass(frozen=True, eq=False)
class NewGroup:
    """What one call of ``fully_shard`` takes, and whether the level computes with it in 16-bit."""

    modules: list[nn.Module]
    is_half: bool


def make_groups(model: nn.Module, regions: Sequence[nn.Module], half: set[int]) -> list[NewGroup]:
    """The calls of ``fully_shard``, inner ones first."""
    tops = set(map(id, regions))
    paths = {id(module): name for name, module in model.named_modules()}
    groups: list[NewGroup] = []
    seen: dict[int, nn.Module] = {}
    for region in regions:
        inside = list(_inside(region, tops))
        own = [parameter for module in inside for parameter in module.parameters(recurse=False)]
        for parameter in own:
            _check_parameter(parameter, region, seen, paths)
        kinds = {_kind(parameter, half) for parameter in own}
        main = _main_kind(region, kinds, half)
        apart: dict[Any, list[nn.Module]] = defaultdict(list)
        if len(kinds) > 1:
            _collect(region, tops, half, main, apart, paths)
        for kind, modules in apart.items():
            if fsdp_internals.completes_groups():
                groups.append(NewGroup(modules, kind[0]))
            else:
                groups += [NewGroup([module], kind[0]) for module in modules]
        if own or region is model:
            groups.append(NewGroup([region], bool(main[0])))
    return groups


def _check_parameter(
    parameter: Tensor, region: nn.Module, seen: dict[int, nn.Module], paths: Mapping[int, str]
) -> None:
    """Refuse what ``fully_shard`` refuses later, when something has been changed."""
    before = seen.setdefault(id(parameter), region)
    if before is not region:
        both = [f'{paths[id(each)] or "the model"} ({class_name(each)})' for each in (before, region)]
        raise AmpAttachError(
            f'{" and ".join(both)} share a parameter of shape {tuple(parameter.shape)}, and are gathered apart: name blocks, '
            f'sharding=dict(blocks=[...]), such that one of them has both, or untie the parameter.'
        )
    is_whole = not (parameter.is_floating_point() or parameter.is_complex())
    if is_whole and not fsdp_internals.SHARDS_WHOLE_NUMBERS:
        raise AmpAttachError(
            f'{paths[id(region)] or "the model"} ({class_name(region)}) has a parameter of {dtype_name(parameter.dtype)}, '
            f'which fully_shard of torch {torch.__version__} cannot shard: make it a buffer, or take torch 2.12 or newer.'
        )
    if not parameter.ndim:
        raise AmpAttachError(
            f'{paths[id(region)] or "the model"} ({class_name(region)}) has a parameter without dimensions, which fully_shard '
            f'cannot divide: give it the shape (1,).'
        )


def _main_kind(region: nn.Module, kinds: set[_Kind], half: set[int]) -> _Kind:
    """The kind of the group that is made for a region: that of its own parameters, or the one that is 16-bit, or FP32."""
    for parameter in region.parameters(recurse=False):
        return _kind(parameter, half)
    order = [(True, None), (False, torch.float32), *sorted(kinds, key=str)]
    return next((kind for kind in order if kind in kinds), (False, None))


def _kind(parameter: Tensor, half: set[int]) -> _Kind:
    # a group has to be of one type
    return (True, None) if id(parameter) in half else (False, parameter.dtype)


def _kind_name(kind: _Kind) -> str:
    is_half, dtype = kind
    return '16-bit' if is_half else 'empty' if dtype is None else dtype_name(dtype)


def _inside(module: nn.Module, tops: set[int]) -> Iterator[nn.Module]:
    """A module and those below it, without other regions."""
    yield module
    for child in module.children():
        if id(child) not in tops:
            yield from _inside(child, tops)


def _collect(
    module: nn.Module,
    tops: set[int],
    half: set[int],
    main: _Kind,
    apart: dict[Any, list[nn.Module]],
    paths: Mapping[int, str],
) -> None:
    """Find the largest modules below whose parameters are all of another kind than ``main``."""
    own = list(module.parameters(recurse=False))
    odd = [parameter for parameter in own if _kind(parameter, half) != main]
    if odd:
        raise AmpAttachError(
            f'{paths[id(module)] or "the model"} ({class_name(module)}) has parameters of its own, '
            f'{_kind_name(_kind(odd[0], half))}, in a group that is {_kind_name(main)}, and fully_shard gathers a group in one '
            f'type: move them into a module of their own (weight_norm and spectral_norm of torch.nn.utils.parametrizations '
            f'do), or name the module in keep_fp32, or as one of sharding=dict(blocks=[...]).'
        )
    for child in module.children():
        if id(child) in tops:
            continue
        kinds = {_kind(p, half) for each in _inside(child, tops) for p in each.parameters(recurse=False)}
        has_forward = not isinstance(child, (nn.ModuleList, nn.ModuleDict))
        if len(kinds) == 1 and has_forward and main not in kinds:
            if all(child is not other for other in apart[next(iter(kinds))]):
                apart[next(iter(kinds))].append(child)
        elif kinds - {main}:
            _collect(child, tops, half, main, apart, paths)

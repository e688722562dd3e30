"""Configs of mmengine, and of mmcv 1, that name apex or its wrapper."""

from __future__ import annotations

from typing import Any

import libcst as cst

from .source import Source

_NAMES = ('ApexOptimWrapper', 'mmengine.ApexOptimWrapper')
#: Takes the arguments and the defaults of mmengine's class, whatever the level is.
_SAME = 'amp_wrapper.ApexOptimWrapper'
_AMP = 'amp_wrapper.AmpOptimWrapper'
_PARTIAL = ('update', 'merge', 'merge_from_dict', 'setdefault')
_OLD = {
    'Fp16OptimizerHook': 'of mmcv 1',
    'GradientCumulativeFp16OptimizerHook': 'of mmcv 1',
    'DistOptimizerHook': 'of mmdetection 2 with apex',
    'EpochBasedRunnerAmp': 'of Swin and mmdetection 2 with apex',
}
_WRITE = (
    "write optim_wrapper = dict(type='amp_wrapper.AmpOptimWrapper', opt_level='O1', loss_scale={scale}, optimizer=...)"
)


def decide(source: Source) -> None:
    """Translate ``ApexOptimWrapper`` where a config names it; list what older configs say of mixed precision."""
    inherits = any(
        isinstance(node, cst.AssignTarget) and isinstance(node.target, cst.Name) and node.target.value == '_base_'
        for node in source.nodes
    )
    done: set[int] = set()
    known = {use.node for use in source.uses}
    for node in source.nodes:
        if isinstance(node, (cst.Call, cst.Dict)):
            _mapping(source, node, inherits, done)
        elif isinstance(node, cst.Assign):
            _assign(source, node, done)
        elif isinstance(node, cst.Attribute) and node.attr.value == 'ApexOptimWrapper' and node not in known:
            source.hand(node, 'ApexOptimWrapper', 'write amp_wrapper.ApexOptimWrapper, after import amp_wrapper')
    for node in source.nodes:
        if isinstance(node, cst.SimpleString) and id(node) not in done and _text(node) in _NAMES:
            source.hand(
                node,
                'ApexOptimWrapper',
                f"a name in a string that is not the type of a config here: write '{_SAME}' if it is built; keep it if it is "
                'only compared (importing amp_wrapper takes the name over)',
            )


def _text(node: cst.CSTNode | None) -> str:
    if isinstance(node, cst.SimpleString):
        value = node.evaluated_value
        return value if isinstance(value, str) else ''
    return ''


def _entries(node: cst.Call | cst.Dict) -> dict[str, cst.BaseExpression]:
    """Keys and values that are written out."""
    if isinstance(node, cst.Call):
        return {arg.keyword.value: arg.value for arg in node.args if arg.keyword is not None}
    return {
        _text(element.key): element.value
        for element in node.elements
        if isinstance(element, cst.DictElement) and _text(element.key)
    }


def _mapping(source: Source, node: cst.Call | cst.Dict, inherits: bool, done: set[int]) -> None:
    entries = _entries(node)
    kind = entries.get('type')
    name = _text(kind)
    if name in _OLD:
        scale = source.code(entries['loss_scale']) if 'loss_scale' in entries else "'dynamic'"
        source.hand(node, name, f'{_OLD[name]}, which mmengine does not know: {_WRITE.format(scale=scale)}')
    if name not in _NAMES or not isinstance(kind, cst.SimpleString):
        return
    done.add(id(kind))
    whole = isinstance(node, cst.Dict) or source.code(node.func) == 'dict'
    parts = node.args if isinstance(node, cst.Call) else node.elements
    if isinstance(node, cst.Call):
        spread = any(arg.star for arg in node.args) or any(arg.keyword is None for arg in node.args)
    else:
        spread = any(isinstance(element, cst.StarredDictElement) for element in parts)
    parent = source.parents.get(node)
    receiver = source.parents.get(parent) if isinstance(parent, cst.Arg) else None
    if isinstance(receiver, cst.Call) and isinstance(receiver.func, cst.Attribute):
        spread = spread or receiver.func.attr.value in _PARTIAL
    replaces = '_delete_' in entries or not inherits
    level = _text(entries.get('opt_level')) if 'opt_level' in entries else 'O1'
    is_known = whole and not spread and (replaces or 'opt_level' in entries)
    if not is_known or (not replaces and level not in ('O1', 'O2') and 'loss_scale' not in entries):
        _write(source, kind, _SAME)
        return
    _write(source, kind, _AMP)
    if level not in ('O1', 'O2') and 'loss_scale' not in entries:
        index = next(i for i, part in enumerate(parts) if getattr(part, 'value', None) is kind)
        source.edit(node, lambda updated: _with_scale(source, updated, index))


def _write(source: Source, node: cst.SimpleString, text: str) -> None:
    source.edit(node, lambda updated: updated.with_changes(value=f'{node.prefix}{node.quote}{text}{node.quote}'))


def _with_scale(source: Source, node: cst.Call | cst.Dict, index: int) -> cst.Call | cst.Dict:
    """The same with ``loss_scale='dynamic'`` beside the type, laid out like it."""
    parts: list[Any] = list(node.args if isinstance(node, cst.Call) else node.elements)
    quote = source.quote
    code = (
        f'f(loss_scale={quote}dynamic{quote})'
        if isinstance(node, cst.Call)
        else f'{{{quote}loss_scale{quote}: {quote}dynamic{quote}}}'
    )
    parsed = cst.parse_expression(code)
    new = parsed.args[0] if isinstance(parsed, cst.Call) else parsed.elements[0]  # type: ignore[attr-defined]
    if index < len(parts) - 1:
        parts.insert(index + 1, new.with_changes(comma=parts[index].comma))
    else:
        before = parts[index - 1].comma if index else cst.Comma(whitespace_after=cst.SimpleWhitespace(' '))
        parts.insert(index, new.with_changes(comma=before))
    return node.with_changes(**{'args' if isinstance(node, cst.Call) else 'elements': parts})


def _assign(source: Source, node: cst.Assign, done: set[int]) -> None:
    """``cfg.optim_wrapper.type = 'ApexOptimWrapper'``, ``optim_wrapper['type'] = ...``, and ``fp16 = dict(...)``."""
    target = node.targets[0].target
    if isinstance(node.value, cst.SimpleString) and _text(node.value) in _NAMES:
        key = ''
        if isinstance(target, cst.Attribute):
            key = target.attr.value
        elif isinstance(target, cst.Subscript) and isinstance(target.slice[0].slice, cst.Index):
            key = _text(target.slice[0].slice.value)
        if key == 'type':
            done.add(id(node.value))
            _write(source, node.value, _SAME)
    if isinstance(target, cst.Name) and target.value == 'fp16' and source.function(node) is source.module:
        entries = _entries(node.value) if isinstance(node.value, (cst.Call, cst.Dict)) else None
        if entries is not None and (isinstance(node.value, cst.Dict) or source.code(node.value.func) == 'dict'):  # type: ignore[attr-defined]
            scale = source.code(entries['loss_scale']) if 'loss_scale' in entries else "'dynamic'"
            source.hand(node, 'fp16', f'of mmcv 1, which mmengine does not read: {_WRITE.format(scale=scale)}')

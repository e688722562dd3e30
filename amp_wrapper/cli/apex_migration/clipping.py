"""Clipping ``model.parameters()`` around ``amp.scale_loss``: at O2 and O5 it misses the masters, which the optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from .arguments import Arguments
from .calls import INITIALIZE
from .source import Source, Use, dotted_name

_CLIPS = ('clip_grad_norm_', 'clip_grad_norm', 'clip_grad_value_')
_WHY = 'at O2 and O5 the optimizer steps FP32 masters, and clipping the weights has no effect'


def decide(source: Source) -> None:
    """Rewrite the clip that follows a block of one optimizer in every case; list what may follow one."""
    blocks = list(_blocks(source))
    if not blocks or _levels(source) == {'O1'}:
        return
    for node in source.nodes:
        model = _model_of(source, node)
        if model is None:
            continue
        assert isinstance(node, cst.Call)
        near = [block for block in blocks if source.function(block[0]) is source.function(node)]
        before = [block for block in near if _is_before(source, block[0], node)]
        # in another branch than all blocks, it is for a run without amp
        if not before:
            continue
        block, use, optimizer = before[-1]
        certain = _always(source, block, node) and len({each[2] for each in near}) == 1
        if certain and optimizer and _belong_together(source, source.code(model), optimizer):
            amp = source.code(use.node).rpartition('.')[0]
            name = f'{amp}.master_params' if amp else None
            if name is not None:
                _rewrite(source, node, f'{name}({optimizer})')
                source.remark(
                    node,
                    f'{dotted_name(node.func)}({source.code(model)}.parameters())',
                    f'clips what {optimizer} steps, now: {_WHY}',
                )
                continue
        source.hand(
            node,
            f'{dotted_name(node.func)}({source.code(model)}.parameters())',
            f'{_WHY}: write amp.master_params({optimizer or "optimizer"}) where amp is in use, after the block',
        )


def _blocks(source: Source) -> Iterator[tuple[cst.With, Use, str]]:
    """Each ``with amp.scale_loss(loss, optimizer)``, with the optimizer's code; '' for several."""
    for use in source.uses:
        call = source.call_of(use)
        if call is None or not use.dotted.endswith('.scale_loss'):
            continue
        block = source.enclosing(call, cst.With)
        if block is None or not any(item.item is call for item in block.items):
            continue
        optimizer = Arguments(call, ('loss', 'optimizers')).values.get('optimizers')
        single = isinstance(optimizer, (cst.Name, cst.Attribute))
        yield block, use, source.code(optimizer) if single and optimizer is not None else ''


def _levels(source: Source) -> set[str]:
    """The opt levels of the file, as far as they are constants; '?' for others."""
    found = set()
    for use in source.uses:
        call = source.call_of(use)
        if call is not None and use.dotted.endswith('.initialize'):
            level = Arguments(call, INITIALIZE).values.get('opt_level')
            if level is None:
                found.add('O1')
            else:
                found.add(str(level.evaluated_value) if isinstance(level, cst.SimpleString) else '?')
    return found


def _model_of(source: Source, node: cst.CSTNode) -> cst.BaseExpression | None:
    """``model`` of ``clip_grad_norm_(model.parameters(), ...)``."""
    if not isinstance(node, cst.Call) or (dotted_name(node.func) or '').rpartition('.')[2] not in _CLIPS:
        return None
    value = _parameters(node)
    if isinstance(value, cst.Call) and isinstance(value.func, cst.Attribute) and not value.args:
        return value.func.value if value.func.attr.value == 'parameters' else None
    return None


def _parameters(call: cst.Call) -> cst.BaseExpression | None:
    for index, arg in enumerate(call.args):
        if (arg.keyword is None and index == 0 and not arg.star) or (arg.keyword and arg.keyword.value == 'parameters'):
            return arg.value
    return None


def _rewrite(source: Source, call: cst.Call, text: str) -> None:
    value = _parameters(call)
    assert value is not None
    source.edit(value, lambda updated: cst.parse_expression(text))


def _ancestors(source: Source, node: cst.CSTNode) -> list[cst.CSTNode]:
    found = [node]
    while found[-1] in source.parents:
        found.append(source.parents[found[-1]])
    return found


def _is_before(source: Source, block: cst.With, node: cst.CSTNode) -> bool:
    """Whether a node may run after a block: it comes later, and not in the other branch of an ``if``."""
    if source.start(block) >= source.start(node):
        return False
    above = _ancestors(source, node)
    mine = _ancestors(source, block)
    shared = next(each for each in mine if each in above)
    # the nearest thing around both: an if around both has each in another branch
    return not isinstance(shared, (cst.If, cst.IfExp))


def _always(source: Source, block: cst.With, node: cst.CSTNode) -> bool:
    """Whether a node runs after a block in every case: what is around the block is around the node too.

    Inside of the block gradients are still scaled: a clip there has to move.
    """
    above = _ancestors(source, node)
    return block not in above and source.parents.get(block) in above


def _belong_together(source: Source, model: str, optimizer: str) -> bool:
    """Whether the file says that an optimizer steps a model, or says nothing of either."""
    calls = [source.call_of(use) for use in source.uses if use.dotted.endswith('.initialize')]
    given = [Arguments(call, INITIALIZE).values for call in calls if call is not None]
    if not given:
        return True
    return any(
        {name: source.code(values[name]) for name in ('models', 'optimizers') if name in values}
        == {'models': model, 'optimizers': optimizer}
        for values in given
    )

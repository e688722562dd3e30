"""The model of a script of ``apex.fp16_utils``, which was halved by hand: amp.initialize does that, so these calls go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import libcst as cst

from . import tables
from .source import Source, Use


@dataclass
class Wrapped:
    """One FP16_Optimizer that becomes ``amp.initialize``."""

    use: Use
    model: str
    optimizer: str


def half(source: Source, use: Use, kind: str, wrapped: Sequence[Wrapped]) -> None:
    """``network_to_half`` and its like around a model that amp.initialize casts: gone."""
    call = source.call_of(use)
    assign = source.parents.get(call) if call is not None else None
    while isinstance(assign, (cst.Arg, cst.Call)):
        # BN_convert_float(network_to_half(model))
        assign = source.parents.get(assign)
    model = source.code(assign.targets[0].target) if isinstance(assign, cst.Assign) and len(assign.targets) == 1 else ''
    if isinstance(assign, cst.Expr) and call is not None and call.args:
        model = source.code(call.args[0].value)
    mine = any(
        one.model == model
        and source.function(one.use.node) is source.function(use.node)
        and source.start(use.node) < source.start(one.use.node)
        for one in wrapped
    )
    if call is None or not call.args or not mine:
        source.hand(use.node, use.dotted, tables.advice(use.dotted))
        return
    use.gone = True
    source.edit(call, lambda updated: updated.args[0].value)
    if assign is not None:
        _drop_if_idle(source, assign, model)


def _drop_if_idle(source: Source, statement: cst.CSTNode, model: str) -> None:
    """Remove ``model = model`` and ``model`` once what was around them is gone."""
    line = source.parents.get(statement)
    if not isinstance(line, cst.SimpleStatementLine) or len(line.body) != 1:
        return

    def change(updated: cst.SimpleStatementLine) -> cst.SimpleStatementLine | cst.RemovalSentinel:
        code = source.code(updated.body[0]).strip()
        return cst.RemoveFromParent() if code in (model, f'{model} = {model}') else updated

    source.edit(line, change)
    condition = source.enclosing(line, cst.BaseCompoundStatement)
    outer = source.parents.get(condition)
    if not isinstance(condition, cst.If) or condition.orelse or not isinstance(outer, (cst.Module, cst.IndentedBlock)):
        return
    if not any(isinstance(inner, (cst.Call, cst.NamedExpr)) for inner in inside(condition.test)):
        source.edit(condition, _none_if_empty)


def _none_if_empty(updated: cst.If) -> cst.If | cst.RemovalSentinel:
    return updated if updated.body.body else cst.RemoveFromParent()


def half_methods(source: Source, one: Wrapped) -> None:
    """``model.half()`` and ``model = Net().cuda().half()`` before the FP16_Optimizer of the model."""
    for node in source.nodes:
        if not (isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and node.func.attr.value == 'half'):
            continue
        assign = source.enclosing(node, (cst.Assign, cst.Expr, cst.BaseCompoundStatement))
        mine = False
        if source.function(node) is source.function(one.use.node) and source.start(node) < source.start(one.use.node):
            if isinstance(assign, cst.Assign) and len(assign.targets) == 1:
                mine = source.code(assign.targets[0].target) == one.model and _outermost(node, assign.value)
            elif isinstance(assign, cst.Expr):
                mine = source.code(node.func.value) == one.model and assign.value is node
        if mine:
            source.edit(node, lambda updated: updated.func.value)
            _drop_if_idle(source, assign, one.model)
        else:
            source.remark(
                node, '.half()', 'is not needed: amp casts what goes into the model, and what comes out is FP32'
            )


def _outermost(node: cst.CSTNode, value: cst.BaseExpression) -> bool:
    """Whether a call is in the chain of methods that an expression ends with: not in an argument."""
    inner: cst.CSTNode = value
    while isinstance(inner, (cst.Call, cst.Attribute)):
        if inner is node:
            return True
        if isinstance(inner, cst.Call) and not isinstance(inner.func, cst.Attribute) and len(inner.args) == 1:
            inner = inner.args[0].value
        else:
            inner = inner.func if isinstance(inner, cst.Call) else inner.value
    return False


def inside(node: cst.CSTNode) -> list[cst.CSTNode]:
    """A node and all nodes in it."""
    return [node] + [inner for child in node.children for inner in inside(child)]

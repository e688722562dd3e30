"""Scripts of ``apex.fp16_utils``: the model halved by hand, ``FP16_Optimizer`` around the optimizer.

They become calls of ``amp`` where the model, the optimizer and the backward passes are clear from the text alone; everything
else is listed.
"""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst
from libcst.metadata import Assignment, ImportAssignment

from . import tables
from .arguments import Arguments
from .halved_model import Wrapped, half, half_methods, inside
from .source import Source, Use, dotted_name

_ORDER = ('init_optimizer', 'static_loss_scale', 'dynamic_loss_scale', 'dynamic_loss_args', 'verbose')
_HALVES = ('network_to_half', 'BN_convert_float', 'convert_network', 'FP16Model')
_SCALER = {'init_scale': 'init_scale', 'scale_factor': 'growth_factor', 'scale_window': 'growth_interval'}
_STATE = "amp.state_dict()['loss_scaler0']['loss_scale']"
#: Attributes of an FP16_Optimizer that an optimizer has not.
_ATTRIBUTES = {
    'overflow': 'optimizer.step() skips by itself; count the skips by what amp.state_dict() says of the loss scale',
    'loss_scale': f'the scale is read as {_STATE}; give loss_scale= to amp.initialize to set it',
    'loss_scaler': f'the scale is read as {_STATE}',
    'dynamic_loss_scale': 'keep what you gave to amp.initialize in a variable of your own',
    'optimizer': 'amp.initialize returns the optimizer itself: write optimizer, not optimizer.optimizer',
    'fp16_groups': 'the 16-bit weights are model.parameters()',
    'fp32_from_fp16_groups': 'the masters are amp.master_params(optimizer)',
    'fp32_from_fp16': 'the masters are amp.master_params(optimizer)',
    'fp32_from_fp32_groups': 'the masters are amp.master_params(optimizer)',
    'inspect_master_grad_data': 'write [p.grad for p in amp.master_params(optimizer)]',
    'clip_master_grads': 'write torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm)',
    'update_master_grads': 'delete it: amp.scale_loss unscales each backward pass, and the gradients add up in FP32',
    'backward': 'write: with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()',
}


def decide(source: Source) -> None:
    """Translate what is clear from the text, and list the rest."""
    uses = [use for use in source.uses if not use.ours]
    kinds = {id(use): tables.WITH_CALL.get((tables.find(use.dotted) or ('', ''))[0], '') for use in uses}
    wrapped: list[Wrapped] = []
    failed: set[str] = set()
    for use in uses:
        if kinds[id(use)] == 'FP16_Optimizer':
            found = _optimizer(source, use)
            if isinstance(found, Wrapped):
                wrapped.append(found)
            else:
                failed.add(found)
    for use in uses:
        kind = kinds[id(use)]
        if kind in _HALVES:
            half(source, use, kind, wrapped)
        elif kind == 'to_python_float':
            _to_python_float(source, use)
    for one in wrapped:
        half_methods(source, one)
    _methods(source, wrapped, failed)


# -- FP16_Optimizer ---------------------------------------------------------------------------------------------------


def _optimizer(source: Source, use: Use) -> Wrapped | str:
    """Turn ``optimizer = FP16_Optimizer(optimizer, ...)`` into ``amp.initialize``; else list it, and return its variable."""
    call = source.call_of(use)
    statement = source.parents.get(call) if call is not None else None
    target = ''
    problem = ''
    if call is None or not isinstance(statement, cst.Assign) or len(statement.targets) != 1:
        problem = 'it is not assigned to one variable here'
    else:
        target = source.code(statement.targets[0].target)
        if dotted_name(statement.targets[0].target) is None:
            problem = 'it is not assigned to one variable here'
    if problem or call is None or not isinstance(statement, cst.Assign):
        source.hand(use.node, use.dotted, f'{problem}: {tables.advice(use.dotted)}')
        return target
    args = Arguments(call, _ORDER)
    scale = _loss_scale(args, source)
    models = _models(source, args.values.get('init_optimizer'), call)
    if args.starred or args.too_many or set(args.values) - set(_ORDER) or not scale:
        problem = 'its arguments cannot be told, or have no counterpart'
    elif len(models) != 1:
        problem = f'the model whose parameters it steps cannot be told ({", ".join(sorted(models)) or "none"} found)'
    elif _wraps_ddp(source, models, call):
        problem = 'the model is in DistributedDataParallel already: first amp.initialize, then DistributedDataParallel'
    amp = source.amp_at(call, use.aliases[0]) if not problem else None
    if amp is None:
        problem = problem or 'the import is not visible here'
        source.hand(call, use.dotted, f'{problem}: {tables.advice(use.dotted)}')
        return target
    model = models.pop()
    arguments = [f'opt_level={source.quote}O2{source.quote}', f'loss_scale={scale}']
    verbose = args.literal('verbose', 'True')
    if verbose != 'True':
        arguments.append(
            'verbosity=0' if verbose == 'False' else f'verbosity=int({source.code(args.values["verbose"])})'
        )

    def change(updated: cst.Assign) -> cst.Assign:
        inner = updated.value.args[args.by_name['init_optimizer']].value  # type: ignore[attr-defined]
        code = f'{model}, {target} = {amp}.initialize({model}, {source.code(inner)}, {", ".join(arguments)})'
        line = cst.parse_statement(code)
        assert isinstance(line, cst.SimpleStatementLine)
        new = line.body[0]
        assert isinstance(new, cst.Assign)
        return new.with_changes(semicolon=updated.semicolon)

    source.edit(statement, change)
    source.remark(
        call,
        use.dotted,
        'became amp.initialize at O2: inputs and targets may be FP32 and outputs are; a dynamic scale starts at 2^16; it is '
        'saved with amp.state_dict(), no longer with the optimizer',
    )
    use.target, use.gone = 'amp_wrapper.amp', True
    return Wrapped(use, model, target)


def _loss_scale(args: Arguments, source: Source) -> str:
    """The ``loss_scale`` of amp.initialize; empty where it is unknown."""
    static = source.code(args.values['static_loss_scale']) if 'static_loss_scale' in args.values else '1.0'
    dynamic = args.literal('dynamic_loss_scale', 'False')
    options = args.values.get('dynamic_loss_args')
    if isinstance(options, cst.Name) and options.value == 'None':
        options = None
    word = f'{source.quote}dynamic{source.quote}'
    if dynamic == 'False':
        return static
    if dynamic == '?':
        condition = source.code(args.values['dynamic_loss_scale'])
        return f'{word} if {condition} else {static}' if options is None else ''
    if options is None:
        return word
    pairs = _pairs(options)
    if pairs is None or set(pairs) - set(_SCALER):
        return ''
    words = [f'{_SCALER[name]}={source.code(value)}' for name, value in pairs.items()]
    if 'scale_factor' in pairs:
        words.append(f'backoff_factor=1 / {source.code(pairs["scale_factor"])}')
    return f'dict({", ".join(words)})' if words else word


def _pairs(node: cst.BaseExpression) -> dict[str, cst.BaseExpression] | None:
    """Keys and values of a dict that is written out."""
    pairs: dict[str, cst.BaseExpression] = {}
    if isinstance(node, cst.Dict):
        for element in node.elements:
            if not isinstance(element, cst.DictElement) or not isinstance(element.key, cst.SimpleString):
                return None
            pairs[str(element.key.evaluated_value)] = element.value
        return pairs
    if isinstance(node, cst.Call) and dotted_name(node.func) == 'dict':
        for arg in node.args:
            if arg.keyword is None:
                return None
            pairs[arg.keyword.value] = arg.value
        return pairs
    return None


def _models(source: Source, node: cst.BaseExpression | None, before: cst.CSTNode) -> set[str]:
    """Whose ``.parameters()`` an optimizer steps, found through the variables that they come from."""
    found: set[str] = set()
    seen: set[str] = set()
    makers = _given(source, dotted_name(node), before) if node is not None and dotted_name(node) else [node]
    waiting: list[cst.CSTNode] = [part for maker in makers for part in _first(maker)]
    while waiting:
        parts = inside(waiting.pop())
        receivers = [
            part.value
            for part in parts
            if isinstance(part, cst.Attribute)
            and part.attr.value in ('parameters', 'named_parameters')
            and isinstance(source.parents.get(part), cst.Call)
        ]
        found.update(source.code(receiver) for receiver in receivers)
        for part in parts:
            name = dotted_name(part)
            if name is not None and name not in seen and name not in found:
                seen.add(name)
                waiting += _given(source, name, before)
    return found


def _first(node: cst.BaseExpression | None) -> list[cst.BaseExpression]:
    """What a call that makes an optimizer is given as parameters."""
    if not isinstance(node, cst.Call):
        return []
    return [arg.value for arg in node.args if arg.keyword is not None and arg.keyword.value == 'params'] or [
        arg.value for arg in node.args[:1] if arg.keyword is None
    ]


def _given(source: Source, name: str | None, before: cst.CSTNode) -> list[cst.BaseExpression]:
    """What a variable was set to, in the same function and before."""
    return [
        node.value
        for node in source.nodes
        if isinstance(node, cst.Assign)
        and source.function(node) is source.function(before)
        and source.start(node) < source.start(before)
        and any(dotted_name(target.target) == name for target in node.targets)
    ]


def _wraps_ddp(source: Source, models: set[str], before: cst.CSTNode) -> bool:
    for use in source.uses:
        call = source.call_of(use)
        if (
            call is None
            or not use.dotted.endswith('DistributedDataParallel')
            or source.start(call) > source.start(before)
        ):
            continue
        statement = source.parents.get(call)
        if not isinstance(statement, cst.Assign) or source.function(call) is not source.function(before):
            continue
        if {source.code(target.target) for target in statement.targets} & models:
            return True
    return False


# -- its methods ------------------------------------------------------------------------------------------------------


def _methods(source: Source, wrapped: Sequence[Wrapped], failed: set[str]) -> None:
    """``optimizer.backward(loss)`` and the other methods of an FP16_Optimizer, in the whole file."""
    names = {one.optimizer: one for one in wrapped}
    if not names and not failed:
        return
    for node in source.nodes:
        if not isinstance(node, cst.Attribute) or node.attr.value not in _ATTRIBUTES:
            continue
        method = node.attr.value
        receiver = dotted_name(node.value)
        call = source.parents.get(node)
        if receiver in names and _same(source, node.value, names[receiver]):
            _method(source, node, method, call, names[receiver])
        elif (
            receiver in failed
            or method in ('clip_master_grads', 'update_master_grads')
            or (
                method == 'backward'
                and isinstance(call, cst.Call)
                and call.args
                and 'optim' in (receiver or '').lower()
            )
        ):
            source.hand(node, f'FP16_Optimizer.{method}', _ATTRIBUTES[method])


def _same(source: Source, node: cst.BaseExpression, one: Wrapped) -> bool:
    """Whether a name means the optimizer that was wrapped: the same variable, or a parameter of that name."""
    if not isinstance(node, cst.Name):
        return True
    found = [item for item in source.scope(node)[node.value] if isinstance(item, Assignment)]
    here = source.scope(one.use.node)
    for item in found:
        if isinstance(item, ImportAssignment):
            return False
        parent = source.parents.get(item.node)
        if item.scope is not here and not isinstance(item.node, cst.Param) and not isinstance(parent, cst.Param):
            return False
    return True


def _method(source: Source, node: cst.Attribute, method: str, call: cst.CSTNode | None, one: Wrapped) -> None:
    amp = source.amp_at(node, one.use.aliases[0])
    name = f'FP16_Optimizer.{method}'
    if amp is None:
        source.hand(node, name, f'{_ATTRIBUTES[method]}; import amp there')
        return
    optimizer = one.optimizer
    called = isinstance(call, cst.Call) and call.func is node
    statement = source.parents.get(call) if called and call is not None else None
    line = source.parents.get(statement) if isinstance(statement, cst.Expr) else None
    alone = isinstance(line, (cst.SimpleStatementLine, cst.SimpleStatementSuite)) and len(line.body) == 1
    if method == 'backward' and called and alone and isinstance(call, cst.Call):
        args = Arguments(call, ('loss', 'update_master_grads', 'retain_graph'))
        if 'loss' not in args.values or args.starred or args.too_many:
            source.hand(node, name, _ATTRIBUTES[method])
            return
        source.edit(line, lambda updated: _with(source, updated, args, amp, optimizer))  # type: ignore[arg-type]
    elif method == 'clip_master_grads' and called and isinstance(call, cst.Call) and call.args:
        if not source.need_torch(node, one.use.aliases[0]):
            source.hand(node, name, _ATTRIBUTES[method])
            return
        masters = cst.Arg(
            cst.parse_expression(f'{amp}.master_params({optimizer})'),
            comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(' ')),
        )
        function = cst.parse_expression('torch.nn.utils.clip_grad_norm_')
        source.edit(call, lambda updated: updated.with_changes(func=function, args=[masters, *updated.args]))
    elif method == 'update_master_grads' and called and alone and isinstance(line, cst.SimpleStatementLine):
        source.edit(line, lambda updated: cst.RemoveFromParent())
    elif method == 'loss_scale' and not called and source.loaded(node):
        quote = source.quote
        code = f'{amp}.state_dict()[{quote}loss_scaler0{quote}][{quote}loss_scale{quote}]'
        source.edit(node, lambda updated: cst.parse_expression(code))
    elif not (method == 'optimizer' and called):
        source.hand(node, name, _ATTRIBUTES[method])


def _with(
    source: Source,
    updated: cst.SimpleStatementLine | cst.SimpleStatementSuite,
    args: Arguments,
    amp: str,
    optimizer: str,
) -> cst.With | cst.IndentedBlock:
    """The statement ``with amp.scale_loss(...)``, in place of a line that is a call of ``backward``."""
    call = updated.body[0].value  # type: ignore[attr-defined]
    loss = source.code(call.args[args.by_name['loss']].value)
    rest = f'retain_graph={source.code(args.values["retain_graph"])}' if 'retain_graph' in args.values else ''
    code = f'with {amp}.scale_loss({loss}, {optimizer}) as scaled_loss:\n    scaled_loss.backward({rest})\n'
    new = cst.parse_statement(code)
    assert isinstance(new, cst.With)
    assert isinstance(new.body, cst.IndentedBlock)
    new = new.with_changes(body=new.body.with_changes(indent=None))
    comment = updated.trailing_whitespace
    if isinstance(updated, cst.SimpleStatementSuite):
        return cst.IndentedBlock([new], header=comment)
    body = new.body.with_changes(header=comment)
    return new.with_changes(leading_lines=updated.leading_lines, body=body)


def _to_python_float(source: Source, use: Use) -> None:
    """``to_python_float(tensor)`` is ``tensor.item()``."""
    call = source.call_of(use)
    if call is None or len(call.args) != 1 or call.args[0].star:
        source.hand(use.node, use.dotted, tables.advice(use.dotted))
        return
    use.gone = True

    def change(updated: cst.Call) -> cst.Call:
        value = updated.args[0].value
        simple = (cst.Name, cst.Attribute, cst.Call, cst.Subscript)
        if not isinstance(value, simple) and not value.lpar:
            value = value.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
        return updated.with_changes(func=cst.Attribute(value, cst.Name('item')), args=[])

    source.edit(call, change)

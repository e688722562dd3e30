"""What is no use of a name: expressions of apex's internals, attributes, strings, messages."""

from __future__ import annotations

import re

import libcst as cst

from . import tables
from .source import Source, Use, root_of

_STRINGS = {
    'importlib.import_module',
    'importlib.util.find_spec',
    'import_module',
    'find_spec',
    '__import__',
    'pytest.importorskip',
}
_STASH = (
    'only apex itself used it, and it is not carried over; the FP32 masters are amp.master_params(optimizer), and their '
    'gradients are unscaled after amp.scale_loss'
)


def decide(source: Source) -> None:
    """List what is left of apex beside its names; translate the loss scale."""
    for use in source.uses:
        dotted = use.dotted
        if use.ours and dotted.startswith('amp_wrapper.amp.'):
            dotted = 'apex' + dotted.removeprefix('amp_wrapper')
        found = tables.find(dotted)
        if found is not None and tables.WITH_CALL.get(found[0]) == 'loss_scalers':
            _loss_scale(source, use, dotted)
        elif found is None and dotted != use.dotted and dotted.split('.')[2] not in tables.OWN_NAMES:
            source.hand(use.node, dotted, tables.advice(dotted))
    known = {use.root for use in source.uses}
    for node in source.nodes:
        if isinstance(node, cst.Attribute) and node.attr.value == '_amp_stash':
            source.hand(node, '_amp_stash', _STASH)
        elif (
            # self.amp._amp_state, in a file that has amp
            isinstance(node, cst.Attribute)
            and node.attr.value == '_amp_state'
            and isinstance(node.value, cst.Attribute)
            and node.value.attr.value == 'amp'
            and source.aliases
            and root_of(node) not in known
            and source.enclosing(node, (cst.Import, cst.ImportFrom)) is None
        ):
            source.hand(node, '_amp_state', tables.LISTED['apex.amp._amp_state'])
        elif isinstance(node, cst.SimpleString):
            _string(source, node)


def messages(source: Source) -> None:
    """Reword errors that ask for apex where the import is not of apex any more; after the imports were settled."""
    for node in source.nodes:
        if isinstance(node, cst.Try):
            _message(source, node)


def _loss_scale(source: Source, use: Use, dotted: str) -> None:
    """``amp._amp_state.loss_scalers[0].loss_scale()``: the one thing of apex's state that scripts read a lot."""
    item = source.parents.get(use.node)
    attribute = source.parents.get(item) if isinstance(item, cst.Subscript) and item.value is use.node else None
    name = attribute.attr.value if isinstance(attribute, cst.Attribute) else ''
    whole = source.parents.get(attribute) if attribute is not None else None
    reads = name == 'loss_scale' and isinstance(whole, cst.Call) and whole.func is attribute and not whole.args
    if use.ours or not reads or not isinstance(item, cst.Subscript) or len(item.slice) != 1:
        text = tables.advice(dotted)
        if name == '_loss_scale':
            text = 'only apex itself used it; for another start, write loss_scale=dict(init_scale=2.0**20) in amp.initialize'
        elif name == '_unskipped':
            text = "only apex itself used it; write amp.state_dict()['loss_scaler0']['unskipped']"
        source.hand(use.node, dotted, text)
        return
    index = source.code(item.slice[0].slice)
    outer = source.enclosing(use.node, cst.FormattedString)
    quote = source.quote
    if outer is not None:
        # before Python 3.12, a string inside an f-string needs the other quotes
        quote = '"' if outer.quote == "'" else "'"
    if index.isdigit():
        key = f'{quote}loss_scaler{index}{quote}'
    elif outer is None and '"' not in index and "'" not in index:
        key = f'f{quote}loss_scaler{{{index}}}{quote}'
    elif outer is not None and re.fullmatch(r'\w+', index):
        key = f'{quote}loss_scaler%d{quote} % {index}'
    else:
        source.hand(use.node, dotted, tables.advice(dotted))
        return
    use.target = 'amp_wrapper.amp.state_dict'
    use.via_amp = True
    scale = f'{quote}loss_scale{quote}'

    def change(updated: cst.Call) -> cst.BaseExpression:
        function = source.code(updated.func.value.value)  # type: ignore[attr-defined]
        return cst.parse_expression(f'{function}()[{key}][{scale}]')

    assert whole is not None
    source.edit(whole, change)


def _string(source: Source, node: cst.SimpleString) -> None:
    text = node.value
    if 'apex.parallel.multiproc' in text:
        source.hand(node, 'apex.parallel.multiproc', tables.LISTED['apex.parallel.multiproc'])
        return
    if re.search(r'(?<![\w.])apex\.\w', text) and source.enclosing(node, cst.Annotation) is not None:
        source.hand(node, text[1:-1], 'a type of apex in a string, which is not edited: see the page for its name here')
        return
    if not re.fullmatch(r"""['"]apex(\.\w+)*['"]""", text):
        return
    parent = source.parents.get(node)
    call = source.parents.get(parent) if isinstance(parent, cst.Arg) else None
    name = source.code(call.func) if isinstance(call, cst.Call) else ''
    if name in _STRINGS or name.endswith(('.import_module', '.find_spec')) or '.amp' in text:
        new = (
            'amp_wrapper' + text[1:-1].removeprefix('apex')
            if text[1:-1] in ('apex', 'apex.amp')
            else 'what replaces it'
        )
        source.hand(node, text[1:-1], f'a name of apex in a string: write {new}')


def _message(source: Source, node: cst.Try) -> None:
    """``raise ImportError('Please install apex ...')`` where the import is not of apex any more."""
    imports = [
        alias for alias in source.aliases if source.enclosing(alias.statement, cst.Try) is node and not alias.ours
    ]
    if not imports or any(alias.statement not in _inside(node.body) for alias in imports):
        return
    for handler in node.handlers:
        for inner in _inside(handler.body):
            if isinstance(inner, cst.Raise) and isinstance(inner.exc, cst.Call) and len(inner.exc.args) == 1:
                value = inner.exc.args[0].value
                if 'apex' in source.code(value).lower() and not any(alias.keep for alias in imports):
                    _reword(source, value)


def _reword(source: Source, value: cst.BaseExpression) -> None:
    if isinstance(value, (cst.SimpleString, cst.ConcatenatedString)):
        text = f'{source.quote}Please install amp_wrapper to run this script.{source.quote}'
        source.edit(value, lambda updated: cst.parse_expression(text))


def _inside(node: cst.CSTNode) -> list[cst.CSTNode]:
    return [node] + [inner for child in node.children for inner in _inside(child)]

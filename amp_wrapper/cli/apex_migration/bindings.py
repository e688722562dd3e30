"""Import statements, and the names that they bind."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import libcst as cst

from . import tables
from .source import Alias, Source, Use, dotted_name

_AMP = ('apex.amp', 'amp_wrapper.amp')


def decide(source: Source) -> None:
    """Give each use of a name that only changes its name its target; list those that go nowhere."""
    for use in source.uses:
        found = tables.find(use.dotted)
        if use.ours:
            continue
        if found is None:
            if use.dotted in tables.MODULES and isinstance(use.node, cst.Name):
                source.hand(use.node, use.dotted, 'the module itself is passed on here; pass on what is used of it')
            else:
                source.hand(use.node, use.dotted, tables.advice(use.dotted))
        elif found[0] not in tables.WITH_CALL and use.target is None:
            use.target = tables.RENAMED[found[0]] + found[1]


def settle(source: Source) -> None:
    """Write the names as their targets say, and then the imports."""
    for alias in source.aliases:
        if alias.ours:
            continue
        if alias.star:
            _settle_star(source, alias)
        elif '.' in alias.local or alias.dotted == 'apex':
            _settle_root(source, alias)
        elif alias.dotted in _AMP:
            alias.need('amp_wrapper', 'amp', alias.local)
        elif alias.dotted in tables.MODULES:
            _settle_module(source, alias)
        else:
            _settle_object(source, alias)
    for use in source.uses:
        if (
            use.target is not None
            and not use.gone
            and use.aliases[0].dotted in _AMP
            and not use.aliases[0].star
            and '.' not in use.aliases[0].local
        ):
            _write(source, use, use.aliases[0].local + use.target.removeprefix('amp_wrapper.amp'))
    _write_imports(source)


def _write(source: Source, use: Use, text: str) -> None:
    # what only its layout tells apart is the same name
    if dotted_name(use.node) != text:
        source.edit(use.node, lambda updated: _like(text, updated))


def _like(text: str, old: cst.Name | cst.Attribute) -> cst.BaseExpression:
    """An expression with the parentheses that the old one stands in."""
    new = cst.parse_expression(text)
    return new.with_changes(lpar=old.lpar, rpar=old.rpar) if isinstance(new, (cst.Name, cst.Attribute)) else new


def _write_whole(source: Source, use: Use, alias: Alias) -> bool:
    """Write the target from its root, and have that imported."""
    target = use.target or ''
    if target.split('.')[0] == 'torch':
        if not source.need_torch(use.node, alias):
            source.hand(use.node, use.dotted, f'write {target}; the name torch means something else here')
            return False
    elif target.startswith('amp_wrapper.amp.') or target == 'amp_wrapper.amp':
        alias.need('amp_wrapper.amp')
    else:
        alias.need('amp_wrapper')
    _write(source, use, target)
    return True


def _settle_root(source: Source, alias: Alias) -> None:
    """``import apex``, also ``as`` something, and ``import apex.parallel``."""
    staying = [use for use in alias.uses if not use.gone and use.target is None]
    moving = [use for use in alias.uses if use.target is not None and not use.gone and use.node not in alias.bare]
    for use in moving:
        if not _write_whole(source, use, alias):
            staying.append(use)
    if any(use.dotted.startswith('apex.amp.') for use in staying) and all(
        use.dotted.startswith('apex.amp.') for use in staying
    ):
        # nothing of apex is left to import for them: they fail where they stand until they are edited
        alias.need('amp_wrapper.amp')
        for use in staying:
            _write(source, use, 'amp_wrapper' + use.dotted.removeprefix('apex'))
        staying = []
    alias.keep = bool(staying)
    if alias.keep and alias.dotted in tables.GONE and alias.local == alias.dotted:
        # importing it would fail, and what stays needs its parent alone
        alias.keep = False
        alias.need('apex')
        return
    if not alias.uses and not alias.bare:
        # it may be there to see whether it is installed
        alias.keep = tables.find(alias.dotted) is None
        if alias.keep:
            source.hand(alias.statement, alias.dotted, tables.advice(alias.dotted))
    if not alias.keep:
        if alias.bare or not (alias.needs or alias.uses):
            _need_root(alias)
        for name in alias.bare:
            source.edit(name, lambda updated: updated.with_changes(value='amp_wrapper'))


def _need_root(alias: Alias) -> None:
    if not any(module.startswith('amp_wrapper') for module, _, _ in alias.needs):
        alias.need('amp_wrapper.amp' if alias.dotted.startswith('apex.amp') else 'amp_wrapper')


def _settle_module(source: Source, alias: Alias) -> None:
    """``from apex import parallel``: names below it are written out."""
    moved = [use.target is not None and _write_whole(source, use, alias) for use in alias.uses if not use.gone]
    alias.keep = not all(moved)
    if not alias.uses:
        _unused(source, alias)


def _settle_object(source: Source, alias: Alias) -> None:
    """``from apex.parallel import DistributedDataParallel``, also ``as`` something."""
    uses = [use for use in alias.uses if not use.gone]
    moving = [use for use in uses if use.target is not None]
    alias.keep = len(moving) < len(uses)
    if not alias.uses:
        found = tables.find(alias.dotted)
        module, _, name = tables.RENAMED.get(found[0] if found else '', '').rpartition('.')
        if found is None or found[1] or module not in tables.IMPORTABLE:
            _unused(source, alias)
        else:
            alias.need(module, name, alias.local if alias.renamed or source.exports(alias.local) else name)
        return
    for use in moving:
        if use.via_amp:
            amp = source.amp_at(use.node, alias)
            _write(source, use, (amp or 'amp') + (use.target or '').removeprefix('amp_wrapper.amp'))
    moving = [use for use in moving if not use.via_amp]
    targets: dict[str, list[Use]] = {}
    for use in moving:
        targets.setdefault((use.target or '').removesuffix(_below(use, alias)), []).append(use)
    for target, found_uses in targets.items():
        module, _, name = target.rpartition('.')
        # the name of the old import may not be given to two things
        if module not in tables.IMPORTABLE or (alias.keep and name == alias.local):
            for use in found_uses:
                alias.keep = not _write_whole(source, use, alias) or alias.keep
            continue
        chosen = alias.renamed or bool(source.others(alias)) or _taken(source, name, alias, target)
        chosen = chosen or source.exports(alias.local)
        if len(targets) == 1 and not alias.keep and chosen:
            alias.need(module, name, alias.local)
            continue
        alias.need(module, name, name)
        for use in found_uses:
            _write(source, use, name + _below(use, alias))
        if len(targets) == 1 and not alias.keep and name != alias.local:
            _rename_rest(source, alias, name)


def _rename_rest(source: Source, alias: Alias, name: str) -> None:
    """``FusedAdam = None`` where the import failed, under the new name."""
    written = {use.node for use in alias.uses}
    for bare in alias.bare:
        if bare not in written:
            source.edit(bare, lambda updated: updated.with_changes(value=name))


def _below(use: Use, alias: Alias) -> str:
    return use.dotted.removeprefix(alias.dotted)


def _taken(source: Source, name: str, alias: Alias, target: str) -> bool:
    if name == alias.local:
        return False
    found = source.scope(alias.statement)[name]
    return bool(found) and source.visible(name, alias.statement) != target


def _settle_star(source: Source, alias: Alias) -> None:
    if source.exports(''):
        alias.keep = True
        source.hand(
            alias.statement,
            f'{alias.dotted}.*',
            'other files may import what this brings from here: import the names that they use one by one',
        )
    for use in alias.uses:
        if use.gone:
            continue
        if use.target is None or not _write_star(source, use, alias):
            alias.keep = True


def _write_star(source: Source, use: Use, alias: Alias) -> bool:
    first = use.dotted.removeprefix(f'{alias.dotted}.').split('.')[0]
    if use.dotted == 'apex.amp' or (use.dotted.startswith('apex.amp.') and alias.dotted == 'apex'):
        alias.need('amp_wrapper', 'amp', 'amp')
        return True
    target = (use.target or '').removesuffix(use.dotted.removeprefix(f'{alias.dotted}.{first}'))
    module, _, name = target.rpartition('.')
    if module in tables.IMPORTABLE and name == first:
        alias.need(module, name, name)
        return True
    return _write_whole(source, use, alias)


def _unused(source: Source, alias: Alias) -> None:
    """An import that nothing in the file uses: gone, unless other files may count on it."""
    if source.exports(alias.local):
        alias.keep = True
        found = tables.find(alias.dotted)
        target = tables.RENAMED.get(found[0], '') if found else ''
        what = f'write {alias.local} = {target}' if target else tables.advice(alias.dotted)
        source.hand(alias.statement, alias.dotted, f'other files may import it from here: {what}')
        return
    siblings = [
        other for other in source.aliases if other is not alias and _body(source, other) is _body(source, alias)
    ]
    tried = isinstance(source.parents.get(_body(source, alias)), cst.Try)
    if tried and not any(other.uses or tables.find(other.dotted) for other in siblings):
        alias.keep = True
        source.hand(alias.statement, alias.dotted, tables.advice(alias.dotted))
    else:
        source.remark(alias.statement, alias.dotted, 'is imported and not used in this file: the import is gone')


def _body(source: Source, alias: Alias) -> cst.CSTNode:
    return source.parents[source.statement_of(alias.statement) or alias.statement]


# -- the statements ---------------------------------------------------------------------------------------------------


def _write_imports(source: Source) -> None:
    written: dict[int, set[str]] = {}
    statements: dict[cst.Import | cst.ImportFrom, list[Alias]] = {}
    for alias in source.aliases:
        if not alias.ours:
            statements.setdefault(alias.statement, []).append(alias)
    for statement, aliases in statements.items():
        line = source.statement_of(statement)
        assert line is not None
        body = source.parents[line] if isinstance(line, cst.SimpleStatementLine) else line
        seen = written.setdefault(id(body), _present(source, body))
        in_place = _in_place(statement, aliases)
        if in_place is not None:
            source.edit(statement, functools.partial(_replaced, in_place))
            seen.update(_text(need) for alias in aliases for need in alias.needs)
            continue
        needs = []
        for need in (need for alias in aliases for need in alias.needs):
            if _text(need) not in seen:
                seen.add(_text(need))
                needs.append(need)
        _replace(source, statement, line, _lines(needs), aliases)


def _replaced(new: cst.ImportFrom, updated: cst.CSTNode) -> cst.ImportFrom:
    return new


def _lines(needs: Sequence[tuple[str, str, str]]) -> list[str]:
    """The new statements: modules, then names, those of one module together."""
    modules = [_text(need) for need in needs if not need[1]]
    names: dict[str, list[str]] = {}
    for need in needs:
        if need[1]:
            names.setdefault(need[0], []).append(_text(need).partition(' import ')[2])
    return [*modules, *(f'from {module} import {", ".join(dict.fromkeys(found))}' for module, found in names.items())]


def _present(source: Source, body: cst.CSTNode) -> set[str]:
    """Imports that stand there already."""
    return {
        source.code(small).strip()
        for line in getattr(body, 'body', ())
        if isinstance(line, cst.SimpleStatementLine)
        for small in line.body
        if isinstance(small, (cst.Import, cst.ImportFrom))
    }


def _text(need: tuple[str, str, str]) -> str:
    module, name, local = need
    if not name:
        return f'import {module}'
    return f'from {module} import {name}' + (f' as {local}' if local and local != name else '')


def _in_place(statement: cst.Import | cst.ImportFrom, aliases: Sequence[Alias]) -> cst.ImportFrom | None:
    """The statement with other names in it, where all of them come from one module: its layout and comments stay."""
    if not isinstance(statement, cst.ImportFrom) or isinstance(statement.names, cst.ImportStar):
        return None
    if len(aliases) != len(statement.names) or any(alias.keep or len(alias.needs) != 1 for alias in aliases):
        return None
    needs = [alias.needs[0] for alias in aliases]
    modules = {module for module, _, _ in needs}
    if len(modules) != 1 or not all(name for _, name, _ in needs) or len(set(needs)) != len(needs):
        return None
    names = []
    for alias, (_, name, local) in zip(aliases, needs):
        assert isinstance(alias.node, cst.ImportAlias)
        as_name = alias.node.asname
        if as_name is None and local not in ('', name):
            as_name = cst.AsName(cst.Name(local))
        elif local in ('', name):
            as_name = None
        names.append(alias.node.with_changes(name=cst.Name(name), asname=as_name))
    return statement.with_changes(module=_module(modules.pop()), names=names)


def _module(name: str) -> cst.Name | cst.Attribute:
    expression = cst.parse_expression(name)
    assert isinstance(expression, (cst.Name, cst.Attribute))
    return expression


def _kept(statement: cst.Import | cst.ImportFrom, aliases: Sequence[Alias]) -> cst.Import | cst.ImportFrom | None:
    if isinstance(statement.names, cst.ImportStar):
        return statement if aliases[0].keep else None
    leaving = {id(alias.node) for alias in aliases if not alias.keep}
    names = [name for name in statement.names if id(name) not in leaving]
    if not names:
        return None
    if len(names) == len(statement.names):
        return statement
    if not isinstance(statement, cst.ImportFrom) or statement.lpar is None:
        names[-1] = names[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
    return statement.with_changes(names=names)


def _replace(
    source: Source,
    statement: cst.Import | cst.ImportFrom,
    line: cst.SimpleStatementLine | cst.SimpleStatementSuite,
    texts: list[str],
    aliases: Sequence[Alias],
) -> None:
    kept = _kept(statement, aliases)
    if kept is statement and not texts:
        return
    small: list[cst.BaseSmallStatement] = [_parsed(text) for text in texts]
    small += [kept] if kept is not None else []
    if len(line.body) > 1 or isinstance(line, cst.SimpleStatementSuite):
        if not small:
            small = [cst.Pass()] if len(line.body) == 1 else []
        source.edit(statement, lambda updated: cst.FlattenSentinel(small) if small else cst.RemoveFromParent())
        return
    gone = [alias.node for alias in aliases if not alias.keep]
    comments = _comments(statement) if kept is None else [comment for node in gone for comment in _comments(node)]

    def lines(updated: cst.SimpleStatementLine) -> cst.FlattenSentinel[cst.SimpleStatementLine] | cst.RemovalSentinel:
        if not small:
            return cst.RemoveFromParent()
        new = [cst.SimpleStatementLine([one]) for one in small]
        above = [*updated.leading_lines, *(cst.EmptyLine(comment=comment) for comment in comments)]
        new[0] = new[0].with_changes(leading_lines=above)
        new[-1] = new[-1].with_changes(trailing_whitespace=updated.trailing_whitespace)
        return cst.FlattenSentinel(new)

    source.edit(line, lines)


def _parsed(text: str) -> cst.BaseSmallStatement:
    line = cst.parse_statement(text)
    assert isinstance(line, cst.SimpleStatementLine)
    return line.body[0]


def _comments(node: cst.CSTNode) -> list[cst.Comment]:
    found = [node] if isinstance(node, cst.Comment) else []
    return found + [comment for child in node.children for comment in _comments(child)]

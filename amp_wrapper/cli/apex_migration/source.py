"""A parsed file: its scopes, the imports of apex in it, the places that use them, and the edits that were decided on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
from libcst.metadata import (
    Assignment,
    ExpressionContext,
    ExpressionContextProvider,
    ImportAssignment,
    MetadataWrapper,
    ParentNodeProvider,
    PositionProvider,
    Scope,
    ScopeProvider,
)

from . import tables

Edit = Callable[[Any], Any]


@dataclass(frozen=True, order=True)
class Note:
    """A line of the report.

    Attributes:
        line: Of the original text, from 1.
        name: What it is about.
        text: Why, and what to write instead.
        by_hand: Whether something is left to do; otherwise it is a remark about what was done.
    """

    line: int
    name: str
    text: str
    by_hand: bool = True


@dataclass(eq=False)
class Alias:
    """One name that an import statement binds.

    Attributes:
        statement: The import.
        node: Its part for this name; the star itself for ``import *``.
        dotted: What is bound, such as ``apex.amp``; for a star, the module.
        local: Name in the file; empty for a star.
        renamed: Whether ``as`` gives the name.
        ours: Not an import of apex: looked at for what an earlier run left, never changed.
        uses: Where it is used.
        bare: Names in the file that are the alias itself, assignments to it included.
        needs: What has to be imported in its place: (module, name, as) or (module, '', '').
        keep: Whether the import of apex stays.
    """

    statement: cst.Import | cst.ImportFrom
    node: cst.ImportAlias | cst.ImportStar
    dotted: str
    local: str
    renamed: bool
    ours: bool
    uses: list[Use] = field(default_factory=list)
    bare: list[cst.Name] = field(default_factory=list)
    needs: list[tuple[str, str, str]] = field(default_factory=list)
    keep: bool = False

    @property
    def star(self) -> bool:
        return isinstance(self.node, cst.ImportStar)

    def need(self, module: str, name: str = '', local: str = '') -> None:
        if (module, name, local) not in self.needs:
            self.needs.append((module, name, local))


@dataclass(eq=False)
class Use:
    """A place that names something of apex.

    Attributes:
        node: The whole dotted expression.
        root: Its first name.
        dotted: What it is in apex's words.
        aliases: The imports that may have bound it.
        target: What to write, in the words of this package or torch; None where it stays.
        via_amp: Whether to write the target through the module ``amp``, whatever was imported.
        gone: Whether the expression disappears with what is around it, so that nothing has to be written for it.
    """

    node: cst.Name | cst.Attribute
    root: cst.Name
    dotted: str
    aliases: list[Alias]
    target: str | None = None
    via_amp: bool = False
    gone: bool = False

    @property
    def ours(self) -> bool:
        return self.aliases[0].ours


def dotted_name(node: cst.CSTNode) -> str | None:
    """``a.b.c`` of a name or a chain of attributes; None for anything else."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        left = dotted_name(node.value)
        return None if left is None else f'{left}.{node.attr.value}'
    return None


def root_of(node: cst.Name | cst.Attribute) -> cst.Name | None:
    inner: cst.CSTNode = node
    while isinstance(inner, cst.Attribute):
        inner = inner.value
    return inner if isinstance(inner, cst.Name) else None


class Source:
    """A parsed file.

    Args:
        module: As libcst parsed it.
        package: Whether it is an ``__init__.py``, whose imports are there for other files.
    """

    def __init__(self, module: cst.Module, package: bool = False) -> None:
        # a parsed module has each node once, which is all that the copy is for
        wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
        self.module = wrapper.module
        self.scopes = wrapper.resolve(ScopeProvider)
        self.parents = wrapper.resolve(ParentNodeProvider)
        self._contexts = wrapper.resolve(ExpressionContextProvider)
        self._all_scopes = {scope for scope in self.scopes.values() if scope is not None}
        self._positions = wrapper.resolve(PositionProvider)
        self.edits: dict[cst.CSTNode, list[Edit]] = {}
        self.notes: set[Note] = set()
        self.aliases: list[Alias] = []
        self.uses: list[Use] = []
        #: (scope, name) of every import, which says what else binds a name
        self._bound: dict[int, Alias] = {}
        self.quote = '"' if module.code.count('"') > module.code.count("'") else "'"
        self.nodes: list[cst.CSTNode] = list(_all(self.module))
        self._package = package
        self._listed = self._find_listed()
        self._find_imports()
        self._find_uses()

    # -- asking ---------------------------------------------------------------------------------------------------

    def line(self, node: cst.CSTNode) -> int:
        return self._positions[node].start.line

    def start(self, node: cst.CSTNode) -> tuple[int, int]:
        position = self._positions[node].start
        return position.line, position.column

    def code(self, node: cst.CSTNode) -> str:
        return self.module.code_for_node(node)

    def scope(self, node: cst.CSTNode) -> Scope:
        """The scope that names of the node are looked up in."""
        current: cst.CSTNode | None = node
        while current is not None:
            scope = self.scopes.get(current)
            if scope is not None:
                return scope
            current = self.parents.get(current)
        return self.scopes[self.module]  # type: ignore[return-value]

    def enclosing(self, node: cst.CSTNode, kind: type[cst.CSTNode] | tuple[type[cst.CSTNode], ...]) -> Any:
        """The nearest node of a kind around this one; None where there is none."""
        current = self.parents.get(node)
        while current is not None and not isinstance(current, kind):
            current = self.parents.get(current)
        return current

    def function(self, node: cst.CSTNode) -> cst.CSTNode:
        """The function around a node, or the module."""
        return self.enclosing(node, cst.FunctionDef) or self.module

    def call_of(self, use: Use) -> cst.Call | None:
        """The call of which the use is the function."""
        parent = self.parents.get(use.node)
        return parent if isinstance(parent, cst.Call) and parent.func is use.node else None

    def statement_of(self, node: cst.CSTNode) -> cst.SimpleStatementLine | cst.SimpleStatementSuite | None:
        found: cst.SimpleStatementLine | cst.SimpleStatementSuite | None = self.enclosing(
            node, (cst.SimpleStatementLine, cst.SimpleStatementSuite)
        )
        return found

    def visible(self, name: str, node: cst.CSTNode) -> str:
        """What a name means at a node: 'nothing', 'other', or the dotted name that it was imported as."""
        found = {item for item in self.scope(node)[name] if isinstance(item, Assignment)}
        if not found:
            return 'nothing'
        meanings: set[str] = set()
        for item in found:
            if isinstance(item, ImportAssignment):
                meanings.update(qualified.name for qualified in item.get_qualified_names_for(name))
            else:
                meanings.add('other')
        return meanings.pop() if len(meanings) == 1 else 'other'

    def loaded(self, node: cst.CSTNode) -> bool:
        """Whether a node is read, not assigned to or deleted."""
        return self._contexts.get(node, ExpressionContext.LOAD) is ExpressionContext.LOAD

    def exports(self, name: str) -> bool:
        """Whether other files may import a name from this one; ``''`` for any name of an ``import *``."""
        return self._package or name in self._listed

    def others(self, alias: Alias) -> list[Assignment]:
        """What else, beside None, is given to the name of an import."""
        found: list[Assignment] = []
        for item in self.scope(alias.statement)[alias.local.split('.')[0]]:
            if isinstance(item, ImportAssignment):
                if id(item.as_name) not in self._bound:
                    found.append(item)
            elif isinstance(item, Assignment) and not self._is_none(item.node):
                found.append(item)
        return found

    def _is_none(self, node: cst.CSTNode) -> bool:
        statement = self.enclosing(node, (cst.Assign, cst.AnnAssign, cst.BaseCompoundStatement))
        value = getattr(statement, 'value', None)
        return isinstance(value, cst.Name) and value.value in ('None', 'False')

    # -- deciding -------------------------------------------------------------------------------------------------

    def edit(self, node: cst.CSTNode, change: Edit) -> None:
        """Have a node replaced by what ``change`` makes of it, after the nodes inside it were."""
        self.edits.setdefault(node, []).append(change)

    def hand(self, node: cst.CSTNode, name: str, text: str) -> None:
        """Something that is left to do."""
        self.notes.add(Note(self.line(node), name, text))

    def remark(self, node: cst.CSTNode, name: str, text: str) -> None:
        """Something that was done, and has an effect that one may want to know."""
        self.notes.add(Note(self.line(node), name, text, by_hand=False))

    def need_torch(self, node: cst.CSTNode, alias: Alias) -> bool:
        """Have ``torch`` imported beside an alias, unless it is there; False where the name means something else."""
        meaning = self.visible('torch', node)
        if meaning == 'nothing':
            alias.need('torch')
        return meaning in ('nothing', 'torch')

    def amp_at(self, node: cst.CSTNode, alias: Alias) -> str | None:
        """What ``amp`` is called at a node; imports it beside an alias where it is not there.

        Returns:
            None where a name that the alias binds is not visible at the node.
        """
        for other in self.aliases:
            if other.dotted not in ('apex.amp', 'amp_wrapper.amp') or not other.local or '.' in other.local:
                continue
            if any(self._bound.get(id(item.as_name)) is other for item in self._imports(other.local, node)):
                return other.local
        home, scope = self.scope(alias.statement), self.scope(node)
        while scope is not home:
            if scope is scope.parent:
                return None
            scope = scope.parent
        if not any('amp' in scope for scope in self._all_scopes):
            alias.need('amp_wrapper', 'amp')
            return 'amp'
        alias.need('amp_wrapper.amp')
        return 'amp_wrapper.amp'

    def _imports(self, name: str, node: cst.CSTNode) -> Iterator[ImportAssignment]:
        return (item for item in self.scope(node)[name] if isinstance(item, ImportAssignment))

    # -- finding --------------------------------------------------------------------------------------------------

    def _find_listed(self) -> set[str]:
        """The names in ``__all__``."""
        return {
            str(inner.evaluated_value)
            for node in self.nodes
            if isinstance(node, (cst.Assign, cst.AugAssign, cst.AnnAssign)) and node.value is not None
            for target in (node.targets if isinstance(node, cst.Assign) else [node])
            if dotted_name(target.target) == '__all__'
            for inner in _all(node.value)
            if isinstance(inner, cst.SimpleString)
        }

    def _find_imports(self) -> None:
        for node in self.nodes:
            if isinstance(node, cst.Import):
                for name in node.names:
                    self._add_alias(node, name, dotted_name(name.name) or '')
            elif isinstance(node, cst.ImportFrom) and not node.relative and node.module is not None:
                module = dotted_name(node.module) or ''
                if isinstance(node.names, cst.ImportStar):
                    if module.split('.')[0] == 'apex':
                        self.aliases.append(Alias(node, node.names, module, '', False, False))
                else:
                    for name in node.names:
                        self._add_alias(node, name, f'{module}.{dotted_name(name.name)}')

    def _add_alias(self, statement: cst.Import | cst.ImportFrom, node: cst.ImportAlias, dotted: str) -> None:
        theirs = dotted.split('.')[0] == 'apex' or dotted in tables.RENAMED
        ours = any(name == dotted or name.startswith(f'{dotted}.') for name in tables.ONCE_MORE)
        ours = ours or dotted.startswith('amp_wrapper.amp.')
        if not theirs and not ours:
            return
        as_name = node.asname.name if node.asname is not None else node.name
        local = dotted_name(as_name) or ''
        alias = Alias(statement, node, dotted, local, node.asname is not None, not theirs)
        self.aliases.append(alias)
        self._bound[id(as_name)] = alias

    def _find_uses(self) -> None:
        stars = [alias for alias in self.aliases if alias.star]
        wanted = {alias.local.split('.')[0] for alias in self.aliases}
        wanted = wanted.union(*(tables.STARS.get(alias.dotted, ()) for alias in stars))
        for node in self.nodes:
            if not isinstance(node, (cst.Name, cst.Attribute)):
                continue
            root = root_of(node)
            if root is None or root.value not in wanted:
                continue
            parent = self.parents.get(node)
            keyword = isinstance(parent, cst.Arg) and parent.keyword is node
            if keyword or isinstance(parent, cst.Attribute) or self.enclosing(node, (cst.Import, cst.ImportFrom)):
                continue
            self._add_use(node, root, stars)

    def _add_use(self, node: cst.Name | cst.Attribute, root: cst.Name, stars: list[Alias]) -> None:
        found = list(self.scope(root)[root.value])
        aliases = [
            self._bound[id(item.as_name)]
            for item in found
            if isinstance(item, ImportAssignment) and id(item.as_name) in self._bound
        ]
        if not aliases:
            for star in stars if not any(isinstance(item, Assignment) for item in found) else ():
                if root.value in tables.STARS.get(star.dotted, ()):
                    rest = (dotted_name(node) or '').removeprefix(root.value)
                    use = Use(node, root, f'{star.dotted}.{root.value}{rest}', [star])
                    star.uses.append(use)
                    self.uses.append(use)
                    return
            return
        rest = (dotted_name(node) or '').removeprefix(root.value)
        theirs = [alias for alias in aliases if not alias.ours]
        aliases = theirs or aliases
        names = []
        for alias in aliases:
            # "import a.b" binds a
            bound = alias.dotted.split('.')[0] if '.' in alias.local else alias.dotted
            names.append(bound + rest)
            if isinstance(node, cst.Name):
                alias.bare.append(node)
        if isinstance(node, cst.Name) and not self.loaded(node):
            return
        dotted = next((name for name in names if tables.find(name)), names[0])
        use = Use(node, root, dotted, aliases)
        for alias in aliases:
            alias.uses.append(use)
        self.uses.append(use)


def _all(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    yield node
    for child in node.children:
        yield from _all(child)

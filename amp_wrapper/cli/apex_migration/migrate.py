"""One file: from its bytes to its new bytes and the lines of the report."""

from __future__ import annotations

import ast
import re
import warnings
from dataclasses import dataclass

import libcst as cst

from . import bindings, calls, clipping, configs, leftovers, order
from .source import Note, Source

#: A file without any of these words needs no parsing.
_WORDS = re.compile(
    rb'apex|ApexOptimWrapper|_amp_stash|Fp16OptimizerHook|DistOptimizerHook|EpochBasedRunnerAmp|^fp16\s*='
    rb'|amp_wrapper(\.amp| import)',
    re.MULTILINE,
)


@dataclass(frozen=True)
class Result:
    """What became of a file.

    Attributes:
        before: Its text.
        after: Its text now.
        data: The bytes of ``after``, in the file's encoding and with its line ends.
        notes: What to read, in the order of the lines.
    """

    before: str
    after: str
    data: bytes
    notes: tuple[Note, ...]

    @property
    def changed(self) -> bool:
        return self.before != self.after

    @property
    def by_hand(self) -> tuple[Note, ...]:
        return tuple(note for note in self.notes if note.by_hand)


class _Transformer(cst.CSTTransformer):
    def __init__(self, source: Source) -> None:
        super().__init__()
        self._edits = source.edits

    def on_leave(self, original_node, updated_node):  # type: ignore[no-untyped-def]
        new = super().on_leave(original_node, updated_node)
        for edit in self._edits.get(original_node, ()):
            if isinstance(new, cst.CSTNode):
                new = edit(new)
        return new


def _check(before: bytes, after: bytes) -> None:
    """Nothing may be written that Python cannot read, where it could before.

    Raises:
        RuntimeError: It cannot: a defect of this tool.
    """
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        try:
            ast.parse(before)
        except (SyntaxError, ValueError):
            return
        try:
            ast.parse(after)
        except SyntaxError as error:
            raise RuntimeError(f'line {error.lineno} of the result is no Python: {error.msg}') from error


def _problem(data: bytes, error: cst.ParserSyntaxError) -> SyntaxError:
    """What Python itself says of a file that libcst cannot read, since its lines are the right ones."""
    try:
        compile(data, '', 'exec', dont_inherit=True)
    except SyntaxError as problem:
        return problem
    except ValueError:
        pass
    found = SyntaxError(error.message)
    found.lineno = error.raw_line
    return found


def migrate(data: bytes, package: bool = False) -> Result:
    """Rewrite a Python file.

    Args:
        data: Content of the file.
        package: Whether it is an ``__init__.py``, whose imports are there for other files.

    Returns:
        What became of it; equal bytes where there is nothing to do.

    Raises:
        SyntaxError: It cannot be parsed; the message names line and reason.
        UnicodeDecodeError: Its bytes are not in the encoding that it declares.
    """
    if not _WORDS.search(data):
        return Result('', '', data, ())
    try:
        module = cst.parse_module(data)
        source = Source(module, package)
    except cst.ParserSyntaxError as error:
        raise _problem(data, error) from None
    except RecursionError:
        raise SyntaxError('nested too deeply') from None
    calls.decide(source)
    order.decide(source)
    clipping.decide(source)
    leftovers.decide(source)
    configs.decide(source)
    bindings.decide(source)
    bindings.settle(source)
    leftovers.messages(source)
    after = source.module.visit(_Transformer(source)) if source.edits else source.module
    assert isinstance(after, cst.Module)
    if source.edits:
        _check(data, after.bytes)
    return Result(module.code, after.code, after.bytes, tuple(sorted(source.notes)))

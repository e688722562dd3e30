"""The arguments of a call: found by name, left out, named, added, with the layout and the comments between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import libcst as cst


class Arguments:
    """The arguments of a call, by name.

    Args:
        call: The call.
        order: Names of its positional arguments.
    """

    def __init__(self, call: cst.Call, order: Sequence[str]) -> None:
        self.starred = any(arg.star for arg in call.args)
        self.by_name: dict[str, int] = {}
        self.values: dict[str, cst.BaseExpression] = {}
        self.positional = 0
        self.too_many = False
        for index, arg in enumerate(call.args):
            if arg.star:
                continue
            if arg.keyword is not None:
                name = arg.keyword.value
            elif index < len(order):
                name = order[index]
                self.positional = index + 1
            else:
                self.too_many = True
                continue
            self.by_name[name] = index
            self.values[name] = arg.value

    def literal(self, name: str, default: str) -> str:
        """'True', 'False', 'None' where that is written, '?' for anything else, the default where nothing is."""
        value = self.values.get(name)
        if value is None:
            return default
        return value.value if isinstance(value, cst.Name) and value.value in ('True', 'False', 'None') else '?'


def rebuilt(
    call: cst.Call,
    indices: Mapping[str, int],
    drop: Sequence[str] = (),
    name: Sequence[str] = (),
    add: Mapping[str, str] | None = None,
) -> cst.Call:
    """A call with arguments left out, named, or added at the end; what stays keeps its layout.

    Args:
        call: As it is after the edits inside it.
        indices: Where each argument stands.
        drop: Left out.
        name: Positional ones that get their name, since one before them is left out.
        add: New keywords and their code.
    """
    names = {indices[one]: one for one in name if one in indices}
    gone = {indices[one] for one in drop if one in indices}
    args: list[cst.Arg] = []
    before = call.whitespace_before_args
    for index, arg in enumerate(call.args):
        if index in gone:
            # its comments stay, behind what stands before it
            if args:
                args[-1] = _with_gap(args[-1], _joined(_gap(args[-1]), _gap(arg)))
            else:
                before = _joined(before, _gap(arg))
            continue
        if index in names and arg.keyword is None:
            equal = cst.AssignEqual(cst.SimpleWhitespace(''), cst.SimpleWhitespace(''))
            arg = arg.with_changes(keyword=cst.Name(names[index]), equal=equal)
        args.append(arg)
    last = call.args[-1] if call.args else None
    if args and last is not None and len(call.args) - 1 in gone:
        # what is last now closes as what was last before
        gap = _gap(args[-1]) if _commented(_gap(args[-1])) else _gap(last)
        args[-1] = _with_gap(args[-1].with_changes(comma=last.comma), gap)
    for keyword, code in (add or {}).items():
        new = cst.parse_expression(f'f({keyword}={code})')
        assert isinstance(new, cst.Call)
        if not args:
            args.append(new.args[0])
            continue
        closing = _gap(args[-1])
        between = _bare(_gap(args[-2])) if len(args) > 1 else cst.SimpleWhitespace(' ')
        added = _with_gap(new.args[0].with_changes(comma=args[-1].comma), _bare(closing))
        if isinstance(closing, cst.ParenthesizedWhitespace) and _commented(closing):
            # its comments stay beside what was last before
            if isinstance(between, cst.ParenthesizedWhitespace):
                closing = closing.with_changes(indent=between.indent, last_line=between.last_line)
            between = closing
        args[-1] = _with_gap(args[-1].with_changes(comma=cst.Comma()), between)
        args.append(added)
    return call.with_changes(args=args, whitespace_before_args=before)


def _gap(arg: cst.Arg) -> cst.BaseParenthesizableWhitespace:
    """What stands between an argument, with its comma, and the next one."""
    return arg.comma.whitespace_after if isinstance(arg.comma, cst.Comma) else arg.whitespace_after_arg


def _with_gap(arg: cst.Arg, gap: cst.BaseParenthesizableWhitespace) -> cst.Arg:
    if isinstance(arg.comma, cst.Comma):
        nothing = cst.SimpleWhitespace('')
        return arg.with_changes(comma=arg.comma.with_changes(whitespace_after=gap), whitespace_after_arg=nothing)
    return arg.with_changes(whitespace_after_arg=gap)


def _bare(gap: cst.BaseParenthesizableWhitespace) -> cst.BaseParenthesizableWhitespace:
    """The same without its comments."""
    if not isinstance(gap, cst.ParenthesizedWhitespace) or not _commented(gap):
        return gap
    return gap.with_changes(first_line=cst.TrailingWhitespace(), empty_lines=())


def _commented(gap: cst.BaseParenthesizableWhitespace) -> bool:
    return isinstance(gap, cst.ParenthesizedWhitespace) and (
        gap.first_line.comment is not None or any(line.comment is not None for line in gap.empty_lines)
    )


def _joined(
    first: cst.BaseParenthesizableWhitespace, second: cst.BaseParenthesizableWhitespace
) -> cst.BaseParenthesizableWhitespace:
    """One space in place of two, with the comments of both: on lines of their own where there is room for one alone."""
    if not isinstance(first, cst.ParenthesizedWhitespace):
        return second if _commented(second) else first
    if not isinstance(second, cst.ParenthesizedWhitespace):
        return first
    trailing = second.first_line.comment
    moved = [cst.EmptyLine(first.indent, first.last_line, trailing)] if trailing is not None else []
    lines = [*first.empty_lines, *moved, *second.empty_lines]
    return second.with_changes(first_line=first.first_line, empty_lines=lines)

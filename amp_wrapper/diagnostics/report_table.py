"""Shows a precision report: as tables in a terminal, by rich where that is installed, and for the template of the page."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from . import terminal
from .module_record import OUTSIDE, RULES
from .pages import bytes_text, number_text, share_text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

#: Types as they are called where there is little room.
SHORT = {'float16': 'fp16', 'bfloat16': 'bf16', 'float32': 'fp32', 'float64': 'fp64'}
#: From this width on, there is room for more columns.
WIDE = 120
_LEFT_OUT = {'not called': 'not called', 'container': '', 'scripted': 'scripted: takes no hooks'}
_MEMORY = ('weights', 'masters', 'optimizer_state', 'gradients', 'activations', 'buffers', 'total', 'measured_peak')
#: The ranges that the terminal has room for.
_SHOWN = ('weights', 'outputs', 'output_gradients')
_KINDS = {
    'weights': 'weights',
    'inputs': 'inputs',
    'outputs': 'outputs',
    'weight_gradients': 'gradients of weights',
    'output_gradients': 'gradients of outputs',
}


def tables(data: Mapping[str, Any], depth: int | None = None) -> RenderableType:
    """The tables of a report, for ``rich.print``.

    Args:
        data: Of the report.
        depth: Of the deepest modules that are shown; None for all.
    """
    return _Tables(data, depth)


def text(data: Mapping[str, Any], depth: int | None = None, width: int | None = None) -> str:
    """The tables as text without colours, where rich is not installed as well.

    Args:
        data: Of the report.
        depth: As of :func:`tables`.
        width: In characters; that of the terminal by default, 100 where there is none. Without rich, tables are as wide as
            what stands in them.
    """
    if find_spec('rich') is None:
        return '\n'.join(map(str, _Tables(data, depth).parts(wide=False)))
    from rich.console import Console

    console = Console(
        width=width or shutil.get_terminal_size((100, 40)).columns, color_system=None, force_terminal=False
    )
    with console.capture() as capture:
        console.print(_Tables(data, depth))
    return '\n'.join(line.rstrip() for line in capture.get().rstrip().splitlines())


class _Tables:
    """Renders itself by the width that there is."""

    def __init__(self, data: Mapping[str, Any], depth: int | None) -> None:
        self._data, self._depth = data, depth

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.text import Text

        for part in self.parts(options.max_width >= WIDE):
            yield Text(part) if isinstance(part, str) else part

    def parts(self, wide: bool) -> Iterator[RenderableType]:
        """Lines and tables, in their order.

        Args:
            wide: Whether there is room for more columns.
        """
        data = self._data
        yield f'Precision of {data["title"]} at {data["policy"]}'
        yield ', '.join(f'{name} {fact}' for name, fact in facts(data).items())
        shown = [m for m in data['modules'] if self._depth is None or m['depth'] <= self._depth]
        yield ''
        yield self._types(shown, wide)
        if not wide:
            yield self._ops(shown)
        rules = {op['rule'] for module in shown for op in module['fp32_ops']}
        for rule in (rule for rule in RULES if rule in rules):
            yield f'  {rule}: {RULES[rule]}'
        yield ''
        yield self._ranges(shown, wide)
        if data['gradients']:
            yield gradient_line(data['gradients'])
        yield ''
        yield self._memory(wide)
        for level, counted in data['memory'].items():
            if 'error' in counted:
                yield f'{level}: {counted["error"]}'
        yield memory_line(data)

    def _types(self, modules: Sequence[Mapping[str, Any]], wide: bool) -> Any:
        table = terminal.table('Types, and what runs in FP32')
        for title in ('module', 'weights', 'input', 'output'):
            table.add_column(title, no_wrap=wide, overflow='fold')
        if wide:
            table.add_column('gradient')
        table.add_column('16-bit ops', justify='right')
        # where there is little room, the ops have a table of their own
        table.add_column('FP32 ops: why' if wide else 'FP32 ops', overflow='fold', justify='left' if wide else 'right')
        for module in modules:
            cells = [terminal.escaped(cell) for cell in (tree_name(module), weights_text(module), *arrows(module))]
            if wide:
                cells.append(short(module['gradients']))
            if module['state'] in _LEFT_OUT:
                table.add_row(*cells, '', _LEFT_OUT[module['state']])
                continue
            lines, count = fp32_lines(module), fp32_count(module)
            table.add_row(
                *cells, str(half_count(module) or ''), terminal.escaped('\n'.join(lines)) if wide else str(count or '')
            )
        return table

    def _ops(self, modules: Sequence[Mapping[str, Any]]) -> Any:
        table = terminal.table('What runs in FP32, and why')
        table.add_column('module', overflow='fold')
        table.add_column('op: why', overflow='fold')
        for module in modules:
            if module['fp32_ops']:
                name = module['name'] or module['class']
                table.add_row(terminal.escaped(name), terminal.escaped('\n'.join(fp32_lines(module, reasons=False))))
        return table

    def _ranges(self, modules: Sequence[Mapping[str, Any]], wide: bool) -> Any:
        table = terminal.table('Largest numbers in FP32, and shares that 16-bit types would lose')
        table.add_column('module', overflow='fold', no_wrap=wide)
        for title in ('weights', 'outputs', 'gradients'):
            table.add_column(title, justify='right')
        kinds = ('float16', 'bfloat16') if wide else ('float16',)
        for kind in kinds:
            table.add_column(f'{SHORT[kind]} over', justify='right')
            table.add_column('under', justify='right')
            table.add_column('rms error', justify='right')
        measured = [module for module in modules if any(key in module['ranges'] for key in _SHOWN)]
        names = {module['name'] for module in measured}
        # those around them, for their place in the tree: lists of modules, say
        around = {name[:place] for name in names for place, sign in enumerate(name) if sign == '.'}
        for module in modules:
            if module['name'] not in names | around:
                continue
            ranges = module['ranges']
            cells = [terminal.escaped(tree_name(module))]
            for key in _SHOWN:
                cells.append(number_text(ranges[key]['largest']) if key in ranges else '')
            for kind in kinds:
                found = [ranges[key][kind] for key in ('weights', 'outputs') if key in ranges]
                if not found:
                    cells += ['', '', '']
                    continue
                over = max(each['overflow'] for each in found)
                under = max(each['underflow'] for each in found)
                error = max(each['rms_error'] for each in found)
                cells += [
                    f'[bold red]{share_text(over)}[/bold red]' if over else '0',
                    share_text(under),
                    number_text(error),
                ]
            table.add_row(*cells)
        return table

    def _memory(self, wide: bool) -> Any:
        table = terminal.table('Memory of one training step by level, counted')
        words = {'optimizer_state': 'optimizer', 'measured_peak': 'GPU peak'}
        measured = is_measured(self._data)
        # eighty columns have room for six numbers
        narrow = ('buffers', 'gradients') if measured else ('buffers',)
        keys = [key for key in _MEMORY if wide or key not in narrow]
        keys = [key for key in keys if key != 'measured_peak' or measured]
        table.add_column('level')
        for key in keys:
            table.add_column(words.get(key, key), justify='right')
        for level, counted in self._data['memory'].items():
            mark = f'[bold]{level}[/bold]' if level == self._data['level'] else level
            if 'error' in counted:
                table.add_row(mark, *['[red]error[/red]'] * len(keys))
                continue
            table.add_row(mark, *('' if counted[key] is None else bytes_text(counted[key]) for key in keys))
        return table


# -- words that both have ----------------------------------------------------------------------------------------------


def facts(data: Mapping[str, Any]) -> dict[str, str]:
    """What the report is about, by what it is called."""
    mode = data['mode'] + (', without torch.compile' if data['compiled'] else '')
    found = {'mode': mode, 'device': data['device'], 'torch': data['torch']}
    if data['optimizer']:
        found['optimizer'] = data['optimizer']
    loss = data['loss']
    if loss is not None:
        found['loss'] = f'{loss["level"]:.6g} ({loss["fp32"]:.6g} in FP32)'
    return found


def short(types: Sequence[str]) -> str:
    """``'fp16, fp32'``."""
    return ', '.join(SHORT.get(kind, kind) for kind in types)


def tree_name(module: Mapping[str, Any]) -> str:
    """The last part of a module's name, indented by its depth, and its class."""
    name = module['name'].rpartition('.')[2] if module['depth'] else module['name']
    label = ' '.join(part for part in (name, module['class']) if part)
    calls = '' if module['calls'] < 2 else f' ×{module["calls"]}'
    return f'{"  " * module["depth"]}{label}{calls}'


def weights_text(module: Mapping[str, Any]) -> str:
    """``'fp16 + master'``."""
    weights = module['weights']
    if weights is None:
        return ''
    beside = {'float32': ' + master', 'split': ' + split', None: ''}[weights['masters']]
    return short(list(weights['types'])) + beside


def arrows(module: Mapping[str, Any]) -> tuple[str, str]:
    """Types of inputs and outputs: 'fp32→fp16' where they are cast at the border of the module."""
    given, computed = (short(module['inputs'][key]) for key in ('given', 'computed'))
    made, handed = (short(module['outputs'][key]) for key in ('computed', 'given'))
    return (
        computed if given == computed else f'{given}→{computed}',
        made if made == handed else f'{made}→{handed}',
    )


def half_count(module: Mapping[str, Any]) -> int:
    """How many ops ran in 16-bit in a module."""
    return sum(sum(module['ops'].get(kind, {}).values()) for kind in ('float16', 'bfloat16'))


def fp32_count(module: Mapping[str, Any]) -> int:
    """How many ops ran in FP32 in a module, at a 16-bit level."""
    return sum(op['calls'] for op in module['fp32_ops'])


def fp32_lines(module: Mapping[str, Any], reasons: bool = True) -> list[str]:
    """One line for all ops in FP32 that have one cause: their names, how often, the rule, and what it says of them."""
    found: dict[str, list[str]] = {}
    for op in module['fp32_ops']:
        # the names of autocast's ops are those of the ops
        about = f' {op["name"]}' if op['name'] and op['rule'] != 'autocast' else ''
        reason = f' ({op["reason"]})' if reasons and op['reason'] != RULES[op['rule']] else ''
        calls = f' ×{op["calls"]}' if op['calls'] > 1 else ''
        found.setdefault(f'{op["rule"]}{about}{reason}', []).append(f'{op["op"]}{calls}')
    return [f'{", ".join(dict.fromkeys(names))}: {why}' for why, names in found.items()]


def gradient_line(gradients: Mapping[str, Any]) -> str:
    """What float16 makes of the gradients, and the loss scale that would put them best."""
    found, best, first = gradients['float16'], gradients['best_scale'], gradients['first_scale']
    if best is None:
        return 'All gradients are zero.'
    plain = found['without_scale']
    line = (
        f'Gradients in float16: without a loss scale, {share_text(plain["underflow"])} of them become zero and '
        f'{share_text(plain["overflow"])} overflow. A scale of {best:g} puts the largest two powers of two below '
        f'the largest float16; {share_text(found["best_scale"]["underflow"])} become zero then.'
    )
    if first != 1.0:
        lost = found['first_scale']
        line += (
            f' The level begins with {first:g}: {share_text(lost["underflow"])} become zero, '
            f'{share_text(lost["overflow"])} overflow.'
        )
    return line


def is_measured(data: Mapping[str, Any]) -> bool:
    """Whether peaks were measured on a GPU."""
    return any(counted.get('measured_peak') is not None for counted in data['memory'].values())


def memory_line(data: Mapping[str, Any]) -> str:
    """How the table of memory came about."""
    parts = ['Activations: what the forward pass keeps for the backward pass.']
    if data['optimizer'] is None:
        parts.append('No optimizer was given: its state is not counted.')
    parts.append('GPU peak: of two steps.' if is_measured(data) else 'Peaks: not measured, no GPU.')
    return ' '.join(parts)


# -- the page ----------------------------------------------------------------------------------------------------------


def for_page(data: Mapping[str, Any]) -> dict[str, Any]:
    """What ``precision_report.html.j2`` asks for."""
    modules = data['modules']
    parents = {module['name'].rpartition('.')[0] for module in modules if module['depth']}
    rows = []
    for module in modules:
        received, given = arrows(module)
        rows.append(
            {
                **module,
                'label': tree_name(module).strip(),
                'is_parent': module['name'] in parents and module['name'] != OUTSIDE,
                'weights_text': weights_text(module),
                'input': received,
                'output': given,
                'gradient': short(module['gradients']),
                'half_ops': half_count(module),
                'fp32_count': fp32_count(module),
                'fp32_lines': fp32_lines(module),
            }
        )
    used = {op['rule'] for module in modules for op in module['fp32_ops']}
    return {
        'data': data,
        'facts': facts(data),
        'rows': rows,
        'rules': {rule: RULES[rule] for rule in RULES if rule in used},
        'range_rows': list(_range_rows(modules)),
        'gradient_line': gradient_line(data['gradients']) if data['gradients'] else '',
        'memory_keys': [key for key in _MEMORY if key != 'measured_peak' or is_measured(data)],
        'memory_line': memory_line(data),
        'largest_memory': max((each.get('total', 0) for each in data['memory'].values()), default=0) or 1,
        'powers': _powers(data),
    }


def _range_rows(modules: Sequence[Mapping[str, Any]]) -> Iterator[list[Any]]:
    for module in modules:
        for key, word in _KINDS.items():
            found = module['ranges'].get(key)
            if found is None:
                continue
            now = found.get('at_level')
            row: list[Any] = [
                {'text': module['name'] or module['class'], 'class': 'name'},
                {'text': word, 'class': 'name'},
                {'text': number_text(found['largest']), 'value': found['largest']},
                ''
                if now is None
                else {
                    'text': number_text(now['largest']) + (f', {now["nonfinite"]} inf/NaN' if now['nonfinite'] else ''),
                    'value': now['largest'],
                    'class': 'bad' if now['nonfinite'] else '',
                },
            ]
            for kind in ('float16', 'bfloat16'):
                lost = found[kind]
                for name in ('overflow', 'underflow', 'subnormal', 'inexact'):
                    style = 'bad' if name == 'overflow' and lost[name] else ''
                    row.append({'text': share_text(lost[name]), 'value': lost[name], 'class': style})
                for name in ('rms_error', 'largest_error'):
                    row.append({'text': number_text(lost[name]), 'value': lost[name]})
            yield row


def _powers(data: Mapping[str, Any]) -> dict[str, dict[int, int]]:
    """Counts over powers of two of the whole model, for histograms."""
    found: dict[str, dict[int, int]] = {}
    gradients = data['gradients'] or {}
    parts = {
        'Weights': [module['ranges'].get('weights') for module in data['modules']],
        'Outputs of modules': [data['outputs']],
        'Gradients, without a loss scale': [gradients.get(key) for key in ('weights', 'outputs')],
    }
    for title, ranges in parts.items():
        total: dict[int, int] = {}
        for each in ranges:
            for power, count in (each or {}).get('powers', {}).items():
                total[int(power)] = total.get(int(power), 0) + count
        if total:
            found[title] = total
    return found

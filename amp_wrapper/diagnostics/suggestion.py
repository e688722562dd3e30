"""The recommendation of a level: what was measured, in words, as a table, as a page, and as plain data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch

from ..policy import OptLevel, dtype_name
from ..policy.levels import LEVEL_TABLE
from . import pages
from .deviations import ModuleDeviation
from .keep_fp32_search import KeepSearch
from .level_study import Study, spread
from .level_verdicts import LevelFacts, percent
from .side_by_side import WARM_UP
from .suggestion_text import FIRST_STEPS, device_name, notes, reason, without_masters

if TYPE_CHECKING:
    from rich.table import Table


@dataclasses.dataclass(frozen=True)
class LevelSuggestion:
    """A recommended level, and why. ``print`` shows it as text.

    Attributes:
        level: 'O0' to 'O5'; None where it was interrupted before enough was known.
        keep_fp32: Modules to keep in FP32, by qualified name or class, beside those that were given.
        reason: In words.
        data: Everything that was measured, as plain dicts, lists, strings and numbers, for JSON.
    """

    level: OptLevel | None
    keep_fp32: tuple[str, ...]
    reason: str
    data: Mapping[str, Any]

    @property
    def config(self) -> str:
        """The line of an mmengine config, without the optimizer; a comment where there is no level."""
        return (
            f"optim_wrapper = dict(type='amp_wrapper.AmpOptimWrapper', {self._words()})" if self.level else '# no level'
        )

    @property
    def script(self) -> str:
        """The line of a script with :mod:`amp_wrapper.amp`."""
        return f'model, optimizer = amp.initialize(model, optimizer, {self._words()})' if self.level else '# no level'

    def _words(self) -> str:
        words: dict[str, Any] = {'opt_level': self.level, **self.data['overrides']}
        if self.keep_fp32:
            given = words.get('keep_fp32') or ()
            words['keep_fp32'] = [*([given] if isinstance(given, (str, type)) else given), *self.keep_fp32]
        return ', '.join(f'{name}={_source(value)}' for name, value in words.items())

    def rows(self) -> list[list[str]]:
        """The table as text: a header, and a row for each level."""
        head = ['level', 'time', 'memory', 'skipped', 'loss scale', 'loss', 'gradients', 'verdict']
        return [head, *(_row(entry, entry is _entry_of(self)) for entry in self.data['levels'])]

    def table(self) -> Table:
        """A table for a terminal, by rich."""
        from rich.table import Table
        from rich.text import Text

        head, *rows = self.rows()
        table = Table(title=None, show_lines=True)
        for title in head:
            table.add_column(title, justify='left' if title in ('level', 'verdict') else 'right', overflow='fold')
        for row in rows:
            style = 'bold green' if row[-1].startswith('recommended') else ''
            table.add_row(*(Text(cell, style=style) for cell in row))
        return table

    def html(self) -> str:
        """A page of its own, which needs no network and no other file."""
        head, *rows = self.rows()
        return pages.render(
            'suggest_level.html.j2', found=self, head=head, rows=rows, data=self.data, infinite=math.inf
        )

    def __str__(self) -> str:
        lines = [self.reason, '']
        rows = self.rows()
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
        for row in rows:
            lines.append('  '.join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[-1]]).rstrip())
        lines += ['', *self.data['notes']]
        if self.level:
            lines += ['', 'mmengine  ' + self.config, 'script    ' + self.script]
        return '\n'.join(lines)


def _source(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return repr(dtype_name(value))
    if isinstance(value, type):
        return repr(value.__name__)
    if isinstance(value, (list, tuple)):
        return f'[{", ".join(map(_source, value))}]'
    return repr(value)


def _entry_of(found: LevelSuggestion) -> Mapping[str, Any] | None:
    return next((each for each in found.data['levels'] if each['recommended']), None)


def _row(entry: Mapping[str, Any], recommended: bool) -> list[str]:
    def ratio(value: float | None) -> str:
        return '' if value is None else f'{value:.2f}'

    def share(value: float | None) -> str:
        return '' if value is None else percent(value) if math.isfinite(value) else 'not finite'

    scale = entry['loss_scale']
    verdict = '; '.join(each['text'] for each in entry['reasons']) or '; '.join(entry['remarks'])
    if recommended:
        verdict = 'recommended' + (f'; {verdict}' if verdict else '')
    elif not entry['tried']:
        verdict = 'not tried'
    name = entry['level']
    if entry['keep_fp32']:
        name += f' keep_fp32={_source(entry["keep_fp32"])}'
    return [
        name,
        ratio(entry['time']['ratio']),
        ratio(entry['memory']['ratio']),
        '' if entry['skips'] is None else str(entry['skips']),
        '' if scale is None else f'{scale:g}',
        share(entry['loss']['first_steps']),
        share(entry['gradients']['error']),
        verdict or ('the reference' if entry['level'] == 'O0' else 'suits'),
    ]


def describe(study: Study) -> LevelSuggestion:
    """The recommendation that a study led to."""
    chosen = study.chosen
    entries = [_entry(study, facts) for facts in (*study.facts.values(), *study.mended)]
    level, keep = (None, ()) if chosen is None else (chosen.level, chosen.keep_fp32)
    why = reason(study)
    data: dict[str, Any] = {
        'level': level,
        'keep_fp32': list(keep),
        'reason': why,
        'interrupted': study.interrupted,
        'not_tried': study.not_tried,
        'prefer': study.prefer,
        'device': device_name(study.device),
        'torch': str(torch.__version__),
        'optimizer': study.optimizer,
        'steps': study.steps,
        'not_timed': WARM_UP,
        'batches': study.batches,
        'seed': study.seed,
        'side_by_side': study.side_by_side,
        'overrides': {name: _plain(value) for name, value in study.overrides.items()},
        'limits': None if study.limits is None else study.limits.plain(),
        'lost_updates': dict(study.lost),
        'without_masters': without_masters(study),
        'searches': {level: _search(found) for level, found in study.searches.items()},
        'levels': entries,
    }
    data['notes'] = notes(study)
    return LevelSuggestion(cast('OptLevel | None', level), keep, why, data)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if callable(value):
        return value.__name__
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value


def _search(found: KeepSearch) -> dict[str, Any]:
    return {
        'keep_fp32': list(found.keep),
        'error_before': found.before.error,
        'error_after': found.after.error,
        'ended': found.ended,
        'trials': [{'keep_fp32': list(trial.keep), 'error': trial.error} for trial in found.trials],
    }


def _entry(study: Study, facts: LevelFacts) -> dict[str, Any]:
    run, deviation = facts.run, facts.deviation
    reference = study.runs.get('O0')
    losses = [] if run is None else run.losses
    off = None
    if reference is not None and losses and facts.level != 'O0':
        pairs = list(zip(losses, reference.losses))[:FIRST_STEPS]
        off = max(abs(a - b) / max(abs(b), 1e-12) if math.isfinite(a) else math.inf for a, b in pairs)
    gradient = None if deviation is None else deviation.gradient
    return {
        'level': facts.level,
        'meaning': LEVEL_TABLE[facts.level].describe(),
        'keep_fp32': list(facts.keep_fp32),
        'tried': facts.tried,
        'suits': facts.suits,
        'recommended': facts is study.chosen,
        'reasons': [dataclasses.asdict(each) for each in facts.reasons],
        'remarks': list(facts.remarks),
        'time': {
            'ratio': facts.time_ratio,
            'seconds': None if run is None or not run.seconds else run.median,
            'spread': None if run is None or reference is None or not run.seconds else spread(run, reference),
            'steps': 0 if run is None else len(run.seconds),
        },
        'memory': {
            'ratio': facts.memory_ratio,
            'counted': None if run is None or run.memory is None else run.memory.plain(),
            'peak': None if run is None else run.peak,
        },
        'skips': None if run is None else run.skips,
        'loss_scale': None if run is None else run.scale,
        'loss': {
            'first': None if deviation is None else deviation.loss,
            'first_steps': off,
            'after': facts.loss_after,
            'values': list(losses),
        },
        'gradients': {
            'error': None if deviation is None else deviation.error,
            'all': None if gradient is None else gradient.error,
            'cosine': None if gradient is None else gradient.cosine,
        },
        'modules': [] if deviation is None else [_module(each, study) for each in deviation.modules.values()],
    }


def _module(module: ModuleDeviation, study: Study) -> dict[str, Any]:
    gradient = module.gradient
    other = None if study.other_batch is None else study.other_batch.modules.get(module.name)
    return {
        'name': module.name,
        'class': module.kind,
        'inputs': module.inputs,
        'outputs': module.outputs,
        'finite': module.finite,
        'gradient': None if gradient is None else gradient.error,
        'cosine': None if gradient is None else gradient.cosine,
        'vanished': None if gradient is None else gradient.vanished,
        'between_batches': None if other is None or other.gradient is None else other.gradient.error,
    }

"""The words of a recommendation: why this level, and what there is to say beside the table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..policy.levels import LEVEL_TABLE, LEVELS
from .keep_fp32_search import KeepSearch
from .level_study import Study, spread
from .level_verdicts import MEMORY, SPEED, TIE, LevelFacts, difference, percent, times
from .side_by_side import WARM_UP

#: The first steps, whose losses are compared one by one.
FIRST_STEPS = 5
#: Quartiles of the ratios of times that are further apart than this, over their median, are told.
UNSTEADY = 0.25


def device_name(device: torch.device) -> str:
    """With the name of the GPU."""
    return f'{device} ({torch.cuda.get_device_name(device)})' if device.type == 'cuda' else str(device)


def without_masters(study: Study) -> dict[str, Any] | None:
    """What the chosen level was without its masters; None where that was not tried."""
    run, chosen = study.without_masters, study.chosen
    reference = study.runs.get('O0')
    if run is None or chosen is None or reference is None:
        return None
    return {
        'level': chosen.level,
        'loss_after': difference(run.checked, reference.checked),
        'loss_after_with_masters': chosen.loss_after,
        'skips': run.skips,
        'problem': run.problem,
    }


def _gains(study: Study, facts: LevelFacts) -> str:
    parts = []
    if facts.memory_ratio is not None:
        how = 'measured' if facts.run is not None and facts.run.peak is not None else 'counted'
        parts.append(f'takes {times(facts.memory_ratio)} the memory of FP32 ({how})')
    if facts.time_ratio is not None:
        parts.append(f'{times(facts.time_ratio)} the time of a step on this device ({study.device.type})')
    return ' and '.join(parts)


def _trials(search: KeepSearch) -> str:
    return '1 trial' if len(search.trials) == 1 else f'{len(search.trials)} trials'


def _ruled_out(levels: Sequence[LevelFacts]) -> str:
    """Levels by the first reason against each."""
    by_reason: dict[str, list[str]] = {}
    for each in levels:
        by_reason.setdefault(each.reasons[0].text.rstrip('.'), []).append(each.level)
    return '; '.join(f'{", ".join(names)}: {text}' for text, names in by_reason.items())


def reason(study: Study) -> str:
    """Why the chosen level is the one to take, or why there is none."""
    chosen, limits, not_tried = study.chosen, study.limits, study.not_tried
    early = f'Interrupted; not tried: {", ".join(not_tried)}. ' if study.interrupted and not_tried else ''
    if study.interrupted and not early:
        early = 'Interrupted, after every level had taken some steps. '
    if chosen is None or limits is None:
        fp32 = study.facts['O0'].reasons
        why = fp32[0].text if fp32 else 'FP32, which all levels are compared with, was not tried'
        return f'{early}No level can be recommended: {why}.'
    if chosen.level == 'O0':
        return early + _why_fp32(study)
    text = LEVEL_TABLE[chosen.level].describe()
    gains = _gains(study, chosen)
    text += f' {gains}.' if gains else '.'
    if chosen.time_ratio is not None and chosen.time_ratio > 1 + TIE and study.prefer == MEMORY:
        text += f' If you train on this device, ask for the fastest: {_ask(SPEED)}.'
    if chosen.loss_after is not None:
        done = study.steps if chosen.run is None else len(chosen.run.losses)
        text += f' After {done} steps its loss is {chosen.loss_after:.2g} off that of FP32'
        text += (
            '' if limits.loss_noise is None else f', and FP32 with the batches in another order {limits.loss_noise:.2g}'
        )
        text += f'; up to {limits.loss:.2g} is allowed.'
    if chosen.keep_fp32:
        search = study.searches[chosen.level]
        before = 'not finite' if not search.before.finite else f'{percent(search.before.error)} off'
        text += (
            f' With {", ".join(chosen.keep_fp32)} in FP32 its gradients are {percent(search.after.error)} off; without, they '
            f'are {before} ({_trials(search)}).'
        )
    others = [
        each for each in study.facts.values() if each.reasons and each.level in study.levels and each is not chosen
    ]
    ruled_out = [each for each in others if not (chosen.keep_fp32 and each.level == chosen.level)]
    if ruled_out:
        text += f' Ruled out: {_ruled_out(ruled_out)}.'
    return early + text


def _why_fp32(study: Study) -> str:
    tried = [each for each in (*study.facts.values(), *study.mended) if each.in_16_bit and each.tried]
    if not tried:
        return 'O0 (FP32 training): no other level was tried.'
    suiting = [each for each in tried if each.suits and each.measure(study.prefer) is not None]
    what = 'time' if study.prefer == SPEED else 'memory'
    other = MEMORY if study.prefer == SPEED else SPEED
    text = 'O0 (FP32 training): '
    if suiting:
        best = min(suiting, key=lambda each: each.measure(study.prefer) or math.inf)
        ratio = percent(best.measure(study.prefer) or 0.0)
        text += f'no level that suits the model saves a tenth of the {what} on this device ({study.device.type}); '
        kept = f' with {", ".join(best.keep_fp32)} in FP32' if best.keep_fp32 else ''
        text += f'{best.level}{kept} takes {ratio} of that of FP32. {_ask(other)} asks for the other of the two.'
        return text
    slow = [each for each in tried if [why.kind for why in each.reasons] == ['slow']]
    if slow:
        saving = [each for each in slow if each.memory_ratio is not None]
        text += f'all other levels that suit the model are slower on this device ({study.device.type}).'
        if saving:
            least = min(saving, key=lambda each: each.memory_ratio or math.inf)
            share = percent(least.memory_ratio or 0.0)
            text += f' {least.level} takes {share} of the memory: {_ask(MEMORY)} asks for that.'
        return text
    return f'{text}no other level suits. {_ruled_out([each for each in tried if each.reasons])}.'


def _ask(prefer: str) -> str:
    """How scripts and the command ask for it."""
    return f"prefer='{prefer}' (--prefer {prefer})"


def notes(study: Study) -> list[str]:
    """What there is to say beside the table."""
    found = []
    if study.runs:
        ways = {
            True: ', side by side',
            False: ', one after the other, since the memory does not suffice for all',
            None: '',
        }
        found.append(
            f'Time and memory are ratios to FP32 (O0). Each level took {study.steps} steps{ways[study.side_by_side]}, of which '
            f'the first {WARM_UP} were not timed, on {device_name(study.device)}. Optimizer: {study.optimizer}.'
        )
    reference = study.runs.get('O0')
    spreads = (
        [] if reference is None else [spread(run, reference) for name, run in study.runs.items() if name in LEVELS[1:]]
    )
    apart = float(np.nanmedian(spreads)) if np.isfinite(spreads).any() else 0.0
    if apart > UNSTEADY:
        found.append(
            f'The times are unsteady: from step to step, the middle half of the ratios to FP32 differs by {percent(apart)}. '
            f'Try again when nothing else computes on this machine, or with more steps.'
        )
    if study.compiled:
        found.append(
            'The model is compiled. Each level ran without torch.compile, which changes times and memory of a step.'
        )
    if study.limits is not None:
        noise = study.limits.gradient_noise
        between = 'there was one batch alone' if noise is None else f'those of another batch are {percent(noise)} off'
        rounded = [f'{percent(error)} with {name}' for name, error in study.sensitivity.items()]
        alone = f', and in FP32 with rounded weights {" and ".join(rounded)}' if rounded else ''
        found.append(
            f'Loss: the largest relative difference in the first {FIRST_STEPS} steps. Gradients: their relative error at the '
            f'first weights, over the modules; {between}{alone}.'
        )
    if study.lost:
        shares = ', '.join(f'{percent(share)} with {name} weights' for name, share in study.lost.items())
        found.append(f'Updates that would be lost without FP32 masters in the last step: {shares}.')
    without = without_masters(study)
    if without is not None:
        if without['problem']:
            found.append(f'{without["level"]} without masters: {without["problem"]}.')
        elif without['loss_after'] is not None and without['loss_after_with_masters'] is not None:
            found.append(
                f'{without["level"]} without masters: its loss is {without["loss_after"]:.2g} off that of FP32, with them '
                f'{without["loss_after_with_masters"]:.2g}.'
            )
    for level, search in study.searches.items():
        kept = ', '.join(search.keep) or 'nothing'
        found.append(
            f'keep_fp32 at {level}: {_trials(search)} (at most {study.max_trials} in all), kept: {kept}; '
            f'{search.ended}.'
        )
    return found

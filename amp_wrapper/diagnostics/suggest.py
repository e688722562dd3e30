"""Tries the levels on copies of a model, one after the other, judges what they did beside FP32, and recommends one."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Unpack

from ..casting.kept import kept_modules
from ..casting.modules import module_device
from ..casting.roots import is_compiled, unwrap
from ..errors import AmpConfigError, AmpUsageError, one_line
from ..optim import FusedAdamW
from ..policy import LEVELS, OptLevel, PolicyOptions, resolve
from ..policy.levels import LEVEL_TABLE
from ..policy.options import Option, is_whole, read_options
from .page import Page, Table, percent
from .sandbox import LOSS_FN, Task, isolated
from .try_levels import WARM_UP, Training, Tried, keep_what_overflows, scale_of
from .watches import called

#: Of the optimizer that is taken where none is given.
DEFAULT_LR = 1e-3
#: Differences of time, memory and loss (of the first loss in FP32) that are none.
TIE, LEAST_LOSS = 0.1, 0.05
#: Errors of gradients: what does not matter, as two batches differ by more; what rules a level out.
LEAST_ERROR, MOST_ERROR = 0.1, 0.5
#: The share of a module's gradient, by its squares, that may become zero.
MOST_VANISHED = 0.1
#: Of levels that are as good as each other the first is taken: without a loss scale before with one.
PREFERRED = ('O5', 'O2', 'O4', 'O1', 'O3', 'O0')
#: What makes optimizers, in an error.
_MAKER = 'a function from a model to its optimizer, such as lambda model: torch.optim.AdamW(model.parameters())'


def _is_maker(value: Any) -> bool:
    return callable(value) and not isinstance(value, type)


def _are_levels(value: Any) -> bool:
    listed = [value] if isinstance(value, str) else value
    return isinstance(listed, (list, tuple)) and bool(listed) and all(each in LEVELS for each in listed)


_OPTIONS = {
    'loss_fn': LOSS_FN,
    'make_optimizer': Option(None, (None, _is_maker), _MAKER),
    'levels': Option(None, (None, _are_levels), f'a list of {", ".join(LEVELS)}, such as ["O0", "O2", "O5"]'),
    'steps': Option(20, (functools.partial(is_whole, low=WARM_UP + 2),), f'a whole number of at least {WARM_UP + 2}'),
    'seed': Option(0, (functools.partial(is_whole, low=None),), 'a whole number'),
    'prefer': Option('speed', ('speed', 'memory')),
}


@dataclasses.dataclass
class LevelSuggestion(Page):
    """A recommended level, and why. ``print`` shows it as text.

    Attributes:
        level: 'O0' to 'O5'; None where it was interrupted before enough was known.
        keep_fp32: Modules to keep in FP32, by qualified name or class, beside those that were given.
        reason: In words.
        config: The line of an mmengine config, without the optimizer; a comment where there is no level.
        script: The line of a script with :mod:`amp_wrapper.amp`.
    """

    level: OptLevel | None
    keep_fp32: tuple[str, ...]
    reason: str
    config: str
    script: str


def suggest_level(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batches: Iterable[Any],
    make_optimizer: Callable[[nn.Module], Optimizer] | None = None,
    levels: Sequence[OptLevel] | None = None,
    steps: int = 20,
    seed: int = 0,
    progress: bool = True,
    prefer: str = 'speed',
    **overrides: Unpack[PolicyOptions],
) -> LevelSuggestion:
    """Try the levels one after the other on copies of a model, and recommend one. Syncs.

    Each level takes the same steps, with the same batches and the same random numbers, beginning with FP32 (O0). What is
    measured: the time of a step, memory, skipped steps, how far loss and first gradients are from FP32, and where float16
    overflows. A few modules that overflow are put into ``keep_fp32``. Ctrl-C ends it early with what is known by then.

    ```python
    found = amp.suggest_level(model, lambda model, batch: criterion(model(batch[0]), batch[1]), loader)
    print(found)
    model, optimizer = amp.initialize(model, optimizer, opt_level=found.level, keep_fp32=list(found.keep_fp32))
    ```

    Args:
        model: On its device, with the weights that training begins with. It may be attached already. Nothing of it changes.
        loss_fn: From (model, batch) to the loss, a floating scalar with its graph. It has to call the model that it is given, a
            copy, and to bring the batch to its device.
        batches: A list or any other iterable, a data loader say. As many as ``steps`` are taken from it; they are copied before
            use.
        make_optimizer: From a model to its optimizer. ``FusedAdamW`` with a learning rate of 1e-3 where None, which the result
            says.
        levels: Those that may be recommended, all by default.
        steps: Of each level; the first two are not timed. At least 4.
        seed: Of the random generators inside; those outside are as before.
        progress: Whether a line on stderr says what runs, where that is a terminal.
        prefer: 'speed' or 'memory': what the recommended level should save on the device of the model.
        **overrides: Options for all levels, as for ``amp.initialize``: ``loss_scale``, ``keep_fp32``, ``master_weights`` and
            others. A level that they conflict with is not tried.

    Returns:
        The recommendation, with everything that was measured.

    Raises:
        AmpConfigError: An impossible argument, or one that does not exist; overrides that go with none of the levels. Nothing
            has been run.
        AmpUsageError: No batch, or batches that cannot be read; a ``make_optimizer`` that makes no optimizer; a ``loss_fn``
            that returns no loss, does not use the model that it is given, or gives a loss in FP32 that is not finite.
        CannotCopyError: A model that cannot be copied.
    """
    words: dict[str, Any] = {'levels': levels, 'steps': steps, 'seed': seed, 'prefer': prefer, 'progress': progress}
    return suggest(Task(model, make_optimizer), loss_fn, batches, overrides, **words)


def suggest(
    task: Task,
    loss_fn: Any,
    batches: Iterable[Any],
    overrides: Mapping[str, Any],
    levels: Any,
    optimizer_name: str = 'as given',
    progress: bool = True,
    **options: Any,
) -> LevelSuggestion:
    """Recommend a level as :func:`suggest_level` does, for what an integration trains.

    Args:
        task: What is trained, and how.
        loss_fn, batches, overrides, levels, progress: As there.
        optimizer_name: What the result calls the optimizer.
        **options: ``steps``, ``seed`` and ``prefer``, as there.
    """
    model = task.model
    if not isinstance(model, nn.Module) or not any(p.requires_grad for p in model.parameters()):
        raise AmpConfigError([f'model={type(model).__name__} must be a module with a trainable parameter.'])
    known = {'loss_fn': loss_fn, 'make_optimizer': task.make_optimizer, 'levels': levels}
    options = read_options(_OPTIONS, {**options, **known})
    allowed = LEVELS if levels is None else [levels] if isinstance(levels, str) else list(levels)
    inner, found = unwrap(model), _resolve([each for each in LEVELS if each in allowed and each != 'O0'], overrides)
    for policy in (each.policy for each in found):
        if policy is not None:
            # names that the model does not have are refused
            kept_modules([('', inner)], policy, without_prefix=True)
    with isolated():
        taken = _take(batches, int(options['steps']))
    if task.make_optimizer is None:
        optimizer_name = f'FusedAdamW with a learning rate of {DEFAULT_LR:g}, since none was given'
    task = task._replace(model=inner, make_optimizer=task.make_optimizer or _default_optimizer)
    training = Training(task, loss_fn, taken, int(options['seed']), int(options['steps']))
    is_interrupted = False
    try:
        for tried in found:
            if progress and sys.stderr.isatty():
                print(f'{tried.level} runs', file=sys.stderr)
            training.try_level(tried)
        for tried in list(found):
            if (mended := keep_what_overflows(training, tried)) is not None:
                found.append(mended)
    except KeyboardInterrupt:
        is_interrupted = True
    for tried in (each for each in found if each.is_known):
        judge(tried, found[0], options['prefer'], inner)
    device = module_device(inner)
    facts = {
        **{name: options[name] for name in ('steps', 'seed', 'prefer')},
        'device': f'{device} ({torch.cuda.get_device_name(device)})' if device.type == 'cuda' else str(device),
        'torch': torch.__version__,
        'optimizer': optimizer_name,
        'batches': len(taken),
        'compiled': is_compiled(model),
        'interrupted': is_interrupted,
        'overrides': dict(overrides),
        'not_tried': [each.level for each in found if each.level in allowed and not each.is_known],
    }
    is_early = is_interrupted and len(found) > 1 and not any(each.is_known for each in found[1:])
    return _page(found, None if is_early else choose(found, options['prefer'], allowed), facts)


def _default_optimizer(model: nn.Module) -> Optimizer:
    return FusedAdamW([p for p in model.parameters() if p.requires_grad], lr=DEFAULT_LR)


def _resolve(levels: Sequence[OptLevel], overrides: Mapping[str, Any]) -> list[Tried]:
    """Return FP32 and the levels, each with its configuration, or with why it cannot be had."""
    found, usual = [Tried('O0', resolve('O0'))], {'num_losses': 1, 'enabled': True}
    for name in (name for name in usual if overrides.get(name, usual[name]) != usual[name]):
        raise AmpConfigError([f'{name}={overrides[name]!r} cannot be tried: leave it out.'])
    for level in levels:
        try:
            policy = resolve(level, **overrides)
            # how long a row of skipped steps is allowed to be is not asked here
            found.append(Tried(level, dataclasses.replace(policy, max_consecutive_skips=None)))
        except AmpConfigError as error:
            found.append(Tried(level, reasons=[('cannot', str(error))]))
    if levels and all(each.policy is None for each in found[1:]):
        resolve(levels[-1], **overrides)
    return found


def _take(batches: Iterable[Any], count: int) -> list[Any]:
    kind = type(batches).__name__
    # the keys of a dict are no batches
    if isinstance(batches, (str, Mapping)) or not (hasattr(batches, '__iter__') or hasattr(batches, '__getitem__')):
        raise AmpConfigError([f'batches={kind} must be a list or another iterable of batches: one batch is [batch].'])
    try:
        found = list(islice(batches, count))
    except Exception as error:
        # data sets are programs of others
        raise AmpUsageError(f'batches={kind} cannot be read ({one_line(error)}).') from error
    if not found:
        raise AmpUsageError('batches is empty: at least one batch is needed.')
    return found


# -- judgement ---------------------------------------------------------------------------------------------------------


def distance(exact: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> tuple[float, str, float]:
    """Return the error of gradients, as :attr:`Tried.error`; and the module of whose gradient the largest part, by its squares,
    became zero, and that part. Syncs."""
    sums: dict[str, list[float]] = {}
    for name, reference in exact.items():
        a, b = reference.double(), other.get(name, torch.zeros_like(reference)).double()
        found = torch.stack([(a - b).square().sum(), a.square().sum(), a[b == 0].square().sum()]).tolist()
        owner = name.rpartition('.')[0]
        sums[owner] = [x + y for x, y in zip(sums.get(owner, [0.0] * 3), found)]
    known = {name: values for name, values in sums.items() if values[1] > 0}
    errors = [min(off / size, 1.0) if math.isfinite(off) else 1.0 for off, size, _ in known.values()]
    lost = {name: gone / size for name, (_, size, gone) in known.items()}
    worst = max(lost, key=lambda name: lost[name], default='')
    return math.sqrt(sum(errors) / max(len(errors), 1)), worst, lost.get(worst, 0.0)


def judge(tried: Tried, fp32: Tried, prefer: str, model: nn.Module) -> None:
    """Fill in ratios to FP32 and the reasons that follow from them.

    Args:
        tried: What a level did.
        fp32: What FP32 did.
        prefer: 'speed' or 'memory'.
        model: What was trained.
    """
    if tried.seconds and fp32.seconds:
        # other programs make steps longer, never shorter
        tried.time = float(np.quantile(tried.seconds, 0.25) / np.quantile(fp32.seconds, 0.25))
    if tried.memory and fp32.memory:
        tried.memory_ratio = tried.memory / fp32.memory
    common = min(len(tried.losses), len(fp32.losses))
    if common > WARM_UP:
        # the mean of the last ones that both have
        ends = [np.mean(each.losses[max(common - 3, WARM_UP) : common]) for each in (tried, fp32)]
        tried.loss_off = float(abs(ends[0] - ends[1]))
    half = None if tried.policy is None else tried.policy.half_type
    if half is None or tried.reasons or not fp32.gradients:
        return
    tried.error, lost, share = distance(fp32.gradients, tried.gradients)
    off, slow, is_lost = tried.loss_off or 0.0, tried.time or 0.0, half is torch.float16 and share > MOST_VANISHED
    is_off, device = bool(off) and off > LEAST_LOSS * abs(fp32.losses[0]), module_device(model)
    lacks = half is torch.bfloat16 and device.type == 'cuda' and not torch.cuda.is_bf16_supported(False)
    vanished = f'{percent(share)} of the gradient of {called(model, lost)} becomes zero at {scale_of(tried)}'
    reasons = [
        ('vanished', vanished, is_lost),
        ('gradients', f'gradients are {percent(tried.error)} off FP32', tried.error > MOST_ERROR and not is_lost),
        ('loss', f'after {common} steps the loss is {off:.3g} off that of FP32', is_off),
        ('hardware', f'{device} has no bfloat16 arithmetic', lacks),
        ('slow', f'a step takes {slow:.2g} times as long as in FP32', slow > 1 + TIE and prefer == 'speed'),
    ]
    tried.reasons += [(kind, text) for kind, text, holds in reasons if holds]


def choose(found: Sequence[Tried], prefer: str, allowed: Sequence[str]) -> Tried | None:
    """Return the level to take: of those that suit, the one with the least time or memory. Among those within ten per cent of
    it, those with accurate gradients come first, then those without ``keep_fp32``, then the first in :data:`PREFERRED`. O3 is
    taken only where it alone was asked for, and O0 where nothing else suits, or saves a tenth. None where nothing is known."""
    suited = [each for each in found if each.is_known and not each.reasons]
    measured = [(each, each.time if prefer == 'speed' else each.memory_ratio) for each in suited]
    fp32 = next((each for each, _ in measured if each.level == 'O0'), None)
    # a few steps say nothing of the end of a training, when updates become too small for 16-bit weights
    others = set(allowed) - ({'O0'} if set(allowed) == {'O3'} else {'O0', 'O3'})
    most = 1 - TIE if 'O0' in allowed and fp32 is not None else math.inf
    good = [(each, ratio or math.inf) for each, ratio in measured if each.level in others]
    best = min((ratio for _, ratio in good if ratio <= most), default=0.0)
    equal = [each for each, ratio in good if ratio <= min(best * (1 + TIE), most)]

    def rank(tried: Tried) -> tuple[bool, bool, int]:
        return (tried.error or 0.0) > LEAST_ERROR, bool(tried.keep_fp32), PREFERRED.index(tried.level)

    return min(equal, key=rank, default=fp32)


# -- words -------------------------------------------------------------------------------------------------------------


def _page(found: Sequence[Tried], best: Tried | None, facts: dict[str, Any]) -> LevelSuggestion:
    level, keep = (None, ()) if best is None else (best.level, best.keep_fp32)
    words: dict[str, Any] = {'opt_level': level, **(best.policy.overrides if best is not None and best.policy else {})}
    if keep:
        given = words.get('keep_fp32', ())
        words['keep_fp32'] = [*([given] if isinstance(given, str) else given), *keep]
    settings = ', '.join(f'{name}={value!r}' for name, value in words.items())
    config = f"optim_wrapper = dict(type='amp_wrapper.AmpOptimWrapper', {settings})" if level else '# no level'
    script = f'model, optimizer = amp.initialize(model, optimizer, {settings})' if level else '# no level'
    rows: list[list[Any]] = []
    entries: list[dict[str, Any]] = []
    for each in found:
        fits = 'recommended' if each is best else 'suits' if each.is_known else 'not tried'
        verdict = '; '.join(text for _, text in each.reasons) or fits
        name = f'{each.level} keep_fp32={list(each.keep_fp32)}' if each.keep_fp32 else each.level
        error, skips = None if each.error is None else percent(each.error), each.skips if each.is_known else None
        rows.append([name, each.time, each.memory_ratio, skips, each.loss_scale, error, verdict])
        entry = {key: value for key, value in vars(each).items() if key not in ('policy', 'gradients', 'overflow')}
        entries.append({**entry, 'tried': each.is_known, 'recommended': each is best})
    head = ['level', 'time', 'memory', 'skipped', 'loss scale', 'gradients', 'verdict']
    note = 'Time and memory are ratios to FP32 (O0). Gradients: their relative error at the first weights, over the modules.'
    marks = {row: 'good' for row, each in enumerate(found) if each is best}
    shown = {key: str(facts[key]) for key in ('optimizer', 'steps', 'batches', 'device', 'torch')}
    if facts['compiled']:
        shown['compiled'] = 'Each level ran without torch.compile, which changes times and memory of a step.'
    reason = _reason(found, best, facts)
    title = f'Recommended level: {level}' if level else 'No level can be recommended'
    data = {'level': level, 'keep_fp32': list(keep), 'reason': reason, **facts, 'levels': entries}
    tables, lines = [Table('Levels', head, rows, note, marks, ('time', 'memory'))], [config, script] if level else []
    return LevelSuggestion(title, reason, shown, tables, lines, data, level, keep, reason, config, script)


def _reason(found: Sequence[Tried], best: Tried | None, facts: Mapping[str, Any]) -> str:
    """Say why the chosen level is the one to take, or why there is none."""
    missing = f'; not tried: {", ".join(facts["not_tried"])}' if facts['not_tried'] else ''
    early = f'Interrupted{missing}. ' if facts['interrupted'] else ''
    if best is None:
        return f'{early}No level can be recommended.'
    if best.level == 'O0':
        what = 'time' if facts['prefer'] == 'speed' else 'memory'
        fits = any({kind for kind, _ in each.reasons} <= {'slow'} for each in found[1:] if each.is_known)
        why = f'no level that suits saves a tenth of the {what}' if fits else 'no other level that was tried suits'
        return f'{early}O0 (FP32 training): {why} on this device.'
    text = f'{early}{LEVEL_TABLE[best.level].describe()}.'
    for name, ratio in (('memory', best.memory_ratio), ('time', best.time)):
        text += '' if ratio is None else f' It takes {ratio:.3g} times the {name} of FP32.'
    return text + (f' Without {", ".join(map(repr, best.keep_fp32))} in FP32, it overflows.' if best.keep_fp32 else '')

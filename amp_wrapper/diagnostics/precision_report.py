"""The precision report: what a model computes in at a level and why, what 16-bit types would lose, and what each level holds.

:func:`report` is ``amp.report``. The command ``amp-wrapper report`` calls :func:`make`.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Unpack

from ..casting.kept import kept_modules
from ..casting.modules import class_name, module_device
from ..casting.roots import is_compiled, unwrap
from ..errors import AmpConfigError, AmpUsageError
from ..policy import LEVELS, OptLevel, Policy, PolicyOptions, dtype_name, resolve
from ..policy.nested import map_tensors
from ..version import __version__
from . import pages, report_table
from .level_trial import Subject, Trial, check_functions, check_options, measured_peak, run_trial
from .module_record import OUTSIDE, ModuleRecord, OpRun
from .ranges import Ranges, exponent_of, range_of
from .recorder import tensors_of
from .rounding import TYPES, Measured, Rounding
from .sandbox import fp32_copy, isolated, made_optimizer

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Of the JSON; it rises when a key changes its meaning or goes. New keys may come at any time.
FORMAT = 1
#: Powers of two that are left between the largest gradient and the largest float16, where a loss scale is proposed.
HEADROOM = 2


class PrecisionReport:
    """What :func:`report` found. ``print(report)`` shows the tables.

    Attributes:
        data: All of it, as plain dicts, lists, strings and numbers: the JSON. The page on the precision report describes its
            keys.
    """

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data

    def table(self, depth: int | None = None) -> RenderableType:
        """The tables for a terminal, for ``rich.print``: as wide as that is.

        Args:
            depth: Of the deepest modules that are shown; None for all.
        """
        return report_table.tables(self.data, depth)

    def text(self, depth: int | None = None, width: int | None = None) -> str:
        """The tables as text without colours.

        Args:
            depth: As of :meth:`table`.
            width: In characters; that of the terminal by default.
        """
        return report_table.text(self.data, depth, width)

    def __str__(self) -> str:
        return self.text()

    def html(self) -> str:
        """A page that needs no network and no other file."""
        return pages.render('precision_report.html.j2', **report_table.for_page(self.data))

    def json(self) -> str:
        """:attr:`data` as JSON."""
        return pages.to_json(self.data)

    def write(self, folder: str | os.PathLike[str], stem: str = 'precision_report') -> tuple[Path, Path]:
        """Write the page and the JSON.

        Args:
            folder: Made where it is missing.
            stem: Name of both files, without an ending.

        Returns:
            Their paths.

        Raises:
            OSError: A file could not be written.
        """
        return pages.write(folder, stem, self.html(), self.data)


def report(
    model: nn.Module,
    example: Any,
    opt_level: OptLevel = 'O2',
    loss_fn: Callable[[nn.Module, Any], Tensor] | None = None,
    *,
    make_optimizer: Callable[[nn.Module], Optimizer] | None = None,
    **overrides: Unpack[PolicyOptions],
) -> PrecisionReport:
    """Report what a model computes in at a level and why, what float16 and bfloat16 would lose, and the memory of each level.

    One training step is run at each level, on copies: the model, its buffers, gradients and the random generators are as
    before. The model may be attached already, wrapped in DDP, in training or evaluation mode. Syncs.

    Args:
        model: Any module; its copies are cast as ``amp.initialize`` does it.
        example: What the model is called with: a tuple of positional arguments, a dict of keyword arguments, or the one
            argument. With ``loss_fn``, whatever that takes. Tensors are on the device of the model.
        opt_level: 'O0' to 'O5'.
        loss_fn: ``loss_fn(model, example)`` gives the loss, a tensor with one element. Without it, there are no ranges of
            gradients, and the sum of the outputs stands in for the loss where memory is counted.
        make_optimizer: ``make_optimizer(model)`` makes an optimizer, whose state is counted. Without it, no state is.
        **overrides: Options of ``amp.initialize``, such as ``keep_fp32=['head']``.

    Raises:
        AmpConfigError: An option that does not exist, or a configuration that cannot mean anything.
        AmpUsageError: A model that is none, or cannot be copied; an example that can be read only once; a loss that is no
            scalar; a ``make_optimizer`` that makes no optimizer.
        AmpAttachError: The level cannot be had for this model.
        Exception: What the model raises in FP32 or at the level.

    Examples:
        >>> import torch
        >>> from amp_wrapper import amp
        >>> found = amp.report(torch.nn.Linear(4, 2), torch.ones(1, 4), opt_level='O5')
        >>> len(found.json()) > 1000
        True
    """
    if not isinstance(model, nn.Module):
        raise AmpUsageError(f'model={type(model).__name__} must be a torch.nn.Module.')
    if isinstance(example, Iterator):
        raise AmpUsageError(
            f'example={type(example).__name__} can be read once, and is used for several steps: hand over what the model is '
            f'called with, a tuple of arguments, a dict or one tensor. next(iter(loader)) takes a batch from a data loader.'
        )
    check_functions(loss_fn=loss_fn, make_optimizer=make_optimizer)
    check_options(overrides, ('loss_fn', 'make_optimizer'))
    policy = resolve(opt_level, **overrides)
    run = _call if loss_fn is None else loss_fn

    def run_copy(copied: nn.Module) -> Any:
        return run(copied, _fresh(example))

    subject = Subject(model, run_copy, loss_fn is not None, make_optimizer)
    return make(subject, policy, overrides, title=class_name(unwrap(model)))


def _call(model: nn.Module, example: Any) -> Any:
    if isinstance(example, tuple) and not hasattr(example, '_fields'):
        return model(*example)
    return model(**example) if isinstance(example, dict) else model(example)


def _fresh(example: Any) -> Any:
    """The example with copies of its tensors: models may write to their inputs."""
    memo = {id(t): t.detach().clone().requires_grad_(t.requires_grad) for t in tensors_of(example)}
    try:
        return copy.deepcopy(example, dict(memo))
    except Exception:
        # what holds things that Python cannot copy is handed over as it is, with other tensors
        return map_tensors(lambda tensor: memo.get(id(tensor), tensor), example)


def make(
    subject: Subject,
    policy: Policy,
    overrides: Mapping[str, Any],
    title: str,
    begins: Callable[[str], object] | None = None,
) -> PrecisionReport:
    """Run the steps, and put the report together.

    Args:
        subject: What is run.
        policy: The level to report on.
        overrides: Its options, which the other levels get too, as far as they go with them.
        title: What the report is about.
        begins: Called with the name of each level before its step.

    Raises:
        AmpError: As of :func:`report`.
    """
    with torch.inference_mode(False):
        return _make(subject, policy, overrides, title, begins or (lambda level: None))


def _optimizer_name(subject: Subject) -> str | None:
    """The class of the optimizer, which is made for a copy."""
    if subject.make_optimizer is None:
        return None
    with isolated():
        return type(made_optimizer(subject.make_optimizer, fp32_copy(subject.model))).__name__


def _make(
    subject: Subject, policy: Policy, overrides: Mapping[str, Any], title: str, begins: Callable[[str], object]
) -> PrecisionReport:
    inner = unwrap(subject.model)
    kept_modules([('', inner)], policy, without_prefix=True)  # refuses names that the model does not have
    begins('O0')
    exact = run_trial(subject, _fp32(policy), records=True, rounds=True, scale=policy.loss_scale.init_scale)
    begins(policy.opt_level)
    here = run_trial(subject, policy, records=True)
    memory: dict[str, Any] = {}
    for level in LEVELS:
        if level == policy.opt_level:
            memory[level] = _memory(subject, policy, here)
        elif level == 'O0':
            memory[level] = _memory(subject, exact.policy, exact)
        else:
            begins(level)
            memory[level] = _memory_at(subject, level, overrides)
    optimizer = _optimizer_name(subject)
    data = {
        'format': FORMAT,
        'amp_wrapper': __version__,
        'torch': torch.__version__,
        'title': title,
        'level': policy.opt_level,
        'policy': policy.describe(),
        'options': policy.to_dict(),
        'device': str(module_device(inner)),
        'mode': 'training' if inner.training else 'evaluation',
        'compiled': is_compiled(subject.model),
        'optimizer': optimizer,
        'loss': None if exact.loss is None else {'fp32': exact.loss, 'level': here.loss},
        'modules': _modules(inner, exact, here),
    }
    found = exact.recorder.totals['outputs'].read() if exact.recorder is not None else None
    data['outputs'] = None if found is None else found.plain()
    data['gradients'] = _gradients(exact, policy)
    data['memory'] = memory
    return PrecisionReport(data)


def _fp32(policy: Policy) -> Policy:
    """O0 for the same model."""
    return dataclasses.replace(resolve('O0'), num_losses=policy.num_losses)


def _memory_at(subject: Subject, level: OptLevel, overrides: Mapping[str, Any]) -> dict[str, Any]:
    try:
        policy = resolve(level, **overrides)
    except AmpConfigError:
        # those that every level takes
        policy = resolve(
            level, **{key: overrides[key] for key in ('keep_fp32', 'fp32_ops', 'keep_inputs') if key in overrides}
        )
    try:
        return _memory(subject, policy, run_trial(subject, policy))
    except Exception as error:
        # whatever the model does at another level
        # a level that the model, or the device, cannot have: the others can still be told
        return {'error': f'{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ""}'}


def _memory(subject: Subject, policy: Policy, trial: Trial) -> dict[str, Any]:
    return {**trial.memory.plain(), 'measured_peak': measured_peak(subject, policy)}


def _modules(model: nn.Module, exact: Trial, here: Trial) -> list[dict[str, Any]]:
    """One entry for each module, in the order of the model, and one for what runs outside of it."""
    assert exact.recorder is not None
    assert here.recorder is not None
    found = []
    for name, module in model.named_modules():
        scripted = isinstance(module, torch.jit.ScriptModule)
        container = not scripted and type(module).forward is nn.Module.forward
        # a scripted one takes no hooks: what it computes belongs to the module that calls it
        uncalled = 'scripted' if scripted else 'container' if container else 'not called'
        found.append(_module(name, class_name(module), exact, here, uncalled))
    if here.recorder.records[OUTSIDE].ops:
        found.append(_module(OUTSIDE, '', exact, here, 'outside'))
    return found


def _module(name: str, kind: str, exact: Trial, here: Trial, uncalled: str) -> dict[str, Any]:
    assert exact.recorder is not None
    assert here.recorder is not None
    before, record = exact.recorder.records[name], here.recorder.records[name]
    weights = here.weights.get(name)
    depth = 0 if name in ('', OUTSIDE) else name.count('.') + 1
    return {
        'name': name,
        'class': kind,
        'depth': depth,
        'calls': record.calls,
        'state': 'called' if record.calls else uncalled,
        'weights': None
        if weights is None
        else {
            'types': dict(weights.types),
            'elements': sum(weights.types.values()),
            'bytes': weights.bytes,
            'masters': weights.masters or None,
        },
        'inputs': {'given': list(record.given), 'computed': list(record.inputs)},
        'outputs': {'computed': list(record.outputs), 'given': list(record.handed)},
        'gradients': list(record.gradients),
        'kept': None if record.kept is None else dataclasses.asdict(record.kept),
        'fp32_ops': [_op(run, calls) for run, calls in record.ops.items() if run.rule],
        'ops': _ops_by_type(record),
        'casts': {f'{source} to {target}': count for (source, target), count in record.casts.items()},
        'ranges': _ranges(name, before, record, exact),
    }


def _op(run: OpRun, calls: int) -> dict[str, Any]:
    return {
        'op': run.op,
        'calls': calls,
        'inputs': list(run.inputs),
        'output': run.output or None,
        'rule': run.rule,
        'name': run.name,
        'reason': run.reason,
    }


def _ops_by_type(record: ModuleRecord) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for run, calls in record.ops.items():
        names = found.setdefault(run.type, {})
        names[run.op] = names.get(run.op, 0) + calls
    return found


def _ranges(name: str, before: ModuleRecord, record: ModuleRecord, exact: Trial) -> dict[str, Any]:
    """In FP32, beside what inputs and outputs were at the level."""
    found: dict[str, Any] = {}
    for key, measured in (('weights', exact.weight_ranges), ('weight_gradients', exact.gradient_ranges)):
        if name in measured:
            found[key] = measured[name].plain()
    for key, gathered in before.ranges.items():
        read = gathered.read()
        # without a loss, a stand-in has made them
        if read is None or (key == 'output_gradients' and exact.loss is None):
            continue
        found[key] = read.plain()
        at_level = record.ranges[key].read()
        if at_level is not None and key != 'output_gradients':
            now = at_level.ranges
            found[key]['at_level'] = {'largest': now.largest, 'nonfinite': now.nonfinite, 'zeros': now.zeros}
    return found


def _gradients(exact: Trial, policy: Policy) -> dict[str, Any] | None:
    """All gradients of the step, those of weights and those of outputs, and the loss scale that suits them."""
    assert exact.recorder is not None
    if exact.loss is None:
        return None
    outputs = exact.recorder.totals['output_gradients'].read()
    parts = {
        'weights': Measured.added(exact.gradient_ranges.values()),
        'outputs': Measured.added(() if outputs is None else (outputs,)),
    }
    both = Measured.added(part for part in parts.values() if part.rounding)
    scale = best_scale(both.ranges, torch.float16)
    found: dict[str, Any] = {key: measured.ranges.plain() for key, measured in parts.items()}
    found['best_scale'] = scale
    found['first_scale'] = policy.loss_scale.init_scale
    for dtype in TYPES:
        found[dtype_name(dtype)] = {
            'without_scale': both.shares(both.rounding.get(dtype, Rounding())),
            'first_scale': both.shares(both.scaled.get(dtype, Rounding())),
        }
    found['float16']['best_scale'] = None if scale is None else _lost_at_best(both, scale)
    return found


def _lost_at_best(measured: Measured, scale: float) -> dict[str, float]:
    """Shares of gradients that float16 loses under :func:`best_scale`, a power of two under which nothing overflows."""
    known, up = range_of(torch.float16), exponent_of(scale)
    # half of the smallest number becomes zero: ties are rounded to even
    zero = measured.at_most(known.bottom - 1 - up)
    below = measured.ranges.between(None, known.normal - up)
    return measured.shares(Rounding(underflow=zero, subnormal=below - zero))


def best_scale(ranges: Ranges, dtype: torch.dtype) -> float | None:
    """The loss scale that puts gradients best: as high as can be, with :data:`HEADROOM` powers of two above the largest.

    Args:
        ranges: Of gradients without a scale.
        dtype: The type they will have.

    Returns:
        A power of two, below 1 where the gradients are too large as they are; None where all gradients are zero.
    """
    if ranges.largest <= 0.0:
        return None
    return 2.0 ** (range_of(dtype).top - 1 - HEADROOM - exponent_of(ranges.largest))

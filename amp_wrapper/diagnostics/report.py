"""The precision report: what a model computes in at a level and why, and its largest numbers."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from ..casting import copies
from ..casting.kept import kept_modules
from ..casting.modules import class_name, module_device
from ..casting.roots import is_compiled, unwrap
from ..errors import AmpConfigError, AmpUsageError, some
from ..policy import OptLevel, Policy, PolicyOptions, dtype_name, resolve
from ..policy.autocast_lists import FLOAT32, OP_RULES
from ..policy.fp32_registry import FP32_OPS
from ..policy.options import read_options
from ..torch_internals import TorchDispatchMode, graph_task_id
from . import watches
from .page import Page, Table
from .sandbox import LOSS_FN, Pass, Task, check_loss, run_step, sandbox

#: What is called outside of the model: a loss function.
OUTSIDE = '(outside the model)'
_NO_MATH = (
    '_local_scalar_dense _to_copy alias clone copy detach empty_like fill full_like lift_fresh new_empty new_empty_strided '
    'new_full new_ones new_zeros ones_like rand_like randn_like resize set zero zeros_like'
)
_NOTE = (
    'Of one forward pass: types of weights and outputs, the largest output in FP32, how many ops computed in 16 bits, and '
    'which in FP32; casts and views are no ops. float16 ends at 65504.'
)


class Types(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what each module of a copy gives and computes in.

    Args:
        model: The copy.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model, self._watch = model, watches.NonfiniteWatch(model)
        # by module and by type
        self._ops: dict[str, dict[str, Counter[str]]] = {}

    def modules(self) -> dict[str, dict[str, Any]]:
        """Return what was noted, by name; :data:`OUTSIDE` is what runs outside of the model. Syncs.

        Of each: the types of its own ``weights``, and of its ``outputs``, whose greatest number is ``largest``; how often its
        ``ops`` ran by type, without modules below.
        """
        named = [(name, class_name(module), module) for name, module in self._model.named_modules()]
        found: dict[str, dict[str, Any]] = {}
        for name, kind, module in [*named, (OUTSIDE, '', nn.Identity())]:
            weights = sorted({dtype_name(parameter.dtype) for parameter in module.parameters(recurse=False)})
            words: dict[str, Any] = {'name': name, 'class': kind, 'weights': weights, 'ops': self._ops.get(name, {})}
            found[name] = {**words, 'outputs': [], 'largest': None, 'kept': None}
        for each in (each for each in self._watch.take() if not each.is_input):
            mine, dtype = found[each.name], dtype_name(each.dtype)
            mine['outputs'] += [dtype] * (dtype not in mine['outputs'])
            mine['largest'] = max(mine['largest'] or 0.0, each.largest)
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name, given, frame = func.overloadpacket.__name__, watches.numbers((args, kwargs)), watches.frame_outside()
        # casts of a level clamp what they round
        files = copies.__file__, watches.__file__
        is_ours = func.namespace == 'amp_wrapper' or (frame is not None and frame.f_code.co_filename in files)
        # a checkpointed segment runs again in the backward pass
        if given and graph_task_id() == -1 and not (is_ours or func.is_view or name.rstrip('_') in _NO_MATH.split()):
            widest = functools.reduce(torch.promote_types, (tensor.dtype for tensor in given))
            stack = self._watch.places.stack
            ops = self._ops.setdefault(stack[-1] if len(stack) > 1 else OUTSIDE, {})
            ops.setdefault(dtype_name(widest), Counter())[name] += 1
        return output


class PrecisionReport(Page):
    """What :func:`report` found. ``print(report)`` shows the tables."""


def report(
    model: nn.Module,
    example: Any,
    opt_level: OptLevel = 'O2',
    loss_fn: Callable[[nn.Module, Any], Tensor] | None = None,
    **overrides: Unpack[PolicyOptions],
) -> PrecisionReport:
    """Report what a model computes in at a level and why, and which of its outputs are too large for float16.

    One forward pass is run in FP32 and one at the level, on copies: the model, its buffers, gradients and the random generators
    are as before. The model may be attached already, wrapped in DDP, in training or evaluation mode. Syncs.

    Args:
        model: Any module; its copies are cast as ``amp.initialize`` does it.
        example: What the model is called with: a tuple of positional arguments, a dict of keyword arguments, or the one
            argument. With ``loss_fn``, whatever that takes. Tensors are on the device of the model.
        opt_level: 'O0' to 'O5'.
        loss_fn: ``loss_fn(model, example)`` gives the loss, a tensor with one element.
        **overrides: Options of ``amp.initialize``, such as ``keep_fp32=['head']``.

    Raises:
        AmpConfigError: An option that does not exist, or a configuration that cannot mean anything.
        AmpUsageError: A model that is none, or cannot be copied; an example that can be read only once; a loss that is no
            scalar; a ``loss_fn`` that calls another model than the one that it is given.
        AmpAttachError: The level cannot be had for this model.
        Exception: What the model raises in FP32 or at the level.

    Examples:
        >>> import torch
        >>> from amp_wrapper import amp
        >>> found = amp.report(torch.nn.Linear(4, 2), torch.ones(1, 4), opt_level='O5')
        >>> len(found.json()) > 500
        True
    """
    if not isinstance(model, nn.Module):
        raise AmpUsageError(f'model={type(model).__name__} must be a torch.nn.Module.')
    if isinstance(example, Iterator):
        raise AmpUsageError(f'example={type(example).__name__} can be read once: give a batch, next(iter(loader)) say.')
    read_options({'loss_fn': dataclasses.replace(LOSS_FN, allowed=(None, callable))}, {'loss_fn': loss_fn})

    def run(copied: nn.Module) -> Any:
        given = watches.copied_batch(example)
        if loss_fn is not None:
            return check_loss(loss_fn(copied, given))
        if isinstance(given, tuple) and not hasattr(given, '_fields'):
            return copied(*given)
        return copied(**given) if isinstance(given, dict) else copied(given)

    policy, title = resolve(opt_level, **overrides), class_name(unwrap(model))
    if not policy.enabled:
        raise AmpConfigError(['enabled=False: there is nothing to report on.'])
    return report_on(Task(model), run, policy, title)


def report_on(task: Task, run: Callable[[nn.Module], Any], policy: Policy, title: str) -> PrecisionReport:
    """Run the forward passes, and put the report together.

    Args:
        task: What is run.
        run: Runs a copy of the model, and returns what it gave: the loss, where that is a single number.
        policy: The level to report on.
        title: What the report is about.

    Raises:
        AmpError: As of :func:`report`.
    """
    inner = unwrap(task.model)
    # names that the model does not have are refused before anything runs
    kept_modules([('', inner)], policy, without_prefix=True)
    with torch.inference_mode(False):
        exact, fp32_loss = _run(task, run, resolve('O0'))
        modules, loss = _run(task, run, policy)
    if not any(each['outputs'] or each['ops'] for name, each in modules.items() if name != OUTSIDE):
        raise AmpUsageError('no module of the model was called: loss_fn has to call the copy that it is given.')
    for name, module in modules.items():
        module['largest'] = exact[name]['largest']
        _explain(module, modules, policy)
    data = {
        'title': title,
        'torch': torch.__version__,
        'level': policy.opt_level,
        'policy': policy.describe(),
        'device': str(module_device(inner)),
        'mode': 'training' if inner.training else 'evaluation',
        'compiled': is_compiled(task.model),
        'loss': None if loss is None else {'fp32': fp32_loss, 'level': loss},
        'modules': [module for name, module in modules.items() if name != OUTSIDE or module['ops']],
    }
    return _page(data)


def _run(task: Task, run: Callable[[nn.Module], Any], policy: Policy) -> tuple[dict[str, dict[str, Any]], float | None]:
    """Run the forward pass of a copy at a level; returns what its modules did, and the loss, where there is one."""
    losses: list[float] = []

    def forward(copied: nn.Module) -> Pass:
        result = run(copied)
        losses.extend(each.item() for each in [result] if isinstance(each, Tensor) and not each.dim())
        return []

    with sandbox(task.model, policy, attach=task.attach) as box:
        types = Types(box.model)
        run_step(box, forward, [types], surrounds=task.surrounds)
        modules = types.modules()
        for name, module in box.model.named_modules():
            kept = box.engine.kept.get(id(module))
            modules[name]['kept'] = None if kept is None else dataclasses.asdict(kept)
    return modules, losses[0] if losses else None


def _explain(module: dict[str, Any], modules: Mapping[str, Any], policy: Policy) -> None:
    """Add which ops of a module run in FP32 at a 16-bit level, and the rule for each; '' where none names it.

    Then it was given FP32 numbers: weights of the level, or what the model itself has cast.
    """
    around = [module['name'].rsplit('.', up)[0] for up in range(module['name'].count('.') + 1)]
    kept = next((why for each in around if (why := modules[each].get('kept')) is not None), None)
    rules = {'fp32_ops': [each.name for each in policy.fp32_ops], 'registry': list(FP32_OPS)}
    if not policy.casts_model:
        rules['autocast'] = [name.partition('.')[0] for name, rule in OP_RULES.items() if rule == FLOAT32]
    # 'linalg.inv' for torch.linalg.inv, 'softmax' for torch.nn.functional.softmax
    known = {rule: {n.replace('linalg.', 'linalg_').rpartition('.')[2] for n in names} for rule, names in rules.items()}
    module['fp32_ops'] = []
    for op, calls in module['ops'].get('float32', {}).items() if policy.runs_16_bit else ():
        bare = op.strip('_').removeprefix('native_').removesuffix('_ex').removesuffix('_forward')
        rule = kept['rule'] if kept else next((rule for rule, names in known.items() if bare in names), '')
        module['fp32_ops'].append({'op': op, 'calls': calls, 'rule': rule})


def _page(data: dict[str, Any]) -> PrecisionReport:
    rows: list[list[Any]] = []
    reasons: dict[str, str] = {}
    large: dict[int, str] = {}
    for each in (each for each in data['modules'] if each['outputs'] or each['ops']):
        half = sum(sum(ops.values()) for dtype, ops in each['ops'].items() if dtype.endswith('float16'))
        fp32 = ', '.join(op['op'] + f' ({op["rule"]})' * bool(op['rule']) for op in each['fp32_ops'])
        if each['kept'] and fp32:
            reasons[each['kept']['rule']] = each['kept']['reason']
        name = each['name'] or '(model)'
        if (each['largest'] or 0.0) > torch.finfo(torch.float16).max:
            large[len(rows)] = name
        rows.append([name, each['class'], each['weights'], each['outputs'], each['largest'], half, fp32])
    note = ' '.join([_NOTE, *(f'{rule}: {reason}.' for rule, reason in reasons.items())])
    columns = ['module', 'class', 'weights', 'outputs', 'max output', '16-bit ops', 'in FP32 (why)']
    table = Table('Modules', columns, rows, note, dict.fromkeys(large, 'bad'), is_tree=True)
    facts = {key: str(data[key]) for key in ('device', 'mode', 'torch')}
    if data['loss'] is not None:
        facts['loss'] = f'{data["loss"]["level"]:.6g} at {data["level"]}, {data["loss"]["fp32"]:.6g} in FP32'
    lead = f'{data["policy"]}.' + (f' float16 has no room for outputs of {some(large.values())}.' if large else '')
    lead += ' The model is compiled, and ran without torch.compile.' if data['compiled'] else ''
    return PrecisionReport(f'Precision of {data["title"]} at {data["level"]}', lead, facts, [table], [], data)

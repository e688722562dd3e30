"""The precision report: what a model computes in at a level and why, its largest numbers, and what each level holds."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from typing_extensions import Unpack

from ..casting import copies
from ..casting.kept import kept_modules
from ..casting.modules import class_name, module_device
from ..casting.roots import is_compiled, unwrap
from ..errors import AmpConfigError, AmpUsageError, one_line, some
from ..policy import LEVELS, OptLevel, Policy, PolicyOptions, dtype_name, resolve
from ..policy.autocast_lists import FLOAT32, OP_RULES
from ..policy.fp32_registry import FP32_OPS
from ..policy.levels import LossScaleConfig
from ..torch_internals import TorchDispatchMode, graph_task_id
from . import watches
from .first_bad import frame_outside
from .page import Page, Table, percent
from .sandbox import copied_batch, sandbox, trainable
from .step import LOSS_FN, MAKE_OPTIMIZER, Pass, Task, check_loss, read_options, run_step

#: What is called outside of the model: a loss function.
OUTSIDE = '(outside the model)'
_NO_MATH = (
    '_local_scalar_dense _to_copy alias clone copy detach empty_like fill full_like lift_fresh new_empty new_empty_strided '
    'new_full new_ones new_zeros ones_like rand_like randn_like resize set zero zeros_like'
)
_NOTE = (
    'Of one training step: types of weights and outputs, the largest output in FP32, how many ops computed in 16 bits, and '
    'which in FP32; casts and views are no ops. float16 ends at 65504.'
)
_OPTIONS = {'loss_fn': dataclasses.replace(LOSS_FN, allowed=(None, callable)), 'make_optimizer': MAKE_OPTIMIZER}


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

        Of each: the elements of its own ``weights`` by type; types of its ``outputs``, and the ``largest``; how often its
        ``ops`` ran by type, without modules below.
        """
        named = {name: (class_name(module), module) for name, module in self._model.named_modules()}
        found: dict[str, dict[str, Any]] = {}
        for name, (kind, module) in {**named, OUTSIDE: ('', nn.Identity())}.items():
            weights: Counter[str] = Counter()
            for parameter in module.parameters(recurse=False):
                weights[dtype_name(parameter.dtype)] += parameter.numel()
            words: dict[str, Any] = {'name': name, 'class': kind, 'weights': weights, 'ops': self._ops.get(name, {})}
            found[name] = {**words, 'outputs': [], 'largest': None}
        for each in (each for each in self._watch.take() if not each.is_input):
            mine, dtype = found[each.name], dtype_name(each.dtype)
            mine['outputs'] += [dtype] * (dtype not in mine['outputs'])
            mine['largest'] = max(mine['largest'] or 0.0, each.largest)
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name, given, frame = func.overloadpacket.__name__, watches.numbers((args, kwargs)), frame_outside()
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
    *,
    make_optimizer: Callable[[nn.Module], Optimizer] | None = None,
    **overrides: Unpack[PolicyOptions],
) -> PrecisionReport:
    """Report what a model computes in at a level and why, its largest outputs, and the memory of each level.

    One training step is run at each level, on copies: the model, its buffers, gradients and the random generators are as
    before. The model may be attached already, wrapped in DDP, in training or evaluation mode. Syncs.

    Args:
        model: Any module; its copies are cast as ``amp.initialize`` does it.
        example: What the model is called with: a tuple of positional arguments, a dict of keyword arguments, or the one
            argument. With ``loss_fn``, whatever that takes. Tensors are on the device of the model.
        opt_level: 'O0' to 'O5'.
        loss_fn: ``loss_fn(model, example)`` gives the loss, a tensor with one element. Without it, the sum of the outputs
            stands in for the loss where memory is counted.
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
        what = 'can be read once, and is used for several steps: hand over a batch, such as next(iter(loader))'
        raise AmpUsageError(f'example={type(example).__name__} {what}.')
    read_options(_OPTIONS, {'loss_fn': loss_fn, 'make_optimizer': make_optimizer})

    def run(copied: nn.Module) -> Any:
        given = copied_batch(example)
        if loss_fn is not None:
            return loss_fn(copied, given)
        if isinstance(given, tuple) and not hasattr(given, '_fields'):
            return copied(*given)
        return copied(**given) if isinstance(given, dict) else copied(given)

    policy, title = resolve(opt_level, **overrides), class_name(unwrap(model))
    if not policy.enabled:
        raise AmpConfigError(['enabled=False: there is nothing to report on.'])
    return report_on(Task(model, make_optimizer), run, loss_fn is not None, policy, overrides, title)


def report_on(
    task: Task,
    run: Callable[[nn.Module], Any],
    has_loss: bool,
    policy: Policy,
    overrides: Mapping[str, Any],
    title: str,
) -> PrecisionReport:
    """Run the steps, and put the report together.

    Args:
        task: What is run.
        run: Runs a copy of the model; returns the loss, or what the model gave.
        has_loss: Whether it returns the loss.
        policy: The level to report on.
        overrides: Its options, which the other levels get too, as far as they go with them.
        title: What the report is about.

    Raises:
        AmpError: As of :func:`report`.
    """
    inner = unwrap(task.model)
    # names that the model does not have are refused before anything runs
    kept_modules([('', inner)], policy, without_prefix=True)
    memory: dict[str, dict[str, Any]] = {}
    with torch.inference_mode(False):
        exact = _Trial(task, run, has_loss, resolve('O0'))
        here = _Trial(task, run, has_loss, policy)
        for level in LEVELS:
            known = {'O0': exact, policy.opt_level: here}.get(level)
            try:
                memory[level] = (known or _Trial(task, run, has_loss, resolve(level, **overrides))).memory
            except Exception as error:
                # a level that the model, or the device, cannot have: the others can still be told
                memory[level] = {'error': one_line(error)}
    for name, module in here.modules.items():
        _explain(module, here, policy)
        module['largest'] = exact.modules[name]['largest']
    data = {
        'title': title,
        'torch': torch.__version__,
        'level': policy.opt_level,
        'policy': policy.describe(),
        'device': str(module_device(inner)),
        'mode': 'training' if inner.training else 'evaluation',
        'compiled': is_compiled(task.model),
        'optimizer': here.optimizer,
        'loss': {'fp32': exact.loss, 'level': here.loss} if has_loss else None,
        'modules': [module for name, module in here.modules.items() if name != OUTSIDE or module['ops']],
        'memory': memory,
    }
    return _page(data)


class _Trial:
    """One step of a copy at a level; its loss scale is 1, and the step is taken whatever its gradients are: that makes the
    state of the optimizer."""

    def __init__(self, task: Task, run: Callable[[nn.Module], Any], has_loss: bool, policy: Policy) -> None:
        losses: list[Tensor] = []
        maker = task.make_optimizer or (lambda copied: SGD(trainable([copied]), lr=0.0))
        unscaled = LossScaleConfig(dynamic=False, init_scale=1.0)
        taken = dataclasses.replace(policy, loss_scale=unscaled, skip_nonfinite=False)
        with sandbox(task.model, taken, maker if trainable([task.model]) else None, task.attach) as box:
            types = Types(box.model)

            def begin(copied: nn.Module) -> Pass:
                result = run(copied)
                if has_loss:
                    losses.append(check_loss(result))
                elif sums := [tensor.float().sum() for tensor in watches.outputs_of(result) if tensor.requires_grad]:
                    # something to begin a backward pass with
                    losses.append(torch.stack(sums).sum())
                return [(loss, None) for loss in losses if loss.requires_grad and box.engine.optimizer is not None]

            step = run_step(box, begin, [types], surrounds=task.surrounds, counts=True)
            self.memory: dict[str, Any] = step.memory
            self.loss = float(losses[0].detach()) if has_loss else None
            self.modules = types.modules()
            self.kept = {name: box.engine.kept.get(id(module)) for name, module in box.model.named_modules()}
            self.optimizer = None if task.make_optimizer is None else type(box.engine.optimizer).__name__


def _explain(module: dict[str, Any], here: _Trial, policy: Policy) -> None:
    """Add which ops of a module run in FP32 at a 16-bit level, and the rule for each; '' where none names it.

    Then it was given FP32 numbers: weights of the level, or what the model itself has cast.
    """
    around = [module['name'].rsplit('.', up)[0] for up in range(module['name'].count('.') + 1)]
    kept = next((why for each in around if (why := here.kept.get(each)) is not None), None)
    rules = {'fp32_ops': [each.name for each in policy.fp32_ops], 'registry': list(FP32_OPS)}
    if not policy.casts_model:
        rules['autocast'] = [name.partition('.')[0] for name, each in OP_RULES.items() if each.rule == FLOAT32]
    # 'linalg.inv' for torch.linalg.inv, 'softmax' for torch.nn.functional.softmax
    known = {rule: {n.replace('linalg.', 'linalg_').rpartition('.')[2] for n in names} for rule, names in rules.items()}
    module['kept'] = None if kept is None else dataclasses.asdict(kept)
    module['fp32_ops'] = []
    for op, calls in module['ops'].get('float32', {}).items() if policy.runs_16_bit else ():
        bare = op.strip('_').removeprefix('native_').removesuffix('_ex').removesuffix('_forward')
        rule = kept.rule if kept is not None else next((rule for rule, names in known.items() if bare in names), '')
        module['fp32_ops'].append({'op': op, 'calls': calls, 'rule': rule})


def _page(data: dict[str, Any]) -> PrecisionReport:
    modules: list[list[Any]] = []
    reasons: dict[str, str] = {}
    large: list[str] = []
    bad: dict[int, str] = {}
    for each in (each for each in data['modules'] if each['outputs'] or each['ops']):
        half = sum(sum(ops.values()) for dtype, ops in each['ops'].items() if dtype.endswith('float16'))
        fp32 = ', '.join(op['op'] + f' ({op["rule"]})' * bool(op['rule']) for op in each['fp32_ops'])
        if each['kept'] and fp32:
            reasons[each['kept']['rule']] = each['kept']['reason']
        name = each['name'] or '(model)'
        if (each['largest'] or 0.0) > torch.finfo(torch.float16).max:
            large.append(name)
            bad[len(modules)] = 'bad'
        modules.append([name, each['class'], list(each['weights']), each['outputs'], each['largest'], half, fp32])
    kinds = list(data['memory']['O0'])
    memory = [
        [level, *(counted[kind] / 2**20 if kind in counted else None for kind in kinds), counted.get('error', '')]
        for level, counted in data['memory'].items()
    ]
    marks = {row: 'good' for row, level in enumerate(data['memory']) if level == data['level']}
    note = ' '.join([_NOTE, *(f'{rule}: {reason}.' for rule, reason in reasons.items())])
    columns = ['module', 'class', 'weights', 'outputs', 'max output', '16-bit ops', 'in FP32 (why)']
    tables = [
        Table(
            'Memory of one training step, in MiB', ['level', *kinds, ''], memory, marks=marks, bars=('total', 'peak')
        ),
        Table('Modules', columns, modules, note, bad, is_tree=True),
    ]
    facts = {key: str(data[key] or '') for key in ('optimizer', 'device', 'mode', 'torch')}
    if data['loss'] is not None:
        facts['loss'] = f'{data["loss"]["level"]:.6g} at {data["level"]}, {data["loss"]["fp32"]:.6g} in FP32'
    total = data['memory'][data['level']]['total'] / max(data['memory']['O0']['total'], 1)
    lead = f'{data["policy"]}. A step holds {percent(total)} of the memory of FP32.'
    lead += f' float16 has no room for outputs of {some(large)}.' if large else ''
    lead += ' The model is compiled, and ran without torch.compile.' if data['compiled'] else ''
    return PrecisionReport(f'Precision of {data["title"]} at {data["level"]}', lead, facts, tables, [], data)

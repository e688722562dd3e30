"""What the ops refuse, with an error that names the argument, before anything is written; with a library and without one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import bits
from op_lists import BF16, F16, F32, random_tensor, scalar
from torch import Tensor

from amp_wrapper import ops

pytestmark = pytest.mark.usefixtures('with_and_without_ops')

Arguments = dict[str, Any]
#: What is done to the arguments of a call that is good, and words of the error.
Fault = tuple[Callable[[Arguments], Any], str]
SIDE = 5
PAIRED = ('multi_tensor_scale', 'multi_tensor_scale_l2norm', 'multi_tensor_axpby', 'multi_tensor_copy')
READ = ('multi_tensor_isnonfinite', 'multi_tensor_l2norm', 'multi_tensor_maxnorm')


def listed(name: str, device: torch.device) -> Arguments:
    """Arguments with a non-finite element, so that a flag would rise."""

    def tensors(seed: int) -> list[Tensor]:
        return [random_tensor(seed + i, (SIDE, SIDE), F32, device) for i in range(3)]

    bad = tensors(0)
    bad[0][0, 0] = math.inf
    if name in READ:
        return dict(tensors=bad, found_inf=scalar(device))
    if name == 'multi_tensor_axpby':
        return dict(xs=bad, ys=tensors(30), targets=tensors(60), a=scalar(device, 0.5), found_inf=scalar(device))
    more: Arguments = {} if name == 'multi_tensor_copy' else dict(scale=scalar(device, 0.5), found_inf=scalar(device))
    return dict(sources=bad, targets=tensors(60), **more)


def put(name: str, value: Any, index: int | None = None) -> Callable[[Arguments], Any]:
    """Replaces an argument, or an element of a list; ``first`` stands for the first list."""

    def change(arguments: Arguments) -> None:
        key = next(iter(arguments)) if name == 'first' else name
        new = value(arguments) if callable(value) else value
        if index is None:
            arguments[key] = new
        else:
            arguments[key][index] = new

    return change


def overlapping(arguments: Arguments) -> None:
    base = torch.zeros(3 * SIDE * SIDE)
    arguments['targets'][2] = base[: SIDE * SIDE].view(SIDE, SIDE)
    arguments['targets'][1] = base[SIDE * SIDE - 1 : 2 * SIDE * SIDE - 1].view(SIDE, SIDE)


#: Of the lists of an op that writes some.
PAIRS: dict[str, Fault] = {
    'fewer targets': (lambda a: a['targets'].pop(), 'pair up'),
    'no sources': (put('first', []), 'pair up'),
    'another shape': (put('targets', torch.zeros(SIDE * SIDE), 1), r'\[1\] has shape'),
    'one for many': (put('targets', torch.zeros(()), 2), r'\[2\] has shape'),
    'sparse source': (put('first', lambda a: torch.zeros(SIDE, SIDE).to_sparse(), 2), r'\[2\] is not dense'),
    'sparse target': (put('targets', lambda a: torch.zeros(SIDE, SIDE).to_sparse(), 1), r'targets\[1\] is not dense'),
    'expanded target': (
        put('targets', torch.zeros(SIDE).expand(SIDE, SIDE), 1),
        r'targets\[1\] has elements that share',
    ),
    'one target twice': (put('targets', lambda a: a['targets'][0], 2), r'targets\[0\] and targets\[2\] share memory'),
    'overlapping targets': (overlapping, r'targets\[1\] and targets\[2\] share memory'),
    'source in another target': (put('first', lambda a: a['targets'][1], 0), r'\[0\] and targets\[1\] share memory'),
    'transposed source': (put('first', lambda a: a['targets'][2].t(), 2), r'\[2\] and targets\[2\] share memory'),
}
#: Of floating tensors that are read, and of scalars.
VALUES: dict[str, Fault] = {
    'integers': (put('first', torch.ones(SIDE, SIDE, dtype=torch.int64), 1), r'\[1\] has dtype torch.int64'),
    'booleans': (put('first', torch.ones(SIDE, SIDE, dtype=torch.bool), 1), r'\[1\] has dtype torch.bool'),
    'a number': (put('first', 3, 1), r'\[1\] must be a tensor'),
    'no tensor': (put('first', None, 1), r'\[1\] must be a tensor'),
    'a list': (put('first', [torch.zeros(3)], 1), r'\[1\] must be a tensor'),
    'flag of Python': (put('found_inf', 0.0), 'found_inf must be a tensor'),
    'flag of two': (put('found_inf', torch.zeros(2)), 'found_inf has shape'),
    'flag of none': (put('found_inf', torch.zeros(0)), 'found_inf has shape'),
    'float64 flag': (put('found_inf', torch.zeros((), dtype=torch.float64)), 'found_inf has .* dtype'),
    'integer flag': (put('found_inf', torch.zeros((), dtype=torch.int32)), 'found_inf has .* dtype'),
}
SCALES: dict[str, Fault] = {
    'two scales': (put('scale', torch.ones(2)), 'scale has shape'),
    'float64 scale': (put('scale', torch.ones((), dtype=torch.float64)), 'scale has .* dtype'),
    'integer target': (put('targets', torch.ones(SIDE, SIDE, dtype=torch.int32), 2), r'targets\[2\] has dtype'),
    'scale in a target': (put('scale', lambda a: a['targets'][1][0, 0]), 'share memory'),
    'flag in a target': (put('found_inf', lambda a: a['targets'][1][0, 0]), 'share memory'),
}


def refused(name: str, arguments: Arguments, fault: Fault) -> str:
    """What is wrong with the refusal; empty where the error is right and nothing was written."""
    error = TypeError if 'must be a tensor' in fault[1] else ValueError
    fault[0](arguments)
    lists = [value if isinstance(value, (list, tuple)) else [value] for value in arguments.values()]
    tensors = [t for tensors in lists for t in tensors if isinstance(t, Tensor) and t.layout is torch.strided]
    tensors = [t for t in tensors if not t.is_meta]
    before = [(bits(t).clone(), t._version) for t in tensors]
    try:
        with pytest.raises(error, match=fault[1]):
            getattr(ops, name)(**arguments)
    except BaseException as failure:
        return f'{name}: {failure}'
    # versions of what other code may watch; those of counters may move
    same = all(
        torch.equal(bits(t), old) and t._version in (was, was + (not t.dim())) for t, (old, was) in zip(tensors, before)
    )
    return '' if same else f'{name}: something was written'


def test_lists_that_do_not_fit_are_refused(device: torch.device) -> None:
    if device.type != 'cpu':
        pytest.skip('tensors of the faults are on the CPU')
    cases = [(name, what, fault) for name in PAIRED for what, fault in PAIRS.items()]
    cases += [(name, what, fault) for name in (*READ, *PAIRED[:3]) for what, fault in VALUES.items()]
    cases += [(name, what, fault) for name in PAIRED[:2] for what, fault in SCALES.items()]
    found = [(what, refused(name, listed(name, device), fault)) for name, what, fault in cases]
    assert not [(what, wrong) for what, wrong in found if wrong]
    for name in (*READ, *PAIRED):
        getattr(ops, name)(**listed(name, device))


def test_fault_on_one_device_keeps_the_others_unwritten(device: torch.device) -> None:
    """With 'meta' as the other device, which every machine has and which computes nothing."""
    for fault in (
        (put('sources', torch.ones(SIDE, SIDE, device='meta', dtype=torch.int32), 1), r'^sources\[1\] has dtype'),
        (put('scale', torch.zeros(2, device=device)), '^scale has shape'),
        (put('targets', torch.ones(2, device='meta'), 1), r'^sources\[1\] has shape'),
    ):
        arguments = listed('multi_tensor_scale', device)
        for key in ('sources', 'targets'):
            arguments[key][1] = torch.ones(SIDE, SIDE, device='meta')
        assert not refused('multi_tensor_scale', arguments, fault)


def test_state_of_a_scale_is_checked(device: torch.device) -> None:
    types = dict(scale=F32, growth_tracker=torch.int32, hysteresis_tracker=torch.int32, found_inf=F32)
    faults = [(put('found_inf', torch.zeros((), device='meta')), 'found_inf is on meta')]
    for name, dtype in types.items():
        faults += [
            (put(name, torch.zeros(2, dtype=dtype, device=device)), f'{name} .*shape'),
            (put(name, scalar(device, 1.0, torch.float64)), f'{name} .*dtype'),
            (put(name, 1.0), f'{name} must be a tensor'),
        ]
    rule = dict(growth_factor=2.0, backoff_factor=0.5, growth_interval=3, hysteresis=2)
    state = {name: scalar(device, 1.0, dtype) for name, dtype in types.items()}
    assert not [wrong for fault in faults if (wrong := refused('update_scale', {**state, **rule}, fault))]


# -- the ops of a step ------------------------------------------------------------------------------------------------


def step(kind: str) -> Arguments:
    """Two float32 parameters with copies, and a bfloat16 one with its remainder."""
    shapes = ((17,), (4, 9), (3,))
    lists: dict[str, list[Tensor]] = dict(
        grads=[torch.ones(shape) for shape in shapes],
        params=[torch.ones(shape, dtype=dtype) for shape, dtype in zip(shapes, (F32, F32, BF16))],
    )
    for name in ('exp_avgs', 'exp_avg_sqs', 'max_exp_avg_sqs') if kind == 'fused_adam' else ('momentum_buffers',):
        lists[name] = [torch.ones(shape) for shape in shapes]
    lists['partners'] = [torch.zeros(s, dtype=dtype) for s, dtype in zip(shapes, (F16, BF16, torch.int16))]
    return dict(**lists, rows=torch.ones(3, ops.ROW), decision=torch.zeros(ops.DECISION))


def start(kind: str = '') -> Arguments:
    """A prologue with all that it takes."""
    return dict(
        decision=torch.zeros(ops.DECISION),
        rows=torch.zeros(3, ops.ROW),
        steps=[torch.ones(()) for _ in range(3)],
        hyper=torch.tensor([[0.1, 0.9, 0.99, 1e-8, 0.0, 0.0, 0.0]] * 2, dtype=torch.float64),
        groups=torch.tensor([0, 1, 0]),
        kind=ops.ADAM,
        rates=[torch.ones(())],
        rated=[1],
        found_inf=torch.zeros(()),
        norm=torch.ones(()),
        scale=torch.full((), 4.0),
        growth_tracker=torch.zeros((), dtype=torch.int32),
        hysteresis_tracker=torch.ones((), dtype=torch.int32),
        counts=torch.zeros(3, dtype=torch.int64),
        rule=[2.0, 0.5, 3.0, 1.0, 0.5, 64.0],
        max_norm=1.0,
        clip_value=2.0,
    )


#: Sizes and types of what kernels read and write without looking.
UPDATE: dict[str, Fault] = {
    'fewer partners': (lambda a: a['partners'].pop(), 'pair up'),
    'fewer gradients': (lambda a: a['grads'].pop(), 'pair up'),
    'short decision': (put('decision', torch.zeros(7)), 'decision has shape'),
    'decision with gaps': (put('decision', torch.zeros(16)[::2]), 'decision has shape'),
    'fewer rows': (put('rows', torch.zeros(2, 12)), 'rows has shape'),
    'rows of float64': (put('rows', torch.zeros(3, 12, dtype=torch.float64)), 'rows has'),
    'another shape': (put('grads', torch.zeros(4), 0), r'grads\[0\] has shape'),
    'sparse gradient': (put('grads', torch.zeros(17).to_sparse(), 0), r'grads\[0\] is not dense'),
    'integer gradient': (put('grads', torch.zeros(17, dtype=torch.int32), 0), r'grads\[0\] has dtype'),
    'float64 parameter': (put('params', torch.zeros(17, dtype=torch.float64), 0), r'dtype .*torch.float(64|32)'),
    'wide copy': (put('partners', torch.zeros(17, dtype=torch.float64), 0), r'partners\[0\] has dtype'),
    'remainder of float32': (put('partners', torch.zeros(17, dtype=torch.int16), 0), r'partners\[0\] has dtype'),
    'copy of 16 bits': (put('partners', torch.zeros(3, dtype=F16), 2), r'partners\[2\] has dtype'),
    'expanded copy': (put('partners', torch.zeros((), dtype=F16).expand(17), 0), r'partners\[0\] has elements'),
    'copy in a gradient': (put('partners', lambda a: a['grads'][1].view(-1).view(F16)[:17], 0), 'share memory'),
    'rows elsewhere': (put('rows', torch.zeros(3, 12, device='meta')), 'rows is on meta'),
    'gradient elsewhere': (put('grads', torch.zeros(17, device='meta'), 0), r'grads\[0\] is on meta'),
}
PROLOGUE: dict[str, Fault] = {
    'flat hyper': (put('hyper', torch.zeros(7, dtype=torch.float64)), 'hyper'),
    'float32 hyper': (put('hyper', torch.zeros(2, 7)), 'hyper has'),
    'fewer groups': (put('groups', torch.zeros(2, dtype=torch.int64)), 'groups has shape'),
    'no such group': (put('groups', torch.tensor([0, 2, 0])), r'groups\[1\] is 2'),
    'negative group': (put('groups', torch.tensor([0, 0, -1])), r'groups\[2\] is -1'),
    'no such rate': (put('rated', [2]), r'rated\[0\] is 2'),
    'fewer rates': (put('rates', []), 'pair up'),
    'float64 rate': (put('rates', torch.zeros((), dtype=torch.float64), 0), r'rates\[0\] has'),
    'no such kind': (put('kind', 2), 'kind=2'),
    'short rule': (put('rule', (2.0,)), 'rule has 1'),
    'rule without a scale': (put('scale', None), 'rule needs scale'),
    'limit without a norm': (put('norm', None), 'max_norm needs norm'),
    'wide step': (put('steps', torch.zeros(2), 1), r'steps\[1\] has shape'),
    'float tracker': (put('growth_tracker', torch.zeros(())), 'growth_tracker has'),
    'narrow counts': (put('counts', torch.zeros(3, dtype=torch.int32)), 'counts has'),
    'scale in the decision': (put('scale', lambda a: a['decision'][5]), 'share memory'),
    'norm among the steps': (put('norm', lambda a: a['steps'][2]), 'share memory'),
    'norm in the rows': (put('norm', lambda a: a['rows'][2, 3]), 'share memory'),
    'scale for norm': (put('norm', lambda a: a['scale']), 'share memory'),
    'one step for two': (put('steps', lambda a: a['steps'][0], 2), 'share memory'),
    'max_norm of NaN': (put('max_norm', math.nan), 'max_norm is not a number'),
    'clip_value of NaN': (put('clip_value', math.nan), 'clip_value is not a number'),
    'endless interval': (put('rule', [2.0, 0.5, math.inf, 1.0, 0.5, 64.0]), r'rule\[2\] is not a number'),
    **{
        f'rule {i} of NaN': (put('rule', [math.nan if i == k else 2.0 for k in range(6)]), rf'rule\[{i}\] is not')
        for i in range(6)
    },
}


def test_steps_that_do_not_fit_are_refused(device: torch.device) -> None:
    """Memory that is too small above all: kernels would write behind its end."""
    if device.type != 'cpu':
        pytest.skip('tensors of the faults are on the CPU')
    cases = [(name, step, what, fault) for name in ('fused_adam', 'fused_sgd') for what, fault in UPDATE.items()]
    cases += [('step_prologue', start, what, fault) for what, fault in PROLOGUE.items()]
    found = [(what, refused(name, make(name), fault)) for name, make, what, fault in cases]
    assert not [(what, wrong) for what, wrong in found if wrong]
    for name, make in (('fused_adam', step), ('fused_sgd', step), ('step_prologue', start)):
        getattr(ops, name)(**make(name))
    # limits beyond float32 are infinite
    ops.step_prologue(**start() | dict(clip_value=1e300, max_norm=1e300, rule=[2.0, 0.5, 1e300, -3e9, 0.0, 1e300]))
    # neighbours in one buffer share nothing
    scale, norm, found, *steps = torch.ones(6).unbind()
    ops.step_prologue(**start() | dict(scale=scale, norm=norm, found_inf=found, steps=steps))

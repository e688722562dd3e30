"""What the ops refuse, with an error that names the argument, before anything is written."""

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

Arguments = dict[str, Any]
#: What is done to the arguments of a call that is good, and words of the error.
Fault = tuple[Callable[[Arguments], Any], str]
SIDE = 5


def put(name: str, value: Any, index: int | None = None) -> Callable[[Arguments], Any]:
    """Replaces an argument, or an element of a list; 'first' and 'last' are the lists of ``listed``."""

    def change(arguments: Arguments) -> None:
        key = list(arguments)[('first', 'last').index(name)] if name in ('first', 'last') else name
        if index is None:
            arguments[key] = value
        else:
            arguments[key][index] = value

    return change


def refused(call: Callable[..., Any], arguments: Arguments, fault: Fault, error: Any = ValueError) -> str:
    """What is wrong with the refusal; empty where the error is right and nothing was written."""
    fault[0](arguments)
    lists = [value if isinstance(value, (list, tuple)) else [value] for value in arguments.values()]
    tensors = [
        t for tensors in lists for t in tensors if isinstance(t, Tensor) and t.layout is torch.strided and not t.is_meta
    ]
    # of what other code may watch: versions of the step's own numbers may move
    watched = [t for t in tensors if t.dim() and not any(t is arguments.get(name) for name in ('decision', 'counts'))]
    before, versions = [bits(t).clone() for t in tensors], [t._version for t in watched]
    try:
        with pytest.raises(error, match=fault[1]):
            call(**arguments)
    except BaseException as failure:
        return str(failure)
    same = all(torch.equal(bits(t), old) for t, old in zip(tensors, before))
    return '' if same and versions == [t._version for t in watched] else 'something was written'


# -- lists ------------------------------------------------------------------------------------------------------------

READ = ('multi_tensor_isnonfinite', 'multi_tensor_l2norm', 'multi_tensor_maxnorm')
PAIRED = ('multi_tensor_scale', 'multi_tensor_axpby', 'multi_tensor_copy')


def listed(name: str, device: torch.device) -> Arguments:
    """Arguments with a non-finite element, so that a flag would rise."""
    first, last = ([random_tensor(seed + i, (SIDE, SIDE), F32, device) for i in range(3)] for seed in (0, 60))
    first[0][0, 0] = math.inf
    if name in READ:
        return dict(tensors=first, found_inf=scalar(device))
    if name == 'multi_tensor_axpby':
        return dict(xs=first, ys=last, a=scalar(device, 0.5), found_inf=scalar(device))
    return dict(sources=first, targets=last) | (
        {} if name == 'multi_tensor_copy' else dict(scale=scalar(device, 0.5), found_inf=scalar(device))
    )


LISTS: dict[str, Fault] = {
    'fewer targets': (lambda a: list(a.values())[1].pop(), 'has 3 tensors and (ys|targets) 2: the lists must pair up'),
    'no sources': (put('first', []), 'pair up'),
    'another shape': (
        put('last', torch.zeros(SIDE * SIDE), 1),
        r'(sources|xs)\[1\] has shape .* and (targets|ys)\[1\]',
    ),
    'one for many': (put('first', torch.zeros(()), 2), r'\[2\] has shape'),
}
FLAGS: dict[str, Fault] = {
    'flag of two': (put('found_inf', torch.zeros(2)), 'found_inf has shape'),
    'flag of none': (put('found_inf', torch.zeros(0)), 'found_inf has shape'),
    'float64 flag': (put('found_inf', torch.zeros((), dtype=torch.float64)), 'found_inf has .* dtype'),
}
FACTORS: dict[str, Fault] = {
    'two scales': (put('scale', torch.ones(2)), 'scale has shape'),
    'float64 scale': (put('scale', torch.ones((), dtype=torch.float64)), 'scale has .* dtype'),
}
#: What torch's functions take, and no kernel does.
UNUSUAL: dict[str, Fault] = {
    'float64': (
        put('first', torch.ones(SIDE, SIDE, dtype=torch.float64), 1),
        r'^(sources|xs|tensors)\[1\] has dtype Double',
    ),
    'integers': (put('first', torch.ones(SIDE, SIDE, dtype=torch.int16), 2), r'\[2\] has dtype Short'),
    'with gaps': (put('first', torch.ones(SIDE, 2 * SIDE)[:, ::2], 0), r'\[0\] has strides .*without gaps'),
    'expanded': (put('first', torch.ones(SIDE).expand(SIDE, SIDE), 0), r'\[0\] has strides .*without gaps'),
}


@pytest.mark.usefixtures('with_and_without_ops')
def test_lists_that_do_not_fit_are_refused(device: torch.device) -> None:
    if device.type != 'cpu':
        pytest.skip('tensors of the faults are on the CPU')
    cases = [(name, fault) for name in PAIRED for fault in LISTS.items()]
    cases += [(name, fault) for name in (*READ, *PAIRED[:2]) for fault in FLAGS.items()]
    cases += [('multi_tensor_scale', fault) for fault in FACTORS.items()]
    found = [(name, what, refused(getattr(ops, name), listed(name, device), fault)) for name, (what, fault) in cases]
    assert not [wrong for wrong in found if wrong[2]]
    for name in (*READ, *PAIRED):
        getattr(ops, name)(**listed(name, device))


@pytest.mark.usefixtures('library')
def test_kernels_leave_to_torch_what_they_do_not_take(device: torch.device) -> None:
    if device.type != 'cpu':
        pytest.skip('tensors of the faults are on the CPU')
    for name in ('multi_tensor_scale', 'multi_tensor_axpby', 'multi_tensor_isnonfinite', 'multi_tensor_l2norm'):
        for what, fault in {**UNUSUAL, **FLAGS, **(LISTS if name in PAIRED else {})}.items():
            if 'without gaps' not in fault[1] or name in PAIRED:
                assert not refused(getattr(torch.ops.amp_wrapper, name).default, listed(name, device), fault), (
                    name,
                    what,
                )


# -- the steps --------------------------------------------------------------------------------------------------------

SHAPES = ((17,), (4, 9), (3,))


def step(kind: str) -> Arguments:
    """Two float32 parameters with copies, a bfloat16 one with its remainder, and all that decides."""
    lists: dict[str, list[Tensor]] = dict(grads=[torch.ones(s) for s in SHAPES])
    lists['params'] = [torch.ones(shape, dtype=dtype) for shape, dtype in zip(SHAPES, (F32, F32, BF16))]
    for name in ('exp_avgs', 'exp_avg_sqs', 'max_exp_avg_sqs') if kind == 'fused_adam' else ('momentum_buffers',):
        lists[name] = [torch.ones(shape) for shape in SHAPES]
    if kind == 'fused_adam':
        lists['steps'] = [torch.ones(()) for _ in SHAPES]
    lists['partners'] = [torch.zeros(s, dtype=dtype) for s, dtype in zip(SHAPES, (F16, BF16, torch.int16))]
    return dict(
        **lists,
        decision=torch.zeros(ops.DECISION),
        hyper=torch.tensor([[0.1, 0.9, 0.99, 1e-8, 0.0, 0.0, 0.0]] * 2, dtype=torch.float64),
        groups=torch.tensor([0, 1, 0]),
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
STEPS: dict[str, Fault] = {
    'fewer partners': (lambda a: a['partners'].pop(), 'pair up'),
    'fewer gradients': (lambda a: a['grads'].pop(), 'pair up'),
    'another shape': (put('grads', torch.zeros(4), 0), r'grads\[0\] has shape'),
    'another layout': (put('grads', torch.zeros(9, 4).t(), 1), r'grads\[1\] has strides'),
    'with gaps': (put('params', torch.zeros(34)[::2], 0), r'params\[0\] \[2\]: tensors without gaps'),
    'sparse gradient': (put('grads', torch.zeros(17).to_sparse(), 0), 'takes dense tensors'),
    'integer gradient': (put('grads', torch.zeros(17, dtype=torch.int32), 0), r'grads\[0\] has dtype Int'),
    'float64 parameter': (put('params', torch.zeros(17, dtype=torch.float64), 0), 'dtype .*Double|Double'),
    'remainder for gradient': (put('grads', torch.zeros(3, dtype=torch.int16), 2), r'grads\[2\] has dtype Short'),
    'wide copy': (put('partners', torch.zeros(17, dtype=torch.float64), 0), r'partners\[0\] has dtype'),
    'remainder of float32': (put('partners', torch.zeros(17, dtype=torch.int16), 0), r'partners\[0\] has dtype'),
    'copy of 16 bits': (put('partners', torch.zeros(3, dtype=F16), 2), r'partners\[2\] has dtype'),
    'expanded copy': (
        put('partners', torch.zeros((), dtype=F16).expand(17), 0),
        r'partners\[0\] \[0\]: tensors without gaps',
    ),
    'short decision': (put('decision', torch.zeros(7)), 'decision has shape'),
    'decision with gaps': (put('decision', torch.zeros(16)[::2]), 'decision has shape'),
    'flat hyper': (put('hyper', torch.zeros(7, dtype=torch.float64)), 'hyper has shape'),
    'float32 hyper': (put('hyper', torch.zeros(2, 7)), 'hyper has'),
    'fewer groups': (put('groups', torch.zeros(2, dtype=torch.int64)), 'groups has shape'),
    'no such group': (put('groups', torch.tensor([0, 2, 0])), r'groups\[1\] is 2'),
    'negative group': (put('groups', torch.tensor([0, 0, -1])), r'groups\[2\] is -1'),
    'no such rate': (put('rated', [2]), r'rated\[0\] is 2'),
    'fewer rates': (put('rates', []), 'pair up'),
    'float64 rate': (put('rates', torch.zeros((), dtype=torch.float64), 0), r'rates\[0\] has'),
    'short rule': (put('rule', (2.0,)), 'rule has 1'),
    'rule without a scale': (put('scale', None), 'rule needs scale'),
    'limit without a norm': (put('norm', None), 'max_norm needs norm'),
    'wide norm': (put('norm', torch.zeros(2)), 'norm has shape'),
    'float tracker': (put('growth_tracker', torch.zeros(())), 'growth_tracker has'),
    'narrow counts': (put('counts', torch.zeros(3, dtype=torch.int32)), 'counts has'),
}
COUNTS: dict[str, Fault] = {
    'wide step': (put('steps', torch.zeros(2), 1), r'steps\[1\] has shape'),
    'fewer steps': (lambda a: a['steps'].pop(), 'steps has 2 tensors: 3'),
    'fewer maxima': (lambda a: a['max_exp_avg_sqs'].pop(), 'max_exp_avg_sqs 2: the lists must pair up'),
}


@pytest.mark.usefixtures('library')
def test_steps_that_do_not_fit_are_refused(device: torch.device) -> None:
    """Memory that is too small above all: kernels would write behind its end."""
    if device.type != 'cpu':
        pytest.skip('tensors of the faults are on the CPU')
    cases = [('fused_sgd', fault) for fault in STEPS.items()]
    cases += [('fused_adam', fault) for fault in (STEPS | COUNTS).items()]
    found = [(name, what, refused(getattr(ops, name), step(name), fault)) for name, (what, fault) in cases]
    assert not [wrong for wrong in found if wrong[2]]
    for name in ('fused_adam', 'fused_sgd'):
        getattr(ops, name)(**step(name))
        # limits beyond float32 are infinite
        getattr(ops, name)(
            **step(name) | dict(clip_value=1e300, max_norm=1e300, rule=[2.0, 0.5, 1e300, -3e9, 0.0, 1e300])
        )


@pytest.mark.usefixtures('library')
def test_meta_beside_real_tensors_is_refused(device: torch.device) -> None:
    """The dispatcher sends the whole list to the kernel for tensors without memory, which would write nothing."""
    arguments = listed('multi_tensor_scale', device)
    fault = put('last', torch.ones(SIDE, SIDE, device='meta'), 1), 'meta'
    assert not refused(torch.ops.amp_wrapper.multi_tensor_scale.default, arguments, fault, Exception)
    assert not refused(
        ops.fused_sgd, step('fused_sgd'), (put('grads', torch.zeros(17, device='meta'), 0), 'meta'), Exception
    )

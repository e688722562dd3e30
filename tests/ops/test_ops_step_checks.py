"""What the ops of an optimizer step refuse, in which words, with nothing written."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ops_models import (
    REFERENCE,
    STEPS,
    UPDATES,
    bits,
    step_samples,
    update_call,
)
from torch import Tensor

from amp_wrapper import ops

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


# -- what is refused ----------------------------------------------------------------------------------------------


FACES = {'front': ops, 'raw': torch.ops.amp_wrapper, 'reference': REFERENCE}
Arguments = dict[str, Any]
Fault = tuple[Callable[[Arguments], Any], str]


def element(name: str, index: int, value: Tensor) -> Callable[[Arguments], Any]:
    return lambda arguments: arguments[name].__setitem__(index, value)


def instead(name: str, value: Any) -> Callable[[Arguments], Any]:
    return lambda arguments: arguments.__setitem__(name, value)


def in_inference(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    with torch.inference_mode():
        return torch.zeros(shape, dtype=dtype)


def without_memory(*shape: int) -> Tensor:
    tensor = torch.zeros(shape)
    tensor.untyped_storage().resize_(0)
    return tensor


def copy_in_gradient(arguments: Arguments) -> None:
    arguments['partners'][4] = arguments['grads'][5].view(F16).view(-1)[:17]


def copy_twice(arguments: Arguments) -> None:
    arguments['partners'][8] = torch.zeros(24, dtype=BF16).view(8, 3)
    arguments['partners'][1] = arguments['partners'][8].view(-1)[:0]
    arguments['partners'][4] = arguments['partners'][8].view(-1).view(F16)[:17]


ROW_SHAPES = '(9, 12) of torch.float32 is expected.'
PARTNERS = (
    'a copy of the same type, a float16 or bfloat16 copy of a float32 parameter, or the int16 remainder of a 16-bit one, is '
    'expected.'
)
INFERENCE = ' was made in inference mode: outside of it, it cannot be written to.'
FREED = ' has no memory: its storage was freed (resized to 0).'
#: Changes and messages, by what is wrong. The lists have 9 tensors: the fifth is a float32 of 17 with a float16 copy.
LISTS: dict[str, Fault] = {
    'fewer partners': (lambda a: a['partners'].pop(), 'grads has 9 tensors and partners 8: the lists must pair up.'),
    'fewer gradients': (lambda a: a['grads'].pop(), 'grads has 8 tensors and params 9: the lists must pair up.'),
    'short decision': (
        instead('decision', torch.zeros(7)),
        'decision has shape (7,) and dtype torch.float32: 8 float32 numbers in a row are expected.',
    ),
    'decision with gaps': (
        instead('decision', torch.zeros(16)[::2]),
        'decision has shape (8,) and dtype torch.float32: 8 float32 numbers in a row are expected.',
    ),
    'freed decision': (instead('decision', without_memory(8)), f'decision{FREED}'),
    'fewer rows': (
        instead('rows', torch.zeros(8, 12)),
        f'rows has shape (8, 12) and dtype torch.float32: {ROW_SHAPES}',
    ),
    'narrow rows': (
        instead('rows', torch.zeros(9, 12, dtype=F16)),
        f'rows has shape (9, 12) and dtype torch.float16: {ROW_SHAPES}',
    ),
    'another shape': (element('grads', 4, torch.zeros(4)), 'grads[4] has shape (4,) and params[4] (17,).'),
    'sparse gradient': (
        element('grads', 4, torch.zeros(17).to_sparse()),
        'grads[4] is not dense: give the values of a sparse tensor, coalesced.',
    ),
    'wide copy': (
        element('partners', 4, torch.zeros(17, dtype=torch.float64)),
        f'partners[4] has dtype torch.float64 beside a parameter of torch.float32: {PARTNERS}',
    ),
    'remainder of float32': (
        element('partners', 4, torch.zeros(17, dtype=torch.int16)),
        f'partners[4] has dtype torch.int16 beside a parameter of torch.float32: {PARTNERS}',
    ),
    'copy of 16 bits': (
        element('partners', 5, torch.zeros(4, 9, dtype=F16)),
        f'partners[5] has dtype torch.float16 beside a parameter of torch.bfloat16: {PARTNERS}',
    ),
    'expanded copy': (
        element('partners', 4, torch.zeros((), dtype=F16).expand(17)),
        'partners[4] has elements that share memory (an expanded tensor): it cannot be written to.',
    ),
    'copy of inference mode': (element('partners', 4, in_inference(17, dtype=F16)), f'partners[4]{INFERENCE}'),
    'copy in a gradient': (
        copy_in_gradient,
        'grads[5] and partners[4] share memory, but are not the same tensor: what is written would be read.',
    ),
    'copy in a copy': (
        copy_twice,
        'partners[4] and partners[8] share memory: give each tensor that is written once.',
    ),
    'decision in a copy': (
        lambda a: (
            a['partners'].__setitem__(4, torch.zeros(40, dtype=F16)[:17])
            or instead('decision', a['partners'][4].as_strided((40,), (1,)).view(F32)[8:16])(a)
        ),
        'decision and partners[4] share memory: give each memory of its own.',
    ),
}
#: What the compiled op leaves to the reference, which says what is wrong.
LEFT: dict[str, Fault] = {
    'rows elsewhere': (
        instead('rows', torch.zeros(9, 12, device='meta')),
        'rows is on meta and decision on cpu: they belong on one device.',
    ),
    'integers': (
        element('grads', 4, torch.zeros(17, dtype=torch.int32)),
        'grads[4] has dtype torch.int32: a real floating tensor is expected.',
    ),
    'gradient elsewhere': (
        element('grads', 4, torch.zeros(17, device='meta')),
        'grads[4] is on meta and decision on cpu.',
    ),
}
#: Of step_prologue, with three parameters and two groups.
TABLES: dict[str, Fault] = {
    'flat hyper': (instead('hyper', torch.zeros(7)), 'hyper must have two dimensions and groups one.'),
    'narrow hyper': (
        instead('hyper', torch.zeros(2, 7)),
        'hyper has shape (2, 7) and dtype torch.float32: (2, 7) of torch.float64 is expected.',
    ),
    'fewer groups': (
        instead('groups', torch.zeros(2, dtype=torch.int64)),
        'groups has shape (2,) and dtype torch.int64: (3,) of torch.int64 is expected.',
    ),
    'no such group': (instead('groups', torch.tensor([0, 2, 0])), 'groups[1] is 2, and hyper has 2 rows.'),
    'negative group': (instead('groups', torch.tensor([0, 0, -1])), 'groups[2] is -1, and hyper has 2 rows.'),
    'no such rate': (instead('rated', [2]), 'rated[0] is 2, and hyper has 2 rows.'),
    'fewer rates': (instead('rates', []), 'rates has 0 tensors and rated 1 groups: they must pair up.'),
    'kind': (instead('kind', 2), 'kind=2: 0 (Adam) or 1 (SGD) is expected.'),
    'short rule': (instead('rule', (2.0,)), 'rule has 1 numbers: 6 or none are expected.'),
    'rule without scale': (instead('scale', None), 'rule needs scale, growth_tracker and hysteresis_tracker.'),
    'no norm': (instead('norm', None), 'max_norm needs norm.'),
    'wide step': (
        element('steps', 1, torch.zeros(2)),
        'steps[1] has shape (2,) and dtype torch.float32: one element of torch.float32 is expected.',
    ),
    'step of inference mode': (element('steps', 1, in_inference()), f'steps[1]{INFERENCE}'),
    'float64 rate': (
        element('rates', 0, torch.zeros((), dtype=torch.float64)),
        'rates[0] has shape () and dtype torch.float64: one element of torch.float32 is expected.',
    ),
    'wide norm': (
        instead('norm', torch.zeros(3)),
        'norm has shape (3,) and dtype torch.float32: one element of torch.float32 is expected.',
    ),
    'float tracker': (
        instead('growth_tracker', torch.zeros(())),
        'growth_tracker has shape () and dtype torch.float32: one element of torch.int32 is expected.',
    ),
    'narrow counts': (
        instead('counts', torch.zeros(3, dtype=torch.int32)),
        'counts has shape (3,) and dtype torch.int32: (3,) of torch.int64 is expected.',
    ),
    'decision of inference mode': (instead('decision', in_inference(8)), f'decision{INFERENCE}'),
    'scale in the decision': (
        lambda a: instead('scale', a['decision'][5])(a),
        'scale and decision[0] share memory: give each memory of its own.',
    ),
    'norm in the rows': (
        lambda a: instead('norm', a['rows'][2, 3])(a),
        'norm and rows[0] share memory: give each memory of its own.',
    ),
    'norm among the steps': (
        lambda a: instead('norm', a['steps'][2])(a),
        'norm and steps[2] share memory: give each memory of its own.',
    ),
    'one step for two': (
        lambda a: element('steps', 2, a['steps'][0])(a),
        'steps[0] and steps[2] share memory: give each tensor that is written once.',
    ),
}


@pytest.mark.parametrize('face', list(FACES))
@pytest.mark.parametrize(
    ('name', 'fault'),
    [(name, fault) for name in UPDATES for fault in (*LISTS, *LEFT)] + [('step_prologue', fault) for fault in TABLES],
)
def test_bad_input_is_refused_and_nothing_written(name: str, fault: str, face: str, device: torch.device) -> None:
    if device.type != 'cpu' or (face == 'raw' and fault in LEFT):
        pytest.skip('tensors of the faults are on the CPU; what is left to the reference is asked of the front')
    call = (
        step_samples(name, device)[2]
        if name == 'step_prologue'
        else update_call(name, [(3, 5), (0,), (), (2, 3, 4, 5), (17,), (4, 9), (33,), (7,), (8, 3)], device, plain=True)
    )
    change, message = (LISTS | LEFT | TABLES)[fault]
    change(call.arguments)

    def seen() -> list[tuple[Tensor, int]]:
        usable = [t for t in call.tensors() if t.layout is torch.strided and not t.is_meta]
        usable = [t for t in usable if t.untyped_storage().nbytes() or not t.numel()]
        return [(bits(t).clone(), -1 if t.is_inference() else t._version) for t in usable]

    before = seen()
    with pytest.raises(ValueError) as caught:
        call.run(FACES[face])
    assert str(caught.value).split('\nException raised from')[0] == message
    assert type(caught.value) is ValueError
    for (old, was), (now, version) in zip(before, seen(), strict=True):
        assert torch.equal(old, now) and was == version, 'written'


@pytest.mark.parametrize('name', STEPS)
def test_samples_are_taken_as_they_are(name: str, device: torch.device) -> None:
    """What the faults above start from is no fault itself, for each of those who are asked."""
    for face in FACES.values():
        for call in step_samples(name, device):
            call.run(face)


@pytest.mark.parametrize('face', [ops, REFERENCE], ids=['front', 'reference'])
def test_a_prologue_refuses_numbers_that_are_none_and_memory_with_two_names(face: Any) -> None:
    """Each with nothing written; some were taken by one of the two, and did different things on a GPU."""
    rule = [2.0, 0.5, 3.0, 1.0, 0.5, 64.0]

    def call(**changes: Any) -> None:
        state = dict(
            decision=torch.zeros(8),
            rows=torch.zeros(1, 12),
            steps=[torch.ones(())],
            hyper=torch.tensor([[0.1, 0.9, 0.99, 1e-8, 0.0, 0.0, 0.0]], dtype=torch.float64),
            groups=torch.zeros(1, dtype=torch.int64),
            kind=0,
            rates=[],
            rated=[],
            found_inf=torch.zeros(()),
            learned=None,
            norm=torch.ones(()),
            scale=torch.full((), 4.0),
            growth_tracker=torch.zeros((), dtype=torch.int32),
            hysteresis_tracker=torch.ones((), dtype=torch.int32),
            counts=torch.zeros(3, dtype=torch.int64),
            rule=rule,
            max_norm=1.0,
            clip_value=2.0,
        )
        state |= changes
        tensors = [t for v in state.values() for t in (v if isinstance(v, list) else [v]) if isinstance(t, Tensor)]
        before = [t.clone() for t in tensors]
        try:
            face.step_prologue(*state.values())
        except ValueError:
            assert all(torch.equal(a, b) for a, b in zip(tensors, before))
            raise

    call()
    # limits beyond float32 are infinite
    call(clip_value=1e300, max_norm=1e300, rule=[2.0, 0.5, 1e300, -3e9, 0.0, 1e300])
    for index in range(6):
        with pytest.raises(ValueError, match=rf'rule\[{index}\] is not a number'):
            call(rule=[math.nan if i == index else number for i, number in enumerate(rule)])
    with pytest.raises(ValueError, match=r'rule\[2\] is not a number, or not a finite one'):
        call(rule=[*rule[:2], math.inf, *rule[3:]])
    for name in ('max_norm', 'clip_value'):
        with pytest.raises(ValueError, match=f'{name} is not a number'):
            call(**{name: math.nan})
    one, table = torch.full((), 4.0), torch.zeros(20)
    whole = torch.ones((), dtype=torch.int32)
    for changes in (
        dict(scale=one, norm=one),
        dict(scale=one, found_inf=one),
        dict(growth_tracker=whole, hysteresis_tracker=whole),
        dict(decision=table[:8], rows=table[7:19].view(1, 12)),
        dict(decision=table[:8], steps=[table[7]]),
        dict(rows=table[:12].view(1, 12), steps=[table[3]]),
        dict(decision=table[:8], rates=[table[7]], rated=[0]),
        dict(scale=one, rates=[one], rated=[0]),
        dict(steps=[one], rates=[one], rated=[0]),
    ):
        with pytest.raises(ValueError, match='share memory'):
            call(**changes)
    with pytest.raises(ValueError, match='negative bit'):
        call(scale=torch._neg_view(torch.tensor(-4.0)))


def test_what_is_written_twice_or_has_no_rows_of_its_kind_is_refused() -> None:
    tensors = [torch.ones(4) for _ in range(4)]
    tables = (torch.ones(1, 12), torch.zeros(8))
    for face in (ops, REFERENCE):
        with pytest.raises(ValueError, match='share memory'):
            face.fused_adam([tensors[0]], [tensors[1]], [tensors[1]], [tensors[2]], [], [], *tables)
        wide = [torch.ones(4, dtype=torch.float64)]
        with pytest.raises(ValueError, match=r'params\[0\] has dtype torch\.float64: float32, float16 or bfloat16 is'):
            face.fused_sgd([tensors[0]], wide, [], [], *tables)
        weight, remainder = torch.ones(4, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int16)
        with pytest.raises(ValueError, match=r'rows has .* torch\.float64: \(1, 12\) of torch\.float32 is expected'):
            face.fused_sgd([tensors[0]], [weight], [], [remainder], tables[0].double(), tables[1])

"""What the ops refuse, in which words, with nothing written; and the overlaps that are allowed."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from ops_models import (
    LISTED,
    NORMS,
    PAIRED,
    REFERENCE,
    Call,
    bits,
    in_fresh_process,
    make_call,
    same_bits,
    state,
    without_compiled,
    zero,
)
from torch import Tensor

from amp_wrapper import ops

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
#: Who is asked: the package's functions, torch.ops, and the reference by itself.
FACES = {'front': ops, 'raw': torch.ops.amp_wrapper, 'reference': REFERENCE}
FIRST = dict(
    multi_tensor_scale='sources',
    multi_tensor_axpby='xs',
    multi_tensor_copy='sources',
    multi_tensor_scale_l2norm='sources',
    multi_tensor_refresh='weights',
) | dict.fromkeys(('multi_tensor_isnonfinite', 'multi_tensor_exponents', *NORMS), 'tensors')
TARGET = {name: 'masters' if name == 'multi_tensor_refresh' else 'targets' for name in PAIRED}
SCALARS = dict(
    multi_tensor_scale=['scale', 'found_inf'],
    multi_tensor_axpby=['a', 'b', 'found_inf'],
    multi_tensor_copy=[],
    multi_tensor_scale_l2norm=['scale', 'found_inf'],
    multi_tensor_refresh=[],
    multi_tensor_isnonfinite=['found_inf'],
    multi_tensor_exponents=[],
    multi_tensor_l2norm=['inverse_scale', 'found_inf'],
    multi_tensor_maxnorm=['inverse_scale', 'found_inf'],
)
SIDE = 5

# a compiled kernel leaves other types to its caller, and torch reads the arguments of torch.ops in its own words
not_raw = pytest.mark.parametrize('face', ['front', 'reference'], indirect=True)


@pytest.fixture(params=list(FACES))
def face(request: pytest.FixtureRequest, device: torch.device) -> str:
    if request.param != 'reference' and without_compiled(device):
        pytest.skip(without_compiled(device))
    return str(request.param)


def good(name: str, device: torch.device) -> Call:
    """A call that every op takes: three square tensors in each list, with a non-finite one, so that a flag would rise."""
    first = F16 if name == 'multi_tensor_refresh' else F32
    rows = [(index, (SIDE, SIDE), (first, F32, F32), (0, 0, 0)) for index in (3, 4, 5)]
    call = make_call(name, rows, device, (0.5, 2.0), True, True)
    call.arguments[FIRST[name]][0][0, 0] = torch.inf
    return call


def snapshot(call: Call) -> list[tuple[Tensor, int]]:
    # a sparse tensor and one of inference mode have no bits, or no version, to look at
    return [
        (bits(tensor).clone(), -1 if tensor.is_inference() else tensor._version)
        for tensor in call.tensors()
        if tensor.layout is torch.strided
    ]


def refused(call: Call, face: str, error: type[Exception], message: str) -> None:
    """The call raises ``error`` with exactly this message, and has written nothing."""
    before = snapshot(call)
    with pytest.raises(error) as caught:
        call.run(FACES[face])
    # torch appends a C++ traceback where TORCH_SHOW_CPP_STACKTRACES is set
    assert str(caught.value).split('\nException raised from')[0] == message
    assert type(caught.value) is error
    after = snapshot(call)
    assert len(before) == len(after)
    assert all(torch.equal(old, new) and was == now for (old, was), (new, now) in zip(before, after)), 'written'


# -- lists that pair up -------------------------------------------------------------------------------------------

Spoil = Callable[[Call, str, str], str]


def shorter(call: Call, first: str, target: str) -> str:
    call.arguments[target].pop()
    return f'{first} has 3 tensors and {target} 2: the lists must pair up.'


def longer(call: Call, first: str, target: str) -> str:
    call.arguments[target].append(call.arguments[target][0].clone())
    return f'{first} has 3 tensors and {target} 4: the lists must pair up.'


def no_sources(call: Call, first: str, target: str) -> str:
    call.arguments[first].clear()
    other = 'ys' if 'ys' in call.arguments else target
    return f'{first} has 0 tensors and {other} 3: the lists must pair up.'


def other_shape(call: Call, first: str, target: str) -> str:
    call.arguments[target][1] = call.arguments[target][1].new_zeros(SIDE * SIDE)
    return f'{first}[1] has shape ({SIDE}, {SIDE}) and {target}[1] ({SIDE * SIDE},).'


def one_for_many(call: Call, first: str, target: str) -> str:
    call.arguments[target][2] = call.arguments[target][2].new_zeros(())
    return f'{first}[2] has shape ({SIDE}, {SIDE}) and {target}[2] ().'


def sparse_source(call: Call, first: str, target: str) -> str:
    call.arguments[first][2] = call.arguments[first][2].float().to_sparse().to(call.arguments[first][2].dtype)
    return f'{first}[2] is not dense: give the values of a sparse tensor, coalesced.'


def sparse_target(call: Call, first: str, target: str) -> str:
    call.arguments[target][1] = call.arguments[target][1].to_sparse()
    return f'{target}[1] is not dense: give the values of a sparse tensor, coalesced.'


def expanded(call: Call, first: str, target: str) -> str:
    call.arguments[target][1] = call.arguments[target][1].new_zeros(SIDE).expand(SIDE, SIDE)
    return f'{target}[1] has elements that share memory (an expanded tensor): it cannot be written to.'


def twice(call: Call, first: str, target: str) -> str:
    call.arguments[target][2] = call.arguments[target][0]
    return f'{target}[0] and {target}[2] share memory: give each tensor that is written once.'


def three_times(call: Call, first: str, target: str) -> str:
    call.arguments[target][1] = call.arguments[target][2] = call.arguments[target][0].view(SIDE, SIDE)
    return f'{target}[0] and {target}[1] share memory: give each tensor that is written once.'


def targets_overlap(call: Call, first: str, target: str) -> str:
    base = call.arguments[target][0].new_zeros(3 * SIDE * SIDE)
    # the later in the list lies before the other in memory
    call.arguments[target][2] = base[: SIDE * SIDE].view(SIDE, SIDE)
    call.arguments[target][1] = base[SIDE * SIDE - 1 : 2 * SIDE * SIDE - 1].view(SIDE, SIDE)
    return f'{target}[1] and {target}[2] share memory: give each tensor that is written once.'


def _as(like: Tensor, memory: Tensor) -> Tensor:
    return memory.reshape(-1).view(like.dtype)[: SIDE * SIDE].view(SIDE, SIDE)


def reads_another(call: Call, first: str, target: str) -> str:
    call.arguments[first][0] = _as(call.arguments[first][0], call.arguments[target][1])
    return f'{first}[0] and {target}[1] share memory, but are not the same tensor: what is written would be read.'


def reads_by_one(call: Call, first: str, target: str) -> str:
    base = torch.zeros(2 * SIDE * SIDE, device=call.arguments[target][1].device)
    call.arguments[target][1] = base[1 : 1 + SIDE * SIDE].view(SIDE, SIDE)
    call.arguments[first][1] = _as(call.arguments[first][1], base)
    return f'{first}[1] and {target}[1] share memory, but are not the same tensor: what is written would be read.'


def transposed(call: Call, first: str, target: str) -> str:
    call.arguments[first][2] = _as(call.arguments[first][2], call.arguments[target][2]).t()
    return f'{first}[2] and {target}[2] share memory, but are not the same tensor: what is written would be read.'


def half_of_it(call: Call, first: str, target: str) -> str:
    # the same memory in another type
    call.arguments[first][1] = call.arguments[target][1].view(F16)[:, ::2].to(F16)
    base = torch.zeros(SIDE * SIDE, device=call.arguments[target][1].device)
    call.arguments[target][1] = base.view(SIDE, SIDE)
    call.arguments[first][1] = base.view(BF16)[: SIDE * SIDE].view(SIDE, SIDE)
    return f'{first}[1] and {target}[1] share memory, but are not the same tensor: what is written would be read.'


def inference_target(call: Call, first: str, target: str) -> str:
    with torch.inference_mode():
        call.arguments[target][1] = torch.zeros(SIDE, SIDE, device=call.arguments[target][1].device)
    return f'{target}[1] was made in inference mode: outside of it, it cannot be written to.'


PAIR_FAULTS: list[Spoil] = [
    shorter,
    longer,
    no_sources,
    other_shape,
    one_for_many,
    sparse_source,
    sparse_target,
    expanded,
    twice,
    three_times,
    targets_overlap,
    reads_another,
    reads_by_one,
    transposed,
    half_of_it,
    inference_target,
]


@pytest.mark.parametrize('spoil', PAIR_FAULTS, ids=lambda spoil: spoil.__name__)
@pytest.mark.parametrize('name', PAIRED)
def test_lists_are_refused(name: str, spoil: Spoil, face: str, device: torch.device) -> None:
    call = good(name, device)
    message = spoil(call, FIRST[name], TARGET[name])
    refused(call, face, ValueError, message)


def test_the_second_list_is_checked_too(face: str, device: torch.device) -> None:
    call = good('multi_tensor_axpby', device)
    call.arguments['ys'][2] = call.arguments['targets'][0]
    text = 'ys[2] and targets[0] share memory, but are not the same tensor: what is written would be read.'
    refused(call, face, ValueError, text)
    call = good('multi_tensor_axpby', device)
    call.arguments['ys'][1] = zero(device)
    refused(call, face, ValueError, f'xs[1] has shape ({SIDE}, {SIDE}) and ys[1] ().')


@pytest.mark.parametrize('name', ['multi_tensor_isnonfinite', 'multi_tensor_exponents', *NORMS])
def test_a_sparse_tensor_is_refused(name: str, face: str, device: torch.device) -> None:
    call = good(name, device)
    message = sparse_source(call, 'tensors', '')
    refused(call, face, ValueError, message)


# -- types --------------------------------------------------------------------------------------------------------


@not_raw
@pytest.mark.parametrize('dtype', [torch.int64, torch.int32, torch.bool, torch.uint8], ids=str)
@pytest.mark.parametrize('name', [name for name in LISTED if name not in ('multi_tensor_copy', 'multi_tensor_refresh')])
def test_integers_are_refused(name: str, dtype: torch.dtype, face: str, device: torch.device) -> None:
    call = good(name, device)
    call.arguments[FIRST[name]][1] = torch.ones(SIDE, SIDE, dtype=dtype, device=device)
    refused(call, face, ValueError, f'{FIRST[name]}[1] has dtype {dtype}: a floating tensor is expected.')


@not_raw
def test_integer_targets_are_refused(face: str, device: torch.device) -> None:
    for name in ('multi_tensor_scale', 'multi_tensor_axpby'):
        call = good(name, device)
        call.arguments['targets'][2] = torch.ones(SIDE, SIDE, dtype=torch.int32, device=device)
        refused(call, face, ValueError, 'targets[2] has dtype torch.int32: a floating tensor is expected.')


def test_copies_of_integers(device: torch.device) -> None:
    source = torch.arange(6, device=device)
    targets = [torch.zeros(6, device=device), torch.zeros(6, device=device, dtype=torch.int32)]
    ops.multi_tensor_copy([source, source], targets)
    assert all(target.tolist() == [0, 1, 2, 3, 4, 5] for target in targets)


@pytest.mark.parametrize('dtype', [F32, torch.float64, torch.int16, torch.complex64], ids=str)
def test_refresh_wants_16_bit_weights(dtype: torch.dtype, face: str, device: torch.device) -> None:
    call = good('multi_tensor_refresh', device)
    call.arguments['weights'][1] = torch.ones(SIDE, SIDE, dtype=dtype, device=device)
    refused(call, face, ValueError, f'weights[1] has dtype {dtype}: float16 or bfloat16 is expected.')


@pytest.mark.parametrize('dtype', [F16, torch.float64, torch.int32], ids=str)
def test_refresh_wants_float32_masters(dtype: torch.dtype, face: str, device: torch.device) -> None:
    call = good('multi_tensor_refresh', device)
    call.arguments['masters'][2] = torch.ones(SIDE, SIDE, dtype=dtype, device=device)
    refused(call, face, ValueError, f'masters[2] has dtype {dtype}: float32 is expected.')


@not_raw
@pytest.mark.parametrize('made', [lambda: 3, lambda: None, lambda: np.zeros(3), lambda: [torch.zeros(3)]])
@pytest.mark.parametrize('name', LISTED)
def test_what_is_no_tensor_is_a_type_error(name: str, made: Any, face: str, device: torch.device) -> None:
    call = good(name, device)
    wrong = made()
    for which in (FIRST[name], TARGET.get(name, FIRST[name])):
        kept = call.arguments[which][1]
        call.arguments[which][1] = wrong
        refused(call, face, TypeError, f'{which}[1] must be a tensor, not {type(wrong).__name__}.')
        call.arguments[which][1] = kept
    if wrong is not None:
        for which in SCALARS[name]:
            kept = call.arguments[which]
            call.arguments[which] = wrong
            refused(call, face, TypeError, f'{which} must be a tensor, not {type(wrong).__name__}.')
            call.arguments[which] = kept
    call.run(FACES[face])  # nothing else was wrong


@functools.cache
def named_in_debug_mode() -> dict[str, int]:
    """How often each op named an object that was gone, in a process whose memory is overwritten when it is freed."""
    code = (
        'import json, sys\n'
        'import torch\n'
        'from amp_wrapper import ops\n'
        'tensors, found = [torch.ones(1)], {}\n'
        'for name, count in json.loads(sys.argv[1]).items():\n'
        '    found[name] = 0\n'
        '    for _ in range(50):\n'
        "        wrong = (type('Wrong' * 1000, (), {})() for _ in range(1))\n"
        '        try:\n'
        '            getattr(ops, name)(*[tensors] * count, wrong)\n'
        '        except TypeError as error:\n'
        "            named = str(error).startswith(('targets[0] must be', 'masters[0] must be'))\n"
        "            found[name] += named and 'Wrong' * 1000 in str(error)\n"
        'print(json.dumps(found))\n'
    )
    counts = {name: 2 if name == 'multi_tensor_axpby' else 1 for name in PAIRED}
    found: dict[str, int] = in_fresh_process('-c', code, json.dumps(counts), environment={'PYTHONMALLOC': 'debug'})
    return found


@pytest.mark.parametrize('name', PAIRED)
def test_the_error_names_what_only_the_call_holds(name: str, device: torch.device) -> None:
    """Objects and a type that are gone with the tuple that the compiled functions make of the argument."""
    if without_compiled(device):
        pytest.skip(without_compiled(device))
    assert named_in_debug_mode()[name] == 50


@pytest.mark.parametrize(
    ('shape', 'dtype'), [((2,), F32), ((0,), F32), ((), torch.float64), ((1,), F16), ((), torch.int32)]
)
@pytest.mark.parametrize('name', [name for name in LISTED if SCALARS[name]])
def test_scalars_are_refused(name: str, shape: Any, dtype: torch.dtype, face: str, device: torch.device) -> None:
    for which in SCALARS[name]:
        call = good(name, device)
        call.arguments[which] = torch.zeros(shape, dtype=dtype, device=device)
        text = f'{which} has shape {shape} and dtype {dtype}: one element of torch.float32 is expected.'
        refused(call, face, ValueError, text)


@pytest.mark.parametrize('name', [name for name in LISTED if 'found_inf' in SCALARS[name]])
def test_a_flag_of_inference_mode_is_refused(name: str, face: str, device: torch.device) -> None:
    call = good(name, device)
    with torch.inference_mode():
        call.arguments['found_inf'] = zero(device)
    refused(call, face, ValueError, 'found_inf was made in inference mode: outside of it, it cannot be written to.')
    with torch.inference_mode():
        call.run(FACES[face])
    assert call.arguments['found_inf'].item() == 1.0


# -- update_scale -------------------------------------------------------------------------------------------------

NAMES = ('scale', 'growth_tracker', 'hysteresis_tracker', 'found_inf')


def update(tensors: list[Any]) -> Call:
    rule = dict(growth=2.0, backoff=0.5, interval=3, hysteresis=2, floor=None, ceiling=None)
    return Call('update_scale', dict(zip(NAMES, tensors)) | rule, NAMES[:3])


@pytest.mark.parametrize('which', range(4), ids=NAMES)
def test_update_scale_refuses(which: int, face: str, device: torch.device) -> None:
    expected = torch.int32 if which in (1, 2) else F32
    for shape, dtype in (((2,), expected), ((), torch.float64), ((), torch.int64)):
        tensors: list[Any] = state(device, bad=True)
        tensors[which] = torch.zeros(shape, dtype=dtype, device=device)
        text = f'{NAMES[which]} has shape {shape} and dtype {dtype}: one element of {expected} is expected.'
        refused(update(tensors), face, ValueError, text)
    if which < 3:
        tensors = state(device, bad=True)
        with torch.inference_mode():
            tensors[which] = tensors[which].clone()
        text = f'{NAMES[which]} was made in inference mode: outside of it, it cannot be written to.'
        refused(update(tensors), face, ValueError, text)
    if face != 'raw':
        tensors = state(device, bad=True)
        tensors[which] = 1.0
        refused(update(tensors), face, TypeError, f'{NAMES[which]} must be a tensor, not float.')


# -- what is allowed ----------------------------------------------------------------------------------------------


def expect(name: str, call: Call) -> list[Tensor]:
    """The targets by plain torch, from copies."""
    rows = [
        [tensor.clone().float() for tensor in call.arguments[which]]
        for which in ('sources', 'xs', 'ys')
        if which in call.arguments
    ]
    if name == 'multi_tensor_scale':
        return [tensor * 0.5 for tensor in rows[0]]
    if name == 'multi_tensor_copy':
        return rows[0]
    return [x * 0.5 + y * 2.0 for x, y in zip(*rows)]


@pytest.mark.parametrize('layout', range(4), ids=['plain', 'transposed', 'strided', 'misaligned'])
@pytest.mark.parametrize('which', [('sources',), ('xs',), ('ys',), ('xs', 'ys')], ids=str)
def test_in_place(which: tuple[str, ...], layout: int, face: str, device: torch.device) -> None:
    """A target may be what it is computed from, whatever its strides."""
    name = 'multi_tensor_scale' if which == ('sources',) else 'multi_tensor_axpby'
    rows = [(index, (SIDE, SIDE), (F32, F32, F32), (layout, layout, layout)) for index in range(3)]
    call = make_call(name, rows, device, (0.5, 2.0), True)
    for one in which:
        call.arguments[one] = list(call.arguments['targets'])
    wanted = expect(name, call)
    call.run(FACES[face])
    assert all(same_bits(target, want) for target, want in zip(call.arguments['targets'], wanted))


@pytest.mark.parametrize('name', ['multi_tensor_scale', 'multi_tensor_axpby', 'multi_tensor_copy'])
def test_tensors_with_gaps_are_read_before_anything_is_written(name: str, face: str, device: torch.device) -> None:
    base = torch.arange(1.0, 41.0, device=device)
    # each source lies in memory that another pair writes: forwards, backwards, and a target without gaps over it
    sources = [base[0:20:2], base[1:21:2], base[20:40:2]]
    targets = [base[1:21:2], base[20:40:2], base[0:20:2]]
    call = make_call(name, [(0, (10,), (F32, F32, F32), (0, 0, 0))] * 3, device, (0.5, 2.0))
    first = FIRST[name]
    call.arguments[first], call.arguments['targets'] = sources, targets
    wanted = expect(name, call)
    call.run(FACES[face])
    assert all(same_bits(target, want) for target, want in zip(targets, wanted))


@pytest.mark.parametrize('name', ['multi_tensor_scale', 'multi_tensor_axpby', 'multi_tensor_copy'])
def test_pairs_without_gaps_come_first(name: str, face: str, device: torch.device) -> None:
    """A target with gaps lies over a source of another pair, which is worked on in place: that one reads the old values.

    The types differ, since the reference works on types in groups.
    """
    for dtype in (F16, BF16):
        base = torch.arange(1.0, 21.0, device=device, dtype=dtype)
        call = make_call(
            name,
            [(0, (10,), (F32, dtype, dtype), (0, 0, 0)), (1, (20,), (dtype, F32, F32), (0, 0, 0))],
            device,
            (0.5, 2.0),
        )
        call.arguments['targets'][0] = base[::2]
        call.arguments[FIRST[name]][1] = base
        wanted = expect(name, call)
        call.run(FACES[face])
        assert same_bits(call.arguments['targets'][1], wanted[1])
        assert same_bits(base[::2], wanted[0].to(dtype))


def test_targets_with_gaps_over_each_other_are_written_in_order(face: str, device: torch.device) -> None:
    results = []
    for dtypes in ((F16, F32), (F32, F16), (F16, F16)):
        base = torch.zeros(20, device=device, dtype=F16)
        sources = [torch.full((10,), 1.0 + index, device=device, dtype=dtype) for index, dtype in enumerate(dtypes)]
        call = Call(
            'multi_tensor_scale',
            dict(sources=sources, targets=[base[::2], base[::2]], scale=zero(device, 0.5), found_inf=None),
            (),
        )
        call.run(FACES[face])
        results.append(base[::2].tolist())
    assert results == [[1.0] * 10] * 3


def test_an_expanded_source_is_read(face: str, device: torch.device) -> None:
    target = torch.zeros(3, 4, device=device)
    Call('multi_tensor_copy', dict(sources=[zero(device, 7.0).expand(3, 4)], targets=[target]), ()).run(FACES[face])
    assert target.tolist() == [[7.0] * 4] * 3


@pytest.mark.parametrize('layout', range(3), ids=['plain', 'transposed', 'strided'])
@pytest.mark.parametrize('name', PAIRED)
def test_versions_of_what_is_written(name: str, layout: int, face: str, device: torch.device) -> None:
    """Autograd learns of each write: once from the compiled ops, and at least once from the reference."""
    first = BF16 if name == 'multi_tensor_refresh' else F32
    rows = [(index, (SIDE, SIDE), (first, F32, F32), (0, layout, layout)) for index in range(3)]
    call = make_call(name, rows, device, (0.5, 2.0), True)
    before = {id(tensor): tensor._version for tensor in call.tensors()}
    written = {id(tensor) for tensor in call.outputs()}
    call.run(FACES[face])
    for tensor in call.tensors():
        bumps = tensor._version - before[id(tensor)]
        if id(tensor) not in written:
            assert bumps == 0
        elif face != 'reference':
            assert bumps == 1
        elif tensor.dim():
            # the flag of finite elements is left alone by the reference, which is no promise
            assert bumps >= 1


@pytest.mark.parametrize('layout', range(3), ids=['plain', 'transposed', 'strided'])
def test_a_copy_onto_itself_is_no_write(layout: int, face: str, device: torch.device) -> None:
    call = make_call('multi_tensor_copy', [(1, (SIDE, SIDE), (F32, F32, F32), (layout, layout, 0))] * 2, device)
    call.arguments['targets'][0] = call.arguments['sources'][0]
    kept = call.arguments['sources'][0].clone()
    before = [tensor._version for tensor in call.arguments['targets']]
    call.run(FACES[face])
    assert [tensor._version for tensor in call.arguments['targets']] == [before[0], before[1] + 1]
    assert same_bits(call.arguments['targets'][0], kept)


def test_autograd_notices_a_write(face: str, device: torch.device) -> None:
    x = torch.full((3,), 2.0, device=device, requires_grad=True)
    y = x * 1
    z = (y * y).sum()
    Call('multi_tensor_copy', dict(sources=[torch.zeros(3, device=device)], targets=[y.detach()]), ()).run(FACES[face])
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        z.backward()


# -- scalars of any shape, and another default type ---------------------------------------------------------------


@pytest.mark.parametrize('name', LISTED)
@pytest.mark.parametrize('shape', [(1,), (1, 1)])
def test_one_element_of_any_shape_is_a_scalar(
    name: str, shape: tuple[int, ...], face: str, device: torch.device
) -> None:
    expected, call = good(name, device), good(name, device)
    for scalar in SCALARS[name]:
        call.arguments[scalar] = call.arguments[scalar].reshape(shape)
    results = zip(expected.run(REFERENCE), call.run(FACES[face]), strict=True)
    assert all(same_bits(old.reshape(-1), new.reshape(-1)) for old, new in results)


@pytest.mark.parametrize('which', range(4))
def test_one_element_of_any_shape_is_a_state_of_the_scale(which: int, face: str, device: torch.device) -> None:
    types = (F32, torch.int32, torch.int32, F32)
    state = [torch.tensor(value, dtype=dtype, device=device) for value, dtype in zip((8.0, 0, 1, 1.0), types)]
    state[which] = state[which].reshape(1)
    FACES[face].update_scale(*state, 2.0, 0.5, 10, 1, None, None)
    assert [tensor.item() for tensor in state] == [4.0, 0, 0, 1.0]


@pytest.mark.parametrize('name', NORMS)
@pytest.mark.parametrize('count', [0, 3])
def test_the_default_type_of_the_process_changes_nothing(
    name: str, count: int, face: str, device: torch.device
) -> None:
    tensors = [torch.ones(2, dtype=F32, device=device)] * count
    found_inf = torch.zeros((), dtype=F32, device=device)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        total, each = getattr(FACES[face], name)(tensors, None, found_inf, True)
    finally:
        torch.set_default_dtype(before)
    assert total.dtype is each.dtype is F32
    assert each.shape == (count,)

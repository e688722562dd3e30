"""The ops as the dispatcher, torch.compile, fake tensors and subclasses see them; and lists on several devices."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from grid import but_every, grid
from ops_models import (
    FLOATS,
    LISTED,
    NORMS,
    PAIRED,
    REFERENCE,
    STEPS,
    Call,
    NoHostRead,
    Row,
    make_call,
    same_bits,
    seeded_rows,
    state,
    step_samples,
    without_compiled,
    zero,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_wrapper import ops
from amp_wrapper.ops import loader, schemas

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16

ROWS: dict[str, list[Row]] = {
    'nothing': [],
    'one': [(1, (3, 5), (F32, F32, F32), (0, 0, 0))],
    'mixed': [(i, (i % 4, 7), (FLOATS[i % 3], FLOATS[i // 3], FLOATS[(i + 1) % 3]), (i % 4, 0, 0)) for i in range(9)],
    'scalars': [(2, (), (F16, F32, BF16), (0, 0, 0)), (3, (0,), (BF16, F16, F32), (0, 0, 0))],
}


def samples(name: str, device: torch.device) -> list[Call]:
    """Calls for opcheck: each with tensors of its own, none empty altogether where the op needs one to find its device."""
    if name == 'update_scale':
        names = ('scale', 'growth_tracker', 'hysteresis_tracker', 'found_inf')
        return [
            Call(name, dict(zip(names, state(device, bad=bad))) | dict(enumerate_rule), names[:3])
            for bad in (False, True)
            for enumerate_rule in (
                dict(growth=2.0, backoff=0.5, interval=1, hysteresis=1, floor=None, ceiling=None),
                dict(growth=2.0, backoff=0.5, interval=2000, hysteresis=2, floor=1.0, ceiling=2.0**16),
            )
        ]
    if name in STEPS:
        return step_samples(name, device)
    if name not in LISTED:
        return []
    calls = []
    for kind, rows in ROWS.items():
        if kind == 'nothing' and device.type != 'cpu':
            continue
        calls.append(make_call(name, rows, device))
        calls.append(make_call(name, rows, device, (0.5, 2.0), True, True, True, (True, False)))
    return calls


def registered() -> set[str]:
    """What the dispatcher itself knows in the namespace."""
    found = torch._C._dispatch_get_all_op_names()
    return {name.split('::')[1] for name in found if name.startswith(f'{schemas.NAMESPACE}::')}


def without_samples(device: torch.device) -> set[str]:
    return {name for name in registered() if len(samples(name, device)) < 2}


def test_every_registered_op_is_checked(device: torch.device) -> None:
    assert not without_samples(device)
    assert registered() == set(schemas.SCHEMAS) == {*LISTED, *STEPS, 'update_scale'}
    planted = torch.library.Library(schemas.NAMESPACE, 'FRAGMENT')
    try:
        planted.define('planted(Tensor x) -> Tensor')
        assert without_samples(device) == {'planted'}
    finally:
        planted._destroy()
    assert not without_samples(device)


@pytest.mark.parametrize('name', but_every(3, schemas.SCHEMAS))
def test_opcheck(name: str, device: torch.device) -> None:
    overload = getattr(torch.ops.amp_wrapper, name).default
    for call in samples(name, device):
        results = torch.library.opcheck(overload, tuple(call.arguments.values()))
        assert set(results.values()) == {'SUCCESS'} and len(results) >= 4


def test_opcheck_sees_a_write_that_the_schema_hides(device: torch.device) -> None:
    """What the check above is worth: an op whose schema does not say what it writes fails it."""
    planted = torch.library.Library('amp_wrapper_planted', 'DEF')
    try:
        planted.define('writes(Tensor x) -> ()')
        planted.impl('writes', lambda x: x.add_(1) and None, 'CompositeExplicitAutograd')
        torch.library.register_fake('amp_wrapper_planted::writes', lambda x: None, lib=planted)
        with pytest.raises(torch.testing._internal.optests.OpCheckError):
            torch.library.opcheck(torch.ops.amp_wrapper_planted.writes.default, (zero(device),))
    finally:
        planted._destroy()


# -- torch.compile ------------------------------------------------------------------------------------------------

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ('c++', 'g++', 'clang++')), reason='inductor needs a C++ compiler'
)
FACES = {'front': ops, 'raw': torch.ops.amp_wrapper}


def compiled(function: Callable[..., Any], backend: Any = 'aot_eager') -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True)


def wrapped(face: Any, name: str) -> Callable[..., Any]:
    """Something before and after the op, so that its place in the graph counts."""

    def function(*arguments: Any) -> Any:
        lists = [
            [t * 1 for t in value] if isinstance(value, list) and i == 0 else value for i, value in enumerate(arguments)
        ]
        result = getattr(face, name)(*lists)
        return result, [tensor + 1 for value in lists if isinstance(value, list) for tensor in value]

    return function


def flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in flat(item)] if isinstance(value, (list, tuple)) else []


def same_compiled(face: str, name: str, rows: list[Row], device: torch.device, backend: str = 'aot_eager') -> None:
    eager, traced = (make_call(name, rows, device, (0.3, 2.0), True, True, True) for _ in range(2))
    function = wrapped(FACES[face], name)
    wanted = flat(function(*eager.arguments.values()))
    results = flat(compiled(function, backend)(*traced.arguments.values()))
    assert len(results) == len(wanted) and all(same_bits(a, b) for a, b in zip(results, wanted))
    # what was written is in the caller's tensors
    assert all(same_bits(a, b) for a, b in zip(traced.tensors(), eager.tensors()))


@pytest.mark.parametrize('face', list(FACES))
@pytest.mark.parametrize('name', but_every(3, LISTED))
def test_compiled_graphs_give_the_same_bits(name: str, face: str, device: torch.device) -> None:
    same_compiled(face, name, ROWS['mixed'], device)


@pytest.mark.parametrize('name', [name for name in LISTED if name != 'multi_tensor_refresh'])
def test_the_reference_is_traced_too(name: str, device: torch.device) -> None:
    same_compiled('front', name, [(1, (3, 5), (torch.float64, F32, F16), (0, 0, 0)), *ROWS['mixed'][:2]], device)


@grid
@needs_compiler
@pytest.mark.parametrize('name', LISTED)
def test_inductor_gives_the_same_bits(name: str, device: torch.device) -> None:
    same_compiled('front', name, ROWS['mixed'], device, 'inductor')


def test_a_new_scale_is_no_new_graph(device: torch.device) -> None:
    graphs = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def step(sources: list[Tensor], targets: list[Tensor], tensors: list[Tensor], found: Tensor) -> Tensor:
        ops.multi_tensor_scale(sources, targets, tensors[0].reciprocal(), found)
        norm, _ = ops.multi_tensor_l2norm(targets, None, found)
        ops.update_scale(*tensors, found, 2.0, 0.5, 2, 1)
        return norm

    function = compiled(step, count)
    sources, targets = [torch.full((5,), 8.0, device=device)], [torch.zeros(5, device=device)]
    tensors, found = state(device, 1024.0)[:3], zero(device)
    scales = []
    for index in range(7):
        found.zero_()
        sources[0][0] = torch.inf if index == 4 else 8.0
        function(sources, targets, tensors, found)
        scales.append(tensors[0].item())
    assert scales == [1024.0, 2048.0, 2048.0, 4096.0, 2048.0, 2048.0, 4096.0]
    assert len(graphs) == 1
    called = {str(node.target) for node in graphs[0].graph.nodes if 'amp_wrapper' in str(node.target)}
    if device.type in ops.compiled_devices():
        assert called == {
            'amp_wrapper.multi_tensor_scale',
            'amp_wrapper.multi_tensor_l2norm',
            'amp_wrapper.update_scale',
        }


# -- the front ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', LISTED)
def test_no_op_reads_the_device(name: str, device: torch.device) -> None:
    for face in (ops, torch.ops.amp_wrapper, REFERENCE):
        call = make_call(name, seeded_rows(12), device, (0.5, 2.0), True, True)
        with NoHostRead():
            call.run(face)
    with pytest.raises(AssertionError, match='the host read'), NoHostRead():
        zero(device).item()


@pytest.mark.parametrize('grad', [True, False], ids=['grad', 'no_grad'])
@pytest.mark.parametrize('face', ['front', 'raw', 'reference'])
@pytest.mark.parametrize('name', LISTED)
def test_tensors_that_require_grad(name: str, face: str, grad: bool, device: torch.device) -> None:
    """They are taken as they are: nothing is recorded, leaves may be written, the results want no gradient."""
    where = dict(FACES, reference=REFERENCE)[face]
    plain = make_call(name, ROWS['mixed'], device, (0.5, 2.0), True, True)
    call = make_call(name, ROWS['mixed'], device, (0.5, 2.0), True, True)
    for tensor in call.tensors():
        if tensor.dim() and tensor.is_floating_point():
            tensor.requires_grad_()
    with torch.set_grad_enabled(grad):
        results = call.run(where)
    assert all(same_bits(a, b) for a, b in zip(results, plain.run(where)))
    assert all(tensor.grad_fn is None for tensor in [*results, *call.tensors()])
    written = {id(tensor) for tensor in call.outputs()}
    assert not any(tensor.requires_grad for tensor in results if id(tensor) not in written)


def bare(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [bare(item) for item in value]
    return value.inner if isinstance(value, Wrapper) else value


class Wrapper(Tensor):
    """A tensor around another, as those of torch.distributed and torchao are."""

    seen: list[str] = []
    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        tensor = Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device, strides=inner.stride()
        )
        tensor.inner = inner
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Wrapper.seen.append(func.overloadpacket.__name__)
        return func(*bare(args), **(kwargs or {}))


@pytest.mark.parametrize('name', LISTED)
def test_subclasses_reach_the_dispatcher(name: str, device: torch.device) -> None:
    if without_compiled(device):
        pytest.skip(f'{without_compiled(device)}; a subclass then sees the operations of torch')
    plain, call = (make_call(name, ROWS['mixed'], device, (0.5, 2.0), True, True) for _ in range(2))
    inner = list(call.tensors())
    before = [tensor._version for tensor in inner]
    outputs = {id(tensor) for tensor in call.outputs()}
    for key, value in call.arguments.items():
        if isinstance(value, list):
            call.arguments[key] = [Wrapper(tensor) for tensor in value]
    Wrapper.seen.clear()
    results = [tensor for tensor in call.run(ops) if type(tensor) is Tensor]
    assert Wrapper.seen == [name]
    wanted = plain.run(ops)
    assert all(same_bits(a, b) for a, b in zip(results, wanted)) or name in PAIRED
    assert all(same_bits(a, b) for a, b in zip(inner, plain.tensors()))
    for tensor, version in zip(inner, before):
        assert (tensor._version > version) == (id(tensor) in outputs)


@pytest.mark.parametrize('name', [*PAIRED, *STEPS, 'update_scale'])
def test_a_device_without_kernels_gets_the_reference(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Called by itself: under the compiled functions, what it writes would not be counted, and autograd not know."""
    found = loader.Library(module=ModuleType('nothing'), devices=frozenset({'some_device'}))
    monkeypatch.setattr(loader, 'library', lambda: found)
    call = samples(name, device)[-1]
    before = [tensor._version for tensor in call.outputs()]
    call.run(ops)
    assert all(
        tensor._version > old for tensor, old in zip(call.outputs(), before) if name != 'update_scale' or old >= 0
    )
    assert ops.backend_of(device) == 'reference'


@pytest.mark.parametrize('face', list(FACES))
@pytest.mark.parametrize('name', LISTED)
def test_fake_tensors(name: str, face: str, device: torch.device) -> None:
    real = make_call(name, ROWS['mixed'], device, (0.5, 2.0), True, True).run(FACES[face])
    mode = FakeTensorMode()
    call = make_call(name, ROWS['mixed'], device, (0.5, 2.0), True, True)
    for key, value in call.arguments.items():
        if isinstance(value, list):
            call.arguments[key] = [mode.from_tensor(tensor) for tensor in value]
        elif isinstance(value, Tensor):
            call.arguments[key] = mode.from_tensor(value)
    with mode:
        results = call.run(FACES[face])
    assert [(t.shape, t.dtype, t.device) for t in results] == [(t.shape, t.dtype, t.device) for t in real]


def test_raw_ops_on_nothing(device: torch.device) -> None:
    raw = torch.ops.amp_wrapper
    raw.multi_tensor_scale([], [])
    raw.multi_tensor_axpby([], [], [])
    raw.multi_tensor_copy([], [])
    assert raw.multi_tensor_refresh([], []).shape == (0,)
    for norm in NORMS:
        total, each = getattr(raw, norm)([], per_tensor=True)
        assert total.item() == 0.0 and each.shape == (0,)
    raw.multi_tensor_exponents(
        [], torch.zeros(0, ops.EXPONENTS, dtype=torch.int64, device=device), torch.zeros(0, device=device)
    )
    found = zero(device)
    raw.multi_tensor_isnonfinite([], found)
    raw.multi_tensor_scale([], [], zero(device, 2.0), found)
    assert found.item() == 0.0


# -- several devices ----------------------------------------------------------------------------------------------


def test_devices_are_served_one_by_one(device: torch.device) -> None:
    """With 'meta' as the other device, which every machine has and which computes nothing."""
    meta = torch.device('meta')
    sources = [torch.ones(3, device=device), torch.ones(4, device=meta), torch.full((5,), 3.0, device=device)]
    for targets in ([torch.zeros(t.shape, device=t.device, dtype=F16) for t in sources] for _ in range(2)):
        ops.multi_tensor_scale(sources, targets, zero(device, 2.0))
        assert targets[0].tolist() == [2.0] * 3 and targets[2].tolist() == [6.0] * 5
        ops.multi_tensor_axpby(sources, sources, targets, zero(device, 2.0))
        assert targets[0].tolist() == [3.0] * 3 and targets[2].tolist() == [9.0] * 5
        ops.multi_tensor_copy(sources, targets)
        assert targets[0].tolist() == [1.0] * 3 and targets[2].tolist() == [3.0] * 5


def test_a_fault_on_one_device_keeps_the_others_unwritten(device: torch.device) -> None:
    meta = torch.device('meta')
    found = zero(device)
    sources = [torch.full((3,), torch.nan, device=device), torch.ones(4, device=meta, dtype=torch.int32)]
    targets = [torch.zeros(3, device=device), torch.zeros(4, device=meta)]
    with pytest.raises(ValueError, match=r'^sources\[1\] has dtype torch.int32'):
        ops.multi_tensor_scale(sources, targets, None, found)
    with pytest.raises(ValueError, match=r'^tensors\[1\] has dtype torch.int32'):
        ops.multi_tensor_isnonfinite(sources, found)
    sources[1] = torch.ones(4, device=meta)
    with pytest.raises(ValueError, match=r'^found_inf has shape \(2,\)'):
        ops.multi_tensor_scale(sources, targets, None, torch.zeros(2, device=device))
    with pytest.raises(ValueError, match=r'^b has shape'):
        ops.multi_tensor_axpby(sources, sources, targets, None, torch.zeros(2, device=device))
    with pytest.raises(ValueError, match=r'^sources\[1\] has shape'):
        ops.multi_tensor_scale(sources, [targets[0], targets[1][:2]])
    assert found.item() == 0.0 and targets[0].tolist() == [0.0] * 3


def test_flags_come_together_from_several_devices(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == 'cpu':
        pytest.skip('needs a second device that computes: pytest --device cuda')
    for bad in range(3):
        tensors = [torch.ones(3, device=place) for place in ('cpu', device, 'cpu')]
        tensors[bad][1] = torch.inf
        found, scale = zero(device), torch.full((), 2.0)
        targets = [torch.zeros_like(tensor) for tensor in tensors]
        ops.multi_tensor_scale(tensors, targets, scale, found)
        assert found.item() == 1.0 and all(target[0].item() == 2.0 for target in targets)
        found.zero_()
        ops.multi_tensor_isnonfinite(tensors, found)
        assert found.item() == 1.0
        total, each = ops.multi_tensor_l2norm([t.nan_to_num(posinf=1.0) for t in tensors], None, None, True)
        assert total.item() == 3.0 and each.tolist() == [float(torch.tensor(3.0).sqrt())] * 3


def test_meta_beside_real_is_refused_by_the_raw_op(device: torch.device) -> None:
    """The dispatcher sends the whole list to the fake kernel, which would write nothing and say nothing."""
    targets = [torch.zeros(3, device=device), torch.zeros(3, device='meta')]
    with pytest.raises(NotImplementedError, match='not both'):
        torch.ops.amp_wrapper.multi_tensor_copy([torch.ones_like(t) for t in targets], targets)
    with pytest.raises(NotImplementedError, match='not both'):
        torch.ops.amp_wrapper.multi_tensor_maxnorm(targets)

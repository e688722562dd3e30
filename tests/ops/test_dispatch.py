"""The ops as torch's dispatcher, torch.compile, fake tensors and subclasses see them; and lists on several devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_lists import F16, F32, FLOATS, NoHostRead, random_tensor, same_bits, scalar
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_wrapper import ops

RAW = torch.ops.amp_wrapper
Calls = dict[str, Callable[[torch.device], tuple[Any, ...]]]


def lists(device: torch.device, *seeds: int) -> list[list[Tensor]]:
    shapes = ((3, 5), (0,), (), (2, 7))
    return [[random_tensor(seed + i, s, FLOATS[i % 3], device, i % 3) for i, s in enumerate(shapes)] for seed in seeds]


def step(device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of four parameters, and a decision to take the step."""
    rows, decision = torch.full((4, ops.ROW), 0.5, device=device), torch.zeros(ops.DECISION, device=device)
    decision[1:4] = 1.0
    return rows, decision


def scale_state(device: torch.device) -> tuple[Tensor, ...]:
    return scalar(device, 1024.0), scalar(device, 0, torch.int32), scalar(device, 1, torch.int32)


def prologue(device: torch.device) -> tuple[Any, ...]:
    rows, decision = step(device)
    hyper = torch.tensor([[0.1, 0.9, 0.99, 1e-8, 0.0, 0.0, 0.0]], dtype=torch.float64)
    steps = [scalar(device, float(i)) for i in range(4)]
    scale = scale_state(device)
    counts, rule = torch.zeros(3, dtype=torch.int64, device=device), [2.0, 0.5, 2.0, 1.0, 1.0, 65536.0]
    flags = (scalar(device), None, scalar(device, 3.0))
    table = (hyper, torch.zeros(4, dtype=torch.int64), ops.ADAM, [scalar(device, 0.1)], [0])
    return decision, rows, steps, *table, *flags, *scale, counts, rule, 1.0, 0.5


#: Arguments of each op.
CALLS: Calls = {
    'multi_tensor_scale': lambda d: (*lists(d, 1, 9), scalar(d, 0.3), scalar(d)),
    'multi_tensor_isnonfinite': lambda d: (*lists(d, 1), scalar(d)),
    'multi_tensor_l2norm': lambda d: (*lists(d, 1), scalar(d, 0.3), scalar(d), True),
    'multi_tensor_maxnorm': lambda d: (*lists(d, 1), scalar(d, 0.3), scalar(d), True),
    'multi_tensor_scale_l2norm': lambda d: (*lists(d, 1, 9), scalar(d, 0.3), scalar(d)),
    'update_scale': lambda d: (*scale_state(d), scalar(d, 1.0), 2.0, 0.5, 1, 1, 1.0, 65536.0),
    'step_prologue': prologue,
    'fused_adam': lambda d: (*lists(d, 1, 9, 20), [t.abs() for t in lists(d, 31)[0]], [], [], *step(d)),
    'fused_sgd': lambda d: (*lists(d, 1, 9, 20), [], *step(d)),
}


def flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in flat(item)] if isinstance(value, (list, tuple)) else []


def test_every_op_of_training_is_an_op_of_torch(device: torch.device) -> None:
    """Its schema says what it writes, its fake kernel agrees with the real one, and it can be traced."""
    for name, make in CALLS.items():
        # the whole check traces through autograd, which is slow and the same for all
        kinds = ('test_schema', 'test_faketensor', 'test_autograd_registration')
        kinds = (*kinds, 'test_aot_dispatch_dynamic') if name in ('multi_tensor_scale', 'fused_adam') else kinds
        results = torch.library.opcheck(getattr(RAW, name).default, make(device), test_utils=kinds)
        assert set(results.values()) == {'SUCCESS'}, name


@pytest.mark.usefixtures('with_and_without_ops')
def test_no_op_reads_the_device_and_both_doors_give_the_same(device: torch.device) -> None:
    for name, make in CALLS.items():
        calls = []
        for door in (ops, RAW):
            arguments = make(device)
            with NoHostRead():
                result = getattr(door, name)(*arguments)
            calls.append([*flat(result), *flat(arguments)])
        # torch.ops goes to the kernels of the process, which were built or not
        assert len(calls[0]) == len(calls[1])
        for one, other in zip(*calls):
            torch.testing.assert_close(one, other, equal_nan=True, rtol=2.0**-20, atol=1e-20)


def test_unscaling_is_one_graph_whatever_the_scale_is(device: torch.device) -> None:
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def unscale(sources: list[Tensor], targets: list[Tensor], state: tuple[Tensor, ...], found: Tensor) -> Tensor:
        ops.multi_tensor_scale(sources, targets, state[0].reciprocal(), found)
        norm, _ = ops.multi_tensor_l2norm(targets, None, found)
        ops.update_scale(*state, found, 2.0, 0.5, 2, 1)
        return norm

    function = torch.compile(unscale, backend=count, fullgraph=True)
    sources, targets = [torch.full((5,), 8.0, device=device)], [torch.zeros(5, device=device)]
    state, found, scales = scale_state(device), scalar(device), []
    for index in range(7):
        found.zero_()
        sources[0][0] = torch.inf if index == 4 else 8.0
        function(sources, targets, state, found)
        scales.append(state[0].item())
    assert scales == [1024.0, 2048.0, 2048.0, 4096.0, 2048.0, 2048.0, 4096.0] and len(graphs) == 1


def test_traced_ops_write_what_eager_ones_write(device: torch.device) -> None:
    """Also where a list has float64 tensors, which no kernel takes."""
    for name, dtype in (('multi_tensor_scale_l2norm', F32), ('multi_tensor_scale', torch.float64), ('fused_sgd', F32)):
        eager, traced = CALLS[name](device), CALLS[name](device)
        for arguments in (eager, traced):
            arguments[0][0] = arguments[0][0].to(dtype)
        wanted = getattr(ops, name)(*eager)
        result = torch.compile(lambda *a, n=name: getattr(ops, n)(*a), backend='aot_eager', fullgraph=True)(*traced)
        assert all(map(same_bits, [*flat(result), *flat(traced)], [*flat(wanted), *flat(eager)])), name


def test_fake_tensors_have_the_shapes_of_real_ones(device: torch.device) -> None:
    for name, make in CALLS.items():
        real = flat(getattr(ops, name)(*make(device)))
        mode = FakeTensorMode()
        arguments = torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, make(device))
        with mode:
            fake = flat(getattr(ops, name)(*arguments))
        assert [(t.shape, t.dtype, t.device) for t in fake] == [(t.shape, t.dtype, t.device) for t in real], name


class Wrapper(Tensor):
    """A tensor around another, as those of torch.distributed and torchao are."""

    seen: Counter[str] = Counter()
    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        shape, strides = inner.shape, inner.stride()
        tensor = Tensor._make_wrapper_subclass(cls, shape, dtype=inner.dtype, device=inner.device, strides=strides)
        tensor.inner = inner
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Wrapper.seen[func.overloadpacket.__name__] += 1
        return func(*torch.utils._pytree.tree_map_only(Wrapper, lambda t: t.inner, args), **(kwargs or {}))


@pytest.mark.usefixtures('library')
def test_subclasses_reach_the_dispatcher(device: torch.device) -> None:
    for name in ('multi_tensor_scale', 'multi_tensor_l2norm', 'fused_adam', 'fused_sgd'):
        plain, wrapped = CALLS[name](device), CALLS[name](device)
        getattr(ops, name)(*plain)
        before = [t._version for t in flat(wrapped)]
        Wrapper.seen.clear()
        getattr(ops, name)(*(list(map(Wrapper, a)) if isinstance(a, list) else a for a in wrapped))
        assert Wrapper.seen == {name: 1}
        assert all(map(same_bits, flat(wrapped), flat(plain)))
        if name != 'multi_tensor_l2norm':
            assert [t._version for t in wrapped[1]] > before[len(wrapped[0]) : len(wrapped[0]) + len(wrapped[1])]


@pytest.mark.usefixtures('with_and_without_ops')
def test_lists_may_lie_on_several_devices(device: torch.device) -> None:
    """With 'meta' as the other device, which every machine has and which computes nothing."""
    sources = [torch.ones(3, device=device), torch.ones(4, device='meta'), torch.full((5,), 3.0, device=device)]
    for _ in range(2):
        targets = [torch.zeros(t.shape, device=t.device, dtype=F16) for t in sources]
        ops.multi_tensor_scale(sources, targets, scalar(device, 2.0))
        assert targets[0].tolist() == [2.0] * 3 and targets[2].tolist() == [6.0] * 5
        ops.multi_tensor_copy(sources, targets)
        assert targets[0].tolist() == [1.0] * 3 and targets[2].tolist() == [3.0] * 5


def test_flags_come_together_from_several_devices(device: torch.device) -> None:
    if device.type == 'cpu':
        pytest.skip('needs a second device that computes: pytest --device cuda')
    for bad in range(3):
        tensors = [torch.ones(3, device=place) for place in ('cpu', device, 'cpu')]
        tensors[bad][1] = torch.inf
        found, scale = scalar(device), torch.full((), 2.0)
        targets = [torch.zeros_like(tensor) for tensor in tensors]
        ops.multi_tensor_scale(tensors, targets, scale, found)
        assert found.item() == 1.0 and all(target[0].item() == 2.0 for target in targets)


def test_meta_beside_real_tensors_is_refused_by_the_dispatcher(device: torch.device) -> None:
    """It sends the whole list to the fake kernel, which would write nothing and say nothing."""
    targets = [torch.zeros(3, device=device), torch.zeros(3, device='meta')]
    with pytest.raises(NotImplementedError, match='not both'):
        RAW.multi_tensor_scale([torch.ones_like(t) for t in targets], targets)
    with pytest.raises(NotImplementedError, match='not both'):
        RAW.multi_tensor_maxnorm(targets)

"""The ops as torch's dispatcher, fake tensors and subclasses see them; and lists on several devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_lists import F16, FLOATS, NoHostRead, random_tensor, same_bits, scalar
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from amp_wrapper import ops

RAW = torch.ops.amp_wrapper
Call = tuple[list[Any], dict[str, Any]]


def lists(device: torch.device, *seeds: int) -> list[list[Tensor]]:
    """Of all types, some misaligned or in another order, an empty tensor among them."""
    shapes = ((3, 5), (0,), (), (2, 7))

    def column(seed: int) -> list[Tensor]:
        return [random_tensor(seed + i, s, FLOATS[i % 3], device, (1, 0, 3)[i % 3]) for i, s in enumerate(shapes)]

    return list(map(column, seeds))


def step(device: torch.device, columns: list[list[Tensor]]) -> Call:
    """One with all that it takes."""
    hyper = torch.tensor([[0.1, 0.9, 0.99, 1e-8, 0.0, 0.0, 0.0]], dtype=torch.float64)
    table = [
        torch.zeros(ops.DECISION, device=device),
        hyper,
        torch.zeros(4, dtype=torch.int64),
        [scalar(device, 0.1)],
        [0],
    ]
    given = dict(
        found_inf=scalar(device),
        norm=scalar(device, 3.0),
        scale=scalar(device, 4.0),
        growth_tracker=scalar(device, 1, torch.int32),
        hysteresis_tracker=scalar(device, 1, torch.int32),
        counts=torch.zeros(3, dtype=torch.int64, device=device),
        rule=[2.0, 0.5, 2.0, 1.0, 1.0, 65536.0],
        max_norm=1.0,
        clip_value=0.5,
    )
    return [*columns, *table], given


def adam(device: torch.device) -> Call:
    squares = [t.abs() for t in lists(device, 31)[0]]
    return step(device, [*lists(device, 1, 9, 20), squares, [], [scalar(device, float(i)) for i in range(4)], []])


#: Arguments of each op.
CALLS: dict[str, Callable[[torch.device], Call]] = {
    'multi_tensor_scale': lambda d: ([*lists(d, 1, 9), scalar(d, 0.3), scalar(d)], {}),
    'multi_tensor_axpby': lambda d: ([*lists(d, 1, 9), scalar(d, 0.3), scalar(d, -2.0), scalar(d)], {}),
    'multi_tensor_isnonfinite': lambda d: ([*lists(d, 1), scalar(d)], {}),
    'multi_tensor_l2norm': lambda d: ([*lists(d, 1), scalar(d, 0.3), scalar(d)], {}),
    'fused_adam': adam,
    'fused_sgd': lambda d: step(d, [*lists(d, 1, 9, 20), []]),
}


def tensors_in(*values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


@pytest.mark.usefixtures('library')
def test_every_op_of_training_is_an_op_of_torch(device: torch.device) -> None:
    """Its schema says what it writes, its fake kernel agrees with the real one, and it can be traced."""
    for name, make in CALLS.items():
        args, given = make(device)
        # the whole check traces through autograd, which is slow and the same for all
        kinds = ['test_schema', 'test_faketensor', 'test_autograd_registration']
        kinds += ['test_aot_dispatch_dynamic'] if name in ('multi_tensor_scale', 'fused_adam') else []
        results = torch.library.opcheck(getattr(RAW, name).default, tuple(args), given, test_utils=kinds)
        assert set(results.values()) == {'SUCCESS'}, name


@pytest.mark.usefixtures('with_and_without_ops')
def test_no_op_reads_the_device(device: torch.device) -> None:
    for name in [name for name in CALLS if ops.serves(device) or name.startswith('multi_tensor')]:
        args, given = CALLS[name](device)
        with NoHostRead():
            getattr(ops, name)(*args, **given)


@pytest.mark.usefixtures('library')
def test_versions_of_what_is_written_move(device: torch.device) -> None:
    for name, make in CALLS.items():
        args, given = make(device)
        tensors = tensors_in(args, given)
        before = [(t._version, t.clone()) for t in tensors]
        getattr(ops, name)(*args, **given)
        for tensor, (version, value) in zip(tensors, before):
            assert same_bits(tensor, value) or tensor._version > version, name
        assert [t._version for t in args[0]] == [version for version, _ in before[: len(args[0])]], name


@pytest.mark.usefixtures('library')
def test_fake_tensors_have_the_shapes_of_real_ones(device: torch.device) -> None:
    for name, make in CALLS.items():
        args, given = make(device)
        mode = FakeTensorMode()
        fake_args, fake_given = tree_map_only(Tensor, mode.from_tensor, (args, given))
        with mode:
            fake = getattr(ops, name)(*fake_args, **fake_given)
        found, real = (tensors_in(result) for result in (fake, getattr(ops, name)(*args, **given)))
        assert [(t.shape, t.dtype, t.device) for t in found] == [(t.shape, t.dtype, t.device) for t in real], name


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
        return func(*tree_map_only(Wrapper, lambda t: t.inner, args), **(kwargs or {}))


@pytest.mark.usefixtures('library')
def test_subclasses_reach_the_dispatcher(device: torch.device) -> None:
    for name in ('multi_tensor_scale', 'multi_tensor_l2norm', 'fused_adam', 'fused_sgd'):
        (plain, plain_given), (wrapped, given) = CALLS[name](device), CALLS[name](device)
        getattr(ops, name)(*plain, **plain_given)
        before = [t._version for t in tensors_in(wrapped)]
        Wrapper.seen.clear()
        getattr(ops, name)(
            *tree_map_only(Tensor, lambda t: Wrapper(t) if t.is_floating_point() else t, wrapped), **given
        )
        assert Wrapper.seen == {name: 1}
        assert all(map(same_bits, tensors_in(wrapped, given), tensors_in(plain, plain_given)))
        moved = [t._version > version for t, version in zip(tensors_in(wrapped), before)]
        assert name == 'multi_tensor_l2norm' or any(moved)


@pytest.mark.usefixtures('with_and_without_ops')
def test_lists_may_lie_on_several_devices(device: torch.device) -> None:
    """Whichever has the flag and the scale."""
    if device.type == 'cpu':
        pytest.skip('needs a second device that computes: pytest --device cuda')
    for bad, place in [(bad, place) for bad in range(4) for place in ('cpu', device)]:
        tensors = [torch.ones(3, device=where) for where in ('cpu', device, 'cpu')]
        targets = [torch.zeros_like(tensor, dtype=F16) for tensor in tensors]
        found, scale = scalar(torch.device(place)), torch.full((), 2.0, device=place)
        if bad < 3:
            tensors[bad][1] = torch.inf
        ops.multi_tensor_scale(tensors, targets, scale, found)
        assert found.item() == float(bad < 3) and all(target[0].item() == 2.0 for target in targets)
        ops.multi_tensor_copy(tensors, targets)
        ops.multi_tensor_axpby(tensors, targets, scale)
        assert all(target[0].item() == 3.0 for target in targets)
        assert bad < 3 or ops.multi_tensor_l2norm(tensors).item() == 3.0

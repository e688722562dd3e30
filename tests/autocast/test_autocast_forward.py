"""Casts inside the forward passes of a model, whatever is called, raised, interrupted or recomputed there."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from toy_autocast import HALVES, LEVELS, TYPES, attach

from amp_wrapper import AmpAttachError
from amp_wrapper.autocast import patching, regions, state
from amp_wrapper.autocast.patching import patches
from amp_wrapper.casting.plan import CastPlan
from amp_wrapper.casting.region_hooks import PLAIN, EnterRegion, LeaveRegion, put_region
from amp_wrapper.policy import resolve

# -- models ------------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.dec = nn.Linear(4, 4)
        self.types: list[torch.dtype] = []
        self.fail: type[BaseException] | None = None

    def encode(self, x: Tensor) -> Tensor:
        return self.enc(x).exp()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.enc[0](x)
        wide = hidden.softmax(-1)
        self.types = [hidden.dtype, wide.dtype, self.enc(x).dtype]
        if self.fail is not None:
            raise self.fail
        return self.dec(wide)


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('training', [True, False])
def test_forward_of_a_model(level: str, training: bool) -> None:
    model = Net().train(training)
    handle = attach(model, level)
    out = model(torch.randn(2, 4))
    assert model.types == [TYPES[level], torch.float32, torch.float32]
    assert out.dtype is torch.float32
    out.sum().backward()
    assert model.dec.weight.grad is not None
    assert model.dec.weight.grad.dtype is torch.float32
    handle.remove()
    model(torch.randn(2, 4))
    assert model.types == [torch.float32] * 3
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


@pytest.mark.parametrize('level', LEVELS)
def test_outputs_of_another_type(level: str) -> None:
    model = Net()
    attach(model, level, cast_model_outputs='bfloat16')
    assert model(torch.randn(2, 4)).dtype is model.dec(torch.randn(2, 4)).dtype is torch.bfloat16


@pytest.mark.parametrize('level', LEVELS)
def test_direct_calls_of_parts(level: str) -> None:
    model = Net()
    seen: list[torch.dtype] = []
    model.enc[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype), prepend=True)
    attach(model, level)
    x = torch.randn(2, 4)
    for call in (model.encode, model.enc, model.enc[0], model.dec):
        assert call(x).dtype is torch.float32
    assert seen == [TYPES[level]] * 3
    assert model.dec(x).equal(F.linear(*(t.to(TYPES[level]) for t in (x, model.dec.weight, model.dec.bias))).float())


@pytest.mark.parametrize('dtype', HALVES)
def test_direct_calls_of_parts_inside_an_autocast_of_the_user(dtype: torch.dtype) -> None:
    """As calls of the model: its own type inside, and FP32 outputs."""
    model, x = Net(), torch.randn(2, 4)
    attach(model)
    expected = model.enc(x)
    with torch.autocast('cpu', dtype):
        assert model.enc(x).equal(expected)
        assert model.dec(x).dtype is torch.float32
        assert torch.get_autocast_dtype('cpu') is dtype


def test_a_model_on_a_device_without_autocast() -> None:
    model = Net().to('meta')
    attach(model)
    assert model(torch.ones(2, 4, device='meta')).shape == (2, 4)
    assert model.enc(torch.ones(2, 4, device='meta')).dtype is torch.float32


@pytest.mark.parametrize(
    'make', [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(2, 4))], ids=['script', 'trace']
)
def test_scripted_modules(make: Callable[[nn.Module], nn.Module]) -> None:
    """They take no hooks."""
    part = make(nn.Sequential(nn.Linear(4, 4)))
    model = nn.Sequential(nn.Linear(4, 4), part)
    for level in ('O2', 'O3', 'O5'):
        with pytest.raises(AmpAttachError, match=r'1 .*torch\.jit'):
            attach(model, level)
    for level in ('O0', 'O1', 'O2'):
        with pytest.raises(AmpAttachError, match=r'the model .*torch\.jit'):
            attach(part, level)
    assert not model._forward_pre_hooks
    assert all(p.dtype is torch.float32 for p in model.parameters())
    attach(model, 'O1')
    out = model(torch.ones(2, 4))
    assert out.dtype is torch.float32
    assert out.equal(out.half().float())
    assert part(torch.ones(2, 4)).dtype is torch.float32


@pytest.mark.parametrize('level', LEVELS)
def test_parts_kept_in_fp32_are_not_cast_when_called_directly(level: str) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))), torch.randn(2, 4)
    attach(model, level, keep_fp32=['1'])
    kept = model[1][0]
    expected = F.linear(x, kept.weight, kept.bias)
    assert model[1](x).equal(expected)
    assert kept(x).equal(expected)


@pytest.mark.parametrize('level', ['O0', 'O2', 'O3', 'O5'])
def test_casts_of_another_model_end_where_a_model_begins(level: str) -> None:
    inner, outer = Net(), Net()
    attach(inner, level)
    attach(outer, 'O1')
    outer.dec = nn.Sequential(inner)
    inside: list[Any] = []
    inner.dec.register_forward_hook(
        lambda *_: inside.append((torch.is_autocast_enabled('cpu'), state.casts_on())), prepend=True
    )
    outer(torch.randn(2, 4))
    assert inside == [(False, False)]
    assert outer.types[1] is torch.float32


@pytest.mark.parametrize('level', ['O0', 'O2', 'O3', 'O5'])
def test_the_other_levels_do_not_cast_by_op(level: str) -> None:
    plain, covered = Net(), Net()
    covered.load_state_dict(plain.state_dict())
    CastPlan([('', plain)], resolve(opt_level=level)).apply()
    handle = attach(covered, level)
    x = torch.randn(2, 4)
    assert plain(x).equal(covered(x))
    assert plain.types == covered.types
    handle.remove()
    assert not covered._forward_pre_hooks
    assert not covered._forward_hooks


@pytest.mark.parametrize('part', ['root', 'below'])
@pytest.mark.parametrize('error', [KeyError, KeyboardInterrupt])
def test_exceptions_leave_nothing_open(part: str, error: type[BaseException]) -> None:
    model = Net()
    attach(model)
    x = torch.randn(2, 4)
    if part == 'root':
        model.fail = error
        with pytest.raises(error):
            model(x)
        model.fail = None
    else:
        hook = model.dec.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(error))
        with pytest.raises(error):
            model.dec(x)
        hook.remove()
    assert regions.count() == 0
    assert not torch.is_autocast_enabled('cpu')
    assert model(x).dtype is torch.float32


def test_a_pass_that_cannot_begin_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    attach(model)

    def fail() -> None:
        raise KeyError

    with monkeypatch.context() as patch:
        patch.setattr(patches, 'acquire', fail)
        for call in (model, model.dec):
            with pytest.raises(KeyError):
                call(torch.randn(2, 4))
            assert regions.count() == 0
            assert not torch.is_autocast_enabled('cpu')
    assert model(torch.randn(2, 4)).dtype is torch.float32


@pytest.mark.parametrize('order', [('O1', 'O4'), ('O4', 'O1')])
def test_a_part_of_two_models_has_the_casts_of_the_later(order: tuple[str, str]) -> None:
    part = nn.Linear(4, 4)
    types: list[torch.dtype] = []
    part.register_forward_hook(lambda module, args, output: types.append(output.dtype))
    first, second = nn.Sequential(part), nn.Sequential(part)
    attach(first, order[0])
    attach(second, order[1])
    x = torch.randn(2, 4)
    assert {m(x).dtype for m in (part, first, second)} == {torch.float32}
    assert types == [TYPES[order[1]], TYPES[order[0]], TYPES[order[1]]]
    # one pair of ours, and the test's own
    assert (len(part._forward_pre_hooks), len(part._forward_hooks)) == (1, 2)


def test_the_next_forward_cleans_up_after_an_interrupt_of_our_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal may come in the middle of the hook that closes; here torch does not even call it."""
    model = Net()
    attach(model)
    model.fail = KeyboardInterrupt
    with monkeypatch.context() as patch:
        patch.setattr(regions, '_cover_interrupts', lambda change: None)
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(2, 4))
        assert regions.count() == 1
    regions._cover_interrupts(1)
    model.fail = None
    assert torch.is_autocast_enabled('cpu')
    assert model(torch.randn(2, 4)).dtype is torch.float32
    assert regions.count() == 0
    assert not torch.is_autocast_enabled('cpu')


def test_what_is_under_way_is_not_stale() -> None:
    model = Net()
    attach(model)
    model.dec.register_forward_pre_hook(lambda *_: regions.unwind_stale())
    seen: list[torch.dtype] = []
    model.dec.register_forward_hook(lambda module, args, output: seen.append(output.dtype), prepend=True)
    model(torch.randn(2, 4))
    assert seen == [torch.float16]


@pytest.mark.parametrize('level', ['O0', 'O1', 'O2', 'O4'])
def test_an_interrupt_that_a_model_survives(level: str) -> None:
    class Patient(nn.Module):
        def __init__(self, inner: Net) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            # not a child: a model of its own
            self.inner = [inner]

        def forward(self, x: Tensor) -> Tensor:
            inner = self.inner[0]
            inner.fail = KeyboardInterrupt
            with pytest.raises(KeyboardInterrupt):
                inner(x)
            inner.fail = None
            assert inner(x).dtype is torch.float32
            assert regions.count() == 1
            return self.fc(x).softmax(-1) + self.fc(x)

    model, inner = Patient(Net()), Net()
    model.inner = [inner]
    attach(inner, level)
    attach(model, 'O1')
    seen: list[torch.dtype] = []
    model.fc.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model(torch.randn(2, 4))
    assert seen == [torch.float16] * 2


class Tree(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x: Tensor, depth: int) -> Tensor:
        if depth:
            self(x, depth - 1)
        return self.fc(x)


def test_a_module_that_calls_itself() -> None:
    model = nn.Sequential(Tree())
    attach(model)
    seen: list[torch.dtype] = []
    model[0].fc.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    assert model[0](torch.randn(1, 2), 2).dtype is torch.float32
    assert seen == [torch.float16] * 3
    tree = Tree()
    attach(tree)
    tree.fc.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    assert tree(torch.randn(1, 2), 2).dtype is torch.float32
    assert seen == [torch.float16] * 6


@pytest.mark.parametrize('level', ['O1', 'O2'])
def test_a_module_that_calls_itself_under_a_plan_that_does_not_cover_forwards(level: str) -> None:
    tree = Tree()
    CastPlan([('', tree)], resolve(opt_level=level)).apply()
    tree(torch.randn(1, 2), 2)
    assert state.depth() == 0
    assert not patches.in_place


def test_hooks_survive_copies_and_pickle() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    attach(model, 'O4')
    x = torch.randn(2, 4)
    expected = model(x)
    assert not expected.equal(F.layer_norm(F.linear(x, model[0].weight, model[0].bias), (4,)))
    for duplicate in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert duplicate(x).equal(expected)
        assert duplicate[0](x).equal(model[0](x))
        with torch.no_grad():
            duplicate[0].weight.zero_()
            duplicate[0].bias.fill_(3.0)
        assert duplicate[0](x).eq(3).all()
        assert model(x).equal(expected)


def test_no_copy_of_a_weight_outlives_the_forward() -> None:
    model, x = nn.Linear(2, 2, bias=False), torch.ones(1, 2)
    attach(model)
    with torch.autocast('cpu', torch.float16), torch.no_grad():
        model(x)
    with torch.autocast('cpu', torch.float16):
        model(x)
        with torch.no_grad():
            model.weight.fill_(3.0)
        assert model(x).tolist() == [[6.0, 6.0]]


class Outer(nn.Module):
    """Uses a layer before, inside and after a model that has it, too."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.layer = [inner], inner[0]  # type: ignore[index]
        self.types: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.types = [F.linear(x, self.layer.weight).dtype]
        self.inner[0](x)
        last = F.linear(x, self.layer.weight)
        self.types.append(last.dtype)
        return last


@pytest.mark.parametrize('level', ['O4', 'O2'])
def test_no_copy_of_a_weight_reaches_a_region_of_another_type(level: str) -> None:
    inner = nn.Sequential(nn.Linear(4, 4))
    outer = Outer(inner)
    attach(outer, 'O1')
    seen: list[torch.dtype] = []
    if level == 'O4':
        attach(inner, level)
    else:
        # at the levels without casts by op a region is plain
        put_region(inner, EnterRegion(PLAIN), LeaveRegion(PLAIN))
    inner[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    outer(torch.randn(2, 4)).sum().backward()
    assert outer.types == [torch.float16] * 2
    assert seen == [torch.bfloat16 if level == 'O4' else torch.float32]
    assert inner[0].weight.grad is not None


class TwoModes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.fc(x)
        return self.fc(x)


def test_a_forward_without_gradients_inside_one_with() -> None:
    model = TwoModes()
    attach(model)
    model(torch.ones(1, 2)).sum().backward()
    assert model.fc.weight.grad is not None


@pytest.mark.parametrize('reentrant', [True, False])
@pytest.mark.parametrize('noted', [True, False])
@pytest.mark.parametrize('level', LEVELS)
def test_checkpointed_segments_see_the_same_types(reentrant: bool, noted: bool, level: str) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.types: list[tuple[torch.dtype, ...]] = []

        def segment(self, x: Tensor) -> Tensor:
            hidden = self.fc(x)
            wide = hidden.softmax(-1)
            loss = F.mse_loss(hidden, hidden.detach())
            self.types.append((hidden.dtype, wide.dtype, loss.dtype))
            return wide + loss

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.segment, x, use_reentrant=reentrant)

    model = Checkpointed()
    plan = CastPlan([('', model)], resolve(opt_level=level), covers_forward=True)
    plan.apply()
    session = state.session_opened()
    x = torch.randn(2, 4, requires_grad=True)
    with set_checkpoint_early_stop(False):
        out = model(x)
    assert plan.ops is not None
    if noted:
        with patching.in_backward(plan.ops.keys):
            out.square().sum().backward()
    else:
        out.square().sum().backward()
    assert model.types == [(TYPES[level], torch.float32, torch.float32)] * 2
    assert model.fc.weight.grad is not None
    state.session_closed(session)


@pytest.mark.parametrize('level', LEVELS)
def test_gradient_penalty(level: str) -> None:
    """Second derivatives through every kind of rule, against float64."""

    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm, self.b = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.norm(F.softplus(self.a(x)))
            return self.b(hidden * hidden.softmax(-1)) + (x**2).sum(-1, keepdim=True)

    def penalty(model: nn.Module, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    torch.manual_seed(0)
    model = Critic()
    exact = copy.deepcopy(model).double()
    attach(model, level)
    x = torch.randn(8, 4)
    penalty(exact, x.double().requires_grad_()).backward()
    penalty(model, x.requires_grad_()).backward()
    # eight products of 4 to 8 terms: a few roundings, of 2^-11 and 2^-8
    bound = 2e-2 if level == 'O1' else 1e-1
    for (name, mine), theirs in zip(model.named_parameters(), exact.parameters()):
        if theirs.grad is None:
            assert mine.grad is None
            continue
        assert mine.grad is not None, name
        assert mine.grad.dtype is torch.float32
        assert (mine.grad - theirs.grad).norm() <= bound * theirs.grad.norm() + 1e-6, name

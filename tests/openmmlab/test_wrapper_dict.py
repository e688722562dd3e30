"""Several wrappers over one model: whose loss reaches whose parameters, at which scale, and who skips."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import toy
from bits import differences
from mmengine.logging import MessageHub
from mmengine.optim import OptimWrapper, OptimWrapperDict
from torch import Tensor, nn

from amp_wrapper import AmpAttachError, AmpOptimWrapper, AmpUsageError
from amp_wrapper.casting import fp32_values


class Two(nn.Module):
    """A generator, a discriminator behind it, and a trunk that either may own."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.generator = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.discriminator = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def two(device: torch.device) -> Two:
    torch.manual_seed(0)
    return Two().to(device)


def batch(device: torch.device, step: int = 0) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step)).to(device)


def sgd(*modules: nn.Module, momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.25, momentum=momentum)


def train(model: Two, wrappers: OptimWrapperDict, device: torch.device, factor: float = 1.0) -> None:
    """Alternating turns, the discriminator not frozen while the generator learns: its gradients wait for its next turn."""
    for step in range(4):
        for name in ('discriminator', 'generator'):
            wrapper = wrappers[name]
            with wrapper.optim_context(model):
                out = model.discriminator(model.generator(batch(device, step)))
                loss = out.float().square().mean() * (factor if name == 'generator' else 1.0)
            wrapper.update_params(loss)


def amp(level: str, *modules: nn.Module, momentum: float = 0.9, **words: Any) -> AmpOptimWrapper:
    return AmpOptimWrapper(opt_level=level, optimizer=sgd(*modules, momentum=momentum), **words)


def test_losses_reach_each_other_as_without_scales(device: torch.device) -> None:
    """Powers of two are exact in FP32: every bit is that of plain wrappers, whatever the two scales are."""
    ends = []
    for make in (
        lambda part: OptimWrapper(sgd(part)),
        lambda part: amp('O0', part),
        lambda part: amp('O0', part, loss_scale=1024.0 if isinstance(part[-1], nn.Tanh) else 8.0),
        lambda part: amp('O0', part, loss_scale='dynamic' if isinstance(part[-1], nn.Tanh) else 1.0),
    ):
        model = two(device)
        wrappers = OptimWrapperDict(generator=make(model.generator), discriminator=make(model.discriminator))
        train(model, wrappers, device)
        ends.append([p.detach().clone() for p in model.parameters()])
    for other in ends[1:]:
        assert differences(ends[0], other) == []


def test_a_stock_wrapper_gets_what_it_expects_and_cannot_give_it(device: torch.device) -> None:
    ends = []
    for scale in (None, 512.0):
        model = two(device)
        generator = (
            OptimWrapper(sgd(model.generator)) if scale is None else amp('O0', model.generator, loss_scale=scale)
        )
        with toy.captured_log() as lines:
            wrappers = OptimWrapperDict(generator=generator, discriminator=OptimWrapper(sgd(model.discriminator)))
        assert any("discriminator is mmengine's OptimWrapper" in line for line in lines) == (scale is not None)
        for step in range(3):
            wrapper = wrappers['discriminator']
            with wrapper.optim_context(model):
                # detached, since its backward knows of no scale
                loss = model.discriminator(model.generator(batch(device, step)).detach()).square().mean()
            wrapper.update_params(loss)
            wrapper = wrappers['generator']
            with wrapper.optim_context(model):
                loss = model.discriminator(model.generator(batch(device, step))).square().mean()
            wrapper.update_params(loss)
        ends.append([p.detach().clone() for p in model.parameters()])
    assert differences(*ends) == []


@pytest.mark.parametrize('levels', [('O2', 'O5'), ('O5', 'O2'), ('O1', 'O2'), ('O2', 'O0'), ('O3', 'O4')])
@pytest.mark.parametrize('wide', [False, True])
def test_levels_differ_and_learn_the_same(levels: tuple[str, str], wide: bool, device: torch.device) -> None:
    ends = []
    for pair in (('O0', 'O0'), levels):
        model = two(device)
        wrappers = OptimWrapperDict(
            generator=amp(pair[0], model.generator, loss_scale=2.0**10, accumulate_in_fp32=wide),
            discriminator=amp(pair[1], model.discriminator, loss_scale=2.0**4, accumulate_in_fp32=wide),
        )
        train(model, wrappers, device)
        found = [(p, fp32_values.master_tensor(p)) for p in model.parameters()]
        ends.append([p.detach().float() if master is None else master.detach() for p, master in found])
        for name, level in zip(('generator', 'discriminator'), pair):
            kinds = {p.dtype for p in getattr(model, name).parameters()}
            assert kinds == {toy.HALF.get(level, torch.float32)}
    for mine, theirs in zip(*ends):
        # without the right scale the two would differ by a factor of 64
        torch.testing.assert_close(mine, theirs, rtol=0, atol=5e-2)


def test_one_joint_loss_and_two_steps(device: torch.device) -> None:
    """Gradients that one wrapper's backward brought are enough for another one's step."""
    ends = []
    for scale in (1.0, 256.0):
        model = two(device)
        wrappers = OptimWrapperDict(
            a=amp('O0', model.generator, loss_scale=scale, skip_nonfinite=True), b=amp('O0', model.discriminator)
        )
        with wrappers['a'].optim_context(model):
            loss = model.discriminator(model.generator(batch(device))).square().mean()
        wrappers['a'].backward(loss)
        for wrapper in wrappers.values():
            wrapper.step()
            wrapper.zero_grad()
        ends.append([p.detach().clone() for p in model.parameters()])
    assert differences(*ends) == []
    assert not torch.equal(ends[0][-1], two(device).discriminator[-1].bias)


@pytest.mark.parametrize('level', ['O1', 'O2', 'O5'])
def test_the_scale_that_overflowed_learns(level: str, device: torch.device) -> None:
    """The generator's loss overflows in the discriminator's parameters: both skip, and only the generator's scale falls."""
    model = two(device)
    scale = dict(init_scale=2.0**8)
    wrappers = OptimWrapperDict(
        generator=amp(level, model.generator, loss_scale=scale),
        discriminator=amp(level, model.discriminator, loss_scale=scale),
    )
    wrappers.initialize_count_status(model, 0, 10)
    handle = model.discriminator[-1].weight.register_hook(lambda grad: torch.full_like(grad, float('inf')))
    start = [p.detach().clone() for p in model.parameters()]
    with wrappers['generator'].optim_context(model.generator):
        loss = model.discriminator(model.generator(batch(device))).float().square().mean()
    wrappers['generator'].update_params(loss)
    handle.remove()
    # the turn of the other one, with gradients of its own that are finite
    with wrappers['discriminator'].optim_context(model.discriminator):
        loss = model.discriminator(batch(device)).float().square().mean()
    wrappers['discriminator'].update_params(loss)
    assert differences(start, [p.detach().to(s.dtype) for p, s in zip(model.parameters(), start)]) == []
    assert [w.loss_scaler.counts.tolist()[:2] for w in wrappers.values()] == [[1, 1], [1, 1]]
    assert [w.loss_scaler.get_scale() for w in wrappers.values()] == [2.0**7, 2.0**8]
    # and afterwards both go on
    train(model, wrappers, device)
    assert [w.loss_scaler.counts.tolist() for w in wrappers.values()] == [[5, 1, 0], [5, 1, 0]]


@pytest.mark.parametrize('overflow', [False, True])
@pytest.mark.parametrize('wide', [False, True])
def test_what_another_loss_brought_goes_into_files(wide: bool, overflow: bool, device: torch.device) -> None:
    """A discriminator that is never frozen holds gradients of the generator's loss at the end of each iteration."""

    def fresh() -> tuple[Two, OptimWrapperDict]:
        model = two(device)
        scale = dict(init_scale=2.0**8)
        return model, OptimWrapperDict(
            generator=amp('O2', model.generator, loss_scale=scale, accumulate_in_fp32=wide),
            discriminator=amp('O2', model.discriminator, loss_scale=scale, accumulate_in_fp32=wide),
        )

    model, wrappers = fresh()
    train(model, wrappers, device, factor=float('inf') if overflow else 1.0)
    # nothing that a hook would have to wait for
    assert not any(wrapper.in_window for wrapper in wrappers.values())
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(wrappers.state_dict())
    assert state['discriminator']['amp']['window']['foreign_found_inf'] == float(overflow)
    other, resumed = fresh()
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    for pair in ((model, wrappers), (other, resumed)):
        train(*pair, device)
    assert differences(model.state_dict(), other.state_dict()) == []
    assert differences(wrappers.state_dict(), resumed.state_dict()) == []


def test_an_overflow_never_reaches_a_wrapper_that_does_not_look(device: torch.device) -> None:
    model = two(device)
    wrappers = OptimWrapperDict(
        generator=amp('O0', model.generator, loss_scale='dynamic'), discriminator=OptimWrapper(sgd(model.discriminator))
    )
    handle = model.discriminator[-1].weight.register_hook(lambda grad: grad * float('inf'))
    with wrappers['generator'].optim_context(model):
        loss = model.discriminator(model.generator(batch(device))).square().mean()
    wrappers['generator'].update_params(loss)
    handle.remove()
    assert wrappers['generator'].loss_scaler.counts.tolist()[:2] == [1, 1]
    wrappers['discriminator'].step()
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_several_losses_of_one_wrapper(device: torch.device) -> None:
    """A member that unscales on arrival takes what others bring as well."""
    ends = []
    for losses in (1, 2):
        model = two(device)
        wrappers = OptimWrapperDict(
            generator=amp('O0', model.generator, loss_scale=64.0),
            discriminator=amp('O0', model.discriminator, loss_scale=16.0, num_losses=losses),
        )
        train(model, wrappers, device)
        ends.append([p.detach().clone() for p in model.parameters()])
    assert differences(*ends) == []


def test_an_exception_in_backward_leaves_gradients_of_others_alone(device: torch.device) -> None:
    model = two(device)
    wrappers = OptimWrapperDict(a=amp('O2', model.generator), b=amp('O2', model.discriminator))
    with wrappers['b'].optim_context(model):
        loss = model.discriminator(batch(device)).sum()
    wrappers['b'].backward(loss)
    before = [p.grad.clone() for p in model.discriminator.parameters()]

    def fail(grad: Tensor) -> Tensor:
        raise RuntimeError('in the middle')

    with wrappers['a'].optim_context(model):
        hidden = model.generator(batch(device))
        hidden.register_hook(fail)
        loss = model.discriminator(hidden).sum()
    with pytest.raises(RuntimeError, match='in the middle'):
        wrappers['a'].backward(loss)
    assert differences(before, [p.grad for p in model.discriminator.parameters()]) == []
    wrappers['b'].step()


@pytest.mark.parametrize('level', ['O0', 'O1', 'O2', 'O3', 'O5'])
def test_a_part_that_two_optimizers_step(level: str, device: torch.device) -> None:
    """One weight, one master: each update starts from the other's, and nothing is rounded in between."""
    model = two(device)
    wrappers = OptimWrapperDict(
        a=amp(level, model.trunk, model.generator, momentum=0),
        b=amp(level, model.trunk, model.discriminator, momentum=0),
    )
    wrappers.initialize_count_status(model, 0, 10)
    weight = model.trunk.weight
    master = fp32_values.master_tensor(weight)
    if level in ('O2', 'O5'):
        assert master is not None
        for wrapper in wrappers.values():
            assert any(p is master for p in wrapper.master_params())
    stepped = weight if master is None else master
    for step in range(3):
        for wrapper, head in ((wrappers['a'], model.generator), (wrappers['b'], model.discriminator)):
            before = stepped.detach().clone()
            with wrapper.optim_context(model):
                loss = head(model.trunk(batch(device, step))).float().square().mean()
            wrapper.backward(loss)
            scale = wrapper.loss_scaler.get_scale()
            grad = weight.grad.float() / scale
            wrapper.step()
            wrapper.zero_grad()
            if level != 'O3':
                torch.testing.assert_close(stepped, before - 0.25 * grad, rtol=0, atol=1e-7)
            assert weight.equal(stepped.to(weight.dtype))
    assert not before.equal(stepped)
    saved = model.state_dict()
    assert saved['trunk.weight'].equal(stepped.detach().float())
    for wrapper in wrappers.values():
        wrapper.detach()
    assert model.trunk.weight.dtype == torch.float32 and model.trunk.weight.equal(stepped.float())
    for wrapper in wrappers.values():
        assert any(p is model.trunk.weight for g in wrapper.optimizer.param_groups for p in g['params'])


def test_shared_parts_that_cannot_be_shared(device: torch.device) -> None:
    for first, second in (('O2', 'O5'), ('O2', 'O1'), ('O0', 'O2'), ('O2', 'O3'), ('O2', None)):
        model = two(device)
        one = amp(first, model.trunk, model.generator)
        parts = (model.trunk, model.discriminator)
        other = OptimWrapper(sgd(*parts)) if second is None else amp(second, *parts)
        with pytest.raises(AmpAttachError, match='stepped by two optimizers'):
            OptimWrapperDict(a=one, b=other)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    # two open accumulations would mix two scales in one gradient
    model = two(device)
    wrappers = OptimWrapperDict(
        a=amp('O2', model.trunk, model.generator), b=amp('O2', model.trunk, model.discriminator)
    )
    losses = []
    for wrapper, head in ((wrappers['a'], model.generator), (wrappers['b'], model.discriminator)):
        with wrapper.optim_context(model):
            losses.append(head(model.trunk(batch(device))).float().mean())
    wrappers['a'].backward(losses[0])
    before = model.trunk.weight.grad.clone()
    with pytest.raises(AmpUsageError, match='steps the same parameters'):
        wrappers['b'].backward(losses[1])
    assert model.trunk.weight.grad.equal(before)
    wrappers['a'].step()
    wrappers['a'].zero_grad()
    wrappers['b'].backward(losses[1])


def test_wrappers_log_under_their_names(device: torch.device, tmp_path: Any) -> None:
    hub = MessageHub.get_instance(f'members{tmp_path.name}')
    model = two(device)
    wrappers = OptimWrapperDict(
        g=amp('O2', model.generator, clip_grad=dict(max_norm=1.0)), d=amp('O1', model.discriminator)
    )
    for wrapper in wrappers.values():
        wrapper.device_log._hub = hub
    train_names = dict(discriminator='d', generator='g')
    for name, member in train_names.items():
        with wrappers[member].optim_context(model):
            images = model.generator(batch(device))
            loss = model.discriminator(images.detach() if member == 'd' else images).float().mean()
        if name == 'discriminator':
            loss = loss * float('inf')
        with toy.captured_log() as lines:
            wrappers[member].update_params(loss)
        if name == 'discriminator':
            assert any(
                'amp: d: non-finite gradients, as is usual until a dynamic loss scale fits' in line for line in lines
            )
    assert {'train/g_amp_scale', 'train/g_grad_norm', 'train/d_amp_scale', 'train/d_amp_skipped'} <= set(
        hub.log_scalars
    )
    assert hub.get_scalar('train/d_amp_skipped').current() == 1
    # of which no step was skipped
    assert 'train/g_amp_skipped' not in hub.log_scalars
    with toy.captured_log() as lines:
        wrappers.load_state_dict(wrappers.state_dict())
    assert any(line.startswith('amp: g: ') for line in lines) and any(line.startswith('amp: d: ') for line in lines)


def test_losses_that_flow_through_each_other_find_their_scales(device: torch.device) -> None:
    """Each brings the other what is too large for float16: both scales have to fall, not wait for one another."""
    model = two(device)
    wrappers = OptimWrapperDict(
        **{
            name: AmpOptimWrapper(
                opt_level='O2', verbosity=0, optimizer=torch.optim.SGD(getattr(model, name).parameters(), lr=1e-6)
            )
            for name in ('generator', 'discriminator')
        }
    )
    wrappers.initialize_count_status(model, 0, 100)
    for step in range(40):
        for wrapper in wrappers.values():
            with wrapper.optim_context(model):
                loss = model.discriminator(model.generator(batch(device, step))).float().square().mean() * 100
            wrapper.update_params(loss)
    for wrapper in wrappers.values():
        steps, skips, streak = wrapper.loss_scaler.counts.tolist()
        assert steps == 40 and skips < 25 and streak == 0, (steps, skips, streak)
        assert wrapper.loss_scaler.get_scale() < 2.0**14


@pytest.mark.parametrize('losses', [1, 2])
@pytest.mark.parametrize('wide', [False, True])
@pytest.mark.parametrize('level', ['O0', 'O1', 'O2', 'O5'])
def test_gradients_that_arrive_where_others_wait_are_added(
    level: str, wide: bool, losses: int, device: torch.device
) -> None:
    """Against autograd's own sum in float64, with three losses on three scales; the second one overflows nowhere."""
    model = two(device)
    words = dict(num_losses=losses, accumulate_in_fp32=wide and losses == 1, momentum=0)
    wrappers = OptimWrapperDict(
        g=amp('O0', model.generator, loss_scale=64.0),
        d=amp(level, model.discriminator, loss_scale=16.0, accumulative_counts=3, **words),
    )
    wrappers.initialize_count_status(model, 0, 300)
    exact = [torch.zeros_like(p, dtype=torch.float64) for p in model.discriminator.parameters()]
    start = [p.detach().double() for p in wrappers['d'].master_params()]
    for step, name in enumerate(('d', 'g', 'g', 'd')):
        wrapper = wrappers[name]
        with wrapper.optim_context(model):
            out = model.discriminator(model.generator(batch(device, step)))
        with wrapper.optim_context(model):
            again = model.discriminator(model.generator(batch(device, step))).float().square().mean()
        alone = torch.autograd.grad(again, list(model.discriminator.parameters()))
        for total, part in zip(exact, alone):
            total += part.double()
        wrapper.backward(out.float().square().mean())
        if name == 'g':
            wrapper.step()
            wrapper.zero_grad()
            # put back what the step moved: only the sums are of interest
            model.generator.load_state_dict(two(device).generator.state_dict())
    wrappers['d'].step()
    half = level in ('O2', 'O5')
    unit = {'O0': 2.0**-23, 'O1': 2.0**-10, 'O2': 2.0**-10, 'O5': 2.0**-7}[level]
    for before, after, total in zip(start, wrappers['d'].master_params(), exact):
        moved = (before - after.detach().double()) / 0.25
        size = total.abs().max() + 1e-3
        assert float((moved - total).abs().max()) <= 8 * unit * float(size) * (1 if half else 2), (level, wide, losses)


def test_sparse_and_dense_gradients_meet(device: torch.device) -> None:
    """A tied embedding that gets rows first and a dense gradient afterwards, and the other way round."""
    for first in ('rows', 'dense'):
        table = nn.Embedding(6, 4, sparse=True).to(device)
        layer = nn.Linear(4, 4).to(device)
        wrappers = OptimWrapperDict(a=amp('O0', table, momentum=0), b=amp('O0', layer, loss_scale=8.0))
        start = table.weight.detach().clone()
        expected = torch.zeros_like(start)
        for kind in ('rows', 'dense') if first == 'rows' else ('dense', 'rows'):
            with wrappers['b'].optim_context(layer):
                rows = table(torch.tensor([1, 1, 2], device=device)) if kind == 'rows' else table.weight
                loss = rows.sum() + layer.weight.sum()
            wrappers['b'].backward(loss)
            if kind == 'rows':
                expected[1] += 2
                expected[2] += 1
            else:
                expected += 1
        wrappers['b'].step()
        wrappers['a'].step()
        torch.testing.assert_close(table.weight, start - 0.25 * expected, rtol=0, atol=1e-6)


def test_a_parameter_of_two_others_is_converted_once_or_refused(device: torch.device) -> None:
    for scale in (1.0, 16.0):
        model = two(device)
        wrappers = OptimWrapperDict(
            a=amp('O0', model.trunk, model.generator, loss_scale=scale),
            b=amp('O0', model.trunk, model.discriminator, loss_scale=scale),
            c=amp('O0', nn.Linear(1, 1).to(device), loss_scale=1.0),
        )
        loss = model.trunk(batch(device)).square().sum()
        alone = torch.autograd.grad(loss, model.trunk.weight, retain_graph=True)[0]
        if scale == 1.0:
            wrappers['c'].backward(loss)
            assert model.trunk.weight.grad.equal(alone)
        else:
            with pytest.raises(AmpUsageError, match='that two other wrappers step'):
                wrappers['c'].backward(loss)
            assert model.trunk.weight.grad is None


def test_a_sibling_that_waits_elsewhere_does_not_stop_the_shared_part(device: torch.device) -> None:
    """Two turns of b in a row, whose loss flows through a's own part: a waits there, and not on the shared trunk."""
    model = two(device)
    wrappers = OptimWrapperDict(
        a=amp('O2', model.trunk, model.generator, loss_scale=8.0),
        b=amp('O2', model.trunk, model.discriminator, loss_scale=8.0),
    )
    wrappers.initialize_count_status(model, 0, 10)
    for step in range(2):
        with wrappers['b'].optim_context(model):
            loss = model.discriminator(model.generator(model.trunk(batch(device, step)))).float().mean()
        wrappers['b'].update_params(loss)
    assert wrappers['b'].loss_scaler.counts.tolist()[:2] == [2, 0]


def test_a_weight_given_to_a_second_optimizer_later_keeps_its_master(device: torch.device) -> None:
    model = two(device)
    wrappers = OptimWrapperDict(a=amp('O2', model.generator), b=amp('O2', model.discriminator))
    wrappers.initialize_count_status(model, 0, 10)
    weight = model.generator[0].weight
    wrappers['b'].optimizer.add_param_group(dict(params=[weight]))
    master = fp32_values.master_tensor(weight)
    assert any(p is master for p in wrappers['b'].master_params())
    assert fp32_values.master_tensor(weight) is master


def test_gradients_cleared_by_the_model_take_their_flag_along(device: torch.device) -> None:
    model = two(device)
    wrappers = OptimWrapperDict(
        g=amp('O2', model.generator, loss_scale=8.0), d=amp('O2', model.discriminator, loss_scale=8.0)
    )
    wrappers.initialize_count_status(model, 0, 10)
    with wrappers['g'].optim_context(model):
        loss = model.discriminator(model.generator(batch(device))).float().mean() * float('inf')
    wrappers['g'].update_params(loss)
    model.discriminator.zero_grad()
    with wrappers['d'].optim_context(model):
        loss = model.discriminator(batch(device)).float().mean()
    wrappers['d'].update_params(loss)
    assert wrappers['d'].loss_scaler.counts.tolist()[:2] == [1, 0]


def test_a_wrapper_without_a_scale_beside_float16_is_told(device: torch.device) -> None:
    model = two(device)
    for level, words, told in (('O0', {}, True), ('O5', {}, True), ('O0', dict(loss_scale='dynamic'), False)):
        with toy.captured_log() as lines:
            OptimWrapperDict(g=amp(level, model.generator, **words), d=amp('O2', model.discriminator))
        assert any('g has no loss scale' in line and 'through d' in line for line in lines) == told


def test_a_deep_copy_of_an_attached_wrapper_is_refused(device: torch.device) -> None:
    model = two(device)
    wrapper = amp('O2', model)
    assert copy.deepcopy(wrapper).opt_level == 'O2'
    wrapper.attach(model)
    with pytest.raises(AmpUsageError, match='deep copy of an attached wrapper'):
        copy.deepcopy((model, wrapper))
    copied = copy.deepcopy(model)
    assert copied.trunk.weight.dtype == torch.float32
    assert copied.trunk.weight.equal(fp32_values.master_tensor(model.trunk.weight))

"""What may be set at DistributedDataParallel, put into or around it, changed after the start, or is refused."""

from __future__ import annotations

import copy
import logging
import os
import pickle
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from mmengine.model import MMDistributedDataParallel, MMSeparateDistributedDataParallel
from mmengine.optim import OptimWrapperDict
from mmengine.registry import MODEL_WRAPPERS
from nets import (
    DOORS,
    HALF,
    LEVELS,
    Door,
    Exact,
    Layers,
    Net,
    Training,
    backward,
    batch,
    differs,
    dyadic,
    fp32,
    gather,
    grads,
    optim_wrapper,
    same_on_all_ranks,
    step,
    wrapped,
)
from on_ranks import Here, on_ranks
from pairs import pairs
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from amp_wrapper import AmpAttachError, AmpUsageError, FusedSGD, amp
from amp_wrapper.engine.ddp import Notice

HOOKS = {
    'average': default_hooks.allreduce_hook,
    'in 16-bit': default_hooks.fp16_compress_hook,
    'wrapped': default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
}


@pairs(level=LEVELS, hook=HOOKS)
@on_ranks()
def test_communication_hooks_survive_the_cast(here: Here, level: str, hook: str) -> None:
    """They see buckets of the type of the weights."""
    types: set[torch.dtype] = set()
    training = Training(here, level)

    def spy(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        types.add(bucket.buffer().dtype)
        return HOOKS[hook](None, bucket)

    # DDP reads annotations as objects, and here they are strings
    spy.__annotations__.clear()
    training.model.register_comm_hook(None, spy)
    for passes in ('a', 'la', 'a1', 'a'):
        training.update(passes)
        training.check(passes)
    # BatchNorm's weight stays FP32, in a bucket of its own, but for O3
    kept = {torch.float32} if level != 'O3' else set()
    assert types == {HALF.get(level, torch.float32)} | kept


class Counting(MMDistributedDataParallel):
    """A class of a user: a module and a buffer of its own, another forward pass, a hook."""

    def __init__(self, **words: Any) -> None:
        super().__init__(**words)
        self.extra, self.calls = nn.Linear(2, 2), 0
        self.register_buffer('seen', torch.zeros(()))
        self.register_forward_pre_hook(lambda module, args: setattr(self, 'calls', self.calls + 1))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen += 1
        return super().forward(*args, **kwargs)


@on_ranks()
def test_a_subclass_of_ddp_keeps_what_it_has(here: Here) -> None:
    model = wrapped(here, Layers(), Counting, static_graph=True, bucket_cap_mb=1.0)
    extra = model.eval().extra
    model.module.train()
    wrapper = optim_wrapper(model.module.parameters(), 'O2')
    for number in range(3):
        step(wrapper, model, batch(here, number))
        same_on_all_ranks(here, fp32(model).values(), f'{number}')
    assert (model.extra, model.calls, float(model.seen), model.static_graph) == (extra, 3, 3, True)
    assert (model.training, model.module.training, model.bucket_bytes_cap) == (False, True, 2**20)


@on_ranks()
def test_ddp_around_a_part_of_the_model(here: Here) -> None:
    model = nn.Sequential(wrapped(here, Layers()))
    wrapper = optim_wrapper(model.parameters(), 'O2')
    backward(wrapper, model, batch(here, 1))
    same_on_all_ranks(here, grads(model), 'gradients')


class Wrapper(nn.Module):
    """No DDP: whether it averages nobody knows."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def _mixed(here: Here) -> tuple[nn.Module, ...]:
    model = wrapped(here, Layers(side=True))
    # what the argument mixed_precision leaves there; torch takes it on GPUs alone
    model.mixed_precision = object()
    return (model,)


def _foreign(here: Here) -> tuple[nn.Module, ...]:
    if 'Wrapper' not in MODEL_WRAPPERS:
        MODEL_WRAPPERS.register_module(name='Wrapper', module=Wrapper)
    return (Wrapper(Layers(side=True).to(here.device)),)


def _inner(here: Here) -> tuple[nn.Module, ...]:
    ddp = wrapped(here, Layers(side=True))
    return ddp.module, ddp


REFUSED = {
    'with mixed_precision or delayed': _mixed,
    'is no DistributedDataParallel': _foreign,
    'hand over the wrapped model': _inner,
}


@pairs(text=REFUSED, level=('O2', 'O3', 'O5'))
@on_ranks()
def test_wrappers_that_would_stop_averaging_are_refused(here: Here, text: str, level: str) -> None:
    model, *_around = REFUSED[text](here)
    wrapper = optim_wrapper(model.parameters(), level)
    with pytest.raises(AmpAttachError, match=text), wrapper.optim_context(model):
        pass
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pairs(level=('O1', 'O2', 'O5'), inside=(False, True))
@on_ranks()
def test_initialize_refuses_a_model_that_ddp_has_wrapped(here: Here, level: str, inside: bool) -> None:
    net = Exact().to(here.device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    ddp = wrapped(here, net)
    if inside and level == 'O1':
        # nothing is cast below DDP
        amp.initialize(net, optimizer, opt_level=level, verbosity=0)
        return
    with pytest.raises(AmpAttachError, match='DistributedDataParallel'):
        amp.initialize(net if inside else ddp, optimizer, opt_level=level, verbosity=0)
    assert net.fc.weight.dtype is torch.float32


@on_ranks()
def test_a_wrapper_that_says_it_survives_the_cast_is_taken(here: Here) -> None:
    (model,) = _foreign(here)
    model.survives_cast = True
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad.div_(here.world)))
    wrapper = optim_wrapper(model.parameters(), 'O2')
    wrapper.attach(model)
    with wrapper.optim_context(model):
        loss = model.module(batch(here, 0), side=True)
    wrapper.backward(loss)
    same_on_all_ranks(here, grads(model), 'gradients')


@pairs(level=('O1', 'O4'))
@on_ranks()
def test_what_is_unfrozen_before_the_level_is_attached_is_averaged(here: Here, level: str) -> None:
    net = Layers()
    net.first.requires_grad_(False)
    model = wrapped(here, net)
    net.first.requires_grad_(True)
    wrapper = optim_wrapper(net.parameters(), level)
    wrapper.attach(model)
    backward(wrapper, model, batch(here, 0), side=True)
    same_on_all_ranks(here, grads(net), 'gradients')


@pairs(level=('O2', 'O5'), unused=(False, True), late=(False, True))
@on_ranks()
def test_parameters_that_are_unfrozen_are_averaged(here: Here, level: str, unused: bool, late: bool) -> None:
    """Frozen when DDP wraps, or between that and the first call; known to the optimizer from the start or late."""
    net = Layers()
    net.first.requires_grad_(False)
    model = wrapped(here, net, find_unused_parameters=unused)
    net.again.requires_grad_(False)
    wrapper = optim_wrapper([p for p in net.parameters() if p.requires_grad or not late], level)
    wrapper.attach(model)
    known = set() if late else {'first', 'again', 'side'}
    plan = [(), (), ('first',), ('first', 'again'), ('first', 'again', 'side')]
    # frozen again by turns
    plan += [('side',), ('first',), (), ('first', 'again')]
    for number, trained in enumerate(plan):
        for name in ('first', 'again', 'side'):
            getattr(net, name).requires_grad_(name in trained)
            if name in trained and name not in known:
                known.add(name)
                wrapper.optimizer.add_param_group(dict(params=list(getattr(net, name).parameters())))
        start = fp32(net)
        backward(wrapper, model, batch(here, number), side=True)
        same_on_all_ranks(here, grads(net), f'gradients {number}')
        wrapper.step()
        wrapper.zero_grad()
        moved = {name for name, value in fp32(net).items() if not value.equal(start[name])}
        wanted = {name for name in start if name.split('.')[0] in ('norm', 'middle', 'last', *trained)}
        assert moved == wanted, number
        same_on_all_ranks(here, fp32(net).values(), f'weights {number}')


@pairs(unused=(False, True), change=('freezes', 'unfreezes'))
@on_ranks()
def test_change_of_requires_grad_in_an_accumulation(here: Here, unused: bool, change: str) -> None:
    """It is refused where gradients would stay on their ranks, and done where they are averaged."""
    net = Layers()
    net.first.requires_grad_(change == 'freezes')
    model = wrapped(here, net, find_unused_parameters=unused)
    wrapper = optim_wrapper(net.parameters(), 'O2', accumulative_counts=2)
    with model.no_sync():
        backward(wrapper, model, batch(here, 0))
    net.first.requires_grad_(change == 'unfreezes')
    if unused and change == 'freezes':
        # it counts as unused
        backward(wrapper, model, batch(here, 1))
    elif unused or change == 'freezes':
        with pytest.raises(AmpUsageError, match='in the middle of an accumulation'):
            backward(wrapper, model, batch(here, 1))
        wrapper.zero_grad()
        backward(wrapper, model, batch(here, 1))
        same_on_all_ranks(here, grads(net), 'gradients')
    else:
        backward(wrapper, model, batch(here, 1))
        same_on_all_ranks(here, grads(net), 'gradients')


@on_ranks()
def test_module_that_is_added_later_starts_alike_and_is_averaged(here: Here) -> None:
    net = Layers()
    model = wrapped(here, net)
    wrapper = optim_wrapper(net.parameters(), 'O1')
    step(wrapper, model, batch(here, 0))
    torch.manual_seed(here.rank)
    net.side = nn.Linear(8, 3).to(here.device)
    assert differs(here, list(net.side.parameters()))
    wrapper.optimizer.add_param_group(dict(params=list(net.side.parameters())))
    for number in range(2):
        step(wrapper, model, batch(here, number), side=True)
        same_on_all_ranks(here, fp32(net).values(), f'{number}')


@pytest.mark.parametrize('where', ['_ddp_init_helper', 'register_comm_hook'])
@on_ranks()
def test_reducer_that_cannot_be_rebuilt_leaves_the_old_one(here: Here, where: str) -> None:
    """As after a collective that ran out of time: once the change is taken back, training goes on."""
    net = Layers()
    net.first.requires_grad_(False)
    model = wrapped(here, net, Counting)
    model.eval()
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    wrapper = optim_wrapper(net.parameters(), 'O1')
    step(wrapper, model, batch(here, 0))
    net.first.requires_grad_(True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DistributedDataParallel, where, fails)
        with pytest.raises(TimeoutError):
            step(wrapper, model, batch(here, 1))
    for trained in (False, True):
        net.first.requires_grad_(trained)
        start = fp32(net)
        step(wrapper, model, batch(here, 2))
        same_on_all_ranks(here, fp32(net).values(), f'{trained}')
        assert (not fp32(net)['first.weight'].equal(start['first.weight'])) == trained
    assert (model.calls, model.training, len(model._comm_hooks)) == (3, False, 1)


def fails(*args: Any, **words: Any) -> None:
    raise TimeoutError


@pytest.mark.parametrize('when', ['at the cast', 'in an accumulation'])
@on_ranks()
def test_whole_model_that_is_frozen_meanwhile(here: Here, when: str) -> None:
    """DDP refuses to be built around it, and gradients that wait stay."""
    net = Layers(side=True)
    model = wrapped(here, net)
    waits = when == 'in an accumulation'
    wrapper = optim_wrapper(net.parameters(), 'O2', accumulative_counts=1 + waits)
    if waits:
        with model.no_sync():
            backward(wrapper, model, batch(here, 0), side=True)
    net.requires_grad_(False)
    with wrapper.optim_context(model):
        model(batch(here, 1), side=True)
    net.requires_grad_(True)
    backward(wrapper, model, batch(here, 2), side=True)
    same_on_all_ranks(here, grads(net), 'gradients')


def waits_for_nothing(ids: Iterable[int]) -> bool:
    return False


@pairs(level=('O1', 'O2', 'O5'), door=DOORS)
@on_ranks()
def test_forward_call_decides_whether_gradients_are_averaged(here: Here, level: str, door: str) -> None:
    """mmengine leaves no_sync before it calls backward."""
    training = Training(here, level, door)

    def call_locally(x: Tensor) -> Tensor:
        with training.model.no_sync():
            return training.model(x)

    for number in range(2):
        training.backward(dyadic(here, 1), call=call_locally)
        training.indices += [1]
        training.one_pass(2)
        training.step_both()
        training.check(f'{number}')


@pairs(level=('O2', 'O5'), fp32_sums=(False, True))
@on_ranks()
def test_call_under_no_sync_before_the_pass_that_averages(here: Here, level: str, fp32_sums: bool) -> None:
    """DDP averages all the same, so what waits has to go through it."""
    training = Training(here, level, accumulate_in_fp32=fp32_sums)

    def call_twice(x: Tensor) -> Tensor:
        loss = training.model(x)
        with training.model.no_sync():
            return loss + training.model(dyadic(here, 3))

    for number in range(2):
        training.one_pass(1, averages=False)
        training.backward(dyadic(here, 2), call=call_twice)
        training.indices += [2, 3]
        training.step_both()
        training.check(f'{number}')


@on_ranks()
def test_parameters_that_no_ddp_averages_are_named(here: Here) -> None:
    net = Layers(side=True).to(here.device)
    net.last = wrapped(here, net.last)
    with mock.patch.object(logging.getLogger('amp_wrapper'), 'warning') as warning:
        wrapper = optim_wrapper(net.parameters(), 'O1', verbosity=1)
        step(wrapper, net, batch(here, 0), side=True)
        step(wrapper, net, batch(here, 1), side=True)
    said = [call.args[0] for call in warning.call_args_list]
    (line,) = (line for line in said if 'no DistributedDataParallel averages' in line)
    assert 'first.weight' in line and 'last.module' not in line


@on_ranks()
def test_copied_models_know_nothing_of_the_ddp(here: Here) -> None:
    training = Training(here, 'O1', 'amp')
    with training.model.no_sync():
        training.backward(dyadic(here, 0))
    for copied in (copy.deepcopy(training.net), pickle.loads(pickle.dumps(training.net))):
        (notice,) = (hook for hook in copied._forward_pre_hooks.values() if isinstance(hook, Notice))
        assert notice.ddp is None


@pairs(level=LEVELS, recompute=('', 'plain', 'reentrant'))
@on_ranks()
def test_tied_weights_and_recomputed_activations(here: Here, level: str, recompute: str) -> None:
    net = Layers(tied=True, recompute=recompute)
    model = wrapped(here, net, static_graph=recompute == 'reentrant')
    wrapper = optim_wrapper(model.parameters(), level)
    for number in range(3):
        # the first layer gives its input gradients, which the old kind of checkpoint asks for
        step(wrapper, model, batch(here, number))
        same_on_all_ranks(here, fp32(net).values(), f'{number}')
    assert net.again.weight is net.middle.weight
    assert differs(here, [batch(here, 0)])


class Pair(nn.Module):
    """A generator and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.g = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.d = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor, use: str) -> Tensor:
        for name in use:
            x = getattr(self, name)(x)
        return x


GAN_LEVELS = {'O2 O5': ('O2', 'O5'), 'O5 O0': ('O5', 'O0'), 'O1 O2': ('O1', 'O2'), 'O2 O2': ('O2', 'O2')}


@pairs(levels=GAN_LEVELS, freezes=(True, False))
@on_ranks()
def test_networks_of_a_gan_have_wrappers_and_ddps_of_their_own(here: Here, levels: str, freezes: bool) -> None:
    """Losses of the generator reach the discriminator, which is frozen meanwhile or not."""
    model = MMSeparateDistributedDataParallel(Pair().to(here.device), find_unused_parameters=not freezes)
    net = model.module
    wrappers = OptimWrapperDict(
        g=optim_wrapper(net.g.parameters(), GAN_LEVELS[levels][0], loss_scale=2.0**10, accumulative_counts=2),
        d=optim_wrapper(net.d.parameters(), GAN_LEVELS[levels][1]),
    )
    wrappers.initialize_count_status(model, 0, 100)
    for number in range(6):
        x = batch(here, number)
        with wrappers['d'].optim_context(net.d):
            with torch.no_grad():
                fake = net.g(x)
            losses = F.softplus(-net.d(x)).mean(), F.softplus(net.d(fake)).mean()
        wrappers['d'].update_params(losses[0] + losses[1])
        net.d.requires_grad_(not freezes)
        with wrappers['g'].optim_context(net.g):
            loss = F.softplus(-net.d(net.g(x))).mean()
        wrappers['g'].update_params(loss)
        net.d.requires_grad_(True)
        same_on_all_ranks(here, fp32(net).values(), f'{number}')
    for name, level in zip(('g', 'd'), GAN_LEVELS[levels]):
        assert {p.dtype for p in getattr(net, name).parameters()} == {HALF.get(level, torch.float32)}


@pairs(level=('O0', 'O1', 'O2', 'O5'), counts=(1, 2), crossing=(False, True))
@on_ranks()
def test_two_wrappers_take_turns_over_one_ddp(here: Here, level: str, counts: int, crossing: bool) -> None:
    """One accumulates; the loss of the other goes through both parts, or through its own."""
    net = Pair()
    model = wrapped(here, net, find_unused_parameters=True)
    wrappers = OptimWrapperDict(
        g=optim_wrapper(net.g.parameters(), level, accumulative_counts=counts),
        d=optim_wrapper(net.d.parameters(), level),
    )
    wrappers.initialize_count_status(model, 0, 100)
    for number in range(4):
        for name, use in (('g', 'g'), ('d', 'gd' if crossing else 'd')):
            loss = step(wrappers[name], model, batch(here, number), use=use)
        same_on_all_ranks(here, fp32(net).values(), f'{number}')
    assert differs(here, [loss])


@pairs(
    level=('O2', 'O5'),
    door=('amp', 'wrapper before DDP'),
    where=('whole', 'part'),
    layout=('contiguous_format', 'channels_last'),
)
@on_ranks()
def test_ranks_that_start_unlike_get_the_unrounded_weights_of_the_first(
    here: Here, level: str, door: str, where: str, layout: str
) -> None:
    """A DDP that is made after the cast, as in scripts for apex, gives the other ranks the rounded ones."""
    torch.manual_seed(here.rank)
    body = nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 3))
    model = nn.Sequential(body).to(here.device, memory_format=getattr(torch, layout))
    started = [gather(here, parameter)[0] for parameter in model.parameters()]
    training = Door(here, model, FusedSGD(model.parameters(), lr=0.0), level, door, {} if where == 'whole' else None)
    if where == 'part':
        model[0] = DistributedDataParallel(body, broadcast_buffers=False)

    def run(seed: int) -> None:
        images = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(seed))
        training.backward(images.to(here.device), call=lambda x: training.model(x).float().square().mean())

    if here.rank == 0:
        # a pass of one rank alone, as tools make it that count operations, makes it wait for nobody
        with (training.model if where == 'whole' else model[0]).no_sync():
            run(0)
        training.optimizer.zero_grad()
    dist.barrier()
    for number in range(3):
        run(10 * number + here.rank)
        with mock.patch.object(dist, 'broadcast', wraps=dist.broadcast) as sent:
            training.step()
        assert sent.called == (number == 0)
        masters = training.optimizer.param_groups[0]['params']
        assert number or all(map(torch.equal, masters, started))
        same_on_all_ranks(here, [*masters, *model.parameters()], f'step {number}')
        training.optimizer.param_groups[0]['lr'] = 0.1


@pairs(level=LEVELS, door=('wrapper', 'amp'), passes=(1, 2), broadcasts=(False, True))
@on_ranks()
def test_skipped_step_restores_buffers(here: Here, level: str, door: str, passes: int, broadcasts: bool) -> None:
    """On every rank, whatever DDP does with them; the batch of one rank has NaN."""
    torch.manual_seed(here.rank)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).to(here.device)
    options = dict(skip_nonfinite=True) if door == 'wrapper' else {}
    ddp, scale = dict(broadcast_buffers=broadcasts), dict(init_scale=8.0)
    training = Door(
        here, model, torch.optim.SGD(model.parameters(), lr=0.1), level, door, ddp, loss_scale=scale, **options
    )
    for number in range(4):
        before = [buffer.clone() for buffer in model.buffers()]
        for part in range(passes):
            inputs = batch(here, 10 * number + part)
            if number % 2 and part == 0 and here.rank == 1:
                inputs[0, 0] = torch.nan
            # a script that adds up without no_sync: buffers are broadcast in the middle of an accumulation
            training.backward(inputs, call=lambda x: training.model(x).float().square().mean())
        training.step()
        if broadcasts:
            # from the broadcast before the first pass on
            before = [gather(here, buffer)[0] for buffer in before]
        assert all(map(torch.equal, before, model.buffers())) == (number % 2 == 1), number


def _on_two_of_three(here: Here) -> None:
    """Ranks 1 and 2 train, in groups of their own."""
    groups = [dist.new_group([1, 2]) for _ in range(2)]
    if here.rank == 0:
        return
    parts = nn.ModuleList(DistributedDataParallel(nn.Linear(6, 6).to(here.device), process_group=g) for g in groups)
    wrapper = optim_wrapper(parts.parameters(), 'O2', loss_scale='dynamic')
    for number in range(3):
        with wrapper.optim_context(parts):
            out = parts[1](parts[0](batch(here, number)))
        wrapper.update_params(out.float().square().mean() * (float('inf') if (number, here.rank) == (1, 1) else 1))
        assert wrapper.step_was_skipped() == (number == 1)
    assert [part.process_group for part in parts] == groups


def test_flags_are_exchanged_in_the_groups_of_the_ddps(ranks_of: Any, tmp_path: Any) -> None:
    """And in no other: the rank that does not train never answers."""
    ranks_of(3).run(tmp_path, _on_two_of_three)


@on_ranks()
def test_one_rank_tells_of_a_skipped_step(here: Here) -> None:
    training = Training(here, 'O2', 'amp', verbosity=1, loss_scale=8.0)
    training.update('a')
    outputs = [os.dup(number) for number in (1, 2)]
    path = here.folder / f'said{here.rank}'
    with path.open('w') as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        for _ in range(2):
            training.update('a0')
    for number, output in zip((1, 2), outputs):
        os.dup2(output, number)
    assert path.read_text().count('step skipped') == (2 if here.rank == 0 else 0)


@pytest.mark.parametrize(('level', 'way'), [('O5', 'inside'), ('O1', 'around'), ('O5', 'function')])
@on_ranks()
def test_compiled_models_under_ddp_follow_eager_training(here: Here, level: str, way: str) -> None:
    """With an accumulation, and a step that NaN on one rank skips on both."""
    torch.use_deterministic_algorithms(False)
    found, words = [], dict(backend='aot_eager')
    for compiles in (False, True):
        net = Net().to(here.device)
        del net.blocks[1]
        training = Door(here, net, torch.optim.SGD(net.parameters(), lr=0.05), level, ddp={}, loss_scale=64.0)
        ddp = training.model
        call = ddp
        if compiles:
            calls = dict(around=ddp, function=lambda x, ddp=ddp: ddp(x) * 1)
            if way == 'inside':
                net.compile(**words)
            else:
                call = torch.compile(calls[way], **words)
        for number, passes in enumerate((1, 1, 2)):
            for part in range(passes):
                x = batch(here, 10 * number + part)
                if number == 1 and here.rank == 1:
                    x[0, 0] = torch.nan
                with ddp.no_sync() if part + 1 < passes else nullcontext():
                    training.backward(x, call=call)
            assert training.step() == (number == 1)
        assert torch.isfinite(net.bn.running_mean).all()
        same_on_all_ranks(here, net.parameters(), way)
        found.append(fp32(net))
        torch.compiler.reset()
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=0.02, atol=0.01, msg=name)

"""The levels over FSDP2 (``fully_shard``), held against DistributedDataParallel and against one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from bits import differences
from mmengine.optim import OptimWrapperDict
from nets import HALF, LEVELS, Block, Door, Net, batch, mesh_of, optim_wrapper, same_on_all_ranks, step, whole, wrapped
from on_ranks import Here, on_ranks
from pairs import pairs
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import amp_wrapper
from amp_wrapper import AmpOptimWrapper, AmpUsageError, FusedAdamW, FusedSGD, MMFullyShard, OverflowStreakError, amp

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    'AdamW': lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-4),
    'FusedAdamW': lambda parameters: FusedAdamW(parameters, lr=0.01, eps=1e-4),
    'FusedSGD': lambda parameters: FusedSGD(parameters, lr=0.1, momentum=0.9),
}
#: At O3, gradients below float16's normal numbers are rounded before or after the division by the number of ranks.
EXACT = ('O0', 'O1', 'O2', 'O4', 'O5')


class Run(Door):
    """A training of :class:`Net`.

    Args:
        here: This rank.
        level: The opt level.
        how: 'ddp', or how the model is sharded: by 'mesh' of ``amp.initialize``, by ``fully_shard`` 'before' it, or before the
            'wrapper'. 'ddp wrapper' is DDP below a wrapper.
        optimizer: Of :data:`OPTIMIZERS`.
        sharding: For ``fully_shard``.
        recompute: Whether activations are computed again.
        options: For ``amp.initialize`` or the wrapper.
    """

    def __init__(
        self,
        here: Here,
        level: str,
        how: str,
        optimizer: str = 'FusedAdamW',
        sharding: Any = None,
        recompute: bool = False,
        **options: Any,
    ) -> None:
        net = Net(recompute).to(here.device)
        # no overflow at the first step
        options = {'loss_scale': dict(init_scale=1024.0) if level in ('O1', 'O2') else None, **options}
        if how in ('before', 'wrapper'):
            amp_wrapper.fully_shard(net, level, mesh=mesh_of(here), **(sharding or {}))
        elif how == 'mesh':
            options |= dict(mesh=mesh_of(here), sharding=sharding)
        door, ddp = 'wrapper' if how.endswith('wrapper') else 'amp', {} if 'ddp' in how else None
        super().__init__(here, net, OPTIMIZERS[optimizer](net.parameters()), level, door, ddp, **options)
        self.losses: list[Tensor] = []
        self.skips: list[bool] = []

    def one_pass(self, number: int, bad: bool = False, loss_id: int = 0) -> None:
        self.losses.append(self.backward(batch(self.here, number) * (math.inf if bad else 1.0), loss_id=loss_id))

    def train(self, numbers: range, bad: tuple[int, int] | None = None) -> None:
        """Some steps; the number of one and a rank may be ``bad``: the batch is infinite there."""
        for number in numbers:
            self.one_pass(number, bad == (number, self.here.rank))
            self.skips.append(self.step())

    def result(self) -> dict[str, Any]:
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group['params']]
        state = [dict(self.optimizer.state.get(parameter, {})) for parameter in parameters]
        return whole(dict(weights=dict(self.net.state_dict()), state=state, losses=self.losses, skips=self.skips))


VARIANTS: dict[str, dict[str, Any]] = {
    'plain': {},
    'recomputed': dict(recompute=True),
    'evaluated': {},
    'offload': dict(sharding=dict(offload=True)),
    'blocks': dict(sharding=dict(blocks=['Linear'])),
    'gathered': dict(sharding=dict(reshard_after_forward=False)),
}


@pairs(level=EXACT, how=('mesh', 'before', 'wrapper'), optimizer=OPTIMIZERS, variant=VARIANTS)
@on_ranks()
def test_sharded_training_equals_ddp(here: Here, level: str, how: str, optimizer: str, variant: str) -> None:
    """Weights, moments, buffers and losses, over a step that an overflow of one rank skips: sums over two are the same sums."""
    found, bad = [], None if level == 'O0' else (1, 1)
    for way in ('ddp wrapper' if how == 'wrapper' else 'ddp', how):
        options = {} if 'ddp' in way and 'sharding' in VARIANTS[variant] else VARIANTS[variant]
        run = Run(here, level, way, optimizer, **options)
        for number in range(4):
            run.train(range(number, number + 1), bad)
            if variant == 'evaluated':
                # weights that it has gathered are gathered anew after the step
                run.one_pass(10 + number)
                run.model.eval()
                with torch.no_grad():
                    run.losses.append(run.model(batch(here, 20)))
                run.model.train()
                run.step()
        found.append(run.result())
    parameters = list(run.net.parameters())
    assert all(isinstance(parameter, DTensor) and parameter.dtype is torch.float32 for parameter in parameters)
    masters = run.wrapper.master_params() if run.wrapper else amp.master_params(run.optimizer)
    # nothing is kept twice
    assert set(map(id, masters)) == set(map(id, parameters))
    assert found[0]['skips'] == [False, level != 'O0', False, False]
    assert differences(*found, any_nan=True) == []


@pairs(level=('O3', 'O5'))
@on_ranks()
def test_16bit_shards_are_close_to_ddp(here: Here, level: str) -> None:
    """Without masters; gradients are rounded in another order."""
    options = dict(master_weights=False) if level == 'O5' else {}
    found = []
    for how in ('mesh', 'ddp'):
        run = Run(here, level, how, 'FusedSGD', **options)
        run.train(range(4))
        found.append(run.result()['weights'])
    half = HALF[level]
    unit = 2.0**-10 if level == 'O3' else 2.0**-7
    assert sum(p.dtype is half for p in run.net.parameters()) > 8
    for name, value in found[0].items():
        torch.testing.assert_close(value.float(), found[1][name].float(), rtol=8 * unit, atol=8 * unit, msg=name)


class Seen(nn.Linear):
    """A layer that notes the types that it is called with."""

    def forward(self, x: Tensor) -> Tensor:
        self.types = {x.dtype, self.weight.dtype, self.bias.dtype}
        return super().forward(x)


@pairs(level=LEVELS, keep=('', 'second', 'Seen'))
@on_ranks()
def test_modules_compute_in_the_types_of_the_level(here: Here, level: str, keep: str) -> None:
    """In training and in evaluation; outputs are FP32."""
    net: Any = nn.Sequential()
    net.first, net.second = Seen(4, 5), Seen(5, 3)
    keeps = dict(keep_fp32=[keep]) if keep and level in ('O2', 'O5') else {}
    optimizer = FusedAdamW(net.to(here.device).parameters())
    amp.initialize(net, optimizer, opt_level=level, mesh=mesh_of(here), verbosity=0, **keeps)
    half = {HALF.get(level, torch.float32)}
    for training in (True, False):
        net.train(training)
        assert net(torch.ones(2, 4, device=here.device)).dtype is torch.float32
        if level in HALF or level == 'O0':
            assert net.first.types == ({torch.float32} if keeps and keep == 'Seen' else half)
            assert net.second.types == ({torch.float32} if keeps else half)


CLIPS: dict[str, dict[str, Any]] = {
    'norm': dict(max_norm=0.5),
    'largest': dict(max_norm=0.05, norm_type='inf'),
    'sum': dict(max_norm=1.0, norm_type=1),
    'value': dict(type='value', clip_value=0.01),
    'raises': dict(max_norm=0.5, error_if_nonfinite=True),
    'above': dict(max_norm=100.0),
}


@pairs(level=('O0', 'O2', 'O5'), optimizer=('AdamW', 'FusedSGD'), clip=CLIPS)
@on_ranks()
def test_gradients_are_clipped_by_the_norm_over_all_shards(here: Here, level: str, optimizer: str, clip: str) -> None:
    """Within rounding of DDP's."""
    found = []
    for how in ('wrapper', 'ddp wrapper'):
        run = Run(here, level, how, optimizer, clip_grad=CLIPS[clip])
        run.train(range(1))
        run.wrapper.device_log.flush()
        norms = [] if clip == 'value' else [float(run.wrapper.message_hub.get_scalar('train/grad_norm').current())]
        run.train(range(1, 2))
        found.append((norms, run.result()['weights']))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    for name, value in found[0][1].items():
        torch.testing.assert_close(value, found[1][1][name], rtol=1e-3, atol=1e-4, msg=name)


@pairs(optimizer=('AdamW', 'FusedAdamW'), rank=(0, 1))
@on_ranks()
def test_errors_about_overflows_are_the_same_on_all_ranks(here: Here, optimizer: str, rank: int) -> None:
    run = Run(here, 'O5', 'wrapper', optimizer, clip_grad=dict(max_norm=1.0, error_if_nonfinite=True))
    with pytest.raises(RuntimeError, match='non-finite'):
        run.train(range(1), bad=(0, rank))
    run = Run(here, 'O2', 'wrapper', optimizer, max_consecutive_skips=1)
    with pytest.raises(OverflowStreakError, match=r'stem\.weight') as error:
        run.train(range(1), bad=(0, rank))
    text = torch.tensor(bytearray(str(error.value).encode()), dtype=torch.uint8)
    same_on_all_ranks(here, [text.to(here.device)], 'the error')


@pairs(level=('O0', 'O2', 'O5'), optimizer=('AdamW', 'FusedAdamW'), row=(0, 3))
@on_ranks()
def test_an_overflow_in_the_shard_of_one_rank_counts_on_all(here: Here, level: str, optimizer: str, row: int) -> None:
    """The step is skipped everywhere, and NaN is not lost in a maximum over ranks."""
    for clip in (None, dict(max_norm=0.1, norm_type='inf', error_if_nonfinite=True)):
        net: Any = amp_wrapper.fully_shard(nn.Linear(3, 4).to(here.device), level, mesh=mesh_of(here))
        options = dict(clip_grad=clip, skip_nonfinite=True, loss_scale=8.0)
        door = Door(here, net, OPTIMIZERS[optimizer](net.parameters()), level, 'wrapper', **options)
        mask = torch.ones(2, 4, device=here.device)
        mask[:, row] = math.nan
        door.backward(torch.ones(2, 3, device=here.device), call=lambda x, net=net, mask=mask: (net(x) * mask).sum())
        if clip is None:
            assert door.step()
        else:
            with pytest.raises(RuntimeError, match='non-finite'):
                door.step()


def _gradients(here: Here, level: str, how: str, last: bool = False, losses: int = 1) -> Tensor:
    """Gradients of three passes, unscaled, whole, in one vector."""
    run = Run(here, level, how, 'FusedSGD', num_losses=losses)
    for number in range(3):
        if last:
            run.net.set_requires_gradient_sync(number == 2)
        run.one_pass(number, loss_id=number % losses)
    grads = [parameter.grad for parameter in amp.master_params(run.optimizer)]
    return torch.cat([whole(grad).double().flatten() for grad in grads])


@pairs(level=('O0', 'O2', 'O4', 'O5'), way=('each', 'each of two losses', 'the last'))
@on_ranks()
def test_sums_of_gradients_are_as_exact_as_those_of_ddp(here: Here, level: str, way: str) -> None:
    """Against FP32: each pass is averaged and added in FP32, or the last one averages all."""
    if level == 'O2':
        with pytest.raises(AmpUsageError, match='loss 1 while FSDP2 keeps'):
            _gradients(here, level, 'before', last=True, losses=2)
    exact = _gradients(here, 'O0', 'ddp')
    bound = 1.25 * float((_gradients(here, level, 'ddp') - exact).norm()) + 2.0**-20 * float(exact.norm())
    last, losses = way == 'the last', 2 if 'two' in way else 1
    assert float((_gradients(here, level, 'mesh', last, losses) - exact).norm()) <= bound


@pairs(level=('O0', 'O5'))
@on_ranks()
def test_no_sync_adds_up_in_fp32(here: Here, level: str) -> None:
    """Of sixteen micro-batches, unless another type is asked for."""
    found = {}
    for name, words in (('each', {}), ('last', dict(no_sync=True)), ('bf16', dict(no_sync=True, reduce_dtype='bf16'))):
        model = MMFullyShard(Net().to(here.device), **words)
        optimizer = FusedSGD(model.parameters(), lr=0.0)
        wrapper = AmpOptimWrapper(
            optimizer=optimizer, opt_level=level, accumulative_counts=16, loss_scale=64.0, verbosity=0
        )
        model.shard(amp_wrapper.resolve(level), [optimizer])
        wrapper.initialize_count_status(model, 0, 16)
        for number in range(16):
            with wrapper.optim_context(model):
                loss = model(batch(here, number))
            wrapper.backward(wrapper.scale_loss(loss))
        found[name] = torch.cat([whole(p.grad).double().flatten() for p in model.parameters()])
    error, coarse = (float((found[name] - found['each']).norm() / found['each'].norm()) for name in ('last', 'bf16'))
    assert error <= (2.0**-7 if level in HALF else 2.0**-16)
    assert level != 'O5' or error < 0.5 * coarse


GROUPS: dict[str, tuple[dict[str, Any], str]] = {
    'default': ({}, 'blocks.0 blocks.1 blocks.0.bn blocks.1.bn bn'),
    'BatchNorm as the rest': (dict(keep_batchnorm_fp32=False), 'blocks.0 blocks.1'),
    'all blocks at once': (dict(blocks='blocks'), 'blocks blocks.0.bn blocks.1.bn bn'),
    'kept parts': (dict(blocks=Block, keep_fp32=['head', 'blocks.1']), 'blocks.0 blocks.1 blocks.0.bn bn head'),
    'by class and name': (dict(blocks=['blocks.1', 'Block']), 'blocks.0 blocks.1 blocks.0.bn blocks.1.bn bn'),
}


@pairs(case=GROUPS)
@on_ranks()
def test_blocks_and_what_stays_fp32_are_gathered_by_themselves(here: Here, case: str) -> None:
    options, expected = GROUPS[case]
    net = amp_wrapper.fully_shard(Net(), 'O5', mesh=mesh_of(here), **options)
    assert {name for name, module in net.named_modules() if isinstance(module, FSDPModule)} == {'', *expected.split()}


@on_ranks()
def test_parametrized_weights_are_gathered_in_fp32(here: Here) -> None:
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)), nn.Linear(3, 2)).to(here.device)
    amp.initialize(net, FusedSGD(net.parameters(), lr=0.1), opt_level='O5', mesh=mesh_of(here), verbosity=0)
    net(batch(here, 0)).sum().backward()
    assert all(isinstance(parameter.grad, DTensor) for parameter in net.parameters())


@on_ranks()
def test_a_model_that_is_nowhere_whole(here: Here) -> None:
    """Sharded on the meta device, then filled: the bits of one that was whole."""
    found = []
    for device in ('meta', str(here.device)):
        with torch.device(device):
            net = Net()
        amp_wrapper.fully_shard(net, 'O5', mesh=mesh_of(here))
        net.to_empty(device=here.device)
        values = Net().to(here.device).state_dict()
        set_model_state_dict(net, values, options=StateDictOptions(full_state_dict=True))
        training = Door(here, net, FusedAdamW(net.parameters(), lr=0.01), 'O5')
        training.backward(batch(here, 0))
        training.step()
        found.append(whole(dict(net.state_dict())))
    assert differences(*found) == []


@pairs(two=(False, True))
@on_ranks()
def test_ranks_begin_with_the_values_of_the_first(here: Here, two: bool) -> None:
    torch.manual_seed(here.rank)
    net: Any = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).to(here.device)
    net[1].running_mean.fill_(here.rank)
    expected = [tensor.detach().clone() for tensor in net.state_dict().values()]
    for tensor in expected:
        torch.distributed.broadcast(tensor, 0)
    amp_wrapper.fully_shard(net, 'O5', mesh=mesh_of(here, 2, 1) if two else mesh_of(here))
    assert all(map(torch.equal, whole(list(net.state_dict().values())), expected))


@on_ranks()
def test_two_wrappers_step_parts_of_one_sharded_model(here: Here) -> None:
    found = []
    for sharded in (True, False):
        net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)).to(here.device)
        with torch.no_grad():
            for index, parameter in enumerate(net.parameters()):
                parameter.copy_(torch.linspace(-1 - index, 1, parameter.numel()).view_as(parameter))
        if sharded:
            amp_wrapper.fully_shard(net, 'O5', mesh=mesh_of(here))
        model = net if sharded else wrapped(here, net)
        wrappers = OptimWrapperDict(
            **{name: optim_wrapper(net[i].parameters(), 'O5', FusedSGD) for i, name in enumerate('gd')}
        )
        wrappers.initialize_count_status(model, 0, 100)
        for number in range(4):
            step(wrappers['gd'[number % 2]], model, batch(here, number))
            for wrapper in wrappers.values():
                wrapper.zero_grad()
        found.append(whole(dict(net.state_dict())))
    assert differences(*found) == []


@pairs(level=('O0', 'O2', 'O5'))
@on_ranks()
def test_a_sharded_average_equals_that_of_ddp(here: Here, level: str) -> None:
    found = []
    for how in ('mesh', 'ddp'):
        average = AveragedModel(Net().to(here.device), multi_avg_fn=get_ema_multi_avg_fn(0.9))
        if how == 'mesh':
            amp_wrapper.fully_shard(average.module, 'O0', mesh=mesh_of(here))
        run = Run(here, level, how)
        for number in range(4):
            run.train(range(number, number + 1))
            average.update_parameters(run.net)
        average.eval()
        found.append(whole(dict(average.module.state_dict(), out=average(batch(here, 9)).detach())))
    assert differences(*found) == []


@pairs(level=('O0', 'O2', 'O5'), optimizer=('AdamW', 'FusedAdamW'), done=(1, 2))
@on_ranks()
def test_an_open_accumulation_is_saved(here: Here, level: str, optimizer: str, done: int) -> None:
    """Gradients of shards are averages, so they are in the state of the wrapper."""
    runs = [Run(here, level, 'wrapper', optimizer, accumulative_counts=3) for _ in range(2)]
    wrappers: list[Any] = [run.wrapper for run in runs]

    def train(run: int, numbers: range) -> None:
        for number in numbers:
            step(wrappers[run], runs[run].net, batch(here, number))

    train(0, range(3 + done))
    runs[1].net.load_state_dict(runs[0].net.state_dict())
    wrappers[1].load_state_dict(wrappers[0].state_dict())
    for run in range(2):
        train(run, range(3 + done, 9))
    assert differences(runs[0].result(), runs[1].result()) == []


@pairs(level=('O0', 'O2', 'O5'), optimizer=OPTIMIZERS)
@on_ranks()
def test_checkpoints_of_torch_resume_exactly(here: Here, level: str, optimizer: str) -> None:
    """``torch.distributed.checkpoint``, as without this package; BatchNorm's statistics are those of each rank."""
    runs = [Run(here, level, 'mesh', optimizer) for _ in range(2)]
    runs[0].train(range(2), bad=None if level == 'O0' else (0, 1))
    weights, state = get_state_dict(runs[0].net, runs[0].optimizer)
    dcp.save(dict(weights=weights, state=state), checkpoint_id=str(here.folder / 'file'))
    buffers = dict(runs[0].net.named_buffers())
    # torch makes the state that is read into by a step
    weights, state = get_state_dict(runs[1].net, runs[1].optimizer)
    dcp.load(dict(weights=weights, state=state), checkpoint_id=str(here.folder / 'file'))
    set_state_dict(runs[1].net, runs[1].optimizer, model_state_dict=weights, optim_state_dict=state)
    for name, buffer in runs[1].net.named_buffers():
        buffer.copy_(buffers[name])
    for run in runs:
        run.losses, run.skips = [], []
        run.train(range(2, 3))
    assert differences(runs[0].result(), runs[1].result()) == []


@pytest.mark.parametrize(('level', 'blocks'), [('O4', True), ('O5', False)])
@on_ranks()
def test_compiled_sharded_models_follow_eager_training(here: Here, level: str, blocks: bool) -> None:
    found = []
    for compiles in (False, True):
        run = Run(here, level, 'mesh')
        if compiles and blocks:
            for block in run.net.blocks:
                block.compile(backend='aot_eager')
        elif compiles:
            run.model = torch.compile(run.net, backend='aot_eager')
        run.train(range(2))
        found.append(run.result())
        torch.compiler.reset()
    assert torch.allclose(*(torch.stack(each['losses']) for each in found), rtol=2.0**-7)
    for name, value in found[0]['weights'].items():
        torch.testing.assert_close(found[1]['weights'][name], value, rtol=2.0**-7, atol=2.0**-6, msg=name)


def _transformer(here: Here) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(2)]
    return nn.Sequential(nn.Linear(6, 8), *layers, nn.Linear(8, 3)).to(here.device)


@pytest.mark.parametrize(
    ('how', 'level', 'clip'),
    [
        ('tensor', 'O0', 'norm'),
        ('tensor', 'O4', ''),
        ('tensor', 'O5', 'largest'),
        ('repeated', 'O0', 'norm'),
        ('repeated', 'O4', 'largest'),
        ('repeated', 'O5', 'norm'),
        ('sharded', 'O0', 'largest'),
        ('sharded', 'O5', ''),
    ],
)
@on_ranks(world=4)
def test_meshes_of_four_ranks_follow_one_process(here: Here, how: str, level: str, clip: str) -> None:
    """Sharded and repeated (2 x 2), sharded alone, and tensor parallel below FSDP2; each element counts once in a norm."""
    grid = mesh_of(here, 2, 2)
    ranks, net = range(here.world), _transformer(here)
    mine = here.rank
    if how == 'tensor':
        # half as many batches as ranks
        ranks, mine = range(2), grid['replicate'].get_local_rank()
        half = HALF.get(level)
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
        for layer in net[1:3]:
            parallelize_module(layer, grid['shard'], {'1': ColwiseParallel(), '3': RowwiseParallel()})
        for module in (*net[1:3], net):
            fully_shard(module, mesh=grid['replicate'], mp_policy=policy)
    else:
        mesh = grid if how == 'repeated' else mesh_of(here)
        amp_wrapper.fully_shard(net, level, mesh=mesh, reduce_dtype='float32')
    found = []
    for model, parts in ((net, [mine]), (_transformer(here), list(ranks))):
        clips = dict(clip_grad=dict(CLIPS[clip], max_norm=0.05)) if clip else {}
        wrapper = AmpOptimWrapper(
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5), opt_level=level, verbosity=0, **clips
        )
        norms: list[float] = []
        for number in range(3):
            step(wrapper, model, torch.cat([batch(here, number, rank) for rank in parts]))
            if clip:
                wrapper.device_log.flush()
                norms.append(float(wrapper.message_hub.get_scalar('train/grad_norm').current()))
        found.append(dict(whole(dict(model.state_dict())), norms=torch.tensor(norms)))
    unit = 2.0**-18 if level == 'O0' else 2.0**-7
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=unit, atol=(1 if clip else 4) * unit, msg=name)
    same_on_all_ranks(here, found[0].values(), how)

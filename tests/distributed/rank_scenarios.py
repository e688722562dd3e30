"""What the ranks of ``test_ddp.py`` do: ``python rank_scenarios.py SCENARIO RANK WORLD FOLDER DEVICE [words]``."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault('OMP_NUM_THREADS', '1')
import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ('support', 'system', 'engine')]
from mmengine.model import BaseModel, MMDistributedDataParallel, MMSeparateDistributedDataParallel
from mmengine.optim import OptimWrapper, OptimWrapperDict
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from amp_wrapper import AmpAttachError, AmpOptimWrapper, AmpUsageError, FusedSGD
from amp_wrapper import amp as scripts
from amp_wrapper.casting import fp32_values as twins
from amp_wrapper.checkpoint import amp_part
from amp_wrapper.engine.ddp import rebuild

LEVELS = ('O0', 'O1', 'O2', 'O3', 'O4', 'O5')
HALF = {'O2': torch.float16, 'O3': torch.float16, 'O5': torch.bfloat16}
# one unit of the last place of 1.0, halved: the bound of one rounding to nearest
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SCENARIOS: dict[str, Callable[..., None]] = {}


class Here:
    """This process."""

    def __init__(self, rank: int, world: int, folder: Path, device: torch.device, words: list[str]) -> None:
        self.rank, self.world, self.folder, self.device, self.words = rank, world, folder, device, words


def scenario(function: Callable[..., None]) -> Callable[..., None]:
    SCENARIOS[function.__name__] = function
    return function


# -- pieces ----------------------------------------------------------------------------------------------------------


class Net(BaseModel):
    """No BatchNorm, so that two half batches are the joint batch; a kept FP32 layer; a tied weight if asked for."""

    def __init__(self, tied: bool = False, recompute: str = '') -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.middle = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)
        self.side = nn.Linear(8, 3)
        self.register_buffer('seen', torch.zeros(2))
        if tied:
            self.again = nn.Linear(8, 8)
            self.again.weight = self.middle.weight
        self.tied, self.recompute = tied, recompute

    def body(self, x: Tensor) -> Tensor:
        x = self.middle(self.norm(torch.tanh(x)))
        return self.again(x) if self.tied else x

    def forward(self, inputs: Tensor, factor: float = 1.0, side: bool = False, mode: str = 'loss') -> Any:
        self.seen.add_(0.125)
        x = self.first(inputs)
        x = checkpoint(self.body, x, use_reentrant=self.recompute == 'reentrant') if self.recompute else self.body(x)
        out = self.last(x) + (self.side(x) if side else 0)
        return dict(loss=out.float().square().mean() * factor)


def data(here: Here, step: int, rank: int | None = None) -> Tensor:
    """Eight rows, of which each rank has its part; other data on each rank, and at each step."""
    whole = torch.randn(4 * here.world, 6, generator=torch.Generator().manual_seed(step))
    rank = here.rank if rank is None else rank
    return whole[rank * 4 : rank * 4 + 4].to(here.device)


def wrap(here: Here, model: nn.Module, **settings: Any) -> DistributedDataParallel:
    ids = [here.device.index] if here.device.type == 'cuda' else None
    return MMDistributedDataParallel(
        module=model.to(here.device), device_ids=ids, **{'broadcast_buffers': False, **settings}
    )


def amp(parameters: Any, level: str, lr: float = 0.1, **settings: Any) -> AmpOptimWrapper:
    kind = FusedSGD if 'fused' in sys.argv else torch.optim.SGD
    optimizer = kind(parameters, lr=lr, momentum=settings.pop('momentum', 0.9))
    if 'split' in sys.argv and level in ('O2', 'O5'):
        settings['master_weights'] = 'split'
    settings.setdefault('loss_scale', 1024.0)
    return AmpOptimWrapper(opt_level=level, optimizer=optimizer, **settings)


def same_on_all_ranks(here: Here, tensors: Any, what: str) -> None:
    """Bit for bit."""
    for index, tensor in enumerate(tensors):
        mine = tensor.detach().contiguous().view(-1).view(torch.uint8)
        all_of_them = [torch.empty_like(mine) for _ in range(here.world)]
        dist.all_gather(all_of_them, mine)
        for rank, other in enumerate(all_of_them):
            assert mine.equal(other), f'{what}[{index}] differs between rank {here.rank} and {rank}'


def differs_somewhere(here: Here, tensors: Any) -> bool:
    """Whether any rank holds other bits: equality would prove nothing where all ranks had the same data."""
    flat = torch.cat([tensor.detach().float().view(-1) for tensor in tensors])
    all_of_them = [torch.empty_like(flat) for _ in range(here.world)]
    dist.all_gather(all_of_them, flat)
    return any(not flat.equal(other) for other in all_of_them)


def weights_of(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def masters_of(wrapper: AmpOptimWrapper) -> list[Tensor]:
    return [p.detach().clone() for p in wrapper.master_params()]


def scaler_of(wrapper: AmpOptimWrapper) -> list[Tensor]:
    return [
        torch.tensor([v]) for s in wrapper.loss_scalers for v in s.state_dict().values() if isinstance(v, (int, float))
    ]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}


def gather(here: Here, tensor: Tensor) -> list[Tensor]:
    found = [torch.empty_like(tensor) for _ in range(here.world)]
    dist.all_gather(found, tensor.contiguous())
    return found


def averaged(here: Here, local: dict[str, Tensor]) -> dict[str, Tensor]:
    """DDP's arithmetic: each part divided, rounded, then added up in the type of the gradients. For two ranks."""
    assert here.world == 2
    return {name: sum(part / here.world for part in gather(here, grad)) for name, grad in local.items()}  # type: ignore[misc]


def backward(wrapper: AmpOptimWrapper, model: nn.Module, inputs: Tensor, **words: Any) -> None:
    with wrapper.optim_context(model):
        losses = model(inputs, **words)
    wrapper.backward(wrapper.scale_loss(losses['loss']))


# -- scenarios -------------------------------------------------------------------------------------------------------


def spy(seen: set[torch.dtype], bucket: Any):  # DDP reads annotations as objects, and here they are strings
    """Communication hook: notes the type of each bucket, and averages."""
    seen.add(bucket.buffer().dtype)
    return default_hooks.allreduce_hook(None, bucket)


del spy.__annotations__['seen'], spy.__annotations__['bucket']


@contextmanager
def refused(kind: type[Exception], why: str) -> Iterator[None]:
    """The block must raise ``kind`` with ``why`` in its message."""
    try:
        yield
    except kind as error:
        if why not in str(error):
            raise RuntimeError(f'refused for another reason than {why!r}') from error
    else:
        raise RuntimeError(f'{why!r}: not refused')


SETTINGS: dict[str, dict[str, Any]] = {
    'plain': {},
    'unused': dict(find_unused_parameters=True),
    'static': dict(static_graph=True),
    'views': dict(gradient_as_bucket_view=True),
    'buffers': dict(broadcast_buffers=True),
    'small buckets': dict(bucket_cap_mb=0.0001),
}


@scenario
def averaging(here: Here) -> None:
    """Gradients are the average of the ranks' own, bit for bit, under each setting of DDP, at each level."""
    for level in LEVELS:
        for name, settings in SETTINGS.items():
            model = wrap(here, Net(), **settings)
            if name != 'unused':
                model.module.side.requires_grad_(False)
            # a frozen layer that DDP was made around: it has to be made anew without it
            wrapper = amp(model.parameters(), level)
            before = (id(model), id(model.module), id(model.process_group))
            buckets: set[torch.dtype] = set()

            if name == 'plain':
                # registered before the cast, so the rebuilt reducer must carry it over
                model.register_comm_hook(buckets, spy)
            wrapper.initialize_count_status(model, 0, 100)
            assert before == (id(model), id(model.module), id(model.process_group))
            for key, value in settings.items():
                if key != 'bucket_cap_mb':
                    assert getattr(model, key) == value, (level, name, key)
            assert model.bucket_bytes_cap == int(settings.get('bucket_cap_mb', 25) * 1024 * 1024)
            with torch.no_grad():
                model.module.seen.add_(here.rank)
            for step in range(4):
                with model.no_sync() if name != 'static' else nullcontext():
                    if name != 'static':
                        backward(wrapper, model, data(here, step))
                        local = gradients(model)
                        assert differs_somewhere(here, local.values()), (level, name)
                        wrapper.zero_grad()
                backward(wrapper, model, data(here, step))
                got = gradients(model)
                same_on_all_ranks(here, got.values(), f'{level} {name} gradients')
                if name != 'static':
                    expected = averaged(here, local)
                    assert got.keys() == expected.keys()
                    for key, value in got.items():
                        assert value.equal(expected[key]), (level, name, key, step)
                    kind = HALF.get(level, torch.float32)
                    assert {value.dtype for value in got.values()} == {kind}
                wrapper.step()
                wrapper.zero_grad()
                assert differs_somewhere(here, [model.module.seen]) == (name != 'buffers'), (level, name)
                same_on_all_ranks(here, weights_of(model), f'{level} {name} weights')
                same_on_all_ranks(here, masters_of(wrapper), f'{level} {name} masters')
            if name == 'plain':
                assert buckets == {HALF.get(level, torch.float32)}, (level, buckets)
    print(sorted(SETTINGS))


@scenario
def joint(here: Here) -> None:
    """Two ranks are one process on the joint batch; an overflow of one rank skips the step on both."""
    for level in LEVELS:
        for counts in (1, 3):
            results = []
            for alone in (False, True):
                net = Net()
                net.side.requires_grad_(False)
                model: nn.Module = net.to(here.device) if alone else wrap(here, net)
                wrapper = amp(
                    model.parameters(),
                    level,
                    accumulative_counts=counts,
                    clip_grad=dict(max_norm=10.0),
                    skip_nonfinite=True,
                )
                # five windows and a remainder
                total = 5 * counts + counts // 2
                wrapper.initialize_count_status(model, 0, total)
                for step in range(total):
                    inputs = (
                        torch.cat([data(here, step, rank) for rank in range(here.world)]) if alone else data(here, step)
                    )
                    factor = float('inf') if step == 2 * counts and (alone or here.rank == 1) else 1.0
                    with wrapper.optim_context(model):
                        losses = model(inputs, factor=factor)
                    wrapper.update_params(losses['loss'])
                results.append((masters_of(wrapper), wrapper.loss_scaler.counts.tolist()))
                if not alone:
                    same_on_all_ranks(here, weights_of(model), f'{level} {counts} weights')
                    same_on_all_ranks(here, masters_of(wrapper), f'{level} {counts} masters')
            (masters, count), (expected, count_alone) = results
            assert count == count_alone == [5 + (counts // 2 > 0), 1, 0], (level, counts, count, count_alone)
            unit = ROUNDING[
                HALF.get(level, torch.bfloat16 if level == 'O4' else torch.float16 if level == 'O1' else torch.float32)
            ]
            # each step moves a weight by gradients of norm 10 at most; the ranks round each of them a few times
            for a, b in zip(masters, expected):
                torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=max(40 * unit, 1e-5))


@scenario
def windows(here: Here) -> None:
    """Accumulation, bit for bit in the arithmetic that the page states, and within its bound of the true sum."""
    for level in LEVELS:
        half = HALF.get(level)
        for wide in (False, True):
            for counts, total in ((1, 2), (2, 4), (3, 8), (5, 6)):
                for distributed in (True, False):
                    net = Net()
                    net.side.requires_grad_(False)
                    model: nn.Module = wrap(here, net) if distributed else net.to(here.device)
                    wrapper = amp(
                        model.parameters(),
                        level,
                        lr=0.5,
                        momentum=0,
                        accumulative_counts=counts,
                        accumulate_in_fp32=wide,
                        skip_nonfinite=False,
                        loss_scale=64.0,
                    )
                    wrapper.initialize_count_status(model, 0, total)
                    step = 0
                    while step < total:
                        length = min(counts, total - step)
                        probe = [_local(here, model, wrapper, step + i, length) for i in range(length)]
                        before = masters_of(wrapper)
                        for i in range(length):
                            with wrapper.optim_context(model):
                                losses = model(data(here, step + i))
                            wrapper.update_params(losses['loss'])
                        after = masters_of(wrapper)
                        names = [n for n, p in net.named_parameters() if p.requires_grad]
                        moved = {
                            n: (b.double() - a.double()) / 0.5
                            for n, b, a in zip(dict(net.named_parameters()), before, after)
                        }
                        for name in names:
                            parts = [gradient[name] for gradient in probe]
                            total_grad = _window_sum(here, parts, half, wide, distributed)
                            index = list(dict(net.named_parameters())).index(name)
                            kind = before[index].dtype
                            expected = before[index] - 0.5 * (total_grad.float() / 64).to(kind)
                            got = after[index]
                            assert got.equal(expected.to(kind)), (level, wide, counts, distributed, step, name)
                            # and the bound of the page, against float64
                            ranks = (
                                [torch.stack(gather(here, part)).double() for part in parts]
                                if distributed
                                else [part.double()[None] for part in parts]
                            )
                            true = sum(part.mean(0) for part in ranks)
                            size = sum(part.abs().mean(0) for part in ranks)
                            unit = ROUNDING[half or torch.float32]
                            roundings = (3 if distributed else 1) if wide and half is not None else length + 2
                            error = (total_grad.double() - true).abs()
                            assert bool((error <= roundings * unit * size + 1e-7).all()), (level, wide, counts, name)
                        assert moved
                        step += length
                    if distributed:
                        same_on_all_ranks(here, masters_of(wrapper), f'{level} masters')


def _local(here: Here, model: nn.Module, wrapper: AmpOptimWrapper, step: int, length: int) -> dict[str, Tensor]:
    """The scaled gradient of one micro-batch on this rank, as backward leaves it."""
    net = getattr(model, 'module', model)
    with wrapper._engine.forward_context(net):
        loss = net(data(here, step))['loss']
    ((loss / length).float() * wrapper.loss_scaler.current_scale).backward()
    found = gradients(net)
    for parameter in net.parameters():
        parameter.grad = None
    return found


def _window_sum(here: Here, parts: list[Tensor], half: Any, wide: bool, distributed: bool) -> Tensor:
    """The arithmetic of a window as docs/distributed.md states it."""
    if wide and half is not None:
        if not distributed:
            return torch.stack([part.float() for part in parts]).cumsum(0)[-1] if len(parts) > 1 else parts[0].float()
        carried: Tensor | None = None
        for part in parts[:-1]:
            carried = part.float() if carried is None else carried + part.float()
        last = parts[-1] if carried is None else carried.to(half) + parts[-1]
    else:
        last = parts[0]
        for part in parts[1:]:
            last = last + part
    return averaged(here, {'': last})[''] if distributed else last


@scenario
def overflows(here: Here) -> None:
    """Infinite gradients on one rank, at each micro-batch of a window: one decision, one scale, one message."""
    for level in LEVELS:
        counts = 3
        for wide in (False, True):
            model = wrap(here, Net(), find_unused_parameters=True)
            wrapper = amp(
                model.parameters(),
                level,
                accumulative_counts=counts,
                accumulate_in_fp32=wide,
                skip_nonfinite=True,
                loss_scale=dict(init_scale=256.0, growth_interval=2),
                clip_grad=dict(max_norm=1.0),
                verbosity=0,
            )
            wrapper.initialize_count_status(model, 0, 1000)
            expected_skips = 0
            for update in range(8):
                # update 0 is clean; then rank 0 and rank 1 in turn, at each micro-batch; then clean again
                where = divmod(update - 1, counts) if 1 <= update <= 6 else (None, None)
                before = (weights_of(model), masters_of(wrapper))
                for micro in range(counts):
                    hit = where == (here.rank, micro)
                    with wrapper.optim_context(model):
                        # a layer that only this micro-batch uses, on one rank only
                        losses = model(data(here, micro), factor=float('inf') if hit else 1.0, side=micro == here.rank)
                    wrapper.update_params(losses['loss'])
                expected_skips += where[0] is not None
                assert wrapper.loss_scaler.counts.tolist()[:2] == [update + 1, expected_skips], (level, update)
                changed = any(not a.equal(b) for a, b in zip(before[1], masters_of(wrapper)))
                assert changed == (where[0] is None), (level, update)
                if not changed:
                    assert all(a.equal(b) for a, b in zip(before[0], weights_of(model)))
                same_on_all_ranks(here, scaler_of(wrapper), f'{level} scaler')
                same_on_all_ranks(here, weights_of(model), f'{level} weights')
                same_on_all_ranks(here, masters_of(wrapper), f'{level} masters')
                optimizer_state = [
                    v for s in wrapper.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)
                ]
                same_on_all_ranks(here, optimizer_state, f'{level} momentum')
            # one clean step, six skips, one clean one: the scale has only fallen
            assert wrapper.loss_scaler.get_scale() == 256.0 * 0.5**6, wrapper.loss_scaler.get_scale()


@scenario
def random_overflows(here: Here) -> None:
    """Any sequence of overflows on any rank leaves scale, trackers and counters equal, where gradients are not averaged too."""
    noop = debugging_hooks.noop_hook
    for kind in ('ddp', 'local hook', 'no_sync', 'ignored'):
        for level in ('O1', 'O2', 'O5'):
            net = Net()
            net.side.requires_grad_(kind == 'ignored')
            if kind == 'ignored':
                DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ['side.weight', 'side.bias'])
            model = wrap(here, net)
            if kind == 'local hook':
                model.register_comm_hook(None, noop)
            wrapper = amp(
                model.parameters(),
                level,
                loss_scale=dict(init_scale=2.0**12, growth_interval=3, hysteresis=2),
                verbosity=0,
            )
            wrapper.initialize_count_status(model, 0, 1000)
            # the same generator on all ranks, so that each knows what the others do
            generator = torch.Generator().manual_seed(3)
            skips = 0
            for update in range(20):
                hits = torch.rand(here.world, generator=generator) < 0.3
                hit = bool(hits[here.rank])
                # in a parameter that DDP leaves to its rank, and nowhere else
                handle = None
                if kind == 'ignored':
                    handle = net.side.weight.register_hook(lambda grad, hit=hit: grad * float('inf') if hit else grad)
                with model.no_sync() if kind == 'no_sync' else nullcontext():
                    factor = float('inf') if hit and kind != 'ignored' else 1.0
                    backward(wrapper, model, data(here, update), factor=factor, side=kind == 'ignored')
                if handle is not None:
                    handle.remove()
                wrapper.step()
                wrapper.zero_grad()
                skips += bool(hits.any())
                assert wrapper.loss_scaler.counts.tolist()[:2] == [update + 1, skips], (kind, level, update)
                same_on_all_ranks(here, scaler_of(wrapper), f'{kind} {level} scaler')
            assert 3 < skips < 18


@scenario
def message(here: Here) -> None:
    """The line about a skipped step comes once, not once a rank."""
    model = wrap(here, Net(), find_unused_parameters=True)
    wrapper = amp(model.parameters(), 'O2')
    for _ in range(2):
        backward(wrapper, model, data(here, 0), factor=float('nan'))
        wrapper.step()
        wrapper.zero_grad()


@scenario
def hooks(here: Here) -> None:
    """Communication hooks and DDP classes of users keep working after the cast, or are refused with the reason."""
    for level in ('O0', 'O2', 'O5'):
        known: dict[str, Any] = {
            'allreduce': (None, default_hooks.allreduce_hook),
            'fp16': (None, default_hooks.fp16_compress_hook),
            'wrapped': (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
        }
        if here.device.type == 'cuda':
            # torch allows it over nccl only
            known['bf16'] = (None, default_hooks.bf16_compress_hook)
            # over gloo its callbacks wait for each other at times
            if level == 'O0':
                known['powerSGD'] = (
                    powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2),
                    powerSGD_hook.powerSGD_hook,
                )
        for name, (state, hook) in known.items():
            model = wrap(here, Net(), find_unused_parameters=True)
            model.register_comm_hook(state, hook)
            wrapper = amp(model.parameters(), level)
            for step in range(4):
                backward(wrapper, model, data(here, step))
                got = gradients(model)
                same_on_all_ranks(here, got.values(), f'{level} {name}')
                wrapper.step()
                wrapper.zero_grad()
            assert [entry[0] for entry in model._comm_hooks] == [hook]
        model = wrap(here, Net(), find_unused_parameters=True)
        model._register_builtin_comm_hook(torch._C._distributed_c10d.BuiltinCommHookType.FP16_COMPRESS)
        wrapper = amp(model.parameters(), level)
        wrapper.attach(model)
        assert model._get_ddp_logging_data()['comm_hook'].endswith('FP16_COMPRESS')
        backward(wrapper, model, data(here, 0))
        same_on_all_ranks(here, gradients(model).values(), f'{level} builtin')

    class Mine(MMDistributedDataParallel):
        """A user's own: further modules, buffers and attributes, another forward pass, hooks."""

        def __init__(self, **words: Any) -> None:
            super().__init__(**words)
            self.extra = nn.Linear(2, 2)
            self.register_buffer('seen', torch.zeros(()))
            self.note = 'kept'
            self.calls = 0
            self.register_forward_pre_hook(self.count)

        @staticmethod
        def count(module: Any, args: Any) -> None:
            module.calls += 1

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.seen += 1
            return super().forward(*args, **kwargs)

    net = Net()
    net.side.requires_grad_(False)
    mine = Mine(module=net.to(here.device), device_ids=None, broadcast_buffers=False, static_graph=True)
    extra = mine.extra
    mine.eval()
    mine.module.train()
    wrapper = amp(net.parameters(), 'O2')
    wrapper.attach(mine)
    assert (mine.extra, mine.note, float(mine.seen), mine.training, mine.module.training) == (
        extra,
        'kept',
        0,
        False,
        True,
    )
    assert mine.static_graph
    for step in range(3):
        backward(wrapper, mine, data(here, step))
        same_on_all_ranks(here, gradients(net).values(), 'own class')
        wrapper.step()
        wrapper.zero_grad()
    assert (mine.calls, float(mine.seen)) == (3, 3)
    # detaching gives FP32 buckets back
    wrapper.detach()
    assert {p.dtype for p in mine.parameters()} == {torch.float32}
    plain = OptimWrapper(wrapper.optimizer)
    with plain.optim_context(mine):
        loss = mine(data(here, 7))['loss']
    plain.backward(loss)
    same_on_all_ranks(here, gradients(net).values(), 'after detach')
    assert differs_somewhere(here, [loss])

    # DDP around a part of the model
    class Part(BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.inner = wrap(here, Net(), find_unused_parameters=True)

        def forward(self, inputs: Tensor, mode: str = 'loss') -> Any:
            return self.inner(inputs)

    part = Part()
    wrapper = amp(part.parameters(), 'O2')
    backward(wrapper, part, data(here, 1))
    same_on_all_ranks(here, gradients(part).values(), 'part')

    cases: list[tuple[str, str, Callable[[], Any]]] = []

    def mixed() -> Any:
        from torch.nn.parallel.distributed import _MixedPrecision

        if here.device.type == 'cpu':
            ddp = wrap(here, Net())
            ddp.mixed_precision = _MixedPrecision(param_dtype=torch.float16)
            return ddp
        return wrap(here, Net(), mixed_precision=_MixedPrecision(param_dtype=torch.float16))

    def fused() -> Any:
        ddp = wrap(here, Net())
        ddp._register_fused_optim(torch.optim.SGD, 0.1)
        return ddp

    def foreign() -> Any:
        from mmengine.registry import MODEL_WRAPPERS

        class Unknown(nn.Module):
            def __init__(self, module: nn.Module) -> None:
                super().__init__()
                self.module = module

        if 'Unknown' not in MODEL_WRAPPERS:
            MODEL_WRAPPERS.register_module(name='Unknown', module=Unknown)
        return MODEL_WRAPPERS.get('Unknown')(Net().to(here.device))

    cases += [
        ('O2', 'casts the model itself', mixed),
        ('O2', 'inside its backward', fused),
        ('O1', 'inside its backward', fused),
    ]
    cases += [('O2', 'is no DistributedDataParallel', foreign)]
    for level, why, make in cases:
        model = make()
        wrapper = amp(model.parameters(), level)
        before = [p.dtype for p in model.parameters()]
        with refused(AmpAttachError, why):
            wrapper.attach(model)
        assert [p.dtype for p in model.parameters()] == before
    # one that says it survives, and does
    model = foreign()
    model.survives_cast = True
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad.div_(here.world)))
    wrapper = amp(model.parameters(), 'O2')
    wrapper.attach(model)
    with wrapper.optim_context(model):
        loss = model.module(data(here, 0), side=True)['loss']
    wrapper.backward(loss)
    same_on_all_ranks(here, gradients(model).values(), 'survivor')


@scenario
def changes(here: Here) -> None:
    """Parameters that are frozen, unfrozen, shared, added; recomputed activations: all ranks stay one model."""
    for level in LEVELS:
        for find_unused in (False, True):
            # frozen when DDP wraps, unfrozen in mid-training, frozen again, toggled
            net = Net()
            net.side.requires_grad_(False)
            net.first.requires_grad_(False)
            model = wrap(here, net, find_unused_parameters=find_unused)
            wrapper = amp(model.parameters(), level)
            wrapper.initialize_count_status(model, 0, 100)
            plan = {0: (), 2: ('first',), 4: ('first', 'side'), 6: ('side',), 7: ('first', 'side'), 8: ()}
            open_now: tuple[str, ...] = ()
            for step in range(10):
                open_now = plan.get(step, open_now)
                for name in ('first', 'side'):
                    getattr(net, name).requires_grad_(name in open_now)
                start = masters_of(wrapper)
                backward(wrapper, model, data(here, step), side=True)
                got = gradients(net)
                wanted = {
                    n
                    for n, p in net.named_parameters()
                    if n.split('.')[0] not in ('first', 'side') or n.split('.')[0] in open_now
                }
                assert got.keys() == wanted, (level, step, got.keys() ^ wanted)
                same_on_all_ranks(here, got.values(), f'{level} step {step} gradients')
                wrapper.step()
                wrapper.zero_grad()
                same_on_all_ranks(here, masters_of(wrapper), f'{level} step {step} masters')
                moved = {
                    n for n, a, b in zip(dict(net.named_parameters()), start, masters_of(wrapper)) if not a.equal(b)
                }
                assert moved == wanted, (level, step, moved ^ wanted)
        # frozen between the wrapping and the attachment
        net = Net()
        model = wrap(here, net)
        net.side.requires_grad_(False)
        wrapper = amp(model.parameters(), level)
        for step in range(3):
            backward(wrapper, model, data(here, step))
            same_on_all_ranks(here, gradients(net).values(), f'{level} frozen early')
            wrapper.step()
            wrapper.zero_grad()
        # everything frozen while another part trains: nothing to wait for
        net.requires_grad_(False)
        with wrapper.optim_context(model):
            assert model(data(here, 0))['loss'].isfinite()
        net.last.requires_grad_(True)
        backward(wrapper, model, data(here, 1))
        same_on_all_ranks(here, gradients(net).values(), f'{level} thawed')
        # one weight in two places, and recomputed activations
        for recompute in ('', 'plain', 'reentrant'):
            net = Net(tied=True, recompute=recompute)
            net.side.requires_grad_(False)
            model = wrap(here, net, static_graph=recompute == 'reentrant')
            wrapper = amp(model.parameters(), level)
            for step in range(3):
                backward(wrapper, model, data(here, step))
                assert differs_somewhere(here, [data(here, step)])
                same_on_all_ranks(here, gradients(net).values(), f'{level} tied {recompute}')
                assert net.again.weight is net.middle.weight
                wrapper.step()
                wrapper.zero_grad()
                same_on_all_ranks(here, masters_of(wrapper), f'{level} tied masters')
        # a frozen part that the optimizer gets later
        net = Net()
        net.side.requires_grad_(False)
        model = wrap(here, net)
        wrapper = amp([p for p in net.parameters() if p.requires_grad], level)
        for step in range(4):
            if step == 2:
                net.side.requires_grad_(True)
                wrapper.optimizer.add_param_group(dict(params=list(net.side.parameters())))
            backward(wrapper, model, data(here, step), side=True)
            assert (net.side.weight.grad is not None) == (step >= 2)
            same_on_all_ranks(here, gradients(net).values(), f'{level} part {step}')
            before = net.side.weight.detach().clone()
            wrapper.step()
            wrapper.zero_grad()
            assert net.side.weight.equal(before) == (step < 2)
            same_on_all_ranks(here, masters_of(wrapper), f'{level} part masters')
        # a module that comes later, with other values on each rank
        if level not in HALF:
            net = Net()
            net.side.requires_grad_(False)
            model = wrap(here, net)
            wrapper = amp(model.parameters(), level)
            backward(wrapper, model, data(here, 0))
            wrapper.step()
            wrapper.zero_grad()
            torch.manual_seed(here.rank)
            net.side = nn.Linear(8, 3).to(here.device)
            wrapper.optimizer.add_param_group(dict(params=list(net.side.parameters())))
            backward(wrapper, model, data(here, 1), side=True)
            assert net.side.weight.grad is not None
            same_on_all_ranks(here, gradients(net).values(), f'{level} added')
            wrapper.step()
            wrapper.zero_grad()
            same_on_all_ranks(here, weights_of(net), f'{level} added')


@scenario
def second_losses(here: Here) -> None:
    """Several losses: averaged each, or refused where DDP would keep them apart."""
    for level in ('O0', 'O1', 'O2', 'O5'):
        for views in (False, True):
            net = Net()
            net.side.requires_grad_(False)
            model = wrap(here, net, gradient_as_bucket_view=views)
            wrapper = amp(model.parameters(), level, num_losses=2, loss_scale=256.0, momentum=0, lr=1.0)
            wrapper.attach(model)
            start = masters_of(wrapper)
            local = []
            for step in range(2):
                with wrapper._engine.forward_context(net):
                    loss = net(data(here, step))['loss']
                (loss.float() * 256.0).backward()
                local.append(gradients(net))
                for parameter in net.parameters():
                    parameter.grad = None
            for step in range(2):
                with wrapper.optim_context(model):
                    loss = model(data(here, step))['loss']
                wrapper.backward(loss, loss_id=step)
            wrapper.step()
            wrapper.zero_grad()
            same_on_all_ranks(here, masters_of(wrapper), f'{level} masters')
            for index, (name, parameter) in enumerate(net.named_parameters()):
                if not parameter.requires_grad:
                    continue
                parts = [averaged(here, {name: part[name]})[name].float() for part in local]
                expected = start[index] - (parts[0] / 256.0 + parts[1] / 256.0)
                torch.testing.assert_close(masters_of(wrapper)[index], expected, rtol=1e-6, atol=1e-7)
        # two backward passes through one forward pass
        net = Net()
        net.side.requires_grad_(False)
        model = wrap(here, net)
        wrapper = amp(model.parameters(), level)
        with wrapper.optim_context(model):
            loss = model(data(here, 0))['loss']
        wrapper.backward(loss, retain_graph=True)
        kept = gradients(net)
        with refused(AmpUsageError, 'second backward pass'):
            wrapper.backward(loss * 2)
        assert all(value.equal(kept[name]) for name, value in gradients(net).items())
        wrapper.step()
        # as mmengine calls it: backward after no_sync was left
        model = wrap(here, Net())
        several = amp(model.parameters(), level, num_losses=2, accumulative_counts=2)
        several.initialize_count_status(model, 0, 10)
        with several.optim_context(model):
            loss = model(data(here, 0), side=True)['loss']
        with refused(AmpUsageError, 'under no_sync'):
            several.backward(loss)


class Pair(BaseModel):
    """A generator and a discriminator, trained by turns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.freezes = True

    def train_step(self, inputs: Tensor, wrappers: Any) -> dict[str, Tensor]:
        first, second = wrappers['discriminator'], wrappers['generator']
        with first.optim_context(self.discriminator):
            with torch.no_grad():
                fake = self.generator(inputs)
            real_loss = F.softplus(-self.discriminator(inputs)).mean()
            fake_loss = F.softplus(self.discriminator(fake)).mean()
        # as a user may: one backward pass for the sum of two losses
        first.update_params(real_loss + fake_loss)
        if self.freezes:
            self.discriminator.requires_grad_(False)
        with second.optim_context(self.generator):
            loss = F.softplus(-self.discriminator(self.generator(inputs))).mean()
        second.update_params(loss)
        if self.freezes:
            self.discriminator.requires_grad_(True)
        return dict(loss=loss.detach())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


@scenario
def gan(here: Here) -> None:
    """Wrappers of different levels over the parts of one model, alternating, frozen by turns or not."""
    for pair in (('O2', 'O5'), ('O5', 'O0'), ('O1', 'O2'), ('O0', 'O0'), ('O2', 'O2')):
        for freezes in (True, False):
            model = MMSeparateDistributedDataParallel(Pair().to(here.device), find_unused_parameters=not freezes)
            net = model.module
            net.freezes = freezes
            wrappers = OptimWrapperDict(
                generator=amp(net.generator.parameters(), pair[0], loss_scale=2.0**10, accumulative_counts=2),
                discriminator=amp(net.discriminator.parameters(), pair[1], loss_scale=2.0**6),
            )
            wrappers.initialize_count_status(model, 0, 100)
            for name, level in zip(('generator', 'discriminator'), pair):
                kind = HALF.get(level, torch.float32)
                assert {p.dtype for p in getattr(net, name).parameters()} == {kind}, (pair, name)
            for step in range(5):
                model.train_step(data(here, step), wrappers)
                for wrapper in wrappers.values():
                    if not wrapper.in_window:
                        same_on_all_ranks(here, masters_of(wrapper), f'{pair} {freezes} masters')
            assert differs_somewhere(here, [data(here, 0)])
            # what the generator's loss left in the discriminator is an average, and goes into files on several ranks, too
            window = amp_part(wrappers['discriminator'].state_dict()).get('window')
            assert (window is None) == freezes, (pair, freezes)
            if window is not None:
                same_on_all_ranks(here, window['gradients'], f'{pair} window')
            counts = [wrapper.loss_scaler.counts[0].item() for wrapper in wrappers.values()]
            assert counts == [
                2 if wrappers['generator'].loss_scaler.checks else 0,
                5 if wrappers['discriminator'].loss_scaler.checks else 0,
            ]


@scenario
def averages(here: Here) -> None:
    """The average of the masters is the same on all ranks, and that of an FP32 copy outside."""
    from mmengine.model import ExponentialMovingAverage, MomentumAnnealingEMA, StochasticWeightAverage

    for level in LEVELS:
        for kind in (ExponentialMovingAverage, MomentumAnnealingEMA, StochasticWeightAverage):
            net = Net()
            net.side.requires_grad_(False)
            model = wrap(here, net)
            wrapper = amp(model.parameters(), level)
            average = kind(net, update_buffers=True)
            outside = kind(Net().to(here.device), update_buffers=True)
            for step in range(4):
                backward(wrapper, model, data(here, step))
                wrapper.step()
                wrapper.zero_grad()
                average.update_parameters(net)
                copied = Net().to(here.device)
                with torch.no_grad():
                    copied.seen.copy_(net.seen)
                    for mine, parameter in zip(copied.parameters(), net.parameters()):
                        twin = twins.fp32_twin(parameter)
                        mine.copy_(parameter.float() if twin is None else twin)
                outside.update_parameters(copied)
            same_on_all_ranks(here, average.module.parameters(), f'{level} average')
            assert not average.module.seen.equal(net.seen.float())
            for mine, theirs in zip(average.module.state_dict().values(), outside.module.state_dict().values()):
                assert mine.dtype == torch.float32 and mine.equal(theirs), (level, kind)


class NaiveSyncBatchNorm(nn.BatchNorm1d):
    """Statistics over all ranks in plain torch: torch's own SyncBatchNorm has no CPU kernels."""

    def forward(self, x: Tensor) -> Tensor:
        sums = torch.cat([x.float().mean(0), x.float().square().mean(0)])
        mean, square = (torch.distributed.nn.functional.all_reduce(sums) / dist.get_world_size()).chunk(2)
        y = (x.float() - mean) * (square - mean.square() + self.eps).rsqrt()
        return (y * self.weight + self.bias).to(x.dtype)


@scenario
def sync_batchnorm(here: Here) -> None:
    """BatchNorm over all ranks stays FP32 at the cast levels and takes 16-bit input; two ranks are the joint batch."""

    class Normed(BaseModel):
        def __init__(self, norm: type[nn.Module]) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first = nn.Linear(6, 8)
            self.bn = norm(8)
            self.last = nn.Linear(8, 3)
            self.seen: list[torch.dtype] = []
            self.bn.register_forward_pre_hook(lambda module, args: self.seen.append(args[0].dtype))

        def forward(self, inputs: Tensor, mode: str = 'loss') -> Any:
            return dict(loss=self.last(self.bn(self.first(inputs))).float().square().mean())

    for level in LEVELS:
        ends = []
        kinds = [nn.SyncBatchNorm] if here.device.type == 'cuda' else [NaiveSyncBatchNorm]
        for kind in (*kinds, nn.BatchNorm1d):
            alone = kind is nn.BatchNorm1d
            net = Normed(kind)
            model: nn.Module = net.to(here.device) if alone else wrap(here, net, broadcast_buffers=True)
            wrapper = amp(model.parameters(), level)
            wrapper.initialize_count_status(model, 0, 100)
            kept = torch.float16 if level == 'O3' else torch.float32
            assert net.bn.weight.dtype == net.bn.running_mean.dtype == kept, level
            for step in range(4):
                parts = [data(here, step, rank) for rank in range(here.world)]
                with wrapper.optim_context(model):
                    loss = model(torch.cat(parts) if alone else data(here, step))['loss']
                wrapper.update_params(loss)
            if level in HALF:
                assert set(net.seen) == {HALF[level]}, (level, net.seen)
            ends.append(masters_of(wrapper))
            if not alone:
                same_on_all_ranks(here, masters_of(wrapper), f'{level} masters')
        for mine, theirs in zip(*ends):
            half = level != 'O0'
            torch.testing.assert_close(mine.float(), theirs.float(), rtol=0, atol=5e-2 if half else 1e-4)


@scenario
def buffers(here: Here) -> None:
    """A skipped step gives buffers back on every rank, whatever DDP does with them; the batch of one rank is bad."""

    class Exchanging(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                mean = x.float().mean(0)
                dist.all_reduce(mean)
                self.running_mean.lerp_((mean / here.world).to(self.running_mean), 0.5)
                self.num_batches_tracked += 1
            return F.batch_norm(x, None, None, self.weight.to(x), self.bias.to(x), training=True)

    for broadcasts in (False, True):
        for sync in (False, True):
            kind = nn.BatchNorm1d
            if sync:
                # torch's own exchanges on GPUs alone
                kind = nn.SyncBatchNorm if here.device.type == 'cuda' else Exchanging
            for level in LEVELS:
                for window in (1, 2):
                    torch.manual_seed(here.rank)
                    model = nn.Sequential(nn.Linear(6, 4), kind(4), nn.Linear(4, 3)).to(here.device)
                    ddp = wrap(here, model, broadcast_buffers=broadcasts)
                    wrapper = amp(
                        ddp.parameters(), level, accumulative_counts=window, skip_nonfinite=True, loss_scale=8.0
                    )
                    wrapper.initialize_count_status(ddp, 0, 100)
                    for step in range(4):
                        before = [buffer.clone() for buffer in model.buffers()]
                        for part in range(window):
                            inputs = data(here, 10 * step + part)
                            if step % 2 and part == 0 and here.rank == 1:
                                inputs[0, 0] = torch.nan
                            with wrapper.optim_context(ddp):
                                loss = ddp(inputs).float().square().mean()
                            wrapper.update_params(loss)
                        now = list(model.buffers())
                        if step % 2:
                            assert wrapper.step_was_skipped()
                            if broadcasts:
                                # the first rank's, from the broadcast before the first pass on
                                before = [gather(here, buffer)[0] for buffer in before]
                            assert all(map(torch.equal, before, now)), (level, window, broadcasts, before, now)
                        else:
                            assert not all(map(torch.equal, before, now)), (level, window, broadcasts)
    # a script that adds gradients up without no_sync: buffers are broadcast in the middle of a window
    for level in LEVELS:
        torch.manual_seed(here.rank)
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).to(here.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scripts.initialize(model, optimizer, opt_level=level, loss_scale=dict(init_scale=8.0), verbosity=0)
        ddp = wrap(here, model, broadcast_buffers=True)
        for step in range(4):
            before = [gather(here, buffer)[0] for buffer in model.buffers()]
            weight = model[0].weight.detach().clone()
            for part in range(3):
                inputs = data(here, 10 * step + part)
                if step % 2 and part == 0:
                    inputs[0, 0] = torch.nan
                with scripts.scale_loss(ddp(inputs).float().square().mean(), optimizer) as scaled:
                    scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert torch.equal(weight, model[0].weight) == (step % 2 == 1), level
            assert all(map(torch.equal, before, model.buffers())) == (step % 2 == 1), (level, step, before)


@scenario
def train(here: Here) -> None:
    """A whole run through mmengine: words are the folder, and 'kill' (rank 1 dies in mid-epoch) or 'resume'."""
    import mmengine.runner.runner
    import toy
    from mmengine.hooks import Hook
    from mmengine.registry import HOOKS

    mmengine.runner.runner.collect_env = dict

    @HOOKS.register_module(force=True)
    class KillRankOne(Hook):
        def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
            if dist.get_rank() == 1 and runner.iter == 9:
                os.kill(os.getpid(), signal.SIGKILL)

    folder, words = here.folder / here.words[0], here.words[1:]
    case = toy.everything('O2', max_epochs=4)
    case.update(
        launcher='pytorch',
        model_wrapper_cfg=dict(type='MMDistributedDataParallel', broadcast_buffers=False),
        randomness=dict(seed=0, deterministic=True, diff_rank_seed=True),
        log_level='INFO',
        resume='resume' in words,
    )
    if here.device.type == 'cpu':
        case['model_wrapper_cfg']['device_ids'] = None
    if 'kill' in words:
        case['custom_hooks'] = [*case['custom_hooks'], dict(type='KillRankOne')]
    runner = toy.run(folder, **case)
    assert runner.epoch == 4
    same_on_all_ranks(here, weights_of(runner.model), 'weights')
    same_on_all_ranks(here, masters_of(runner.optim_wrapper), 'masters')
    same_on_all_ranks(here, scaler_of(runner.optim_wrapper), 'scaler')
    if here.rank == 0:
        average = next(hook for hook in runner.hooks if hasattr(hook, 'ema_model')).ema_model.state_dict()
        state = {**{f'ema.{k}': v for k, v in average.items()}, **runner.model.module.state_dict()}
        state['scaler'] = torch.cat([value.double() for value in scaler_of(runner.optim_wrapper)])
        torch.save({key: value.cpu() for key, value in state.items()}, folder / 'end.pt')
    del runner


@scenario
def flexible(here: Here) -> None:
    """mmengine's other runner: DDPStrategy is right, and strategies that shard are refused."""
    import mmengine.runner._flexible_runner
    import toy

    if here.device.type == 'cpu':
        # mmengine sets a CUDA device when it starts processes
        torch.cuda.set_device = lambda device: None
    for level in ('O0', 'O2', 'O5'):
        config = toy.toy_config(
            here.folder / level,
            dict(type='AmpOptimWrapper', opt_level=level, optimizer=dict(type='SGD', lr=0.1), accumulative_counts=2),
        )
        wrapping = dict(type='MMDistributedDataParallel', broadcast_buffers=False)
        if here.device.type == 'cpu':
            wrapping['device_ids'] = None
        config.strategy = dict(type='DDPStrategy', model_wrapper=wrapping)
        config.launcher = 'pytorch'
        config.randomness, config.env_cfg = dict(seed=0), {}
        runner = mmengine.runner._flexible_runner.FlexibleRunner.from_cfg(config)
        runner.train()
        assert {p.dtype for n, p in runner.model.named_parameters() if 'fc' in n} == {HALF.get(level, torch.float32)}
        same_on_all_ranks(here, weights_of(runner.model), f'{level} weights')
        same_on_all_ranks(here, masters_of(runner.optim_wrapper), f'{level} masters')
        del runner
    # mmengine mixes the names of the average up, and would fail at the first checkpoint
    config.custom_hooks = [dict(type='EMAHook')]
    config.experiment_name = 'with_average'
    with refused(AmpUsageError, 'EMAHook under DDPStrategy'):
        mmengine.runner._flexible_runner.FlexibleRunner.from_cfg(config).train()


class Heads(BaseModel):
    """Two parts that one forward pass can use by turns, or both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.g = nn.Linear(6, 6)
        self.d = nn.Linear(6, 6)

    def forward(self, inputs: Tensor, use: str = 'gd', mode: str = 'loss') -> Any:
        x, losses = inputs, {}
        for name in use:
            x = getattr(self, name)(x)
            losses[name] = x.float().square().mean()
        return dict(losses, loss=losses[use[-1]])


@scenario
def turns(here: Here) -> None:
    """Two wrappers over one DDP, frozen by turns; one of them accumulates."""
    for level in ('O0', 'O1', 'O2', 'O5'):
        for find_unused in (False, True):
            for counts in (1, 2):
                net = Heads()
                model = wrap(here, net, find_unused_parameters=find_unused)
                wrappers = OptimWrapperDict(
                    g=amp(net.g.parameters(), level, accumulative_counts=counts), d=amp(net.d.parameters(), level)
                )
                wrappers.initialize_count_status(model, 0, 100)
                # with find_unused_parameters nobody has to freeze
                for step in range(4):
                    for name in ('d', 'g'):
                        for part in ('d', 'g'):
                            getattr(net, part).requires_grad_(part == name or (find_unused and step > 1))
                        with wrappers[name].optim_context(model):
                            loss = model(data(here, step), use=name)['loss']
                        wrappers[name].update_params(loss)
                    same_on_all_ranks(here, wrappers['d'].master_params(), f'{level} {find_unused} {counts} d')
                    if not wrappers['g'].in_window:
                        same_on_all_ranks(here, wrappers['g'].master_params(), f'{level} {find_unused} {counts} g')
                assert differs_somewhere(here, [loss])
        # one loss through both, while the other accumulates
        net = Heads()
        model = wrap(here, net, find_unused_parameters=True)
        wrappers = OptimWrapperDict(
            g=amp(net.g.parameters(), level, accumulative_counts=2), d=amp(net.d.parameters(), level)
        )
        wrappers.initialize_count_status(model, 0, 100)
        for step in range(4):
            for name, use in (('g', 'g'), ('d', 'gd')):
                with wrappers[name].optim_context(model):
                    loss = model(data(here, step), use=use)['loss']
                wrappers[name].update_params(loss)
            same_on_all_ranks(here, wrappers['d'].master_params(), f'{level} crossing d')
            if step % 2:
                same_on_all_ranks(here, wrappers['g'].master_params(), f'{level} crossing g')


@scenario
def refusals(here: Here) -> None:
    """What DDP cannot follow is an error, before anything is lost."""
    for level in ('O0', 'O1', 'O2'):
        for wide in (False, True):
            # frozen and unfrozen in the middle of a window
            for find_unused in (False, True):
                net = Net()
                net.first.requires_grad_(False)
                model = wrap(here, net, find_unused_parameters=find_unused)
                words = dict(accumulative_counts=2, accumulate_in_fp32=wide)
                wrapper = amp(model.parameters(), level, **words)
                wrapper.initialize_count_status(model, 0, 100)
                with wrapper.optim_context(model):
                    loss = model(data(here, 0), side=True)['loss']
                wrapper.update_params(loss)
                assert wrapper.in_window
                if find_unused:
                    net.first.requires_grad_(True)
                else:
                    net.side.requires_grad_(False)
                with refused(AmpUsageError, 'in the middle of an accumulation window'):
                    with wrapper.optim_context(model):
                        raise RuntimeError('not reached')
                net.first.requires_grad_(False)
                net.side.requires_grad_(True)
                with wrapper.optim_context(model):
                    loss = model(data(here, 1), side=True)['loss']
                wrapper.update_params(loss)
                same_on_all_ranks(here, masters_of(wrapper), f'{level} {wide} {find_unused}')
        # several losses of one forward pass, each for a part of it
        net = Heads()
        model = wrap(here, net)
        wrapper = amp(model.parameters(), level, num_losses=2)
        with wrapper.optim_context(model):
            out = model(data(here, 0))
            first = model.module.g.weight.float().sum()
        before = weights_of(model)
        with refused(AmpUsageError, 'reached only some of the parameters'):
            wrapper.backward(first, loss_id=0)
        del out
        assert all(a.equal(b) for a, b in zip(before, weights_of(model)))
        # the reducer is built anew between a forward pass and its backward pass
        net = Heads()
        model = wrap(here, net)
        wrapper = amp(model.parameters(), level)
        with wrapper.optim_context(model):
            loss = model(data(here, 0))['loss']
        net.g.requires_grad_(False)
        with wrapper.optim_context(model), torch.no_grad():
            model(data(here, 1))
        with refused(AmpUsageError, 'built anew in between'):
            wrapper.update_params(loss)
        with wrapper.optim_context(model):
            loss = model(data(here, 0))['loss']
        wrapper.update_params(loss)
        same_on_all_ranks(here, masters_of(wrapper), f'{level} again')
        # two DDP modules of one wrapper, of which one has averaged already
        parts = nn.ModuleList([wrap(here, nn.Linear(6, 6)) for _ in range(2)])
        wrapper = amp(parts.parameters(), level)
        with wrapper.optim_context(parts):
            z = parts[0](data(here, 0))
        wrapper.backward(z.float().square().mean(), retain_graph=True)
        with wrapper.optim_context(parts):
            y = parts[1](z)
        with refused(AmpUsageError, 'second backward pass'):
            wrapper.backward(y.float().square().mean())
        # ranks that take another number of steps
        if level != 'O0':
            model = wrap(here, Heads())
            wrapper = amp(model.parameters(), level)
            wrapper.attach(model)
            model._join_config = model._join_config._replace(enable=True)
            with refused(AmpUsageError, 'join()'):
                with wrapper.optim_context(model):
                    raise RuntimeError('not reached')
    # the model inside a DDP that nobody mentions
    model = wrap(here, Heads())
    for level in ('O2', 'O5'):
        wrapper = amp(model.parameters(), level)
        with refused(AmpAttachError, 'something listens to the gradient'):
            with wrapper.optim_context(model.module):
                raise RuntimeError('not reached')
        assert {p.dtype for p in model.parameters()} == {torch.float32}


@scenario
def disabled(here: Here) -> None:
    """With enabled=False DDP is left as it is: a parameter that is unfrozen later stays on its rank, as in plain torch."""
    net = Net()
    net.side.requires_grad_(False)
    model = wrap(here, net)
    reducer = model.reducer
    wrapper = amp(model.parameters(), 'O2', enabled=False)
    wrapper.initialize_count_status(model, 0, 10)
    for step in range(2):
        net.side.requires_grad_(step == 1)
        backward(wrapper, model, data(here, step), side=True)
        same_on_all_ranks(here, [net.first.weight.grad], 'first')
    assert differs_somewhere(here, [net.side.weight.grad])
    assert model.reducer is reducer and {p.dtype for p in net.parameters()} == {torch.float32}


@scenario
def late_wrapping(here: Here) -> None:
    """A DDP that is made around a model that was attached already is found at its first forward pass."""
    for level in ('O0', 'O2', 'O5'):
        for wide in (False, True):
            net = Heads().to(here.device)
            wrapper = amp(net.parameters(), level, accumulative_counts=2, accumulate_in_fp32=wide)
            wrapper.attach(net)
            model = wrap(here, net)
            for step in range(4):
                with wrapper.optim_context(model):
                    loss = model(data(here, step))['loss']
                wrapper.update_params(loss)
            same_on_all_ranks(here, masters_of(wrapper), f'{level} {wide}')
    # replaced by others of the same number, and of other values on each rank
    for level in ('O0', 'O1'):
        net = Heads()
        model = wrap(here, net)
        wrapper = amp(model.parameters(), level)
        backward(wrapper, model, data(here, 0))
        wrapper.step()
        wrapper.zero_grad()
        torch.manual_seed(here.rank)
        net.d = nn.Linear(6, 6).to(here.device)
        net.d.register_buffer('seen', torch.full((), float(here.rank), device=here.device))
        group = wrapper.optimizer.param_groups[0]
        group['params'] = list(net.parameters())
        for step in range(2):
            backward(wrapper, model, data(here, step))
            same_on_all_ranks(here, gradients(net).values(), f'{level} replaced')
            wrapper.step()
            wrapper.zero_grad()
        same_on_all_ranks(here, [*weights_of(net), net.d.seen], f'{level} replaced')
    # frozen when DDP was made, and exchanged for another of the same size before the first forward pass
    for level in ('O0', 'O1', 'O2'):
        for find_unused in (False, True):
            net = Net()
            net.side.requires_grad_(False)
            model = wrap(here, net, find_unused_parameters=find_unused)
            net.side.requires_grad_(True)
            net.last.requires_grad_(False)
            wrapper = amp(model.parameters(), level)
            for step in range(2):
                backward(wrapper, model, data(here, step), side=True)
                same_on_all_ranks(here, gradients(net).values(), f'{level} {find_unused} exchanged')
                wrapper.step()
                wrapper.zero_grad()


@scenario
def groups(here: Here) -> None:
    """Flags are exchanged in the groups of the DDP modules, and in no other: three ranks, of which two train."""
    first, second = dist.new_group([1, 2]), dist.new_group([1, 2])
    if here.rank > 0:
        parts = nn.ModuleList(
            DistributedDataParallel(nn.Linear(6, 6).to(here.device), process_group=group) for group in (first, second)
        )
        wrapper = amp(parts.parameters(), 'O2', loss_scale='dynamic', verbosity=0)
        for step in range(3):
            with wrapper.optim_context(parts):
                out = parts[1](parts[0](data(here, step)))
            wrapper.update_params(out.float().square().mean() * (float('inf') if (step, here.rank) == (1, 1) else 1))
        assert wrapper.loss_scaler.counts.tolist()[:2] == [3, 1]
        assert [part.process_group for part in parts] == [first, second]
        # what comes later starts from the first rank of the group, which is not the first of the world
        net = Heads()
        model = DistributedDataParallel(net.to(here.device), process_group=first)
        wrapper = amp(model.parameters(), 'O0')
        wrapper.attach(model)
        net.late = nn.Linear(2, 2).to(here.device)
        with torch.no_grad():
            net.late.weight.fill_(float(here.rank))
        wrapper.optimizer.add_param_group(dict(params=list(net.late.parameters())))
        with wrapper.optim_context(model):
            assert model(data(here, 0))['loss'].isfinite()
        assert bool((net.late.weight == 1).all())
    dist.barrier()


@scenario
def local_flags(here: Here) -> None:
    """An overflow that another's loss brought on one rank, under no_sync, counts on all."""
    for level in ('O1', 'O2', 'O5'):
        model = MMSeparateDistributedDataParallel(Heads().to(here.device))
        net = model.module
        scale = dict(init_scale=2.0**8)
        wrappers = OptimWrapperDict(
            g=amp(net.g.parameters(), level, loss_scale=scale, verbosity=0),
            d=amp(net.d.parameters(), level, loss_scale=scale, verbosity=0),
        )
        wrappers.initialize_count_status(model, 0, 100)
        for step in range(3):
            factor = float('inf') if (step, here.rank) == (1, 1) else 1.0
            with net.d.no_sync(), wrappers['g'].optim_context(net.g):
                loss = net.d(net.g(data(here, step))).float().square().mean() * factor
            wrappers['g'].update_params(loss)
            with wrappers['d'].optim_context(net.d):
                loss = net.d(data(here, step)).float().square().mean()
            wrappers['d'].update_params(loss)
            for name, wrapper in wrappers.items():
                same_on_all_ranks(here, scaler_of(wrapper), f'{level} {name} {step} scaler')
                same_on_all_ranks(here, masters_of(wrapper), f'{level} {name} {step} masters')
        assert [w.loss_scaler.get_scale() for w in wrappers.values()] == [2.0**7, 2.0**8]


@scenario
def gan_files(here: Here) -> None:
    """A checkpoint of a model with a DDP for each child: plain names, whole on any number of ranks, its average too."""
    import mmengine.runner.runner
    from mmengine.config import Config
    from mmengine.runner import Runner

    mmengine.runner.runner.collect_env = dict
    root = Path(__file__).resolve().parents[2]
    sys.path.insert(0, str(root))
    folder, resume = here.folder / here.words[0], 'resume' in here.words
    config = Config.fromfile(root / 'configs' / 'digits' / 'gan_o2_o5.py')
    config.merge_from_dict(
        {
            'model.generator.width': 4,
            'model.discriminator.width': 4,
            'train_cfg': dict(by_epoch=True, max_epochs=1 if 'half' in here.words else 2, val_interval=5),
            'default_hooks.checkpoint': dict(type='CheckpointHook', interval=1),
            'custom_hooks': [dict(type='EMAHook', momentum=0.1), dict(type='amp_wrapper.ExactResumeHook')],
            'work_dir': str(folder),
            'launcher': 'pytorch',
            'resume': resume,
            'log_level': 'WARNING',
        }
    )
    # a schedule that does not know the end, so that a part of a run is a part
    config.param_scheduler = dict(type='ConstantLR', factor=1.0)
    for loader in ('train_dataloader', 'val_dataloader'):
        config[loader].batch_size = 128
    if here.device.type == 'cpu':
        config.model_wrapper_cfg.device_ids = None
    if here.world == 1:
        config.launcher = 'none'
    runner = Runner.from_cfg(config)
    runner.train()
    average = next(hook for hook in runner.hooks if hasattr(hook, 'ema_model')).ema_model
    if here.world > 1:
        assert isinstance(runner.model, MMSeparateDistributedDataParallel)
        same_on_all_ranks(here, weights_of(runner.model), 'weights')
        same_on_all_ranks(here, average.parameters(), 'average')
    if here.rank == 0:
        saved = torch.load((folder / 'last_checkpoint').read_text(), weights_only=True, map_location='cpu')
        assert not [name for name in saved['state_dict'] if '.module.' in name], list(saved['state_dict'])
        assert not [name for name in saved['ema_state_dict'] if '.module.' in name.removeprefix('module.')]
        # the average stands in the model's place
        flat = [p.detach().float().cpu() for p in average.module.parameters()]
        inner = runner.model.module if here.world > 1 else runner.model
        names = [name.replace('.module.', '.') for name, _ in inner.named_parameters()]
        for name, value in zip(names, flat):
            assert saved['state_dict'][name].equal(value), name
        torch.save({**saved['state_dict'], **saved['ema_state_dict']}, folder / 'end.pt')
    del runner, average


@scenario
def planted(here: Here) -> None:
    """The silent failure itself, for the test of the tests: the reducer is not rebuilt."""
    rebuild.rebuild_ddp = lambda ddp: None
    SCENARIOS[here.words[0]](here)


def main() -> None:
    name, rank, world, folder, kind = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5]
    # what torchrun would say
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    device = torch.device(kind, rank) if kind == 'cuda' else torch.device(kind)
    if kind == 'cuda':
        torch.cuda.set_device(rank)
    dist.init_process_group(
        'nccl' if kind == 'cuda' else 'gloo',
        init_method=f'file://{folder / "_".join(["store", name, str(world), *sys.argv[6:]])}',
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    SCENARIOS[name](Here(rank, world, folder, device, sys.argv[6:]))
    dist.barrier()
    # gloo's threads abort a process that ends under them, and models hold their groups
    gc.collect()
    dist.destroy_process_group()
    print(f'{name}: done', flush=True)


if __name__ == '__main__':
    main()

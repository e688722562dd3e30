"""The levels over FSDP2 (``fully_shard``), held against DistributedDataParallel and against one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import differences
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

import amp_wrapper
from amp_wrapper import AmpAttachError, AmpConfigError, AmpOptimWrapper, AmpUsageError, FusedAdamW, FusedSGD, amp
from amp_wrapper.fsdp_internals import completes_groups, shard_groups
from scenarios.common import Here, same_on_all_ranks, scenario

LEVELS = ('O0', 'O1', 'O2', 'O3', 'O4', 'O5')
HALF = {'O2': torch.float16, 'O3': torch.float16, 'O5': torch.bfloat16}
Kind = Callable[..., Optimizer]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)

    def body(self, x: Tensor) -> Tensor:
        y = self.bn(self.conv(x)).relu().permute(0, 2, 3, 1)
        return x + self.mix(self.norm(y)).permute(0, 3, 1, 2)

    def forward(self, x: Tensor, recompute: bool = False) -> Tensor:
        out: Tensor = checkpoint(self.body, x, use_reentrant=False) if recompute else self.body(x)
        return out


class Net(nn.Module):
    """BatchNorm and a head that can be kept in FP32; no shape is a multiple of the number of ranks."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 7, 3)
        self.bn = nn.BatchNorm2d(7)
        self.blocks = nn.Sequential(Block(7), Block(7))
        self.head = nn.Linear(7, 5)
        self.temperature = nn.Parameter(torch.ones(1))
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.stem(x))
        for block in self.blocks:
            x = block(x, self.recompute)
        return self.head(x.mean((2, 3))) * self.temperature


def data(here: Here, step: int, rank: int | None = None) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + (here.rank if rank is None else rank))
    x, y = torch.randn(4, 3, 6, 6, generator=generator), torch.randint(0, 5, (4,), generator=generator)
    return x.to(here.device), y.to(here.device)


def mesh_of(here: Here) -> DeviceMesh:
    return init_device_mesh(here.device.type, (here.world,))


def ddp_of(here: Here, net: nn.Module) -> DistributedDataParallel:
    ids = [here.device.index] if here.device.type == 'cuda' else None
    return DistributedDataParallel(net, device_ids=ids, broadcast_buffers=False)


def assembled(module: nn.Module) -> dict[str, Tensor]:
    """The state dict with whole tensors."""
    state = module.module.state_dict() if isinstance(module, DistributedDataParallel) else module.state_dict()
    return {k: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone() for k, v in state.items()}


def momenta(net: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer's state by position, whole."""
    found = {}
    parameters = [p for group in optimizer.param_groups for p in group['params']]
    for index, parameter in enumerate(parameters):
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found[f'{index}.{name}'] = (value.full_tensor() if isinstance(value, DTensor) else value).clone()
    return found


def train(here: Here, level: str, kind: Kind, how: str, steps: int = 4, **options: Any) -> tuple[Any, Any, list[float]]:
    """Some steps through the functional interface; the model, the optimizer, and the losses."""
    net: Any = Net(recompute=options.pop('recompute', False)).to(here.device)
    # no overflow at the first step
    options.setdefault('loss_scale', 1024.0 if level in ('O1', 'O2') else None)
    if how == 'ours':
        options['mesh'] = mesh_of(here)
    if how == 'before':
        amp_wrapper.fully_shard(net, level, mesh=mesh_of(here))
    optimizer = kind(net.parameters())
    amp.initialize(net, optimizer, opt_level=level, verbosity=0, **options)
    if how == 'ddp':
        net = ddp_of(here, net)
    losses = []
    for step in range(steps):
        x, y = data(here, step)
        loss = F.cross_entropy(net(x), y)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return net, optimizer, losses


def adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-4)


def plain_adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-4, foreach=False)


def torch_fused(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-4, fused=True)


def our_fused(parameters: Any) -> Optimizer:
    return FusedAdamW(parameters, lr=0.01, eps=1e-4)


def our_sgd(parameters: Any) -> Optimizer:
    return FusedSGD(parameters, lr=0.1, momentum=0.9)


@scenario
def fsdp_bits(here: Here) -> None:
    """Weights, moments, buffers and losses have the bits of DDP, where sums over two ranks are the same sums."""
    for level in LEVELS:
        if level == 'O3':
            # without a loss scale, gradients below float16's normal numbers are rounded before or after the division
            continue
        kinds = (adamw, our_fused, our_sgd, *((torch_fused,) if level in ('O2', 'O4') else ()))
        if 'quick' in here.words:
            kinds = (adamw, our_fused) if level == 'O2' else (our_fused,)
        for kind in kinds:
            theirs = train(here, level, kind, 'ddp')
            for how in ('ours', 'before') if kind is our_fused else ('ours',):
                mine = train(here, level, kind, how)
                what = (level, kind.__name__, how)
                if kind is torch_fused:
                    # its kernel for CPUs rounds what is left over at the end of a tensor differently
                    assert mine[2] == pytest.approx(theirs[2], rel=1e-3), what
                else:
                    assert mine[2] == theirs[2], what
                    assert differences(assembled(mine[0]), assembled(theirs[0])) == [], what
                    assert differences(momenta(mine[0], mine[1]), momenta(theirs[0], theirs[1])) == [], what
                same_on_all_ranks(here, [p for p in assembled(mine[0]).values() if p.ndim > 1], level)
                parameters = list(mine[0].parameters())
                assert all(isinstance(p, DTensor) and p.dtype is torch.float32 for p in parameters)
                assert all(any(p is q for q in parameters) for p in amp.master_params(mine[1]))


@scenario
def fsdp_recomputed(here: Here) -> None:
    """Activation checkpointing changes no bit."""
    for level in ('O2', 'O4', 'O5'):
        mine, theirs = (train(here, level, our_fused, 'ours', recompute=yes) for yes in (True, False))
        assert mine[2] == theirs[2]
        for name, value in assembled(mine[0]).items():
            if 'running' not in name and 'num_batches' not in name:
                assert torch.equal(value, assembled(theirs[0])[name]), (level, name)


@scenario
def fsdp_16bit_shards(here: Here) -> None:
    """Without masters, shards are 16-bit: close to DDP's, where gradients are rounded in another order."""
    for level, options in (('O3', {}), ('O5', dict(master_weights=False)), ('O3', dict(dtype='bfloat16'))):
        mine = train(here, level, our_sgd, 'ours', **_known(options))
        theirs = train(here, level, our_sgd, 'ddp', **_known(options))
        half = torch.float16 if level == 'O3' else torch.bfloat16
        assert {p.dtype for p in mine[0].parameters()} <= {half, torch.float32}
        assert sum(p.dtype is half for p in mine[0].parameters()) > 8
        unit = 2.0**-10 if half is torch.float16 else 2.0**-7
        for name, value in assembled(mine[0]).items():
            other = assembled(theirs[0])[name]
            assert torch.allclose(value.float(), other.float(), rtol=8 * unit, atol=8 * unit), (level, name)


def _known(options: dict[str, Any]) -> dict[str, Any]:
    """amp.initialize has no ``dtype``."""
    return {} if 'dtype' in options else dict(options)


class Seen(nn.Linear):
    """A layer that says in which types it is called."""

    def forward(self, x: Tensor) -> Tensor:
        self.types = (x.dtype, self.weight.dtype, self.bias.dtype)
        return super().forward(x)


@scenario
def fsdp_types(here: Here) -> None:
    """What modules compute with, in training and evaluation; outputs are FP32."""
    for level in LEVELS:
        for keep in ((), ('second',), ('Seen',)):
            if keep and level not in HALF:
                continue
            net: Any = nn.Sequential()
            net.first, net.second = Seen(4, 5), Seen(5, 3)
            net.to(here.device)
            optimizer = FusedAdamW(net.parameters())
            amp.initialize(net, optimizer, opt_level=level, mesh=mesh_of(here), verbosity=0, keep_fp32=keep or None)
            assert type(net).__name__ == 'FSDPSequential'
            half = HALF.get(level, torch.float32)
            for mode in (True, False):
                net.train(mode)
                out = net(torch.randn(2, 4, device=here.device))
                assert out.dtype is torch.float32, (level, mode)
                kept = (torch.float32,) * 3
                wanted = [kept if 'Seen' in keep else (half,) * 3, kept if keep else (half,) * 3]
                types = [net.first.types, net.second.types]
                if level in HALF:
                    assert types == wanted, (level, mode, keep, types)
                else:
                    assert {t for each in types for t in each[1:]} == {torch.float32}
            gathered = {group.param_dtype for group in shard_groups(net)}
            # shards of O3 are 16-bit themselves
            casts = level in ('O2', 'O5') and 'Seen' not in keep
            assert gathered == ({half, *([None] if keep else [])} if casts else {None})


def wrapped(
    here: Here, level: str, kind: Kind, how: str, clip: Any = None, counts: int = 1, bad: Any = None, **options: Any
) -> tuple[AmpOptimWrapper, Any, list[Any]]:
    """Some steps through mmengine's interface; the wrapper, the model, and (norm, skipped) of each step."""
    net: Any = Net().to(here.device)
    if how == 'ddp':
        net = ddp_of(here, net)
    elif how == 'hsdp':
        amp_wrapper.fully_shard(net, level, mesh=init_device_mesh(here.device.type, (2, here.world // 2)))
    else:
        amp_wrapper.fully_shard(net, level, mesh=mesh_of(here), **options.pop('sharding', {}))
    scale = dict(init_scale=1024.0) if level in ('O1', 'O2') else None
    wrapper = AmpOptimWrapper(
        optimizer=kind(net.parameters()),
        opt_level=level,
        clip_grad=clip,
        accumulative_counts=counts,
        verbosity=0,
        loss_scale=scale,
        **options,
    )
    told: list[Any] = []
    for step in range(4 * counts):
        x, y = data(here, step)
        if bad == (step, here.rank):
            x = x * math.inf
        with wrapper.optim_context(net):
            loss = F.cross_entropy(net(x), y)
        wrapper.update_params(loss)
        if (step + 1) % counts == 0:
            norm = wrapper._last.grad_norm  # type: ignore[union-attr]
            told.append((None if norm is None else float(norm), wrapper.step_was_skipped()))
    return wrapper, net, told


CLIPS: tuple[Any, ...] = (
    dict(max_norm=0.5),
    dict(max_norm=0.05, norm_type='inf'),
    dict(max_norm=1.0, norm_type=1),
    dict(type='value', clip_value=0.01),
    dict(max_norm=0.5, error_if_nonfinite=True),
)


@scenario
def fsdp_clipping(here: Here) -> None:
    """Norms over all shards, to within rounding of DDP's at the first step, from equal weights; what rounding becomes later
    depends on the processor's sums, so later steps have a wider bound. By value with DDP's bits."""
    for level in ('O2', 'O5') if 'quick' in here.words else ('O0', 'O2', 'O4', 'O5'):
        # O4 does what O0 does
        for kind in (adamw, our_sgd) if level in HALF else (our_sgd,):
            for clip in CLIPS if level != 'O4' else CLIPS[:1]:
                _, mine, told = wrapped(here, level, kind, 'fsdp', clip)
                _, theirs, wanted = wrapped(here, level, kind, 'ddp', clip)
                for step, ((norm, skipped), (full, also)) in enumerate(zip(told, wanted)):
                    assert skipped == also
                    assert (norm is None) == (full is None)
                    bound = 1e-3 if step else 1e-6
                    assert norm is None or math.isclose(norm, full, rel_tol=bound), (level, clip, step, norm, full)
                for name, value in assembled(mine).items():
                    assert torch.allclose(value, assembled(theirs)[name], rtol=1e-3, atol=1e-4), (level, clip, name)
                if clip.get('type') == 'value' and level != 'O0':
                    assert differences(assembled(mine), assembled(theirs)) == []


@scenario
def fsdp_overflow(here: Here) -> None:
    """Infinity on one rank: skipped on every rank, nothing is left of it, and the scale falls once."""
    quick = 'quick' in here.words
    for level in ('O2', 'O4', 'O5') if quick else ('O1', 'O2', 'O3', 'O4', 'O5'):
        for kind in (our_fused,) if quick else (adamw, torch_fused, our_fused):
            for rank in range(here.world):
                bad = (1, rank)
                wrapper, mine, told = wrapped(here, level, kind, 'fsdp', bad=bad)
                other, theirs, wanted = wrapped(here, level, kind, 'ddp', bad=bad)
                assert [skipped for _, skipped in told] == [False, True, False, False] == [s for _, s in wanted]
                assert wrapper.loss_scaler.get_scale() == other.loss_scaler.get_scale()
                if level != 'O3' and here.world == 2 and kind is not torch_fused:
                    assert differences(assembled(mine), assembled(theirs)) == [], (level, kind.__name__)
                assert all(bool(value.isfinite().all()) for value in assembled(mine).values())


@scenario
def fsdp_raises_on_overflow(here: Here) -> None:
    """``error_if_nonfinite`` and the limit of skips in a row end every rank, and name the same parameters."""
    for kind in (adamw, our_fused):
        clip = dict(max_norm=1.0, error_if_nonfinite=True)
        with pytest.raises(RuntimeError, match='non-finite'):
            wrapped(here, 'O5', kind, 'fsdp', clip, bad=(1, 0))
        with pytest.raises(amp_wrapper.OverflowStreakError, match=r'stem\.weight') as error:
            wrapped(here, 'O2', kind, 'fsdp', bad=(0, 1), max_consecutive_skips=1)
        names = torch.tensor(bytearray(str(error.value).encode()), dtype=torch.uint8)
        same_on_all_ranks(here, [names.to(here.device)], 'the error')


@scenario
def fsdp_accumulation(here: Here) -> None:
    """FP32 sums of what each pass averages, or one average of all; several losses; within a bound of FP32 gradients."""
    exact = _gradients(here, 'O0', 'ddp')
    length = math.sqrt(sum(float(g.double().square().sum()) for g in exact))

    def error_of(found: list[Tensor]) -> float:
        return math.sqrt(sum(float((a.double() - b.double()).square().sum()) for a, b in zip(found, exact))) / length

    for level in ('O4', 'O5') if 'quick' in here.words else ('O0', 'O2', 'O4', 'O5'):
        # DDP averages each pass, and sums in FP32: what follows must not be worse, but for the order of sums
        bound = 1.25 * error_of(_gradients(here, level, 'ddp')) + 2.0**-20
        for how in ('each', 'last'):
            for losses in (1, 2):
                if how == 'last' and losses == 2:
                    continue
                error = error_of(_gradients(here, level, how, losses))
                assert error <= bound, (level, how, losses, error, bound)
    with pytest.raises(AmpUsageError, match='scales would mix'):
        _gradients(here, 'O2', 'last', 2)


def _gradients(here: Here, level: str, how: str, losses: int = 1) -> list[Tensor]:
    """The gradients of three micro-batches, unscaled, whole."""
    net: Any = Net().to(here.device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    options: dict[str, Any] = {} if how == 'ddp' else dict(mesh=mesh_of(here))
    options['loss_scale'] = 1024.0 if level == 'O2' else None
    amp.initialize(net, optimizer, opt_level=level, verbosity=0, num_losses=losses, **options)
    model = ddp_of(here, net) if how == 'ddp' else net
    for index in range(3):
        if how == 'last':
            net.set_requires_gradient_sync(index == 2)
        x, y = data(here, index)
        loss = F.cross_entropy(model(x), y)
        with amp.scale_loss(loss, optimizer, loss_id=index % losses) as scaled:
            scaled.backward()
    found = [p.grad for p in amp.master_params(optimizer)]
    return [g.full_tensor() if isinstance(g, DTensor) else g for g in found if g is not None]


@scenario
def fsdp_reduction_in_fp32(here: Here) -> None:
    """``accumulate_in_fp32`` means that gradients are averaged in FP32, and a conflict with a sharded model is an error."""
    _, net, _ = wrapped(here, 'O5', our_fused, 'fsdp', accumulate_in_fp32=True, sharding=dict(reduce_dtype='float32'))
    assert {g.reduce_dtype for g in shard_groups(net) if g.param_dtype} == {torch.float32}
    with pytest.raises(AmpAttachError, match=r'accumulate_in_fp32=True.*reduce_dtype=torch.float32'):
        wrapped(here, 'O5', our_fused, 'fsdp', accumulate_in_fp32=True)
    net = amp_wrapper.fully_shard(Net(), 'O5', mesh=mesh_of(here), accumulate_in_fp32=True)
    assert {g.reduce_dtype for g in shard_groups(net) if g.param_dtype} == {torch.float32}


@scenario
def fsdp_refusals(here: Here) -> None:
    """Each names what is wrong and what to write, on every rank, before anything is changed."""
    mesh = mesh_of(here)
    bf16 = torch.bfloat16

    def all_in(dtype: torch.dtype | None) -> Callable[[Any], Any]:
        def shard(net: Any) -> None:
            for module in (*net.blocks, net):
                fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))

        return shard

    cases: list[tuple[Callable[[Any], Any], str, dict[str, Any], str]] = [
        (
            all_in(bf16),
            'O5',
            {},
            r'blocks\.0 \(Block\) gathers .* in bfloat16.* blocks\.0\.bn\.weight in float32, but not all',
        ),
        (
            all_in(None),
            'O5',
            {},
            r'gathers its parameters in float32.*temperature in bfloat16.*the others param_dtype=torch\.bfloat16',
        ),
        (all_in(bf16), 'O4', {}, r'Net gathers its parameters in bfloat16, and O4 .*no param_dtype'),
        (all_in(bf16), 'O2', dict(keep_batchnorm_fp32=False), r'param_dtype=torch\.float16'),
        (all_in(None), 'O3', {}, r'shards in float32.*cast before sharding, model\.to\(torch\.float16\)'),
        (lambda net: all_in(None)(net.bfloat16()), 'O5', dict(from_16bit=True), r'shards in bfloat16.*drop \.half'),
    ]
    for shard, level, options, text in cases:
        net = Net().to(here.device)
        shard(net)
        before = assembled(net)
        optimizer = FusedAdamW(net.parameters())
        with pytest.raises(AmpAttachError, match=f'(?s){text}'):
            amp.initialize(net, optimizer, opt_level=level, verbosity=0, **options)
        assert differences(assembled(net), before) == []
        assert not any(
            hook for module in net.modules() for hook in module._forward_pre_hooks.values() if 'amp' in repr(hook)
        )
    net = Net().to(here.device)
    optimizer = FusedAdamW(net.parameters())
    amp_wrapper.fully_shard(net, 'O5', mesh=mesh)
    with pytest.raises(AmpAttachError, match=r'built before the model was sharded.*mesh=mesh'):
        amp.initialize(net, optimizer, opt_level='O5', verbosity=0)
    with pytest.raises(AmpAttachError, match=r'sharded by fully_shard already.*leave mesh out'):
        amp.initialize(net, FusedAdamW(net.parameters()), opt_level='O5', verbosity=0, mesh=mesh)
    split = FusedAdamW(net.parameters())
    wrapper = AmpOptimWrapper(optimizer=split, opt_level='O5', master_weights='split', verbosity=0)
    with pytest.raises(AmpAttachError, match=r"master_weights='split'.*nothing is kept twice"):
        wrapper.attach(net)
    net = Net().to(here.device)
    optimizer = FusedAdamW(net.parameters())
    F.cross_entropy(net(data(here, 0)[0]), data(here, 0)[1]).backward()
    optimizer.step()
    with pytest.raises(AmpAttachError, match='has state already'):
        amp.initialize(net, optimizer, opt_level='O5', verbosity=0, mesh=mesh)
    assert not any(isinstance(module, FSDPModule) for module in net.modules())
    for words, text in (
        (dict(mesh=3), 'must be a DeviceMesh'),
        (dict(mesh=mesh, sharding=dict(block='Block')), "unknown key 'block'.*did you mean 'blocks'"),
        (dict(mesh=mesh, sharding=dict(blocks='Blok')), "'Blok'.*did you mean 'Block'"),
        (dict(mesh=mesh, sharding=dict(reduce_dtype='int8')), "reduce_dtype.*'int8'"),
        (dict(mesh=mesh, sharding=dict(reshard_after_forward='no')), "reshard_after_forward.*'no'"),
        (dict(sharding=dict(blocks='Block')), 'without a mesh'),
    ):
        net = Net().to(here.device)
        with pytest.raises(AmpConfigError, match=text):
            amp.initialize(net, FusedAdamW(net.parameters()), opt_level='O5', verbosity=0, **words)  # type: ignore[arg-type]
        assert not any(isinstance(module, FSDPModule) for module in net.modules())
    with pytest.raises(AmpConfigError, match='3 dimensions'):
        amp_wrapper.fully_shard(net, 'O5', mesh=init_device_mesh(here.device.type, (here.world, 1, 1)))
    old = nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 3)), nn.Linear(3, 3)).to(here.device)
    with pytest.raises(AmpAttachError, match=r'weight_norm.*parametrizations'):
        amp_wrapper.fully_shard(old, 'O5', mesh=mesh)
    large = nn.Linear(3, 2 * here.world).to(here.device)
    with torch.no_grad():
        large.weight[-1, 0] = 1e5
    fully_shard(large, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
    with pytest.raises(AmpAttachError, match=r'beyond the range of float16.*up to 100000'):
        amp.initialize(large, torch.optim.SGD(large.parameters(), lr=0.1), opt_level='O2', verbosity=0)


@scenario
def fsdp_blocks(here: Here) -> None:
    """Which modules are gathered one by one."""

    def groups(**options: Any) -> list[str]:
        net = amp_wrapper.fully_shard(Net(), 'O5', mesh=mesh_of(here), **options)
        names = {id(module): name for name, module in net.named_modules()}
        return sorted('+'.join(names[id(m)] for m in group.modules) for group in shard_groups(net))

    def expected(*joined: str) -> list[str]:
        # torch before 2.13 would not average the gradients of all modules of a group where only some of them are called
        return sorted(joined if completes_groups() else [name for names in joined for name in names.split('+')])

    assert groups() == ['', 'blocks.0', 'blocks.0.bn', 'blocks.1', 'blocks.1.bn', 'bn']
    assert groups(keep_batchnorm_fp32=False) == ['', 'blocks.0', 'blocks.1']
    assert groups(blocks='blocks') == expected('', 'blocks', 'blocks.0.bn+blocks.1.bn', 'bn')
    assert groups(blocks=Block, keep_fp32=['head', 'blocks.1']) == expected(
        '', 'blocks.0', 'blocks.0.bn', 'blocks.1', 'bn+head'
    )
    assert groups(blocks=['blocks.1', 'Linear']) == expected(
        '', 'bn+blocks.0.bn', 'blocks.0.mix', 'blocks.1', 'blocks.1.bn', 'blocks.1.mix', 'head'
    )
    # outside of 16-bit weights nothing needs a group of its own
    net = amp_wrapper.fully_shard(Net(), 'O4', mesh=mesh_of(here))
    assert len(shard_groups(net)) == 3


@scenario
def fsdp_from_meta(here: Here) -> None:
    """A model that is nowhere whole: sharded on the meta device, then filled; the bits of one that was whole."""
    mine, theirs = [], []
    for meta in (True, False):
        with torch.device('meta' if meta else here.device):
            net = Net()
        source = Net().to(here.device)
        amp_wrapper.fully_shard(net, 'O5', mesh=mesh_of(here))
        if meta:
            net.to_empty(device=here.device)
        with torch.no_grad():
            for tensor, value in zip(net.state_dict().values(), source.state_dict().values()):
                whole = DTensor.from_local(value, tensor.device_mesh) if isinstance(tensor, DTensor) else value
                tensor.copy_(whole.redistribute(placements=tensor.placements) if isinstance(tensor, DTensor) else whole)
        optimizer = FusedAdamW(net.parameters(), lr=0.01)
        amp.initialize(net, optimizer, opt_level='O5', verbosity=0)
        x, y = data(here, 0)
        with amp.scale_loss(F.cross_entropy(net(x), y), optimizer) as loss:
            loss.backward()
        optimizer.step()
        (mine if meta else theirs).append(assembled(net))
    assert differences(mine[0], theirs[0]) == []

"""What may be set at DDP, changed after the start, wrapped late or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from mmengine.model import BaseModel, MMDistributedDataParallel
from mmengine.optim import OptimWrapper
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from amp_wrapper import AmpAttachError, AmpUsageError
from scenarios.common import (
    HALF,
    LEVELS,
    Heads,
    Here,
    Net,
    backward,
    data,
    differs_somewhere,
    gradients,
    masters_of,
    optim_wrapper,
    refused,
    same_on_all_ranks,
    scenario,
    weights_of,
    wrap,
)


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
            wrapper = optim_wrapper(model.parameters(), level)
            for step in range(4):
                backward(wrapper, model, data(here, step))
                got = gradients(model)
                same_on_all_ranks(here, got.values(), f'{level} {name}')
                wrapper.step()
                wrapper.zero_grad()
            assert [entry[0] for entry in model._comm_hooks] == [hook]
        model = wrap(here, Net(), find_unused_parameters=True)
        model._register_builtin_comm_hook(torch._C._distributed_c10d.BuiltinCommHookType.FP16_COMPRESS)
        wrapper = optim_wrapper(model.parameters(), level)
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
    wrapper = optim_wrapper(net.parameters(), 'O2')
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
    wrapper = optim_wrapper(part.parameters(), 'O2')
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
        wrapper = optim_wrapper(model.parameters(), level)
        before = [p.dtype for p in model.parameters()]
        with refused(AmpAttachError, why):
            wrapper.attach(model)
        assert [p.dtype for p in model.parameters()] == before
    # one that says it survives, and does
    model = foreign()
    model.survives_cast = True
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad.div_(here.world)))
    wrapper = optim_wrapper(model.parameters(), 'O2')
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
            wrapper = optim_wrapper(model.parameters(), level)
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
        wrapper = optim_wrapper(model.parameters(), level)
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
            wrapper = optim_wrapper(model.parameters(), level)
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
        wrapper = optim_wrapper([p for p in net.parameters() if p.requires_grad], level)
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
            wrapper = optim_wrapper(model.parameters(), level)
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
def refusals(here: Here) -> None:
    """What DDP cannot follow is an error, before anything is lost."""
    for level in ('O0', 'O1', 'O2'):
        for wide in (False, True):
            # frozen and unfrozen in the middle of an accumulation
            for find_unused in (False, True):
                net = Net()
                net.first.requires_grad_(False)
                model = wrap(here, net, find_unused_parameters=find_unused)
                words = dict(accumulative_counts=2, accumulate_in_fp32=wide)
                wrapper = optim_wrapper(model.parameters(), level, **words)
                wrapper.initialize_count_status(model, 0, 100)
                with wrapper.optim_context(model):
                    loss = model(data(here, 0), side=True)['loss']
                wrapper.update_params(loss)
                assert wrapper.in_window
                if find_unused:
                    net.first.requires_grad_(True)
                else:
                    net.side.requires_grad_(False)
                with refused(AmpUsageError, 'in the middle of an accumulation'):
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
        wrapper = optim_wrapper(model.parameters(), level, num_losses=2)
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
        wrapper = optim_wrapper(model.parameters(), level)
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
        wrapper = optim_wrapper(parts.parameters(), level)
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
            wrapper = optim_wrapper(model.parameters(), level)
            wrapper.attach(model)
            model._join_config = model._join_config._replace(enable=True)
            with refused(AmpUsageError, 'join()'):
                with wrapper.optim_context(model):
                    raise RuntimeError('not reached')
    # the model inside a DDP that nobody mentions
    model = wrap(here, Heads())
    for level in ('O2', 'O5'):
        wrapper = optim_wrapper(model.parameters(), level)
        with refused(AmpAttachError, 'something listens to the gradient'):
            with wrapper.optim_context(model.module):
                raise RuntimeError('not reached')
        assert {p.dtype for p in model.parameters()} == {torch.float32}


@scenario
def late_wrapping(here: Here) -> None:
    """A DDP that is made around a model that was attached already is found at its first forward pass."""
    for level in ('O0', 'O2', 'O5'):
        for wide in (False, True):
            net = Heads().to(here.device)
            wrapper = optim_wrapper(net.parameters(), level, accumulative_counts=2, accumulate_in_fp32=wide)
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
        wrapper = optim_wrapper(model.parameters(), level)
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
            wrapper = optim_wrapper(model.parameters(), level)
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
        wrapper = optim_wrapper(parts.parameters(), 'O2', loss_scale='dynamic', verbosity=0)
        for step in range(3):
            with wrapper.optim_context(parts):
                out = parts[1](parts[0](data(here, step)))
            wrapper.update_params(out.float().square().mean() * (float('inf') if (step, here.rank) == (1, 1) else 1))
        assert wrapper.loss_scaler.counts.tolist()[:2] == [3, 1]
        assert [part.process_group for part in parts] == [first, second]
        # what comes later starts from the first rank of the group, which is not the first of the world
        net = Heads()
        model = DistributedDataParallel(net.to(here.device), process_group=first)
        wrapper = optim_wrapper(model.parameters(), 'O0')
        wrapper.attach(model)
        net.late = nn.Linear(2, 2).to(here.device)
        with torch.no_grad():
            net.late.weight.fill_(float(here.rank))
        wrapper.optimizer.add_param_group(dict(params=list(net.late.parameters())))
        with wrapper.optim_context(model):
            assert model(data(here, 0))['loss'].isfinite()
        assert bool((net.late.weight == 1).all())
    dist.barrier()

"""Each private name of torch, tried on the version that runs; and the list of the versions that were tried."""

from __future__ import annotations

import gc
import importlib
import pickle
import re
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.library import Library
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from tried_names import public_names, tried_names

import amp_wrapper
from amp_wrapper import ddp_internals, torch_internals

ROOT = Path(__file__).resolve().parents[2]


def test_the_versions_that_were_tried() -> None:
    assert torch_internals.TRIED == ('2.6.0', '2.13.0', '2.14.1', '2.15.0')
    # what the package asks for is the oldest to the newest, and what its tests run on is one of them
    (_, oldest, _), (_, newest, _) = (torch_internals.TRIED[index].split('.') for index in (0, -1))
    assert f'"torch>=2.{oldest},<2.{int(newest) + 1}"' in (ROOT / 'pyproject.toml').read_text(encoding='utf-8')
    pinned = re.search(r'^torch==(\S+)', (ROOT / 'requirements' / 'runtime.txt').read_text(encoding='utf-8'), re.M)
    assert pinned is not None
    assert pinned[1] in torch_internals.TRIED


def test_each_name_is_tried_here() -> None:
    """Whatever ``torch_internals`` has, this file calls or compares."""
    names = public_names(torch_internals) | public_names(ddp_internals)
    assert len(names) > 30
    # that one says what versions do, and asks for no name
    assert names - tried_names(__file__) == {'COUNTS_BROADCASTS', 'VERSION'}


def test_graph_task_id() -> None:
    assert torch_internals.graph_task_id() == -1
    seen: list[int] = []
    x = torch.ones(1, requires_grad=True)
    for _ in range(2):
        y = x * 2
        y.register_hook(lambda gradient: seen.append(torch_internals.graph_task_id()))
        y.backward()
    assert -1 not in seen and len(set(seen)) == 2
    assert torch_internals.graph_task_id() == -1


def test_fused_sgd() -> None:
    """As what leads to it."""
    words = dict(lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True)
    p = nn.Parameter(torch.randn(5))
    optimizer = torch.optim.SGD([p], fused=True, **words)  # type: ignore[arg-type]
    alone, momentum = p.detach().clone(), torch.zeros(5)
    for skip in (0, 0, 1, 0):
        found = torch.full((), float(skip))
        p.grad = torch.randn(5)
        optimizer.found_inf = found  # type: ignore[attr-defined]
        optimizer.step()
        rest = dict(dampening=0.0, maximize=False, is_first_step=False, found_inf=found)
        torch_internals.fused_sgd([alone], [p.grad], [momentum], **words, **rest)
        assert torch.equal(p, alone)


def test_watch_clipping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both functions, also under a name of their own; not in compiled code, and not where torch lacks the name. The norm
    itself is taken first, and writes nothing."""
    sort = '_group_tensors_by_device_and_dtype'
    # restored afterwards
    monkeypatch.setattr(clip_grad, sort, getattr(clip_grad, sort))
    by_name = torch.nn.utils.clip_grad_norm_
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    seen: list[bool] = []

    def clip_compiled() -> None:
        torch.compiler.reset()
        torch.compile(lambda: by_name([weight], 1.0), fullgraph=True, backend='eager')()

    try:
        clip_compiled()
        compiles = True
    except torch._dynamo.exc.Unsupported:
        # torch 2.9, whatever stands there
        compiles = False
    weight.grad = torch.ones(2)
    writes: list[int] = []

    def see(found: Sequence[Tensor], written: int) -> None:
        seen.append(found[0] is weight.grad)
        writes.append(written)

    torch_internals.watch_clipping(see)
    by_name([weight], 1.0)
    assert seen and all(seen)
    assert writes == [0, 1]
    if hasattr(torch.nn.utils, 'get_total_norm'):
        writes.clear()
        torch.nn.utils.get_total_norm([weight.grad])
        assert writes == [0]
    assert torch.allclose(weight.grad, torch.full((2,), 2**-0.5), atol=1e-5)
    seen.clear()
    # and keeps none alive, not even until Python looks for cycles
    gc.disable()
    try:
        other = torch.nn.Parameter(torch.ones(2))
        for clip in (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_):
            for foreach in (None, True, False):
                other.grad = torch.ones(2)
                gone = weakref.ref(other.grad)
                clip([other], 0.1, foreach=foreach)
                other.grad = None
                assert gone() is None
    finally:
        gc.enable()
    seen.clear()
    for foreach in (None, True, False):
        for clip in (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_):
            writes.clear()
            version = weight.grad._version
            clip([weight], 0.1, foreach=foreach)
            # each gradient is written to as often as was said
            assert weight.grad._version == version + sum(writes) > version
    torch.nn.utils.clip_grad_value_([weight], 0.05)
    assert seen and all(seen) and weight.grad.tolist() == pytest.approx([0.05, 0.05])
    seen.clear()
    if compiles:
        clip_compiled()
    assert seen == []
    without = SimpleNamespace()
    monkeypatch.setattr(torch_internals, 'clip_grad', without)
    torch_internals.watch_clipping(lambda found, written: None)
    assert vars(without) == {}


def test_current_node() -> None:
    assert torch_internals.current_node() is None
    seen: list[str] = []

    class Noting(torch_internals.TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            node = torch_internals.current_node()
            if node is not None:
                seen.append(node.name())
            return op(*args, **(kwargs or {}))

    x = torch.ones(1, requires_grad=True)
    with Noting():
        x.exp().backward()
    assert 'ExpBackward0' in seen
    assert torch_internals.current_node() is None


def test_writes_in_place() -> None:
    assert torch_internals.writes_in_place(torch.ops.aten.add_.Tensor)
    assert torch_internals.writes_in_place(torch.ops.aten.add.out)
    assert not torch_internals.writes_in_place(torch.ops.aten.add.Tensor)


def test_modes_are_asked_for_on_request() -> None:
    assert not torch_internals.in_function_transform(or_mode=True)
    with torch_internals.TorchDispatchMode():
        assert torch_internals.in_function_transform(or_mode=True)
        assert not torch_internals.in_function_transform()


def test_function_transforms() -> None:
    seen: list[bool] = []

    def square(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch_internals.in_function_transform())
        return x * x

    square(torch.ones(2))
    torch.func.vmap(square)(torch.ones(2))
    torch.func.grad(lambda x: square(x).sum())(torch.ones(2))
    torch.jit.trace(square, torch.ones(2), check_trace=False)
    assert seen == [False, True, True, True]


def test_kernels_of_a_key() -> None:
    assert torch_internals.has_kernel('aten::mm', 'AutocastCPU')
    assert not torch_internals.has_kernel('aten::relu', 'AutocastCPU')


def test_keys_below() -> None:
    library = Library('amp_wrapper_internals', 'FRAGMENT')
    library.define('double(Tensor x) -> Tensor')
    library.impl('double', lambda x: x * 2, 'CompositeExplicitAutograd')
    below, calls = torch_internals.keys_below('AutocastCPU'), []
    op = torch.ops.amp_wrapper_internals.double.default

    def kernel(keyset, x):
        calls.append(x.dtype)
        return op.redispatch(keyset & below, x)

    library.impl('double', kernel, 'AutocastCPU', with_keyset=True)
    x = torch.ones(1)
    assert op(x).item() == 2 and calls == []
    with torch.autocast('cpu', torch.bfloat16):
        assert op(x).item() == 2
    assert calls == [torch.float32]


def test_overlap_inside_a_tensor() -> None:
    x = torch.ones(2, 2)
    assert [torch_internals.internal_overlap(y) for y in (x, x.t(), x[:1].expand(2, 2))] == [0, 0, 1]
    # gaps
    assert torch_internals.internal_overlap(torch.ones(4)[::2]) in (0, 2)


def test_subclasses_that_hold_tensors() -> None:
    offsets = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert torch_internals.is_traceable_wrapper_subclass(offsets)
    assert not torch_internals.is_traceable_wrapper_subclass(nn.Parameter(torch.ones(1)))


def test_the_function_of_a_context() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch_internals.function_of(ctx))
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 2

    seen: list[Any] = []
    y = Double.apply(torch.ones(1, requires_grad=True))
    assert [*seen, torch_internals.function_of(y.grad_fn)] == [Double, Double]


def test_base_classes_of_modules() -> None:
    assert issubclass(nn.BatchNorm2d, torch_internals.BatchNorm) and issubclass(
        nn.SyncBatchNorm, torch_internals.BatchNorm
    )
    assert not issubclass(nn.InstanceNorm2d, torch_internals.BatchNorm)
    assert issubclass(nn.InstanceNorm2d, torch_internals.BatchOrInstanceNorm)
    assert issubclass(torch_internals.BatchNorm, torch_internals.BatchOrInstanceNorm)
    assert issubclass(nn.MSELoss, torch_internals.Loss) and issubclass(nn.BCELoss, torch_internals.Loss)


def test_hooks_of_modules() -> None:
    module = nn.Linear(1, 1)
    calls: list[str] = []

    def noting(name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: calls.append(name)

    module.register_forward_pre_hook(noting('before'), with_kwargs=True)
    module.register_forward_hook(noting('after'), always_call=True)
    module.register_state_dict_pre_hook(noting('before saving'))
    module.register_state_dict_post_hook(noting('after saving'))
    module.register_load_state_dict_pre_hook(noting('before loading'))
    module.register_load_state_dict_post_hook(noting('after loading'))
    assert torch_internals.hooks_of(module)[:2] == (
        torch_internals.forward_pre_hooks(module),
        torch_internals.forward_hooks(module),
    )
    assert [vars(module)[name] for name in torch_internals.FORWARD_HOOKS] == list(torch_internals.hooks_of(module)[:2])
    assert [len(hooks) for hooks in torch_internals.hooks_of(module)] == [1] * 5
    for hook in torch_internals.saving_and_loading_hooks(module):
        hook()
    assert calls == ['before loading', 'before saving', 'after saving']
    assert all(
        getattr(nn.Module, name).__module__ == 'torch.nn.modules.module' for name in torch_internals.STATE_DICT_METHODS
    )
    for hooks in torch_internals.hooks_of(module):
        hooks.clear()
    calls.clear()
    torch_internals.drop_hook_flags(module)
    # a hook with the number of one that is gone is called as it was registered
    assert not module._forward_pre_hooks_with_kwargs and not module._forward_hooks_always_called
    module.load_state_dict(module.state_dict())
    module(torch.ones(1))
    assert calls == ['before saving']


def test_hooks_that_come_first() -> None:
    """In the dict itself, too: some versions of torch.compile read it in the order in which its keys came."""
    module = nn.Linear(1, 1)
    module.register_forward_pre_hook(print)
    handle = torch_internals.first_pre_hook(module, repr, with_kwargs=True)
    hooks = torch_internals.forward_pre_hooks(module)
    assert list(hooks.values()) == list(dict.values(hooks)) == [repr, print]
    assert handle.id in module._forward_pre_hooks_with_kwargs
    hooks.move_to_end(handle.id)  # type: ignore[attr-defined]
    torch_internals.refill(hooks)
    assert list(dict.values(hooks)) == [print, repr]
    handle.remove()
    assert list(hooks.values()) == [print]


def test_conversions_end_in_one_method(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[nn.Module] = []

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        monkeypatch.setattr(nn.Module, '_apply', original)

        def apply(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            seen.append(module)
            return original(module, *args, **kwargs)

        return apply

    torch_internals.wrap_apply(wrap)
    for convert in (nn.Module.half, nn.Module.double, lambda module: module.to(torch.bfloat16)):
        module = nn.ReLU()
        convert(module)
        assert seen.pop() is module and seen == []


def test_hooks_of_optimizers() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    before, after = len(torch_internals.global_pre_hooks), len(torch_internals.global_post_hooks)
    handles = [
        register_optimizer_step_pre_hook(print),
        register_optimizer_step_post_hook(print),
        optimizer.register_step_pre_hook(print),
        optimizer.register_step_post_hook(repr),
    ]
    try:
        assert len(torch_internals.global_pre_hooks) == before + 1
        assert len(torch_internals.global_post_hooks) == after + 1
        assert list((torch_internals.step_pre_hooks(optimizer) or {}).values()) == [print]
        assert list((torch_internals.step_post_hooks(optimizer) or {}).values()) == [repr]
    finally:
        for handle in handles:
            handle.remove()
    bare = torch.optim.SGD.__new__(torch.optim.SGD)
    assert torch_internals.step_pre_hooks(bare) is None and torch_internals.step_post_hooks(bare) is None


@pytest.mark.parametrize('noted', [False, True])
def test_schedulers_are_told_of_steps(noted: bool) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    if noted:
        torch_internals.note_step(optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        scheduler.step()
    assert any('lr_scheduler.step()' in str(warning.message) for warning in caught) is not noted


def test_bindings_of_ops() -> None:
    x = torch.ones(2)
    found = torch_internals.variable_function('exp')
    assert found is not None and torch.equal(found(x), x.exp())
    assert torch_internals.variable_function('no_such_op') is None


def test_kernels_at_the_key_of_no_device() -> None:
    """An op comes to it where the thread lets it, and its autocast is on; ops without a kernel there do not notice."""
    torch_internals.fall_through(torch_internals.SPARE_KEY)
    seen: list[str] = []
    library = torch.library.Library('aten', 'IMPL')
    library.impl('erfinv', lambda x: seen.append('erfinv') or x, torch_internals.SPARE_KEY)
    reach = torch_internals.include_key(torch_internals.SPARE_KEY)
    for inside in (True, False):
        reach(inside)
        with torch.autocast('ipu', dtype=torch.bfloat16):
            torch.ones(1).erfinv()
            assert torch.equal(torch.zeros(1).exp(), torch.ones(1))
            assert torch.cond(torch.tensor(True), lambda x: x + 1, lambda x: x - 1, (torch.zeros(1),)).item() == 1
        torch.ones(1).erfinv()
    library._destroy()
    assert seen == ['erfinv']


def test_the_decorator_of_checkpoint() -> None:
    try:
        made = checkpoint(use_reentrant=False)(torch.exp)
    except TypeError:
        assert torch_internals.checkpointed_function() is None
    else:
        assert type(made) is torch_internals.checkpointed_function()
        assert made.function is torch.exp


@pytest.fixture
def one_process() -> Iterator[None]:
    """A group of processes that has this one alone."""
    if not torch.distributed.is_available():
        pytest.skip('this torch has no torch.distributed')
    torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def test_ddp(one_process: None) -> None:
    active: list[object] = []

    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            active.append(ddp_internals.active_ddp())
            return super().forward(x)

    model = Model(2, 2)
    model.bias.requires_grad_(False)
    ddp = DistributedDataParallel(model)
    assert list(ddp_internals.ddp_parameters(ddp)) == [model.weight, model.bias]
    assert list(ddp_internals.reducer_parameters(ddp)) == [model.weight]
    log = ddp_internals.ddp_log(ddp)
    assert (log['num_parameter_tensors'], log['total_parameter_size_bytes']) == (1, 16)
    assert {'_join_config', 'require_backward_grad_sync'} <= vars(ddp).keys() & {*ddp_internals.DDP_FIELDS}
    ddp(torch.ones(1, 2)).sum().backward()
    assert active == [ddp] and ddp_internals.active_ddp() is None
    assert not ddp_internals.delays_all_reduce(ddp)
    assert not ddp_internals.joins(ddp)
    with ddp.join():
        assert ddp_internals.joins(ddp)


def test_ddp_that_waits_for_gradients(one_process: None) -> None:
    class TwoOutputs(nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x @ self.weight, x + self.bias

    ddp = DistributedDataParallel(TwoOutputs(2, 2))
    first, second = ddp(torch.ones(1, 2))
    first.sum().backward()
    assert not ddp_internals.is_finalized(ddp)
    second.sum().backward()
    assert ddp_internals.is_finalized(ddp)


def test_ddp_that_delays_all_reduce(one_process: None) -> None:
    model = nn.Linear(2, 2)
    named = [('weight', model.weight)]
    ddp = DistributedDataParallel(model, delay_all_reduce_named_params=named, param_to_hook_all_reduce=model.bias)
    assert ddp_internals.delays_all_reduce(ddp)


def test_communication_hooks(one_process: None) -> None:
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    assert ddp_internals.comm_hooks(ddp) == []
    ddp.register_comm_hook('its state', default_hooks.fp16_compress_hook)
    assert ddp_internals.comm_hooks(ddp) == [(default_hooks.fp16_compress_hook, 'its state')]
    other = DistributedDataParallel(nn.Linear(2, 2))
    ddp_internals.register_builtin_comm_hook(other, ddp_internals.builtin_comm_hooks()['FP16_COMPRESS'])
    assert ddp_internals.ddp_log(other)['comm_hook'].endswith('FP16_COMPRESS')
    assert ddp_internals.comm_hooks(other) == []


def test_hooks_of_ddp_for_the_compiler(one_process: None) -> None:
    model = nn.Linear(2, 2)
    with torch._dynamo.config.patch(optimize_ddp='python_reducer'):
        ddp = DistributedDataParallel(model)
    assert model.weight._post_accumulate_grad_hooks
    ddp_internals.remove_accumulate_hooks(ddp)
    assert not model.weight._post_accumulate_grad_hooks


def test_optimizers_that_step_in_backward() -> None:
    pytest.importorskip('torch.distributed.optim')
    model = nn.Linear(2, 2)
    assert not ddp_internals.steps_in_backward(model.weight)
    torch.distributed.optim._apply_optimizer_in_backward(torch.optim.SGD, [model.weight], {'lr': 1.0})
    assert ddp_internals.steps_in_backward(model.weight) and not ddp_internals.steps_in_backward(model.bias)


@pytest.mark.parametrize('backend', ['eager', 'aot_eager'])
def test_checkpoint_is_still_known_to_the_compiler(backend: str, device: torch.device) -> None:
    """It is recognised by its identity, and its arguments by their names."""
    amp_wrapper.amp.initialize(nn.Linear(1, 1), opt_level='O1', verbosity=0)
    layer = nn.Linear(4, 4).to(device)

    def step(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False).sin()

    x = torch.randn(2, 4, device=device)
    step(x).sum().backward()
    expected = layer.weight.grad.clone()
    layer.weight.grad = None
    torch.compile(step, backend=backend, fullgraph=True)(x).sum().backward()
    assert torch.equal(layer.weight.grad, expected)


def test_zero_redundancy(one_process: None) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    weights = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    optimizer = ZeroRedundancyOptimizer(weights, optimizer_class=torch.optim.SGD, lr=0.5, momentum=0.9)
    assert torch_internals.is_zero(optimizer) and not torch_internals.is_zero(torch.optim.SGD(weights, lr=1.0))
    assert not torch_internals.overlaps_with_ddp(optimizer)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    others = [nn.Parameter(weight.detach().clone()) for weight in weights]
    optimizer.param_groups[0]['params'][:] = others
    torch_internals.replace_in_zero(optimizer, dict(zip(map(id, weights), others)))
    for other in others:
        other.grad = torch.zeros_like(other)
    optimizer.step()
    # the momentum came along
    assert all(torch.allclose(other, torch.full_like(other, 0.05)) for other in others)
    assert all(torch.equal(weight, torch.full_like(weight, 0.5)) for weight in weights)


def test_what_is_in_metadata(tmp_path: Path) -> None:
    """The classes are there, and what torch writes asks for no other."""
    from torch.distributed.checkpoint import state_dict_saver

    for module, names in torch_internals.METADATA_CLASSES.items():
        assert all(hasattr(importlib.import_module(module), name) for name in names.split()), module
    with pytest.warns(UserWarning, match='single process'):
        state_dict_saver.save({'a': torch.ones(2), 'b': torch.ones(1, dtype=torch.bfloat16)}, checkpoint_id=tmp_path)
    asked = []

    class Asks(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            asked.append((torch_internals.MOVED_MODULES.get(module, module), name))
            return super().find_class(module, name)

    with open(tmp_path / '.metadata', 'rb') as stream:
        Asks(stream).load()
    known = {(module, name) for module, names in torch_internals.METADATA_CLASSES.items() for name in names.split()}
    others = set(asked) - known
    assert asked and {module for module, _ in others} <= {'torch'}
    assert all(isinstance(getattr(torch, name), torch.dtype) for _, name in others)


def test_workers_are_started_anew() -> None:
    loader = DataLoader(list(range(4)), num_workers=1, persistent_workers=True)
    first = iter(loader)
    assert iter(loader) is first
    torch_internals.forget_workers(loader)
    assert iter(loader) is not first

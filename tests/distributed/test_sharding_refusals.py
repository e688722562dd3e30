"""What cannot be sharded, or was sharded unlike the level: refused on every rank, before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import differences
from nets import Block, Net, batch, mesh_of, whole
from on_ranks import Here, on_ranks
from pairs import pairs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import amp_wrapper
from amp_wrapper import AmpAttachError, AmpConfigError, AmpOptimWrapper, FusedAdamW, FusedSGD, amp


def _by_torch(here: Here, dtype: torch.dtype | None, half: bool = False) -> Net:
    """Sharded by torch itself."""
    net = Net().to(here.device)
    for module in (*net.blocks, net.bfloat16() if half else net):
        fully_shard(module, mesh=mesh_of(here), mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    return net


def _large(here: Here) -> nn.Module:
    net = nn.Linear(3, 4).to(here.device)
    with torch.no_grad():
        net.weight[-1, 0] = 1e5
    return fully_shard(net, mesh=mesh_of(here), mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))


UNFIT: dict[str, tuple[Callable[[Here], nn.Module], str, dict[str, Any]]] = {
    r'bn\.weight.* param_dtype=torch\.float32': (lambda here: _by_torch(here, torch.bfloat16), 'O5', {}),
    r' param_dtype=torch\.bfloat16, not torch\.float32': (lambda here: _by_torch(here, None), 'O5', {}),
    r'O4 cannot keep.* param_dtype=torch\.float32': (lambda here: _by_torch(here, torch.bfloat16), 'O4', {}),
    r'torch\.float16': (lambda here: _by_torch(here, torch.bfloat16), 'O2', dict(keep_batchnorm_fp32=False)),
    r' dtype=torch\.float16': (lambda here: _by_torch(here, None), 'O3', {}),
    r' dtype=torch\.float32, not': (lambda here: _by_torch(here, None, half=True), 'O5', dict(from_16bit=True)),
    r'beyond the range of float16.*100000': (_large, 'O2', {}),
}


@pairs(text=UNFIT)
@on_ranks()
def test_models_sharded_in_types_of_another_level_are_refused(here: Here, text: str) -> None:
    make, level, options = UNFIT[text]
    net = make(here)
    before = whole(dict(net.state_dict()))
    with pytest.raises(AmpAttachError, match=f'(?s){text}'):
        amp.initialize(net, FusedAdamW(net.parameters()), opt_level=level, verbosity=0, **options)
    assert differences(whole(dict(net.state_dict())), before) == []


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(4), Block(4)])
        self.layers[1].up.weight = self.layers[0].up.weight


class Scalar(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.factor = nn.Parameter(torch.ones(()))


REFUSED: dict[str, tuple[type[Exception], Callable[[], nn.Module], dict[str, Any]]] = {
    'must be a DeviceMesh': (AmpConfigError, Net, dict(mesh=3)),
    'of one dimension': (AmpConfigError, Net, dict(mesh='2, 1, 1')),
    "mesh_dim_names=.'replicate', 'shard'": (AmpConfigError, Net, dict(mesh='1, 2')),
    "unknown key 'block'.*did you mean 'blocks'": (AmpConfigError, Net, dict(sharding=dict(block='Block'))),
    "'Blok'.*did you mean 'Block'": (AmpConfigError, Net, dict(sharding=dict(blocks='Blok'))),
    "reduce_dtype.*'int8'": (AmpConfigError, Net, dict(sharding=dict(reduce_dtype='int8'))),
    "reshard_after_forward.*'no'": (AmpConfigError, Net, dict(sharding=dict(reshard_after_forward='no'))),
    'factor of': (ValueError, Net, dict(sharding=dict(reshard_after_forward=3))),
    'without a mesh': (AmpConfigError, Net, dict(mesh=None, sharding=dict(blocks='Block'))),
    'is shared with a module': (AmpAttachError, Tied, {}),
    'scalar parameters': (ValueError, Scalar, {}),
    'weight_norm.*parametrizations': (AmpAttachError, lambda: nn.utils.weight_norm(nn.Linear(3, 3)), {}),
    '16-bit already': (AmpAttachError, lambda: Net().bfloat16(), dict(from_16bit=True)),
}


@pairs(text=REFUSED, level=('O5', 'O2'))
@on_ranks()
def test_what_cannot_be_sharded_is_refused_before_anything_changes(here: Here, text: str, level: str) -> None:
    kind, make, words = REFUSED[text]
    net = make().to(here.device)
    optimizer = FusedSGD(net.parameters(), lr=0.1)
    words = {'mesh': mesh_of(here), **words}
    if isinstance(words['mesh'], str):
        words['mesh'] = init_device_mesh(here.device.type, tuple(map(int, words['mesh'].split(','))))
    before = [(id(parameter), parameter.dtype) for parameter in net.parameters()]
    with pytest.raises(kind, match=f'(?s){text}'):
        amp.initialize(net, optimizer, opt_level=level, verbosity=0, **words)
    assert not any(isinstance(module, FSDPModule) for module in net.modules())
    assert [(id(parameter), parameter.dtype) for parameter in optimizer.param_groups[0]['params']] == before


@on_ranks()
def test_sharding_and_initialize_in_an_order_that_cannot_work(here: Here) -> None:
    net = Net().to(here.device)
    early = FusedAdamW(net.parameters())
    with pytest.raises(AmpConfigError, match='conflicts with a mesh'):
        amp_wrapper.fully_shard(net, 'O5', mesh=mesh_of(here), master_weights='split')
    with pytest.raises(AmpConfigError, match='contradicts accumulate_in_fp32'):
        amp_wrapper.fully_shard(net, 'O5', mesh=mesh_of(here), accumulate_in_fp32=True, reduce_dtype='bfloat16')
    # nothing has been changed
    amp_wrapper.fully_shard(net, 'O5', mesh=mesh_of(here))
    with pytest.raises(AmpAttachError, match='built before the model was sharded'):
        amp.initialize(net, early, opt_level='O5', verbosity=0)
    with pytest.raises(AmpAttachError, match='sharded already'):
        amp.initialize(net, FusedAdamW(net.parameters()), opt_level='O5', verbosity=0, mesh=mesh_of(here))
    options: dict[str, Any] = dict(opt_level='O5', verbosity=0, optimizer=FusedAdamW(net.parameters()))
    with pytest.raises(AmpAttachError, match='nothing is kept twice'):
        AmpOptimWrapper(master_weights='split', **options).attach(net)
    with pytest.raises(AmpAttachError, match=r'reduce_dtype=torch\.float32, not'):
        AmpOptimWrapper(accumulate_in_fp32=True, **options).attach(net)
    net = Net().to(here.device)
    stepped = FusedAdamW(net.parameters())
    net(batch(here, 0)).sum().backward()
    stepped.step()
    with pytest.raises(AmpAttachError, match='has state already'):
        amp.initialize(net, stepped, opt_level='O5', verbosity=0, mesh=mesh_of(here))

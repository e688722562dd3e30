"""FSDP2 through mmengine: ``MMFullyShard``.

The model is built and its weights are initialised as always; it is sharded once the optimizer wrapper is there, which says
what the level keeps in FP32, and before a checkpoint is loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from mmengine.device import get_device
from mmengine.model import BaseAveragedModel, MMDistributedDataParallel
from mmengine.optim import OptimWrapper, OptimWrapperDict
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from .. import distributed_internals
from ..casting.sharding import Sharding, begin_alike, shard
from ..errors import AmpAttachError, AmpConfigError, nearest, some
from ..policy import Policy, resolve
from ..policy.options import is_count, plain
from ..registry import MODEL_WRAPPERS
from .attaching import AVERAGES, LEAVE, amp_wrappers, averages_of
from .log import log

#: How a config may describe a mesh.
Mesh = DeviceMesh | Sequence[int] | None
#: What of a policy decides how a model is sharded.
_DECISIVE = ('enabled', 'cast_model_type', 'master_weights', 'keep_batchnorm_fp32', 'keep_fp32', 'accumulate_in_fp32')


@MODEL_WRAPPERS.register_module()
class MMFullyShard(nn.Module):
    """Shards a model of mmengine over all ranks, by FSDP2, in place of ``MMDistributedDataParallel``.

    ```python
    model_wrapper_cfg = dict(type='amp_wrapper.MMFullyShard', blocks=['SwinBlock'])
    optim_wrapper = dict(type='AmpOptimWrapper', opt_level='O5', optimizer=...)
    ```

    Runner builds it before there is an optimizer wrapper, so nothing is sharded then; that happens before a checkpoint is
    loaded, for the level of the wrapper.

    Args:
        module: A model of mmengine, whole.
        mesh: A ``DeviceMesh``, or its shape: ``(8,)`` shards over eight ranks, ``(2, 4)`` over four and repeats that twice.
            None: over all ranks.
        blocks: As for :func:`amp_wrapper.fully_shard`.
        reduce_dtype: As there.
        reshard_after_forward: As there.
        offload: As there.
        no_sync: Whether, while gradients are accumulated over several iterations, each rank keeps whole gradients of its own
            until the last one. Saves communication, and costs the memory of all gradients of the model. They are summed, and
            averaged, in ``reduce_dtype``, which is FP32 then unless another one is given.
        checkpoints: 'whole': rank 0 puts the states together and writes a file. 'sharded': each rank writes its own shards to a
            folder, which is read by any number of ranks.

    Raises:
        AmpConfigError: A mesh that does not fit the number of processes; no such kind of checkpoints.
    """

    #: Gradients are averaged after a cast as before it.
    survives_cast = True

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh = None,
        blocks: str | type | Sequence[str | type] | None = None,
        reduce_dtype: str | torch.dtype | None = None,
        reshard_after_forward: bool | int | None = None,
        offload: bool = False,
        no_sync: bool = False,
        checkpoints: str = 'whole',
    ) -> None:
        super().__init__()
        if checkpoints not in ('whole', 'sharded'):
            near = nearest(str(checkpoints), ('whole', 'sharded'))
            raise AmpConfigError([f"checkpoints={checkpoints!r}{near} must be 'whole' or 'sharded'."])
        self.module = module
        self.checkpoints = checkpoints
        self._mesh = mesh_of(mesh)
        words = dict(
            blocks=blocks, reduce_dtype=reduce_dtype, reshard_after_forward=reshard_after_forward, offload=offload
        )
        self._options: dict[str, Any] = words
        self._accumulates_apart = no_sync
        self._holds_back = False
        # what cannot mean anything at any level is an error now
        Sharding.of(self._mesh, self._options, resolve('O0'))
        begin_alike(module, self._mesh)

    @property
    def is_sharded(self) -> bool:
        """Whether it has happened."""
        return any(map(distributed_internals.is_fully_sharded, self.module.modules()))

    def shard(
        self,
        policy: Policy,
        optimizers: Sequence[Optimizer] = (),
        average: BaseAveragedModel | None = None,
        apart: bool = False,
    ) -> None:
        """Shard the model for a level, once.

        Args:
            policy: Of the optimizer wrapper.
            optimizers: They step shards afterwards.
            average: Of this model; it is sharded in the same way, in FP32.
            apart: Whether each child of the model is sharded by itself, since the model's ``train_step`` calls them one by one.

        Raises:
            AmpAttachError: A model that cannot be sharded.
            AmpConfigError: Options that conflict with the level, or name nothing.
        """
        if self.is_sharded:
            return
        options = dict(self._options)
        if self._accumulates_apart and policy.casts_model and options['reduce_dtype'] is None:
            # torch adds up in this type what is averaged later
            options['reduce_dtype'] = 'float32'
        chosen = Sharding.of(self._mesh, options, policy)
        shard(_parts(self.module, apart), policy, chosen, optimizers, LEAVE, AVERAGES)
        if average is not None:
            chosen = dataclasses.replace(chosen, reduce_dtype=None)
            shard(_parts(average.module, apart), resolve('O0'), chosen, (), LEAVE, AVERAGES)
            # what it was made with
            named = dict(average.module.named_parameters())
            average.avg_parameters = average.module.state_dict() if average.update_buffers else named

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A forward pass inside, and the backward pass through it, belong to an accumulation that goes on."""
        self._holds_back = True
        try:
            yield
        finally:
            self._holds_back = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """That of the model."""
        if self._accumulates_apart and self.is_sharded:
            # torch asks in the backward pass, which mmengine runs outside of no_sync
            for module in filter(distributed_internals.is_fully_sharded, self.module.modules()):
                module.set_requires_gradient_sync(not self._holds_back, recurse=False)  # type: ignore[operator]
        return self.module(*args, **kwargs)

    def train_step(self, data: Any, optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
        """As of ``MMDistributedDataParallel``; with several optimizers, that of the model, which knows when each is stepped."""
        if isinstance(optim_wrapper, OptimWrapperDict):
            return self.module.train_step(data, optim_wrapper)  # type: ignore[operator, no-any-return]
        return MMDistributedDataParallel.train_step(self, data, optim_wrapper)

    # mmengine's, which call those of the model
    val_step = MMDistributedDataParallel.val_step
    test_step = MMDistributedDataParallel.test_step
    _run_forward = MMDistributedDataParallel._run_forward
    detect_anomalous_params = False


def _parts(model: nn.Module, apart: bool) -> list[nn.Module]:
    """What is sharded by itself: a model, or each of its children that has something to train.

    Raises:
        AmpAttachError: Children are sharded, and the model has parameters of its own.
    """
    if not apart:
        return [model]
    own = [name for name, parameter in model.named_parameters(recurse=False) if parameter.requires_grad]
    if own:
        raise AmpAttachError(
            f'{type(model).__name__} has parameters of its own ({some(own)}), which nothing would average where an '
            f'OptimWrapperDict trains each of its children: move them into a module of their own.'
        )
    return [child for child in model.children() if any(True for _ in child.parameters())]


def mesh_of(mesh: Mesh) -> DeviceMesh:
    """The mesh that a config describes, on mmengine's device.

    Raises:
        AmpConfigError: A shape that does not fit the number of processes; no processes.
    """
    if isinstance(mesh, DeviceMesh):
        return mesh
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise AmpConfigError(['MMFullyShard needs several processes: start it by tools/dist_train.sh CONFIG N.'])
    world = torch.distributed.get_world_size()
    sizes = (world,) if mesh is None else tuple(mesh) if isinstance(mesh, (list, tuple)) else (mesh,)
    shape = tuple(map(plain, sizes))
    if len(shape) not in (1, 2) or not all(map(is_count, shape)) or torch.Size(shape).numel() != world:
        raise AmpConfigError([f'mesh={mesh!r} must be None, or one or two sizes with the product {world}, the ranks.'])
    names = ('replicate', 'shard')[-len(shape) :]
    return init_device_mesh(torch.device(get_device()).type, shape, mesh_dim_names=names)


# -- when a runner is ready --------------------------------------------------------------------------------------------


def shard_model_of(runner: Any) -> None:
    """Shard the model of a runner, whose optimizer wrapper is built and whose weights are initialised; once.

    Args:
        runner: About to load a checkpoint, or to go without.

    Raises:
        AmpAttachError: Wrappers of several levels.
    """
    model = runner.model
    if not isinstance(model, MMFullyShard) or model.is_sharded:
        return
    wrapper = getattr(runner, 'optim_wrapper', None)
    if not isinstance(wrapper, (OptimWrapper, OptimWrapperDict)):
        # nothing trains yet, or ever: the model is whole on each rank, as it was built
        return
    policy, apart = policy_of(wrapper), isinstance(wrapper, OptimWrapperDict)
    members = list(wrapper.values()) if isinstance(wrapper, OptimWrapperDict) else [wrapper]
    model.shard(policy, [member.optimizer for member in members], next(iter(averages_of(runner)), None), apart)
    shape = ' x '.join(map(str, model._mesh.shape))
    log(f'the model is sharded over {shape} processes, for {policy.describe()}')


def policy_of(wrapper: Any) -> Policy:
    """The configuration that a model is sharded for: that of the wrapper, or of all members of an ``OptimWrapperDict``.

    Raises:
        AmpAttachError: Members that differ.
    """
    policies: list[Policy] = [member.policy for member in amp_wrappers(wrapper).values()] or [resolve('O0')]
    if differing := [name for name in _DECISIVE if len({getattr(policy, name) for policy in policies}) > 1]:
        raise AmpAttachError(f'members of an OptimWrapperDict differ in {some(differing)}: shards need one level.')
    return policies[0]

"""FSDP2 through mmengine: ``MMFullyShard`` for ``Runner``, and ``FullyShardStrategy`` for ``FlexibleRunner``.

The model is built and its weights are initialised as always; it is sharded once the optimizer wrapper is there, which says
what the level keeps in FP32, and before a checkpoint is loaded.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from mmengine._strategy import DDPStrategy
from mmengine.device import get_device
from mmengine.hooks import EMAHook
from mmengine.model import BaseAveragedModel, BaseDataPreprocessor, is_model_wrapper
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.runner import weights_to_cpu
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from .. import distributed_internals
from ..casting.sharding import Sharding, begin_alike, shard
from ..checkpoint import sharded
from ..errors import AmpAttachError, AmpConfigError, nearest, some
from ..policy import Policy, resolve
from ..policy.options import is_count, plain
from ..registry import MODEL_WRAPPERS, STRATEGIES
from . import shard_files
from .wrappers import amp_wrappers

_KINDS_SHOWN = f'known are {", ".join(map(repr, shard_files.KINDS))}'


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
            folder, which is read by any number of ranks. 'async': the same, while the training goes on.

    Raises:
        AmpConfigError: A mesh that does not fit the number of processes; no such kind of checkpoints.
    """

    #: Gradients are averaged after a cast as before it.
    survives_cast = True

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh | Sequence[int] | None = None,
        blocks: str | type | Sequence[str | type] | None = None,
        reduce_dtype: str | torch.dtype | None = None,
        reshard_after_forward: bool | int | None = None,
        offload: bool = False,
        no_sync: bool = False,
        checkpoints: str = 'whole',
    ) -> None:
        super().__init__()
        if checkpoints not in shard_files.KINDS:
            raise AmpConfigError(
                [f'checkpoints={checkpoints!r}{nearest(str(checkpoints), shard_files.KINDS)}: {_KINDS_SHOWN}.']
            )
        self.module = module
        self.checkpoints = checkpoints
        self.pending: sharded.Pending | None = None
        self._mesh = mesh_of(mesh)
        self._options = {
            'blocks': blocks,
            'reduce_dtype': reduce_dtype,
            'reshard_after_forward': reshard_after_forward,
            'offload': offload,
        }
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
        leave, averages = (BaseDataPreprocessor,), (BaseAveragedModel,)
        options = dict(self._options)
        if self._accumulates_apart and policy.casts_model and options['reduce_dtype'] is None:
            # torch adds up in this type what is averaged later
            options['reduce_dtype'] = 'float32'
        chosen = Sharding.of(self._mesh, options, policy)
        shard(_parts(self.module, apart), policy, chosen, optimizers, leave, averages)
        if average is not None:
            chosen = dataclasses.replace(chosen, reduce_dtype=None)
            shard(_parts(average.module, apart), resolve('O0'), chosen, (), leave, averages)
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
            found: dict[str, Tensor] = self.module.train_step(data, optim_wrapper)  # type: ignore[operator]
            return found
        with optim_wrapper.optim_context(self):
            data = self.module.data_preprocessor(data, training=True)  # type: ignore[operator]
            if isinstance(data, Mapping):
                losses = self(**data, mode='loss')
            else:
                losses = self(*data, mode='loss')
        loss, log_vars = self.module.parse_losses(losses)  # type: ignore[operator]
        optim_wrapper.update_params(loss)
        found = log_vars
        return found

    def val_step(self, data: Any) -> Any:
        """That of the model."""
        return self.module.val_step(data)  # type: ignore[operator]

    def test_step(self, data: Any) -> Any:
        """That of the model."""
        return self.module.test_step(data)  # type: ignore[operator]


@STRATEGIES.register_module()
class FullyShardStrategy(DDPStrategy):
    """Shards the model of a ``FlexibleRunner`` over all ranks, by FSDP2: the counterpart of :class:`MMFullyShard`.

    ``strategy=dict(type='amp_wrapper.FullyShardStrategy', blocks=['SwinBlock'])``

    Args:
        mesh: As for :class:`MMFullyShard`.
        blocks: As there.
        reduce_dtype: As there.
        reshard_after_forward: As there.
        offload: As there.
        no_sync: As there.
        checkpoints: As there.
        activation_checkpointing: Names of modules, as in mmengine's configs, whose forward pass is computed once more in the
            backward pass.
        **kwargs: For mmengine's ``DDPStrategy``.
    """

    def __init__(
        self,
        *,
        mesh: DeviceMesh | Sequence[int] | None = None,
        blocks: str | type | Sequence[str | type] | None = None,
        reduce_dtype: str | torch.dtype | None = None,
        reshard_after_forward: bool | int | None = None,
        offload: bool = False,
        no_sync: bool = False,
        checkpoints: str = 'whole',
        activation_checkpointing: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs.get('model_wrapper') is not None:
            raise AmpConfigError(
                [
                    f'model_wrapper={kwargs["model_wrapper"]!r}: FullyShardStrategy has a wrapper of its own. Leave it out.'
                ]
            )
        super().__init__(**kwargs)
        self._sharding = {
            'mesh': mesh,
            'blocks': blocks,
            'reduce_dtype': reduce_dtype,
            'reshard_after_forward': reshard_after_forward,
            'offload': offload,
            'no_sync': no_sync,
            'checkpoints': checkpoints,
        }
        self._recomputed = activation_checkpointing

    def _wrap_model(self, model: nn.Module) -> nn.Module:
        if is_model_wrapper(model):
            return model
        model = self.convert_model(model.to(get_device()))
        if self._recomputed is not None:
            recompute(model, self._recomputed)
        return MMFullyShard(model, **self._sharding)  # type: ignore[arg-type]

    def build_optim_wrapper(self, optim_wrapper: Any, model: nn.Module | None = None) -> Any:
        """As of mmengine, and the model is sharded for the level of the wrapper."""
        built = super().build_optim_wrapper(optim_wrapper, model)
        if isinstance(model, MMFullyShard):
            model.shard(policy_of(built), optimizers_of(built), apart=isinstance(built, OptimWrapperDict))
        return built

    def model_state_dict(self) -> dict[str, Any]:
        """The weights under the names that the model has without a wrapper."""
        assert isinstance(self.model, MMFullyShard)
        state: dict[str, Any] = weights_to_cpu(self.model.module.state_dict())
        return state

    def save_checkpoint(self, filename: str, **kwargs: Any) -> None:
        """Write a checkpoint, whole on rank 0 or in shards. Collective."""
        with shard_files.saving(self, kwargs.get('save_optimizer', True)):
            super().save_checkpoint(filename, **kwargs)


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
            f'{type(model).__name__} is trained by an OptimWrapperDict, so that each of its children is sharded by itself, and '
            f'has parameters of its own ({some(own)}), which nothing would average: move them into a module of their own.'
        )
    return [child for child in model.children() if any(True for _ in child.parameters())]


def mesh_of(mesh: DeviceMesh | Sequence[int] | None) -> DeviceMesh:
    """The mesh that a config describes, on mmengine's device.

    Raises:
        AmpConfigError: A shape that does not fit the number of processes; no processes.
    """
    if isinstance(mesh, DeviceMesh):
        return mesh
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise AmpConfigError(
            [
                "type='amp_wrapper.MMFullyShard' shards over processes, and there is one alone: start it by "
                'tools/dist_train.sh CONFIG N, or with a launcher.'
            ]
        )
    world = torch.distributed.get_world_size()
    sizes = (world,) if mesh is None else tuple(mesh) if isinstance(mesh, (list, tuple)) else (mesh,)
    shape = tuple(map(plain, sizes))
    if not shape or not all(map(is_count, shape)) or torch.Size(shape).numel() != world:
        raise AmpConfigError(
            [
                f'mesh={mesh!r} must be sizes whose product is the number of processes, {world}: ({world},), say, or None.'
            ]
        )
    if len(shape) > 2:
        raise AmpConfigError(
            [f'mesh={mesh!r} must have one size, or two: how often the model is repeated, and over how many.']
        )
    names = ('replicate', 'shard')[-len(shape) :]
    return init_device_mesh(torch.device(get_device()).type, shape, mesh_dim_names=names)


def recompute(model: nn.Module, names: Sequence[str]) -> None:
    """Let some modules run their forward pass once more in the backward pass, and keep nothing of the first.

    mmengine's function for it takes the kind of torch's checkpoint that gives no gradients to a module whose inputs need none.

    Args:
        model: Changed in place.
        names: Qualified names of modules in it.

    Raises:
        AmpConfigError: No module has one of the names.
    """
    modules = dict(model.named_modules())
    problems = [
        f'activation_checkpointing has {name!r}{nearest(name, modules)}.' for name in names if name not in modules
    ]
    if problems:
        raise AmpConfigError(problems)
    for name in names:
        module = modules[name]
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)  # type: ignore[method-assign]


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
    averages = [hook.ema_model for hook in runner.hooks if isinstance(hook, EMAHook) and hasattr(hook, 'ema_model')]
    policy = policy_of(wrapper)
    apart = isinstance(wrapper, OptimWrapperDict)
    model.shard(policy, optimizers_of(wrapper), averages[0] if averages else None, apart)
    shape = ' x '.join(map(str, model._mesh.shape))
    runner.logger.info(f'amp: the model is sharded over {shape} processes, for {policy.describe()}')


def policy_of(wrapper: Any) -> Policy:
    """The configuration that a model is sharded for: that of the wrapper, or of all members of an ``OptimWrapperDict``.

    Raises:
        AmpAttachError: Members that differ.
    """
    members = list(amp_wrappers(wrapper).values())
    if not members:
        return resolve('O0')
    first: Policy = members[0].policy
    for member in members[1:]:
        names = (
            'casts_model',
            'cast_model_type',
            'master_weights',
            'keep_batchnorm_fp32',
            'keep_fp32',
            'accumulate_in_fp32',
        )
        differing = [name for name in names if getattr(member.policy, name) != getattr(first, name)]
        if differing:
            raise AmpAttachError(
                f'members of an OptimWrapperDict at {first.opt_level} and {member.policy.opt_level}, which differ in '
                f'{some(differing)}: one model is sharded for one level. Give all members the same.'
            )
    return first


def optimizers_of(wrapper: Any) -> list[Optimizer]:
    """What a wrapper steps, or the members of a dict of them; nothing for a config."""
    members = list(wrapper.values()) if isinstance(wrapper, OptimWrapperDict) else [wrapper]
    return [member.optimizer for member in members if isinstance(member, OptimWrapper)]

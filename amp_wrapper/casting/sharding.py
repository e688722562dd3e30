"""Shards a model by FSDP2 (``fully_shard``) for a level: which modules make a group, and in which type it is gathered."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import Unpack

from .. import fsdp_internals
from ..errors import AmpAttachError, AmpConfigError, nearest
from ..policy import PolicyOptions, resolve
from ..policy.levels import OptLevel, Policy, parse_dtype, spellings
from ..policy.options import plain
from ..shards import is_sharded
from .cast_handle import cast_in_place
from .modules import class_name
from .new_groups import NewGroup, find_blocks, make_groups
from .plan import CastPlan
from .shard_groups import has_16bit_shards

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclasses.dataclass(frozen=True)
class Sharding:
    """How a model is sharded.

    Attributes:
        mesh: One dimension: parameters are sharded over it. Two: sharded over the second, repeated over the first.
        blocks: Classes, class names, or glob patterns over qualified names: each module they name is gathered as a whole, when
            it runs. None: the items of the outermost ``nn.ModuleList`` and ``nn.Sequential`` that have modules inside.
        reduce_dtype: The type in which gradients are averaged. None: that of the gathered parameters.
        reshard_after_forward: Whether gathered parameters are freed between forward and backward pass, or on how many ranks
            they are kept in parts. None: of all but the outermost.
        offload: Whether shards, gradients and optimizer state stay on the CPU.
    """

    mesh: DeviceMesh
    blocks: tuple[str | type, ...] | None = None
    reduce_dtype: torch.dtype | None = None
    reshard_after_forward: bool | int | None = None
    offload: bool = False

    @classmethod
    def of(cls, mesh: Any, options: Mapping[str, Any] | None, policy: Policy) -> Sharding:
        """From what a user has written, which is not changed.

        Args:
            mesh: Has to be a ``DeviceMesh``.
            options: The other fields; ``reduce_dtype`` may be a name.
            policy: The configuration.

        Raises:
            AmpConfigError: Every conflict in one message.
        """
        problems = []
        if type(mesh).__name__ != 'DeviceMesh':
            problems.append(
                f"mesh={mesh!r} must be a DeviceMesh, such as torch.distributed.device_mesh.init_device_mesh('cuda', "
                f'(torch.distributed.get_world_size(),)).'
            )
        elif mesh.ndim > 2:
            problems.append(
                f'mesh={mesh!r} has {mesh.ndim} dimensions: fully_shard takes one, over which it shards, or two, where it '
                f'repeats the model over the first. Hand over a part of it, by the names of its dimensions.'
            )
        elif mesh.ndim == 2 and not mesh.mesh_dim_names:
            problems.append(
                f'mesh={mesh!r} has two dimensions without names, which fully_shard wants: '
                f"init_device_mesh({mesh.device_type!r}, {tuple(mesh.shape)}, mesh_dim_names=('replicate', 'shard'))."
            )
        words = dict(options or {})
        known = [field.name for field in dataclasses.fields(cls) if field.name != 'mesh']
        problems += [
            f'sharding has an unknown key {key!r}{nearest(str(key), known)}: known are {", ".join(known)}.'
            for key in words
            if key not in known
        ]
        blocks = words.get('blocks')
        if isinstance(blocks, (str, type)):
            blocks = (blocks,)
        if blocks is not None and not (
            isinstance(blocks, (list, tuple)) and all(isinstance(each, (str, type)) and each for each in blocks)
        ):
            problems.append(
                f"sharding['blocks']={blocks!r} must be module classes, class names or patterns over names."
            )
            blocks = None
        reduce, known_types = words.get('reduce_dtype'), (torch.float32, torch.float16, torch.bfloat16)
        dtype = parse_dtype(reduce)
        if reduce is not None and dtype not in known_types:
            problems.append(f"sharding['reduce_dtype']={reduce!r} must be {spellings(*known_types)}, or None.")
        if policy.accumulate_in_fp32 and policy.casts_model:
            if dtype not in (None, torch.float32):
                problems.append(
                    f"sharding['reduce_dtype']={reduce!r} conflicts with accumulate_in_fp32=True, which sums gradients in "
                    f'float32: leave one of the two out.'
                )
            dtype = torch.float32
        after = plain(words.get('reshard_after_forward'))
        if after is not None and not isinstance(after, int):
            problems.append(
                f"sharding['reshard_after_forward']={after!r} must be True, False, a number of ranks or None."
            )
        elif not isinstance(after, (bool, type(None))) and not problems:
            size = mesh.size(mesh.ndim - 1)
            if after < 1 or size % after:
                problems.append(f"sharding['reshard_after_forward']={after} must divide the number of ranks, {size}.")
        offload = words.get('offload', False)
        if not isinstance(offload, bool):
            problems.append(f"sharding['offload']={offload!r} must be True or False.")
        if policy.split_masters:
            problems.append(
                "master_weights='split' with a mesh: FP32 shards are the masters already, and nothing is kept twice. Leave "
                'master_weights out.'
            )
        if problems:
            raise AmpConfigError(problems)
        return cls(mesh, None if blocks is None else tuple(blocks), dtype, after, offload)


def shard(
    models: Sequence[nn.Module],
    policy: Policy,
    sharding: Sharding,
    optimizers: Sequence[Optimizer] = (),
    leave: tuple[type, ...] = (),
    average: tuple[type, ...] = (),
) -> None:
    """Shard models in place, so that the level can be attached to them. Every rank of the mesh calls it.

    At the levels with masters, the shards are FP32 and stand for the masters; modules are gathered in 16-bit, but for those
    that the level keeps in FP32, which make groups of their own. Without masters, weights are cast first and the shards are
    16-bit. At O0, O1 and O4 everything is FP32.

    Weights and buffers begin as those of the first rank, as under DDP; otherwise each would give a part of its own.

    Args:
        models: FP32, neither wrapped nor cast; they may be on the meta device.
        policy: The configuration; enabled.
        sharding: How.
        optimizers: Their groups hold the sharded parameters in place of the whole ones afterwards.
        leave: As for :class:`~amp_wrapper.casting.plan.CastPlan`.
        average: The same.

    Raises:
        AmpAttachError: A model that is wrapped, sharded, cast or 16-bit; on another kind of device than the mesh; a mesh of
            CPUs with torch 2.6; a module that mixes types; an optimizer that has state already. Nothing has been changed.
        AmpConfigError: ``blocks`` that name nothing.
    """
    groups: list[NewGroup] = []
    half: list[nn.Parameter] = []
    for model in models:
        _check_model(model, sharding)
        _check_optimizers(optimizers, model)
        plan = CastPlan([('', model)], policy, leave, average)
        half += plan.parameters.values()
        regions = [*reversed(find_blocks(model, sharding.blocks)), model]
        groups += make_groups(model, regions, set(map(id, plan.parameters.values())))
    before = [dict(model.named_parameters(remove_duplicate=False)) for model in models]
    # from here on, things change
    for model in models:
        begin_alike(model, sharding.mesh)
    if has_16bit_shards(policy):
        assert policy.cast_model_type is not None
        for parameter in half:
            cast_in_place(parameter, policy.cast_model_type)
    _call_fully_shard(groups, policy, sharding)
    sharded: dict[int, nn.Parameter] = {}
    for model, known in zip(models, before):
        sharded |= {id(known[name]): now for name, now in model.named_parameters(remove_duplicate=False)}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group['params'][:] = [sharded.get(id(parameter), parameter) for parameter in group['params']]


_Model = TypeVar('_Model', bound=nn.Module)


def fully_shard(
    model: _Model,
    opt_level: OptLevel = 'O1',
    *,
    mesh: DeviceMesh,
    blocks: str | type | Sequence[str | type] | None = None,
    reduce_dtype: str | torch.dtype | None = None,
    reshard_after_forward: bool | int | None = None,
    offload: bool = False,
    **options: Unpack[PolicyOptions],
) -> _Model:
    """Shard a model for a level, in place, before its optimizer is built. Every rank of the mesh calls it.

    ```python
    with torch.device('meta'):
        model = Transformer()
    amp_wrapper.fully_shard(model, 'O5', mesh=mesh)
    model.to_empty(device='cuda')
    model.load_state_dict(...)                    # or whatever initialises it
    optimizer = amp_wrapper.FusedAdamW(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level='O5')
    ```

    ``torch.distributed.fsdp.fully_shard`` does the work; the groups that it makes have the types which the level needs. A model
    that is small enough to be whole on each rank needs no such call: ``amp.initialize(model, optimizer, mesh=mesh)``.

    Args:
        model: FP32, neither wrapped nor cast; may be on the meta device.
        opt_level: 'O0' to 'O5', as it will be given to ``amp.initialize`` or ``AmpOptimWrapper``.
        mesh: One dimension: parameters are sharded over it. Two: sharded over the second, repeated over the first.
        blocks: Module classes, class names, or glob patterns over qualified names: what they name is gathered as a whole,
            when it runs. By default the items of the outermost ``nn.ModuleList`` and ``nn.Sequential`` that have modules
            inside.
        reduce_dtype: The type in which gradients are averaged; that of the gathered parameters by default.
        reshard_after_forward: As for torch's ``fully_shard``.
        offload: Whether shards, gradients and optimizer state stay on the CPU.
        **options: Those of the level that decide what is 16-bit: ``dtype``, ``keep_batchnorm_fp32``, ``keep_fp32``,
            ``master_weights`` and the like; the same as for ``amp.initialize`` or ``AmpOptimWrapper``.

    Returns:
        The model itself.

    Raises:
        AmpConfigError: Every conflict of the configuration in one message.
        AmpAttachError: A model that is wrapped, sharded, cast or 16-bit; on another kind of device than the mesh; a module that
            mixes types. Nothing has been changed.
    """
    policy = resolve(opt_level, **options)
    words = {
        'blocks': blocks,
        'reduce_dtype': reduce_dtype,
        'reshard_after_forward': reshard_after_forward,
        'offload': offload,
    }
    shard([model], policy, Sharding.of(mesh, words, policy))
    return model


@torch.no_grad()
def begin_alike(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give parameters and buffers the values that they have on the first rank of a mesh. Collective.

    Args:
        model: Not sharded; tensors on the meta device are left alone.
        mesh: Of all ranks that will hold a part of it.
    """
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    for tensor in {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values():
        if tensor.is_meta or mesh.size() == 1:
            continue
        value = tensor.detach().to(mesh.device_type).contiguous()
        for group in groups:
            torch.distributed.broadcast(value, torch.distributed.get_global_rank(group, 0), group=group)
        tensor.copy_(value)


def _check_model(model: nn.Module, sharding: Sharding) -> None:
    mesh = sharding.mesh
    if mesh.device_type == 'cpu' and not fsdp_internals.TRAINS_ON_CPUS:
        raise AmpAttachError(
            f'fully_shard of torch {torch.__version__} trains on no CPU, and the mesh is of CPUs: take a newer torch (2.9 was '
            f'tried), or a mesh of GPUs.'
        )
    for name, module in model.named_modules():
        if isinstance(module, (DistributedDataParallel, DataParallel)):
            raise AmpAttachError(
                f'{name or "the model"} is wrapped in {type(module).__name__}, and a mesh was given: sharding averages '
                f'gradients itself. Hand over the model alone.'
            )
        if fsdp_internals.is_fully_sharded(module):
            raise AmpAttachError(
                f'{name or "the model"} ({class_name(module)}) is sharded by fully_shard already, and a mesh was given: leave '
                f'mesh out, or do not call fully_shard.'
            )
    for name, parameter in model.named_parameters():
        if is_sharded(parameter):
            raise AmpAttachError(
                f'{name} is a DTensor already, and a mesh was given: call fully_shard for such a model yourself, and '
                f'leave mesh out here.'
            )
        # fully_shard moves what is on the CPU to the device of the mesh
        if parameter.device.type not in (mesh.device_type, 'cpu', 'meta'):
            raise AmpAttachError(
                f'{name} is on {parameter.device}, and the mesh is of {mesh.device_type}: they must be of one kind.'
            )


def _check_optimizers(optimizers: Sequence[Optimizer], model: nn.Module) -> None:
    mine = set(map(id, model.parameters()))
    for optimizer in optimizers:
        if any(optimizer.state.get(p) for group in optimizer.param_groups for p in group['params'] if id(p) in mine):
            raise AmpAttachError(
                f'{type(optimizer).__name__} has state already, and a mesh was given: state of whole parameters does not fit '
                f'their shards. Initialise before the first step, and load the state afterwards, by '
                f'torch.distributed.checkpoint.state_dict.set_optimizer_state_dict.'
            )


def _call_fully_shard(groups: Sequence[NewGroup], policy: Policy, sharding: Sharding) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    gathers = policy.cast_model_type if policy.casts_model and not has_16bit_shards(policy) else None
    # torch changed in 2.15 what it takes without a type
    averages = sharding.reduce_dtype or gathers
    pins = sharding.mesh.device_type == 'cuda'
    # None means the same as leaving it out, and torch 2.6 refuses it
    after: dict[str, Any] = {}
    if sharding.reshard_after_forward is not None:
        after['reshard_after_forward'] = sharding.reshard_after_forward
    for group in groups:
        fully_shard(
            group.modules[0] if len(group.modules) == 1 else group.modules,
            mesh=sharding.mesh,
            **after,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=gathers if group.is_half else None,
                # what stays FP32 is averaged in FP32
                reduce_dtype=averages if group.is_half or not policy.casts_model else None,
                # the casts of the level are hooks of their own
                cast_forward_inputs=False,
            ),
            offload_policy=CPUOffloadPolicy(pin_memory=pins) if sharding.offload else OffloadPolicy(),
        )

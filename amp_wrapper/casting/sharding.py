"""Shards a model by FSDP2 (``fully_shard``) for a level: which modules make a group, and in which type it is gathered."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import Unpack

from ..distributed_internals import COMPLETES_GROUPS
from ..errors import AmpAttachError, AmpConfigError, some
from ..policy import PolicyOptions, resolve
from ..policy.levels import OptLevel, Policy, to_dtype
from ..policy.options import OPTIONS, Option, is_whole, read_words
from ..shards import is_sharded
from .kept import Kept, match
from .masters import replace_parameters
from .modules import class_name
from .plan import CastPlan, cast_in_place
from .roots import is_parallel
from .shard_check import has_16bit_shards

#: What one call of ``fully_shard`` is for, and whether the level computes with it in 16-bit.
Call = tuple[list[nn.Module], bool]
#: How to shard over a mesh: the other fields of :class:`Sharding`, as users write them.
SHARDING_OPTIONS: dict[str, Option] = {
    'blocks': OPTIONS['keep_fp32'],
    'reduce_dtype': Option(None, (torch.float32, torch.float16, torch.bfloat16, None), convert=to_dtype),
    'reshard_after_forward': Option(None, (True, False, None, is_whole), 'True, False or a count'),
    'offload': Option(False, (True, False)),
}


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
        """Read what a user has written, which is not changed.

        Args:
            mesh: Has to be a ``DeviceMesh``.
            options: By the keys of :data:`SHARDING_OPTIONS`.
            policy: The configuration.

        Raises:
            AmpConfigError: Every conflict in one message.
        """
        problems: list[str] = []
        if not isinstance(mesh, DeviceMesh) or mesh.ndim > 2 or (mesh.ndim == 2 and not mesh.mesh_dim_names):
            text = "of one dimension, or of two, the first of which repeats the model: mesh_dim_names=('replicate', 'shard')"
            problems.append(f'mesh={mesh!r} must be a DeviceMesh {text}.')
        read = read_words('sharding', options or {}, SHARDING_OPTIONS, problems)
        if policy.split_masters:
            problems.append("master_weights='split' conflicts with a mesh: FP32 shards are the masters. Leave it out.")
        if policy.accumulate_in_fp32 and policy.casts_model:
            if read.get('reduce_dtype') not in (None, torch.float32):
                problems.append("sharding['reduce_dtype'] contradicts accumulate_in_fp32=True, float32: leave it out.")
            read['reduce_dtype'] = torch.float32
        if problems:
            raise AmpConfigError(problems)
        return cls(mesh, **read)


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
        AmpAttachError: A model that is wrapped, sharded, cast or 16-bit; a module that mixes types; a parameter that two groups
            share; an optimizer that has state already. Nothing has been changed.
        AmpConfigError: ``blocks`` that name nothing. Nothing has been changed.
        RuntimeError, ValueError: By torch, for a parameter of whole numbers before 2.12, a parameter without dimensions, or a
            number of ranks in ``reshard_after_forward`` that does not divide theirs. A part of the model may be sharded.
    """
    half: set[nn.Parameter] = set()
    calls: list[Call] = []
    for model in models:
        unfit = [class_name(part) for part in model.modules() if is_parallel(part)]
        unfit += [name for name, parameter in model.named_parameters() if is_sharded(parameter)]
        if unfit:
            raise AmpAttachError(
                f'{some(unfit)} is sharded already, or a wrapper: hand over the whole model, without DDP.'
            )
        plan = CastPlan([('', model)], policy, leave, average)
        if plan.rounded and not has_16bit_shards(policy):
            raise AmpAttachError(
                f'{some(plan.rounded)} is 16-bit already: shards are FP32, so hand over the FP32 model.'
            )
        half.update(plan.parameters.values())
        calls += order_of_calls(model, find_blocks(model, sharding.blocks), half)
    for optimizer in optimizers:
        if any(optimizer.state.values()):
            raise AmpAttachError(
                f'{type(optimizer).__name__} has state already, which fits no shards: shard before its first step, and load '
                f'its state afterwards by torch.distributed.checkpoint.state_dict.set_optimizer_state_dict.'
            )
    before = [parameter for model in models for parameter in model.parameters()]
    # from here on, things change
    for model in models:
        begin_alike(model, sharding.mesh)
    for parameter in half if has_16bit_shards(policy) else ():
        cast_in_place(parameter, policy.cast_model_type or torch.float32)
    for modules, is_half in calls:
        _call_fully_shard(modules, is_half, policy, sharding)
    shards = [parameter for model in models for parameter in model.parameters()]
    for optimizer in optimizers:
        replace_parameters(optimizer, dict(zip(map(id, before), shards)))


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
        AmpAttachError: A model that is wrapped, sharded, cast or 16-bit; a module that mixes types; a parameter that two groups
            share. Nothing has been changed.
        RuntimeError, ValueError: By torch, as for its own ``fully_shard``; a part of the model may be sharded.
    """
    policy = resolve(opt_level, **options)
    words = dict(blocks=blocks, reduce_dtype=reduce_dtype, reshard_after_forward=reshard_after_forward, offload=offload)
    shard([model], policy, Sharding.of(mesh, words, policy))
    return model


@torch.no_grad()
def begin_alike(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give parameters and buffers the values that they have on the first rank of a mesh. Collective.

    Args:
        model: Not sharded; tensors on the meta device are left alone.
        mesh: Of all ranks that will hold a part of it.
    """
    for tensor in [each for each in (*model.parameters(), *model.buffers()) if not each.is_meta and mesh.size() > 1]:
        value = tensor.detach().to(mesh.device_type).contiguous()
        for group in mesh.get_all_groups():
            torch.distributed.broadcast(value, group=group, group_src=0)
        tensor.copy_(value)


def find_blocks(model: nn.Module, wanted: tuple[str | type, ...] | None) -> list[nn.Module]:
    """The modules that are gathered one by one, without the model itself.

    By default the items of the outermost lists that have modules inside, such as the layers of a transformer.
    """
    if wanted is None:
        # a ModuleDict is no list, and nobody calls it
        lists = [each for each in model.modules() if isinstance(each, (nn.ModuleList, nn.Sequential))]
        items = [item for each in lists for item in each.children() if _has_forward(item) and item not in lists]
        below = {each for item in items for child in item.children() for each in child.modules()}
        return [item for item in items if item not in below and any(True for _ in item.children())]
    names = [item if isinstance(item, str) else item.__name__ for item in wanted]
    named = match([('', model)], [(Kept("sharding['blocks']", name, ''), item) for name, item in zip(names, wanted)])
    return [each for each in model.modules() if id(each) in named and each is not model and _has_forward(each)]


def _has_forward(module: nn.Module) -> bool:
    """Whether a module is called, which gathers its group: a ``ModuleList`` is not."""
    return type(module).forward is not nn.Module.forward


def order_of_calls(model: nn.Module, blocks: Sequence[nn.Module], half: Container[nn.Parameter]) -> list[Call]:
    """Put the calls of ``fully_shard`` in order: each leaves out what those before it have sharded. Nothing is called here.

    Args:
        model: Its own call is the last one.
        blocks: What is gathered as a whole. What stays FP32 inside has calls before each.
        half: The parameters that the level computes with in 16-bit.

    Raises:
        AmpAttachError: A module that mixes types; a parameter that two calls reach.
    """
    calls: list[Call] = []
    takers: dict[nn.Parameter, Call] = {}

    def visit(name: str, module: nn.Module, around: Call, kept: Call) -> None:
        """Give a module and those below to the call around it, to a call of its own, or to that for what stays FP32."""
        if any(module in modules for modules, _ in calls):
            return
        types = {parameter in half for parameter in module.parameters()}
        if module is model or module in blocks:
            around, kept = ([module], True in types), ([], False)
            # inner modules come first
            calls[:0] = kept, around
        elif around[1] and types == {False} and _has_forward(module):
            # the largest modules whose parameters all stay FP32
            around = kept
            kept[0].append(module)
        for key, parameter in module.named_parameters(recurse=False):
            # fully_shard would untie it without a word
            is_shared = takers.setdefault(parameter, around) is not around
            if is_shared or (parameter in half) != around[1]:
                raise AmpAttachError(
                    f'{key} of {name or "the model"} ({class_name(module)}) is shared with a module that is gathered apart, or '
                    f'stays FP32 beside 16-bit parameters: move it into a module of its own, as weight_norm of '
                    f'torch.nn.utils.parametrizations does, or name a module around both in keep_fp32 or blocks.'
                )
        for key, child in module.named_children():
            visit(f'{name}.{key}'.lstrip('.'), child, around, kept)

    visit('', model, ([], False), ([], False))
    # before torch 2.13 each has a group of its own
    apart = [([each], is_half) for modules, is_half in calls for each in modules]
    return [call for call in calls if call[0]] if COMPLETES_GROUPS else apart


def _call_fully_shard(modules: list[nn.Module], is_half: bool, policy: Policy, sharding: Sharding) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    gathered, frees = policy.cast_model_type if is_half else None, sharding.reshard_after_forward
    # what stays FP32 is averaged in FP32; torch changed in 2.15 what it takes without a type
    averaged = sharding.reduce_dtype or gathered if is_half or not policy.casts_model else None
    # inputs are cast by the modules of the level
    types = MixedPrecisionPolicy(gathered, averaged, cast_forward_inputs=False)
    offload = CPUOffloadPolicy(pin_memory=sharding.mesh.device_type == 'cuda') if sharding.offload else OffloadPolicy()
    # torch 2.6 refuses None
    words: dict[str, Any] = {} if frees is None else {'reshard_after_forward': frees}
    fully_shard(modules, mesh=sharding.mesh, mp_policy=types, offload_policy=offload, **words)

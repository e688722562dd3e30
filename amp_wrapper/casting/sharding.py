"""Shards a model by FSDP2 (``fully_shard``) for a level: which modules make a group, and in which type it is gathered."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import Unpack

from .. import fsdp_internals
from ..errors import AmpAttachError, AmpConfigError, nearest, some
from ..policy import PolicyOptions, resolve
from ..policy.levels import OptLevel, Policy, dtype_name
from ..policy.options import OPTIONS, Option, is_whole, to_dtype
from ..shards import is_sharded
from .cast_handle import cast_in_place
from .kept import Kept, match
from .modules import class_name
from .plan import CastPlan
from .shard_check import NO_SPLIT_SHARDS, has_16bit_shards

_AVERAGED = (torch.float32, torch.float16, torch.bfloat16)


def _is_mesh(value: Any) -> bool:
    fits = isinstance(value, DeviceMesh) and (value.device_type != 'cpu' or fsdp_internals.TRAINS_ON_CPUS)
    return fits and (value.ndim == 1 or (value.ndim == 2 and bool(value.mesh_dim_names)))


_MESH = Option(
    None,
    (_is_mesh,),
    "a DeviceMesh (of GPUs with torch 2.6) of one dimension, such as init_device_mesh('cuda', (8,)), or of two with "
    "names, the first of which repeats the model: init_device_mesh('cuda', (2, 4), mesh_dim_names=('replicate', 'shard'))",
)
#: What one call of ``fully_shard`` is for, and the type in which the level computes with it.
Group = tuple[list[nn.Module], torch.dtype]
#: How to shard over a mesh: the other fields of :class:`Sharding`, as users write them.
SHARDING_OPTIONS: dict[str, Option] = {
    'blocks': OPTIONS['keep_fp32'],
    'reduce_dtype': Option(None, (*_AVERAGED, None), convert=to_dtype),
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
        words, table = dict(options or {}), SHARDING_OPTIONS
        problems = [
            f'sharding has an unknown key {key!r}{nearest(str(key), table)}: known are {", ".join(table)}.'
            for key in words
            if key not in table
        ]
        _MESH.read('mesh', mesh, problems)
        read = {
            name: option.read(f'sharding[{name!r}]', words.get(name, option.default), problems)
            for name, option in table.items()
        }
        ranks = read['reshard_after_forward']
        if type(ranks) is int and not problems and (ranks < 1 or mesh.size(mesh.ndim - 1) % ranks):
            problems.append(f"sharding['reshard_after_forward']={ranks} must divide the number of ranks of {mesh!r}.")
        if policy.accumulate_in_fp32 and policy.casts_model:
            if read['reduce_dtype'] not in (None, torch.float32):
                problems.append(
                    "sharding['reduce_dtype'] must be float32 beside accumulate_in_fp32=True: leave it out."
                )
            read['reduce_dtype'] = torch.float32
        if policy.split_masters:
            problems.append(f"master_weights='split' conflicts with a mesh: {NO_SPLIT_SHARDS}")
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
        AmpAttachError: A model that is wrapped, sharded, cast or 16-bit; on another kind of device than the mesh; a module that
            mixes types; a parameter that two groups share, or without dimensions; an optimizer that has state already. Nothing
            has been changed.
        AmpConfigError: ``blocks`` that name nothing. Nothing has been changed.
        RuntimeError: By torch before 2.12, for a parameter of whole numbers. A part of the model may be sharded.
    """
    computed_in: dict[int, torch.dtype] = {}
    groups: list[Group] = []
    for model in models:
        _check_model(model, sharding.mesh)
        plan = CastPlan([('', model)], policy, leave, average)
        if plan.rounded and not has_16bit_shards(policy):
            raise AmpAttachError(
                f'{some(list(plan.rounded))} are 16-bit already, and shards are FP32: drop .half() or .bfloat16().'
            )
        computed_in |= {id(parameter): parameter.dtype for parameter in model.parameters()}
        if policy.cast_model_type is not None:
            computed_in |= dict.fromkeys(map(id, plan.parameters.values()), policy.cast_model_type)
        groups += make_groups(model, find_blocks(model, sharding.blocks), computed_in)
    for optimizer in optimizers:
        whole = [p for group in optimizer.param_groups for p in group['params'] if id(p) in computed_in]
        if any(map(optimizer.state.get, whole)):
            raise AmpAttachError(
                f'{type(optimizer).__name__} has state already, which does not fit shards: initialise before the first step, '
                f'and load the state afterwards by torch.distributed.checkpoint.state_dict.set_optimizer_state_dict.'
            )
    before = [(model, *named) for model in models for named in model.named_parameters(remove_duplicate=False)]
    # from here on, things change
    for model in models:
        begin_alike(model, sharding.mesh)
    for _, _, parameter in before if has_16bit_shards(policy) else ():
        cast_in_place(parameter, computed_in[id(parameter)])
    for group in groups:
        _call_fully_shard(group, policy, sharding)
    sharded = {id(parameter): model.get_parameter(name) for model, name, parameter in before}
    for optimizer in optimizers:
        for options in optimizer.param_groups:
            options['params'][:] = [sharded.get(id(parameter), parameter) for parameter in options['params']]


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
            mixes types; a parameter that two groups share, or without dimensions. Nothing has been changed.
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
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta and mesh.size() > 1:
            value = tensor.detach().to(mesh.device_type).contiguous()
            for group in mesh.get_all_groups():
                torch.distributed.broadcast(value, group=group, group_src=0)
            tensor.copy_(value)


def _check_model(model: nn.Module, mesh: DeviceMesh) -> None:
    for name, module in model.named_modules():
        if isinstance(module, (DistributedDataParallel, DataParallel)):
            raise AmpAttachError(
                f'{name or "the model"} is wrapped in {type(module).__name__}, and a mesh was given: sharding averages '
                f'gradients itself. Hand over the model alone.'
            )
    for name, parameter in model.named_parameters():
        problem = ''
        if is_sharded(parameter):
            problem = 'is a DTensor already: leave mesh out, or do not call fully_shard'
        # fully_shard moves what is on the CPU to the device of the mesh
        elif parameter.device.type not in (mesh.device_type, 'cpu', 'meta'):
            problem = f'is on {parameter.device}, and the mesh is of {mesh.device_type}: they must be of one kind'
        elif not parameter.ndim:
            problem = 'has no dimensions, and cannot be divided: give it the shape (1,)'
        if problem:
            raise AmpAttachError(f'a mesh was given, and {name} {problem}.')


def find_blocks(model: nn.Module, wanted: tuple[str | type, ...] | None) -> list[nn.Module]:
    """The modules that are gathered one by one, outer ones first, without the model itself."""
    if wanted is None:
        return list(_items(model))
    rules = [
        (Kept("sharding['blocks']", item if isinstance(item, str) else item.__name__, ''), item) for item in wanted
    ]
    named = match([('', model)], rules)
    return [each for each in model.modules() if id(each) in named and each is not model and _has_forward(each)]


def _items(module: nn.Module) -> Iterator[nn.Module]:
    """The items of the outermost lists that have modules inside, such as the layers of a transformer."""
    for child in module.children():
        listed = isinstance(module, (nn.ModuleList, nn.Sequential))
        is_list = isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        if listed and not is_list and any(True for _ in child.children()):
            yield child
        else:
            yield from _items(child)


def _has_forward(module: nn.Module) -> bool:
    """Whether a module is called, which gathers its group: a ``ModuleList`` is not."""
    return type(module).forward is not nn.Module.forward


def make_groups(model: nn.Module, blocks: Sequence[nn.Module], computed_in: Mapping[int, torch.dtype]) -> list[Group]:
    """The calls of ``fully_shard``, in order: each leaves out what those before it have sharded. Nothing is called here.

    Args:
        model: Its own call is the last one.
        blocks: What is gathered as a whole, outer modules first. Modules inside that are of another type come before each.
        computed_in: The type in which the level computes with each parameter, by id.

    Raises:
        AmpAttachError: A module that mixes types; a parameter that two groups share.
    """
    groups: list[Group] = []
    taken: set[int] = set()

    def sizes_of(module: nn.Module) -> Counter[torch.dtype]:
        """How many elements of each type a call for a module would take."""
        sizes: Counter[torch.dtype] = Counter()
        for parameter in module.parameters():
            if id(parameter) not in taken:
                sizes[computed_in[id(parameter)]] += parameter.numel()
        return sizes

    def find_apart(module: nn.Module, main: torch.dtype) -> Iterator[tuple[nn.Module, torch.dtype]]:
        """The largest modules below whose parameters are all of one other type than ``main``, with that type."""
        for child in module.children():
            dtypes = list(sizes_of(child))
            if len(dtypes) == 1 and main not in dtypes and _has_forward(child):
                yield child, dtypes[0]
            elif set(dtypes) - {main}:
                yield from find_apart(child, main)

    for block in [*reversed(blocks), model]:
        sizes = sizes_of(block)
        if not sizes and block is not model:
            continue
        own = [computed_in[id(parameter)] for parameter in block.parameters(recurse=False)]
        main = own[0] if own else max(sizes, key=sizes.__getitem__, default=torch.float32)
        apart = dict(find_apart(block, main))
        for dtype in dict.fromkeys(apart.values()):
            modules = [module for module, other in apart.items() if other is dtype]
            together = [modules] if fsdp_internals.COMPLETES_GROUPS else [[module] for module in modules]
            groups += [(each, dtype) for each in together]
        groups.append(([block], main))
        taken.update(map(id, block.parameters()))
    _check_groups(model, groups, computed_in)
    return groups


def _check_groups(model: nn.Module, groups: Sequence[Group], computed_in: Mapping[int, torch.dtype]) -> None:
    calls = {module: group for group in groups for module in group[0]}
    # by the names of modules: the group of each is that of the nearest one above it which fully_shard is called for
    inside: dict[str, Group] = {'': groups[-1]}
    owners: dict[int, tuple[Group, str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        inside[name] = group = calls.get(module, inside[name.rpartition('.')[0]])
        called = f'{name or "the model"} ({class_name(module)})'
        for key, parameter in module.named_parameters(recurse=False):
            dtype = computed_in[id(parameter)]
            first, holder = owners.setdefault(id(parameter), (group, called))
            if first is not group:
                # fully_shard would untie it without a word
                raise AmpAttachError(
                    f'{holder} and {called} share a parameter, {key}, and are gathered apart: name blocks, '
                    f'sharding=dict(blocks=[...]), such that one of them has both, or untie it.'
                )
            if dtype is not group[1]:
                raise AmpAttachError(
                    f'{called} has {key}, which the level computes with in {dtype_name(dtype)}, beside '
                    f'parameters in {dtype_name(group[1])}: move it into a module of its own (weight_norm and spectral_norm of '
                    f'torch.nn.utils.parametrizations do), or name the module in keep_fp32 or sharding=dict(blocks=[...]).'
                )


def _call_fully_shard(group: Group, policy: Policy, sharding: Sharding) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    modules, dtype = group
    is_half = policy.casts_model and dtype is policy.cast_model_type
    gathered = dtype if is_half else None
    # what stays FP32 is averaged in FP32; torch changed in 2.15 what it takes without a type
    averaged = sharding.reduce_dtype or gathered if is_half or not policy.casts_model else None
    pins, after = sharding.mesh.device_type == 'cuda', sharding.reshard_after_forward
    # None means the same as leaving it out, and torch 2.6 refuses it
    options: dict[str, Any] = {} if after is None else {'reshard_after_forward': after}
    fully_shard(
        modules,
        mesh=sharding.mesh,
        # inputs are cast by the modules of the level
        mp_policy=MixedPrecisionPolicy(gathered, averaged, cast_forward_inputs=False),
        offload_policy=CPUOffloadPolicy(pin_memory=pins) if sharding.offload else OffloadPolicy(),
        **options,
    )

"""Calls whose arguments change with the name: DistributedDataParallel, SyncBatchNorm, the optimizers, layer norms, amp."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import libcst as cst

from . import tables
from .arguments import Arguments, rebuilt
from .source import Source, Use

INITIALIZE = (
    'models',
    'optimizers',
    'enabled',
    'opt_level',
    'cast_model_type',
    'patch_torch_functions',
    'keep_batchnorm_fp32',
    'master_weights',
    'loss_scale',
    'cast_model_outputs',
    'num_losses',
    'verbosity',
    'min_loss_scale',
    'max_loss_scale',
)
#: Keywords of the functions of apex.amp, all of which are taken here, and of ours, which an earlier run may have left.
_AMP = {
    'initialize': (*INITIALIZE, 'keep_fp32', 'fp32_ops', 'from_16bit'),
    'scale_loss': ('loss', 'optimizers', 'loss_id', 'model', 'delay_unscale', 'delay_overflow_check'),
    'init': ('enabled', 'loss_scale', 'enable_caching', 'verbose', 'allow_banned'),
}

_DDP = (
    'module',
    'message_size',
    'delay_allreduce',
    'shared_param',
    'allreduce_trigger_params',
    'retain_allreduce_buffers',
    'allreduce_always_fp32',
    'num_allreduce_streams',
    'allreduce_communicators',
    'gradient_average',
    'gradient_predivide_factor',
    'gradient_average_split_factor',
    'prof',
)
_OVERLAPS = 'torch overlaps communication and backward by itself'
#: Why an argument of apex's DistributedDataParallel is left out; the gradients are the same without it.
_DDP_DROPPED = {
    'message_size': f'{_OVERLAPS}; bucket_cap_mb sets the size of its buckets in MiB',
    'delay_allreduce': f'{_OVERLAPS}; where some parameters get no gradient in a step, add find_unused_parameters=True',
    'shared_param': 'torch takes shared parameters as they are',
    'allreduce_trigger_params': f'{_OVERLAPS}, and decides when from its buckets',
    'retain_allreduce_buffers': 'gradient_as_bucket_view=True is the nearest',
    'num_allreduce_streams': f'{_OVERLAPS}, on a stream of its own',
    'allreduce_communicators': 'give process_group= for a group of your own',
    'gradient_predivide_factor': 'torch divides by the number of processes before it adds up, which cannot overflow',
    'gradient_average_split_factor': 'torch divides by the number of processes before it adds up, which cannot overflow',
    'prof': 'torch.profiler names the work of DistributedDataParallel by itself',
}
#: Arguments that change the gradients: (the value that means what torch does, what to do for another).
_DDP_BY_HAND = {
    'gradient_average': (
        'True',
        'torch always averages: multiply the loss by torch.distributed.get_world_size() for a sum, and delete the argument',
    ),
    'allreduce_always_fp32': (
        'False',
        'torch averages in the type of the gradient, 16-bit at O2, O3 and O5: register_comm_hook with a hook that casts to '
        'FP32, or opt_level O1 or O4, whose gradients are FP32; then delete the argument',
    ),
}

_ADAM = (
    'params',
    'lr',
    'bias_correction',
    'betas',
    'eps',
    'adam_w_mode',
    'weight_decay',
    'amsgrad',
    'set_grad_none',
    'capturable',
    'master_weights',
)
_SGD = (
    'params',
    'lr',
    'momentum',
    'dampening',
    'weight_decay',
    'nesterov',
    'wd_after_momentum',
    'materialize_master_grads',
    'set_grad_none',
)
_GRAD_NONE = 'zero_grad() sets gradients to None, as in torch; write zero_grad(set_to_none=False) for zeros'


# -- one function for each kind of call -------------------------------------------------------------------------------


def ddp(source: Source, use: Use, call: cst.Call) -> None:
    """apex's DistributedDataParallel, which becomes torch's."""
    order = ('module',) if use.ours else _DDP
    args = Arguments(call, order)
    if use.ours:
        names = [name for name in args.values if name in _DDP and name != 'module']
    else:
        names = [name for name in args.values if name != 'module']
    drop = []
    for name in names:
        if name in _DDP_BY_HAND:
            harmless, why = _DDP_BY_HAND[name]
            if args.literal(name, harmless) != harmless:
                source.hand(call, f'{use.dotted}({name}=)', why)
                continue
            drop.append(name)
        elif name in _DDP_DROPPED:
            source.remark(call, f'{use.dotted}({name}=)', f'left out: {_DDP_DROPPED[name]}')
            drop.append(name)
        elif not use.ours:
            source.hand(call, f'{use.dotted}({name}=)', "no argument of apex's that is known here; delete it")
    if drop or args.positional > 1:
        stay = [name for name in args.values if name != 'module' and name not in drop]
        source.edit(call, lambda updated: rebuilt(updated, args.by_name, drop, stay))


def sync_batch_norm(source: Source, use: Use, call: cst.Call) -> None:
    """apex's SyncBatchNorm and the function that puts it into a model."""
    if use.dotted.endswith('convert_syncbn_model'):
        order: tuple[str, ...] = ('module', 'process_group', 'channel_last')
    else:
        order = ('num_features', 'eps', 'momentum', 'affine', 'track_running_stats', 'process_group')
        order += ('channel_last', 'fuse_relu')
    args = Arguments(call, order)
    drop = []
    for name, why in (
        (
            'channel_last',
            'torch has the channels second: permute the input, or use memory_format=torch.channels_last, which changes the '
            'layout in memory alone; then delete the argument',
        ),
        ('fuse_relu', 'call torch.nn.functional.relu on the output, and delete the argument'),
    ):
        if name not in args.values:
            continue
        if args.literal(name, 'False') == 'False':
            drop.append(name)
        else:
            source.hand(call, f'{use.dotted}({name}=)', why)
    if drop:
        source.edit(call, lambda updated: rebuilt(updated, args.by_name, drop))


def layer_norm(source: Source, use: Use, call: cst.Call) -> None:
    """apex's layer norms, which become torch's."""
    args = Arguments(call, ('normalized_shape', 'eps', 'elementwise_affine', 'memory_efficient'))
    drop = [name for name in ('memory_efficient',) if name in args.values]
    if drop:
        source.remark(call, f'{use.dotted}(memory_efficient=)', 'left out: it changes the memory used, and no result')
    add = {}
    if use.dotted.endswith('RMSNorm') and 'eps' not in args.values:
        if args.starred:
            source.hand(
                call,
                use.dotted,
                "torch.nn.RMSNorm takes its eps from the input's type unless eps is given: 1e-5 in apex",
            )
        else:
            add['eps'] = '1e-5'
    if drop or add:
        source.edit(call, lambda updated: rebuilt(updated, args.by_name, drop, (), add))


def adam(source: Source, use: Use, call: cst.Call) -> str | None:
    """apex's FusedAdam: FusedAdamW here, or FusedAdam, by ``adam_w_mode``.

    Returns:
        The name here; None where it is unknown.
    """
    args = Arguments(call, _ADAM)
    problems = _problems(args, _ADAM)
    mode = args.literal('adam_w_mode', 'True')
    if mode not in ('True', 'False'):
        problems.append(
            'adam_w_mode decides between amp_wrapper.FusedAdamW (True) and FusedAdam (False), and is no constant here'
        )
    if args.literal('bias_correction', 'True') != 'True':
        problems.append(
            'bias_correction=False has no counterpart: delete it, and use a warm-up of the rate for the first steps'
        )
    if args.literal('amsgrad', 'False') != 'False':
        problems.append('apex refused amsgrad=True; amp_wrapper.FusedAdamW takes it')
    if args.literal('master_weights', 'False') != 'False':
        problems.append("master_weights: write amp.initialize(model, optimizer, opt_level='O2') instead")
    if args.literal('capturable', 'False') == '?':
        problems.append('capturable is ignored here, all steps can be captured: delete it')
    if problems:
        source.hand(
            call,
            use.dotted,
            f'{"; ".join(problems)}. Then write amp_wrapper.FusedAdamW with weight_decay=0.0 where it is '
            'not given, or amp_wrapper.FusedAdam',
        )
        return None
    drop = ['bias_correction', 'adam_w_mode', 'set_grad_none', 'capturable', 'master_weights']
    if args.literal('set_grad_none', 'True') != 'True':
        source.remark(call, f'{use.dotted}(set_grad_none=)', f'left out: {_GRAD_NONE}')
    drop = [name for name in drop if name in args.values]
    # two arguments are in the same place in both
    stay = [name for name in _ADAM[2:] if name in args.values]
    add = {'weight_decay': '0.0'} if mode == 'True' and 'weight_decay' not in args.values else {}
    if drop or stay or add:
        source.edit(call, lambda updated: rebuilt(updated, args.by_name, drop, stay, add))
    return 'amp_wrapper.FusedAdamW' if mode == 'True' else 'amp_wrapper.FusedAdam'


def sgd(source: Source, use: Use, call: cst.Call) -> str | None:
    """apex's FusedSGD.

    Returns:
        The name here; None where something has no counterpart.
    """
    args = Arguments(call, _SGD)
    problems = _problems(args, _SGD, starred=False)
    if args.literal('wd_after_momentum', 'False') != 'False':
        problems.append('wd_after_momentum=True has no counterpart: weight decay comes before momentum, as in torch')
    if problems:
        source.hand(call, use.dotted, f'{"; ".join(problems)}. Then write amp_wrapper.FusedSGD')
        return None
    if 'materialize_master_grads' in args.values:
        source.remark(call, f'{use.dotted}(materialize_master_grads=)', 'left out: the fused step needs no choice')
    if args.literal('set_grad_none', 'True') != 'True':
        source.remark(call, f'{use.dotted}(set_grad_none=)', f'left out: {_GRAD_NONE}')
    drop = [name for name in ('wd_after_momentum', 'materialize_master_grads', 'set_grad_none') if name in args.values]
    if drop:
        source.edit(call, lambda updated: rebuilt(updated, args.by_name, drop))
    return 'amp_wrapper.FusedSGD'


def _problems(args: Arguments, order: Sequence[str], starred: bool = True) -> list[str]:
    problems = []
    if args.starred and starred:
        problems.append('its arguments come from * or **, whose content is not known here')
    problems += [f'{name} is no argument of it any more' for name in args.values if name not in order]
    if args.too_many:
        problems.append('it has more arguments than it ever took')
    return problems


def amp_arguments(source: Source, use: Use, call: cst.Call, name: str) -> None:
    """A function of amp: all of apex's arguments are taken, others listed."""
    known = _AMP.get(name, ())
    for arg in call.args:
        if known and arg.keyword is not None and arg.keyword.value not in known:
            source.hand(
                call,
                f'apex.amp.{name}({arg.keyword.value}=)',
                f'no argument of {name} any more; it takes {", ".join(known)}',
            )


_CALLS: dict[str, Callable[[Source, Use, cst.Call], None]] = {
    'DistributedDataParallel': ddp,
    'SyncBatchNorm': sync_batch_norm,
    'convert_syncbn_model': sync_batch_norm,
    'FusedLayerNorm': layer_norm,
    'MixedFusedLayerNorm': layer_norm,
    'FusedRMSNorm': layer_norm,
    'MixedFusedRMSNorm': layer_norm,
}


def decide(source: Source) -> None:
    """Look at every call of a name of apex, and decide what becomes of its arguments."""
    uncalled: list[Use] = []
    for use in source.uses:
        call = source.call_of(use)
        dotted = use.dotted
        if use.ours:
            dotted = next(
                (
                    new + dotted.removeprefix(old)
                    for old, new in tables.ONCE_MORE.items()
                    if dotted == old or dotted.startswith(f'{old}.')
                ),
                dotted,
            )
        last = dotted.rpartition('.')[2]
        if call is None:
            if not use.ours and tables.WITH_CALL.get(dotted) in ('FusedAdam', 'FusedSGD'):
                uncalled.append(use)
            continue
        if dotted.startswith('apex.amp.'):
            amp_arguments(source, use, call, last)
        elif last in _CALLS and dotted.startswith('apex.'):
            _CALLS[last](source, use, call)
        elif not use.ours and tables.WITH_CALL.get(dotted) in ('FusedAdam', 'FusedSGD'):
            use.target = (adam if last == 'FusedAdam' else sgd)(source, use, call)
    for use in uncalled:
        if not _asks_whether_it_is_there(source, use):
            source.hand(use.node, use.dotted, tables.advice(use.dotted))
            continue
        made = [other.target for other in use.aliases[0].uses if other.dotted == use.dotted and other not in uncalled]
        if made and all(target is not None for target in made):
            use.target = made[0]


def _asks_whether_it_is_there(source: Source, use: Use) -> bool:
    """Whether a name is only compared with None, or tested, as after an import that may have failed."""
    parent = source.parents.get(use.node)
    if isinstance(parent, cst.Comparison):
        others = [part.comparator for part in parent.comparisons]
        return all(isinstance(part, cst.Name) and part.value == 'None' for part in others)
    tests = (cst.If, cst.IfExp, cst.Assert, cst.While)
    if isinstance(parent, tests):
        return parent.test is use.node
    return isinstance(parent, (cst.BooleanOperation, cst.UnaryOperation))

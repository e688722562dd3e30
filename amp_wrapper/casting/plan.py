"""Casting a model to 16-bit and back: which tensors, which hooks at its modules, and the FP32 view of its state.

The FP32 value behind a cast parameter is found in :mod:`.twins`; the forward hooks themselves are in :mod:`.forward_hooks`.
"""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from weakref import ReferenceType, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.utils.parametrize import is_parametrized
from torch.optim.swa_utils import AveragedModel

from ..autocast import patching as fp32_ops
from ..errors import AmpAttachError, AmpConfigError, nearest
from ..policy import lookup
from ..policy.nested import CASTABLE, HALF_TYPES, EnterObject
from ..policy.policy import Policy
from . import computed_weights, given_weights, quiet_hooks
from . import conversions as conversion_guard
from . import fp32_values as twins
from . import late_modules as module_guard
from .cast_hooks import (
    AmpHook,
    CastInputs,
    CastOutputs,
    EnterAutocast,
    EnterCasts,
    EnterCastsBelow,
    EnterForward,
    EnterFp32,
    EnterPlain,
    Fp32Inputs,
    LeaveAutocast,
    LeaveCasts,
    LeaveCastsBelow,
    LeaveForward,
    LeavePlain,
    StayedBehind,
    has_hook,
    holds_casts,
    is_loss,
    module_device,
    run_in_fp32,
)
from .late_modules import own_tensors, some

logger = logging.getLogger('amp_wrapper')

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)


class Fp32StateDict(AmpHook):
    """State-dict hook of a module that owns cast tensors: FP32 values, the exact ones where there are masters.

    The side that somebody else wrote to last wins. A weight that was edited through ``.data`` wins as well: its master follows
    it first, and a warning names it. ``state_dict(keep_vars=True)`` asks for the variables and gets them as they are.

    Args:
        module: Held by a weak reference, which neither copies nor pickled modules have.
        speaks: Whether there are warnings.
    """

    # of copies as well
    speaks = True

    def __init__(self, module: nn.Module, speaks: bool = True) -> None:
        self._owner: ReferenceType[nn.Module] | None = ref(module)
        self.speaks = speaks

    def __call__(self, module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any) -> None:
        for name, tensor in own_tensors(module):
            key = prefix + name
            value = state_dict.get(key)
            if value is None or value is tensor or tensor.dtype not in HALF_TYPES:
                continue
            if twins.agree_on_host(tensor) and self.speaks:
                logger.warning(
                    f'amp: {key} was changed by something other than the optimizer, and its FP32 master follows it. Call '
                    f'weights_changed() right after such an edit, so that training takes it up at once.'
                )
            exact = twins.fp32_value(tensor)
            state_dict[key] = tensor.detach().float() if exact is None else exact

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A deep copy of a module that is trained is FP32. Its own tensors are copied before its hooks are."""
        owner = None if self._owner is None else self._owner()
        if self.stays_behind and owner is not None:
            for _, tensor in own_tensors(owner):
                copied = memo.get(id(tensor))
                if isinstance(copied, Tensor) and copied is not tensor:
                    _become_fp32(copied, tensor)
            return StayedBehind()
        hook = Fp32StateDict.__new__(Fp32StateDict)
        hook._owner = None
        return hook

    def __getstate__(self) -> dict[str, Any]:
        return {'_owner': None}


class LoadFp32(AmpHook):
    """Pair of load hooks: loaded values reach the masters unrounded, and parameters keep their identity.

    ``before`` runs inside ``_load_from_state_dict``, so mmengine's own loader triggers it too, and remembers what is
    about to be loaded. ``after`` sees what became of it: a weight that is the loaded value rounded gives its master the
    value itself; a weight that somebody changed otherwise wins as it is. It also repairs what ``assign=True`` replaced:
    the optimizer and DDP hold the old parameters.
    """

    def __init__(self) -> None:
        self.parameters: dict[str, Tensor] = {}
        self.values: dict[str, Tensor] = {}
        self.versions: dict[str, int] = {}
        # on a deep copy that is FP32
        self.idle = False

    def before(self, module: nn.Module, state_dict: Any, prefix: str, *_: Any) -> None:
        if self.idle:
            return
        self.parameters = dict(own_tensors(module))
        self.versions = {name: tensor._version for name, tensor in self.parameters.items()}
        found = {name: state_dict.get(prefix + name) for name in self.parameters}
        self.values = {name: value for name, value in found.items() if isinstance(value, Tensor) and not value.is_meta}

    @torch.no_grad()
    def after(self, module: nn.Module, incompatible_keys: Any) -> None:
        if self.idle:
            return
        before, self.parameters = self.parameters, {}
        values, self.values = self.values, {}
        versions, self.versions = self.versions, {}
        for name, now in list(own_tensors(module)):
            old, value = before.get(name, now), values.get(name)
            if now is not old:
                owner: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
                old.copy_(now)
                owner[name] = old
            if old.dtype in HALF_TYPES and value is not None and value.shape == old.shape and twins.has_twin(old):
                value = value.to(old.device, torch.float32)
                if value.to(old.dtype).view(torch.int16).equal(old.detach().view(torch.int16)):
                    twins.write_fp32(old, value)
                    continue
            if old._version != versions.get(name):
                # newer than whatever was written to either side before
                twins.take_weight(old)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # torch holds its methods, which a copy keeps
        hook = memo[id(self)] = LoadFp32()
        hook.idle = self.idle or self.stays_behind
        return hook

    def __getstate__(self) -> dict[str, Any]:
        return {'parameters': {}, 'values': {}, 'versions': {}, 'idle': self.idle}


class CastPlan:
    """What would be cast in some modules: made before anything is touched, so that masters see unrounded weights.

    Args:
        roots: (qualified name, module) pairs; each root casts its inputs and outputs.
        policy: The configuration.
        leave: Module classes that are not touched at all, such as mmengine's data preprocessors.
        average: Module classes of averaged models, which stay FP32 beside the classes torch has.
        enter: Casts tensors inside output objects of a framework's own kind.
        covers_forward: For the functional API: at O1 and O4 every forward of a root or of a module below it runs with
            casts, in training and evaluation, and gives FP32 outputs (``policy.cast_model_outputs``). At the other levels
            the casts of other models end at the doors of the roots. False leaves autocast to the caller.

    Attributes:
        parameters: The parameters that will become 16-bit, with their qualified names, in model order.
        rounded: The trainable ones among all parameters that are 16-bit before the cast.
        raised: 16-bit tensors that will become FP32.

    Raises:
        AmpAttachError: A trainable parameter is 16-bit already, and the policy does not take it; one is not initialised yet,
            beyond the range of float16, or already cast by another wrapper.
        AmpConfigError: A ``keep_fp32`` pattern that matches nothing.
    """

    def __init__(
        self,
        roots: Sequence[tuple[str, nn.Module]],
        policy: Policy,
        leave: tuple[type, ...] = (),
        average: tuple[type, ...] = (),
        enter: EnterObject | None = None,
        covers_forward: bool = False,
    ) -> None:
        self.roots = list(roots)
        self._enter = enter
        self._covers = covers_forward
        self.policy = policy
        self._leave = leave
        # under autocast their weights are FP32 anyway
        self._average = (AveragedModel, *average) if policy.casts_model else ()
        self._cast_modules: list[nn.Module] = []
        self._kept_modules: list[tuple[nn.Module, bool, bool]] = []
        self._named: set[int] = set()
        self._classes: tuple[type[nn.Module], ...] = ()
        self._seen: set[int] = set()
        self._kept_tensors: set[int] = set()
        # what the weights of cast modules are computed from
        self._sources: set[int] = set()
        self.parameters: dict[str, nn.Parameter] = {}
        self.rounded: dict[str, nn.Parameter] = {}
        # finite buffers that the cast makes infinite
        self.infinite: list[str] = []
        self._buffers: dict[str, Tensor] = {}
        for name, root in self.roots:
            self._refuse(name, root)
        self.ops: fp32_ops.OpSet | None = None
        self._named = self._match_patterns()
        if policy.runs_16_bit:
            self._check_named_classes()
            self._classes = self._registered_classes()
            for name, root in self.roots:
                self._visit(root, name, kept=False, is_root=True)
        if policy.casts_model:
            self._keep_sharers()
            self._collect()
            assert policy.cast_model_type is not None
            self.infinite = given_weights.check_range(self.parameters, self._buffers, policy.cast_model_type)
        self.raised = self._find_raised()
        if policy.runs_16_bit:
            # last, since it wraps methods of the model's classes, and nothing may be touched by a plan that is refused
            classes = sorted({type(m) for m in self._modules()}, key=_class_name)
            self.ops = fp32_ops.OpSet(policy.fp32_ops, classes, casts=self.casts_ops)

    @property
    def casts_ops(self) -> bool:
        """Whether the hooks of the plan open regions in which ops are cast."""
        return self._covers and self.policy.runs_16_bit and not self.policy.casts_model

    def _hook_sets(self) -> dict[int, fp32_ops.OpSet]:
        """What another wrapper that autocasts has put on the roots."""
        return {
            id(root): hook.ops
            for _, root in self.roots
            for hook in root._forward_pre_hooks.values()
            if isinstance(hook, (EnterForward, EnterCasts))
        }

    def _modules(self) -> Iterator[nn.Module]:
        for _, root in self.roots:
            yield from root.modules()

    def _check_named_classes(self) -> None:
        """A module class that the configuration names and the model does not have is a mistake."""
        problems = []
        for op in self.policy.fp32_ops:
            cls = lookup.find(op.name, load=False)
            if lookup.is_module_class(cls) and not any(isinstance(module, cls) for module in self._modules()):
                known = sorted({type(module).__name__ for module in self._modules()})
                problems.append(
                    f'fp32_ops={op.name!r} matches no module{nearest(op.name.rpartition(".")[2], known)}. '
                    f'The model has {some(known)}.'
                )
        if problems:
            raise AmpConfigError(problems)

    def _registered_classes(self) -> tuple[type[nn.Module], ...]:
        dtype = self.policy.cast_model_type if self.policy.casts_model else self.policy.autocast_dtype
        assert dtype is not None
        device = module_device(self.roots[0][1]).type if self.roots else 'cpu'
        return fp32_ops.module_classes(self.policy.fp32_ops, dtype, device)

    def _refuse(self, name: str, root: nn.Module) -> None:
        if holds_casts(root):
            raise AmpAttachError(
                f'the model ({type(root).__name__}) already carries the casts of another wrapper: '
                f'attach a model once, or take the casts off with detach() first.'
            )
        for key, module in root.named_modules(prefix=name):
            # hooks do not go on them: where a cast needs none, they are left alone
            if isinstance(module, torch.jit.ScriptModule) and (module is root or self.policy.casts_model):
                raise AmpAttachError(
                    f'{key or "the model"} ({type(module).__name__}) was made by torch.jit.script or '
                    f'torch.jit.trace, and such a module takes no hooks, which the casts need. Hand over the Python module and '
                    f'script what is around it; below a Python module, O1 and O4 take scripted ones.'
                )
        left = frozenset(id(p) for m in root.modules() if isinstance(m, self._leave) for p in m.parameters())
        self.rounded.update(given_weights.rounded_before(root.named_parameters(prefix=name), self.policy, left))

    def _visit(self, module: nn.Module, name: str, kept: bool, is_root: bool = False) -> None:
        if id(module) in self._seen or isinstance(module, (*self._leave, torch.jit.ScriptModule)):
            return
        self._seen.add(id(module))
        bottom = self.policy.keep_batchnorm_fp32 and _is_batchnorm(module)
        if bottom:
            # its kernels take 16-bit input beside FP32 weights and give back the input's type: no hook is needed
            for tensor in (*module.parameters(), *module.buffers()):
                self._kept_tensors.add(id(tensor))
            return
        loss = not is_root and is_loss(module)
        named = id(module) in self._named or isinstance(module, (*self._average, *self._classes))
        starts = (loss or named) and not kept
        kept = kept or starts
        if kept:
            owns = any(True for _ in module.parameters(recurse=False)) or is_parametrized(module)
            if starts or owns:
                self._kept_modules.append((module, starts, starts and not loss))
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                self._kept_tensors.add(id(tensor))
        else:
            self._cast_modules.append(module)
            self._sources.update(map(id, computed_weights.sources(module)))
        for key, child in module.named_children():
            self._visit(child, f'{name}.{key}' if name else key, kept)

    def _match_patterns(self) -> set[int]:
        """The modules that ``keep_fp32`` names, under any of their names."""
        named: set[int] = set()
        unmatched = set(self.policy.keep_fp32)
        names: list[str] = []
        classes: set[str] = set()
        for prefix, root in self.roots:
            for key, module in root.named_modules(prefix=prefix, remove_duplicate=False):
                names.append(key)
                classes.add(type(module).__name__)
                for item in self.policy.keep_fp32:
                    if isinstance(item, type):
                        hit = isinstance(module, item)
                    else:
                        hit = (key != '' and fnmatch.fnmatchcase(key, item)) or type(module).__name__ == item
                        # the user knows nothing of the names that several models get
                        hit = hit or (self._covers and fnmatch.fnmatchcase(key.removeprefix(f'{prefix}.'), item))
                    if hit:
                        named.add(id(module))
                        unmatched.discard(item)
        problems = []
        for item in sorted(unmatched, key=str):
            label = item if isinstance(item, str) else item.__name__
            known = [name for name in names if name]
            problems.append(
                f'keep_fp32={label!r} matches no module{nearest(label, [*known, *classes])}. '
                f'The model has {some(known or sorted(classes))}.'
            )
        if problems:
            raise AmpConfigError(problems)
        return named

    def _keep_sharers(self) -> None:
        """A module that shares a tensor with one kept in FP32 has to compute in FP32 too, all of it."""
        changed = True
        while changed:
            changed = False
            for module in list(self._cast_modules):
                own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
                if any(id(tensor) in self._kept_tensors for tensor in own):
                    self._cast_modules.remove(module)
                    self._kept_modules.append((module, True, True))
                    self._kept_tensors.update(map(id, own))
                    changed = True

    def _collect(self) -> None:
        names: dict[int, str] = {}
        for prefix, root in self.roots:
            for key, tensor in (*root.named_parameters(prefix=prefix), *root.named_buffers(prefix=prefix)):
                names.setdefault(id(tensor), key)
        seen: set[int] = set()
        for module in self._cast_modules:
            for parameter in module.parameters(recurse=False):
                if self._is_ours(parameter, seen):
                    self.parameters[names[id(parameter)]] = parameter
            for buffer in module.buffers(recurse=False):
                if self._is_ours(buffer, seen):
                    self._buffers[names[id(buffer)]] = buffer

    def _find_raised(self) -> list[Tensor]:
        """What is 16-bit before, and FP32 after: where modules stay FP32, and at the levels whose weights are FP32.

        Frozen weights at the latter stay as they are: nothing is added to them, and their size is why they are 16-bit.
        """
        found: dict[int, Tensor] = {}
        # under autocast they want FP32 weights beside FP32 inputs, and are small
        norms = self.policy.runs_16_bit and not self.policy.casts_model
        for module in self._modules():
            if isinstance(module, (*self._leave, torch.jit.ScriptModule)):
                continue
            own = [tensor for _, tensor in own_tensors(module) if tensor.dtype in HALF_TYPES]
            trained = {id(parameter) for parameter in self.rounded.values()}
            frozen = any(isinstance(t, nn.Parameter) and id(t) not in trained for t in own)
            for tensor in own:
                kept = id(tensor) in self._kept_tensors or (norms and isinstance(module, _NORMS))
                if kept or (not self.policy.casts_model and self.policy.from_16bit and self._is_raised(tensor, frozen)):
                    found[id(tensor)] = tensor
        return list(found.values())

    @staticmethod
    def _is_raised(tensor: Tensor, beside_frozen: bool) -> bool:
        """At a level with FP32 weights: what is trained, and buffers of modules in which nothing is frozen and 16-bit."""
        return tensor.requires_grad if isinstance(tensor, nn.Parameter) else not beside_frozen

    def _is_ours(self, tensor: Tensor, seen: set[int]) -> bool:
        kept = id(tensor) in self._kept_tensors or id(tensor) in self._sources
        if id(tensor) in seen or kept or tensor.dtype not in CASTABLE:
            return False
        seen.add(id(tensor))
        return True

    def apply(self) -> CastHandle:
        """Cast the tensors and put the hooks on.

        Returns:
            The handle that takes both back.
        """
        policy = self.policy
        before = self._hook_sets()
        for _, root in self.roots:
            if policy.cast_model_type is not None or has_hook(root, Fp32Inputs):
                strip_hooks(root)
        watched = [module for module in self._modules() if not isinstance(module, self._leave)]
        handle = CastHandle([root for _, root in self.roots], self.parameters, list(self._buffers.values()), watched)
        for tensor in self.raised:
            _cast_in_place(tensor, torch.float32)
        if policy.cast_model_type is torch.float32:
            self._let_types_meet()
        if policy.casts_model:
            assert policy.cast_model_type is not None
            self._apply_casts(policy.cast_model_type)
        for _, root in self.roots:
            if policy.cast_model_type is not None:
                if not has_hook(root, CastInputs):
                    inputs = CastInputs(policy.cast_model_type) if policy.casts_model else Fp32Inputs()
                    root.register_forward_pre_hook(inputs, with_kwargs=True)
                root.register_forward_hook(CastOutputs(policy.cast_model_outputs or torch.float32, self._enter))
            elif self.casts_ops:
                pass  # the hooks that close a region cast outputs
            elif policy.cast_model_outputs is not None:
                root.register_forward_hook(CastOutputs(policy.cast_model_outputs, self._enter))
            elif policy.runs_16_bit and not has_hook(root, CastOutputs):
                # a validation loop may autocast by itself
                root.register_forward_hook(CastOutputs(torch.float32, self._enter, only_eval=True))
            if self.ops is not None and not self.casts_ops:
                _drop_forward_hooks(root, (EnterForward, LeaveForward))
                ops = self.ops if id(root) not in before else before[id(root)] | self.ops
                # first of all, so that other people's pre-hooks run inside the pass
                root.register_forward_pre_hook(EnterForward(ops), prepend=True)
                root.register_forward_hook(LeaveForward(), always_call=True)
        if self._covers:
            self._cover_forwards(before)
        if policy.cast_model_type is not None or policy.runs_16_bit:
            conversion_guard.guard(watched, policy.opt_level)
        if self.ops is not None:
            fp32_ops.attach(watched, self.ops)
            module_guard.watch(watched, policy.casts_model)
            if not policy.casts_model:
                for module, starts, gives_back in self._kept_modules:
                    if not has_hook(module, EnterFp32):
                        run_in_fp32(module, starts and gives_back)
        return handle

    def _cover_forwards(self, before: dict[int, fp32_ops.OpSet]) -> None:
        policy = self.policy
        kinds = (EnterForward, LeaveForward, EnterCasts, LeaveCasts, EnterPlain, LeavePlain)
        roots = {id(root): root for _, root in self.roots}
        if not self.casts_ops:
            for root in roots.values():
                _drop_forward_hooks(root, (EnterPlain, LeavePlain))
                root.register_forward_pre_hook(EnterPlain(), prepend=True)
                root.register_forward_hook(LeavePlain(), always_call=True)
            return
        assert self.ops is not None
        assert policy.autocast_dtype is not None
        outputs = policy.cast_model_outputs or torch.float32
        for root in roots.values():
            _drop_forward_hooks(root, kinds)
            ops = self.ops if id(root) not in before else before[id(root)] | self.ops
            # first of all, so that other people's pre-hooks run inside
            root.register_forward_pre_hook(EnterCasts(ops, policy.autocast_dtype), prepend=True)
            root.register_forward_hook(LeaveCasts(outputs, self._enter), always_call=True)
        # modules kept in FP32 are no part of this: called directly, they run as they are
        for module in self._cast_modules:
            if id(module) not in roots:
                _drop_forward_hooks(module, kinds)
                enter = EnterCastsBelow(self.ops, policy.autocast_dtype)
                quiet_hooks.cover_below(module, enter, LeaveCastsBelow(outputs, self._enter))

    def _let_types_meet(self) -> None:
        """Beside frozen 16-bit weights at O0: each module computes in the type of its own weights, as at the other levels."""
        owners = [
            (module, own[0].dtype)
            for module in self._modules()
            if not isinstance(module, (*self._leave, torch.jit.ScriptModule))
            and (own := [p for p in module.parameters(recurse=False) if p.dtype in CASTABLE])
        ]
        if any(dtype in HALF_TYPES for _, dtype in owners):
            for module, dtype in owners:
                if not has_hook(module, CastInputs):
                    module.register_forward_pre_hook(Fp32Inputs(dtype), with_kwargs=True)

    def _apply_casts(self, dtype: torch.dtype) -> None:
        for tensor in (*self.parameters.values(), *self._buffers.values()):
            _cast_in_place(tensor, dtype)
        for module in self._cast_modules:
            computed = computed_weights.names(module)
            if computed:
                module.register_forward_pre_hook(computed_weights.CastComputed(computed, dtype))
            if computed or is_parametrized(module) or any(p.dtype is dtype for p in module.parameters(recurse=False)):
                module.register_forward_pre_hook(CastInputs(dtype), with_kwargs=True)
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()
        for module, starts, gives_back in self._kept_modules:
            module.register_forward_pre_hook(CastInputs(torch.float32), with_kwargs=True)
            if starts and gives_back:
                module.register_forward_hook(CastOutputs(dtype))
        cast_modules = set(self._cast_modules)
        for _, root in self.roots:
            left = {id(inside) for m in root.modules() if isinstance(m, self._leave) for inside in m.modules()}
            for module in root.modules():
                if id(module) not in left and any(True for _ in own_tensors(module)):
                    if module in cast_modules:
                        exact = Fp32StateDict(module, self.policy.verbosity >= 1)
                        module._register_state_dict_hook(exact)  # type: ignore[no-untyped-call]
                    hooks = LoadFp32()
                    module.register_load_state_dict_pre_hook(hooks.before)  # type: ignore[no-untyped-call]
                    module.register_load_state_dict_post_hook(hooks.after)  # type: ignore[no-untyped-call]


class CastHandle:
    """Takes a cast back. Made by :meth:`CastPlan.apply`."""

    def __init__(
        self,
        roots: list[nn.Module],
        parameters: dict[str, nn.Parameter],
        buffers: list[Tensor],
        watched: Sequence[nn.Module] = (),
    ) -> None:
        self.roots = roots
        # modules that leave the model before its casts do are let go with it
        self._watched = WeakSet(watched)
        self.parameters = parameters
        self._buffers = buffers

    @property
    def casts(self) -> bool:
        """Whether any parameter changed its type."""
        return bool(self.parameters)

    def remove(self) -> None:
        """Take every hook off and give the tensors FP32 values: those of their masters where there are any."""
        fp32_ops.release(self._watched)
        module_guard.unwatch(self._watched)
        conversion_guard.release(self._watched)
        for root in self.roots:
            strip_hooks(root)
        for tensor in (*self.parameters.values(), *self._buffers):
            exact = twins.fp32_value(tensor)
            if exact is None:
                _cast_in_place(tensor, torch.float32)
            else:
                grad, tensor.grad = tensor.grad, None
                tensor.data = exact
                tensor.grad = None if grad is None else grad.float()
                twins.unpair(tensor)


def autocast_forward(
    module: nn.Module,
    dtype: torch.dtype,
    outputs: torch.dtype = torch.float32,
    enter: EnterObject | None = None,
) -> None:
    """Put :class:`torch.autocast` around every forward of ``module``; :func:`strip_hooks` takes it off.

    Args:
        module: An FP32 model.
        dtype: The 16-bit type.
        outputs: The type of floating outputs.
        enter: Casts tensors inside output objects of a framework's own kind.
    """
    module.register_forward_pre_hook(EnterAutocast(dtype), prepend=True)
    module.register_forward_hook(LeaveAutocast(), always_call=True)
    module.register_forward_hook(CastOutputs(outputs, enter))


def strip_hooks(root: nn.Module) -> None:
    """Take every hook of this package off ``root`` and its submodules; the tensors stay as they are."""
    for module in root.modules():
        for hooks in _hook_dicts(module):
            _drop(hooks)
        _forget_flags(module)


def _hook_dicts(module: nn.Module) -> tuple[dict[int, Any], ...]:
    return (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._state_dict_hooks,
        module._load_state_dict_pre_hooks,
        module._load_state_dict_post_hooks,
    )


def copies_are_fp32(roots: Iterable[nn.Module]) -> None:
    """From now on, deep copies of cast models are plain FP32 models: with the values of the masters, where there are any.

    Args:
        roots: Cast models, with all their hooks on.
    """
    for root in roots:
        for hook in _hooks_of(root):
            hook.stays_behind = True


def _hooks_of(root: nn.Module) -> Iterator[AmpHook]:
    for module in root.modules():
        for hooks in _hook_dicts(module):
            for hook in hooks.values():
                inner = getattr(hook, 'hook', hook)
                found = inner if isinstance(inner, AmpHook) else getattr(inner, '__self__', None)
                if isinstance(found, AmpHook):
                    yield found


def _drop(hooks: dict[int, Any], kinds: tuple[type, ...] = (AmpHook, StayedBehind)) -> None:
    for key, hook in list(hooks.items()):
        # torch wraps load pre-hooks; ours are bound methods of LoadFp32
        inner = getattr(hook, 'hook', hook)
        if isinstance(inner, kinds) or isinstance(getattr(inner, '__self__', None), kinds):
            del hooks[key]


def _drop_forward_hooks(module: nn.Module, kinds: tuple[type, ...]) -> None:
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        _drop(hooks, kinds)
    _forget_flags(module)


def _forget_flags(module: nn.Module) -> None:
    for flags, hooks in (
        (module._forward_pre_hooks_with_kwargs, module._forward_pre_hooks),
        (module._forward_hooks_always_called, module._forward_hooks),
    ):
        for key in [key for key in flags if key not in hooks]:
            del flags[key]


def restore_fp32_copy(copied: nn.Module, original: nn.Module) -> bool:
    """Turn a deep copy of a cast model into a plain FP32 one that holds the original's masters.

    Args:
        copied: A deep copy of ``original``; changed in place, its parameters keep their identity.
        original: A model, cast or not.

    Returns:
        Whether there was anything to do.
    """
    pairs = [
        (mine, theirs)
        for module, source in zip(copied.modules(), original.modules())
        if any(isinstance(hook, Fp32StateDict) for hook in source._state_dict_hooks.values())
        for (_, mine), (_, theirs) in zip(own_tensors(module), own_tensors(source))
    ]
    had_hooks = any(has_hook(module, AmpHook) for module in copied.modules())
    strip_hooks(copied)
    for mine, theirs in pairs:
        _become_fp32(mine, theirs)
    return had_hooks


def _become_fp32(mine: Tensor, theirs: Tensor) -> None:
    """A copied tensor takes the FP32 value of its original, and keeps its identity."""
    if mine.dtype in HALF_TYPES:
        twins.agree(theirs)
        exact = twins.fp32_value(theirs)
        mine.data = theirs.detach().float() if exact is None else exact.clone()
        mine.grad = None


def is_cast(module: nn.Module) -> bool:
    """Whether any module below carries casts of this package."""
    return any(has_hook(child, AmpHook) for child in module.modules())


def _cast_in_place(tensor: Tensor, dtype: torch.dtype) -> None:
    grad, tensor.grad = tensor.grad, None
    # through .data, so that the optimizer, DDP and tied modules keep the very object they hold
    tensor.data = tensor.data.to(dtype)
    tensor.grad = None if grad is None else grad.to(dtype)


def _class_name(cls: type) -> str:
    return f'{cls.__module__}.{cls.__qualname__}'


def _is_batchnorm(module: nn.Module) -> bool:
    # mmcv's SyncBatchNorm is no subclass of torch's
    return isinstance(module, _BatchNorm) or type(module).__name__ == 'SyncBatchNorm'

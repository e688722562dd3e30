"""Decides what of a model becomes 16-bit, and by which rule each of its modules is called; casts it and back."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from .. import compiler_internals, torch_internals
from ..errors import AmpAttachError
from ..policy import said_once
from ..policy.fp32_registry import BCE_WARNING
from ..policy.levels import Policy
from ..policy.nested import CASTABLE, HALF_TYPES, EnterObject
from ..shards import is_sharded
from . import cast_module, checks, fp32_values, region, shard_check, state_dicts
from .kept import BATCHNORM, FOLLOWS, SHARED, kept_inputs, kept_modules
from .modules import is_loss, is_table, own_tensors, weight_hooks, weight_sources
from .rule import Rule, rule_of

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, torch_internals.BatchOrInstanceNorm)


class Role(enum.Enum):
    """What becomes of a module."""

    CAST = 'weights and buffers become 16-bit, and so do inputs'
    OUTERMOST = 'stays FP32, and so do all modules inside; its output goes back to 16-bit'
    INSIDE = 'inside of one that stays FP32'
    NORM = 'stays FP32 and takes 16-bit input, without a rule: its kernels give back the type of the input'
    TABLE = 'buffers alone, which stay as they are; its output becomes 16-bit'


class CastPlan:
    """What is cast in some modules: made before anything is touched, so that masters see unrounded weights.

    Args:
        roots: (qualified name, module) pairs; each root casts its inputs and outputs.
        policy: The configuration.
        leave: Module classes that are not touched at all, such as mmengine's data preprocessors.
        average: Module classes of averaged models, which stay FP32 beside the classes torch has.
        enter: Casts tensors inside output objects of a framework's own kind.
        covers_forward: For the functional API: at O1 and O4 every forward of a root or of a module below it runs with
            casts, in training and evaluation, and gives FP32 outputs (``policy.cast_model_outputs``). At the other levels
            the casts of other models end at the roots. False leaves autocast to the caller.
        within: The models of which the roots are parts, where they were sharded as wholes.

    Attributes:
        roots, leave: As given.
        parameters: The parameters that will become 16-bit, with their qualified names, in model order.
        gathered: The sharded parameters that FSDP2 gathers in 16-bit, with their names. The shards stay what they are.
        rounded: The trainable ones among all parameters that are 16-bit before the cast.
        kept: The modules that stay FP32 by themselves, by id, and why.
        momentum: The names of parts that stay FP32 since they follow others.
        raised: 16-bit tensors that will become FP32.

    Raises:
        AmpAttachError: A trainable parameter is 16-bit already, and the policy does not take it; one is not initialised yet,
            beyond the range of float16, or already cast by another wrapper; or sharded in a way that the level cannot keep.
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
        within: Sequence[nn.Module] = (),
    ) -> None:
        self.roots, self.policy = list(roots), policy
        self._enter, self._covers, self.leave = enter, covers_forward, leave
        self.rounded: dict[str, nn.Parameter] = {}
        for name, root in self.roots:
            self._refuse(name, root)
        self.kept = kept_modules(self.roots, policy, average, covers_forward)
        self.momentum = [why.name for why in self.kept.values() if why.reason == FOLLOWS]
        self._kept_inputs = kept_inputs(self.roots, policy)
        self._roles: dict[nn.Module, Role] = {}
        for _, root in self.roots:
            self._give_roles(root, root, is_inside=False)
        self.parameters: dict[str, nn.Parameter] = {}
        self.gathered: dict[str, nn.Parameter] = {}
        self._buffers: list[Tensor] = []
        if policy.casts_model:
            self._sort_tensors(self._keep_sharers())
        elif policy.keeps_types and policy.master_weights:
            # they get masters, and nothing else
            self.parameters = self.rounded
        if policy.enabled:
            around = within or [root for _, root in self.roots]
            shard_check.check_shards(self.roots, policy, set(map(id, self.gathered.values())), around)
        if policy.casts_model and policy.cast_model_type is torch.float16:
            checks.check_range({**self.parameters, **self.gathered})
        self.raised = [] if policy.keeps_types else self._find_raised()
        # what cannot be done is known before anything changes
        for module in self._roles:
            cast_module.class_for(cast_module.base_of(type(module)))

    def _refuse(self, name: str, root: nn.Module) -> None:
        if cast_module.holds_casts(root):
            raise AmpAttachError(
                f'the model ({type(root).__name__}) already carries casts: attach or initialize it once. One more optimizer '
                f'comes by amp.initialize([], optimizer); detach() of a wrapper takes its casts off.'
            )
        for key, module in root.named_modules(prefix=name):
            if self.policy.runs_16_bit and inspect.isgeneratorfunction(module.forward):
                raise AmpAttachError(
                    f'the forward of {key or "the model"} ({type(module).__name__}) is a generator, which runs after the call '
                    f'and its casts: return a list.'
                )
            # their class cannot be swapped: where a cast needs none, they are left alone
            if isinstance(module, torch.jit.ScriptModule) and (module is root or self.policy.casts_model):
                raise AmpAttachError(
                    f'{key or "the model"} ({type(module).__name__}) was made by torch.jit.script or '
                    f'torch.jit.trace, and such a module takes no casts. Hand over the Python module and '
                    f'script what is around it; below a Python module, O1 and O4 take scripted ones.'
                )
        left = {id(p) for m in root.modules() if isinstance(m, self.leave) for p in m.parameters()}
        # of sharded ones, check_shards says what they may be
        left |= {id(p) for p in root.parameters() if is_sharded(p)}
        self.rounded.update(checks.rounded_before(root.named_parameters(prefix=name), self.policy, frozenset(left)))

    def _give_roles(self, module: nn.Module, root: nn.Module, is_inside: bool) -> None:
        """Say what becomes of a module and those below it; ``is_inside`` of one that stays FP32."""
        if module in self._roles or isinstance(module, (*self.leave, torch.jit.ScriptModule)):
            return
        why = self.kept.get(id(module))
        if why is BATCHNORM:
            self._roles[module] = Role.NORM
            return
        if is_inside:
            self._roles[module] = Role.INSIDE
        elif why is not None:
            self._roles[module] = Role.OUTERMOST
        else:
            is_buffers = self.policy.casts_model and module is not root and is_table(module)
            self._roles[module] = Role.TABLE if is_buffers else Role.CAST
        for child in module.children():
            self._give_roles(child, root, is_inside or why is not None)

    def _keep_sharers(self) -> set[Tensor]:
        """A module that shares a tensor with one kept in FP32 has to compute in FP32 too, all of it. Returns what stays."""
        own = {module: {tensor for _, tensor in own_tensors(module)} for module in self._roles}
        stays = {t for module, role in self._roles.items() if role not in (Role.CAST, Role.TABLE) for t in own[module]}
        while sharers := [m for m, role in self._roles.items() if role is Role.CAST and own[m] & stays]:
            for module in sharers:
                self._roles[module], self.kept[id(module)] = Role.OUTERMOST, SHARED
                stays |= own[module]
        for module, role in self._roles.items():
            # of tables all stays, of modules whose weights are computed what those are computed from
            stays |= own[module] if role is Role.TABLE else set(weight_sources(module))
        return stays

    def _sort_tensors(self, stays: set[Tensor]) -> None:
        half = self.policy.cast_model_type or torch.float32
        names: dict[Tensor, str] = {}
        for prefix, root in self.roots:
            for key, tensor in (*root.named_parameters(prefix=prefix), *root.named_buffers(prefix=prefix)):
                names.setdefault(tensor, key)
        for module, role in self._roles.items():
            # which want statistics in the type of their input
            is_norm = isinstance(module, torch_internals.BatchOrInstanceNorm)
            for _, tensor in own_tensors(module) if role is Role.CAST else ():
                if tensor in stays or tensor.dtype not in CASTABLE:
                    continue
                stays.add(tensor)
                if isinstance(tensor, nn.Parameter):
                    (self.gathered if is_sharded(tensor) else self.parameters)[names[tensor]] = tensor
                elif is_norm or not checks.is_too_fine(tensor, half):
                    self._buffers.append(tensor)

    def _find_raised(self) -> list[Tensor]:
        """What is 16-bit before, and FP32 after: where modules stay FP32, and at the levels whose weights are FP32.

        Frozen weights at the latter stay as they are: nothing is added to them, and their size is why they are 16-bit.
        """
        found: dict[int, Tensor] = {}
        casts, raises = self.policy.casts_model, self.policy.from_16bit and not self.policy.casts_model
        for module, role in self._roles.items():
            own = [t for _, t in own_tensors(module) if t.dtype in HALF_TYPES and not is_sharded(t)]
            # under autocast they want FP32 weights beside FP32 inputs, and are small
            is_norm = self.policy.runs_16_bit and not casts and isinstance(module, _NORMS)
            is_whole = is_norm or role not in (Role.CAST, Role.TABLE)
            # buffers as well where nothing is frozen
            has_frozen = any(isinstance(t, nn.Parameter) and not t.requires_grad for t in own)
            for tensor in own:
                trains = tensor.requires_grad if isinstance(tensor, nn.Parameter) else not has_frozen
                if is_whole or (raises and trains):
                    found[id(tensor)] = tensor
        return list(found.values())

    def apply(self) -> None:
        """Cast the tensors, and let calls of the modules follow their rules."""
        policy, rules = self.policy, self._rules()
        region.reach()
        compiler_internals.forget_graphs()
        if policy.runs_16_bit and policy.verbosity >= 1:
            said_once.said.clear()
        for rule in rules.values():
            if rule.is_model:
                cast_module.install(rule.policy)
        for module in self._roles:
            cast_module.take_off(module)
        for tensor in self.raised:
            cast_in_place(tensor, torch.float32)
        for tensor in (*self.parameters.values(), *self._buffers) if policy.casts_model else ():
            cast_in_place(tensor, policy.cast_model_type or torch.float32)
        for module, rule in rules.items():
            cast_module.put(module, rule).is_attached = True
            if rule.casts and self._roles[module] is Role.CAST:
                _add_hooks(module)

    def remove(self) -> None:
        """Take the casts off, and give the tensors FP32 values: those of their masters where there are any."""
        for module in (module for _, root in self.roots for module in root.modules()):
            cast_module.take_off(module)
        for tensor in (*self.parameters.values(), *self._buffers):
            fp32_values.replace_data(tensor, fp32_values.fp32_value(tensor))
            fp32_values.unpair(tensor)

    def _rules(self) -> dict[nn.Module, Rule]:
        """What a call of each module does."""
        policy = self.policy
        casts_ops = self._covers and policy.runs_16_bit and not policy.casts_model
        if casts_ops:
            inside = region.TABLES
        elif policy.runs_16_bit:
            inside = region.OPERANDS if policy.casts_model else region.REGISTRY
        else:
            # casts of other models end here
            inside = region.NOTHING if self._covers and not policy.keeps_types else region.AS_AROUND
        plain = Rule(
            # of its own: what it names acts as long as a module has it
            replace(policy),
            casts=policy.casts_model or policy.keeps_types,
            entry=inside if policy.runs_16_bit else region.AS_AROUND,
        )
        if policy.keeps_types:
            given = set(map(id, self.parameters.values()))
            return {module: plain for module in self._roles if given.intersection(map(id, module.parameters(False)))}
        covers = replace(
            plain,
            outputs=policy.cast_model_outputs or torch.float32,
            enter=self._enter,
            opens=inside,
            sets_autocast=self._covers,
            autocast=policy.autocast_dtype if casts_ops else None,
        )
        rules = {module: self._rule(module, role, plain) for module, role in self._roles.items()}
        if casts_ops:
            below = replace(covers, outermost=True)
            rules |= {module: below for module, role in self._roles.items() if role is Role.CAST}
        for _, root in self.roots:
            rule, dtype = rules.get(root) or plain, policy.cast_model_type
            stays_fp32 = rule.inputs is torch.float32
            rules[root] = replace(
                covers,
                inputs=rule.inputs or dtype,
                sources=rule.sources,
                kept=self._kept_inputs.get(id(root), ()) if dtype is not None else (),
                # a validation loop may autocast by itself
                only_eval=policy.cast_model_outputs is None and dtype is None and not casts_ops,
                sets_autocast=self._covers or rule.sets_autocast,
                autocast=None if stays_fp32 else covers.autocast,
                warning=rule.warning,
                is_model=policy.runs_16_bit,
            )
        return {module: rule for module, rule in rules.items() if rule is not None}

    def _rule(self, module: nn.Module, role: Role, plain: Rule) -> Rule | None:
        """What a call of a module does that is no root and opens no region."""
        policy, half = self.policy, self.policy.cast_model_type if self.policy.casts_model else None
        weights = list(module.parameters(recurse=False))
        if role is Role.TABLE:
            return replace(plain, outputs=half, clamps=True)
        if role is Role.OUTERMOST or (role is Role.INSIDE and (weights or is_parametrized(module))):
            # a table is named so that its numbers stay exact
            gives_back = role is Role.OUTERMOST and not is_loss(module) and not is_table(module)
            warning = BCE_WARNING if isinstance(module, nn.BCELoss) else ''
            rule = replace(plain, inputs=torch.float32, warning=warning)
            if half is not None:
                return replace(rule, outputs=half if gives_back else None)
            # where autocast is on
            return replace(rule, sources=HALF_TYPES, gives_back=gives_back, sets_autocast=True)
        if role is Role.CAST and half is not None:
            sources = weight_sources(module)
            is_cast = is_parametrized(module) or any(weight.dtype in CASTABLE for weight in (*weights, *sources))
            kept = self._kept_inputs.get(id(module), ())
            if is_cast or kept:
                return replace(plain, inputs=half if is_cast else None, kept=kept)
        has_methods = policy.runs_16_bit and any(hasattr(type(module), name) for name in cast_module.ENTRY_METHODS)
        return plain if has_methods or any(True for _ in own_tensors(module)) else None


def _add_hooks(module: nn.Module) -> None:
    """Saved values are FP32, and computed weights get the type of their module. The hooks do nothing without a rule."""
    if isinstance(module, nn.RNNBase):
        module.flatten_parameters()
    if state_dicts.save not in module._state_dict_hooks.values():
        module.register_state_dict_post_hook(state_dicts.save)  # type: ignore[no-untyped-call]
    if any(True for _ in weight_sources(module)):
        module.register_forward_pre_hook(_cast_computed)


def _cast_computed(module: nn.Module, args: Any) -> None:
    """Let computed weights take the type that a module computes in; differentiable. A hook behind those that compute them."""
    rule = rule_of(module) or Rule()
    for hook in weight_hooks(module) if rule.inputs is not None else ():
        value = getattr(module, hook.name, None)
        # a parameter again, once the normalisation is removed
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and value.dtype in CASTABLE:
            setattr(module, hook.name, value.to(rule.inputs))


def cast_in_place(tensor: Tensor, dtype: torch.dtype) -> None:
    """Cast a tensor and its gradient."""
    fp32_values.replace_data(tensor, tensor.data.to(dtype))

"""Decides what of a model becomes 16-bit, and by which rule each of its modules is called; casts it and back."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from .. import torch_internals
from ..errors import AmpAttachError
from ..policy import said_once
from ..policy.fp32_registry import BCE_WARNING
from ..policy.levels import Policy
from ..policy.nested import CASTABLE, HALF_TYPES, EnterObject
from ..shards import is_sharded
from . import (
    cast_module,
    checks,
    computed_weights,
    functions,
    late_modules,
    recompute,
    region,
    shard_check,
    state_dicts,
)
from .cast_handle import CastHandle, cast_in_place
from .cast_module import ENTRY_METHODS
from .kept import BATCHNORM, FOLLOWS, SHARED, check_inputs, kept_inputs, kept_modules
from .modules import is_loss, is_table, own_tensors
from .rule import Rule

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, torch_internals.BatchOrInstanceNorm)


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
            the casts of other models end at the roots. False leaves autocast to the caller.
        within: The models of which the roots are parts, where they were sharded as wholes.

    Attributes:
        parameters: The parameters that will become 16-bit, with their qualified names, in model order.
        gathered: The sharded parameters that FSDP2 gathers in 16-bit, with their names. The shards stay what they are.
        rounded: The trainable ones among all parameters that are 16-bit before the cast.
        kept: The modules that stay FP32 by themselves, by id, and why.
        momentum: The names of parts that stay FP32 since they follow others.
        infinite: The names of finite buffers that the cast makes infinite.
        coarse: The names of buffers in which it makes neighbours equal.
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
        self.roots = list(roots)
        self._enter = enter
        self._covers = covers_forward
        self.policy = policy
        self._leave = leave
        self._cast_modules: list[nn.Module] = []
        self._kept_modules: list[tuple[nn.Module, bool, bool]] = []
        self._seen: set[int] = set()
        self._kept_tensors: set[int] = set()
        # what the weights of cast modules are computed from, and the buffers of modules that hold nothing else
        self._sources: set[int] = set()
        self._tables: list[nn.Module] = []
        self.parameters: dict[str, nn.Parameter] = {}
        self.gathered: dict[str, nn.Parameter] = {}
        self.rounded: dict[str, nn.Parameter] = {}
        self.infinite: list[str] = []
        self.coarse: list[str] = []
        self._buffers: dict[str, Tensor] = {}
        for name, root in self.roots:
            self._refuse(name, root)
        self.kept = kept_modules(self.roots, policy, average, covers_forward)
        self.momentum = [why.name for why in self.kept.values() if why.reason == FOLLOWS]
        check_inputs(self.roots, policy)
        if policy.runs_16_bit:
            for _, root in self.roots:
                self._visit(root, kept=False, is_root=True)
        if policy.casts_model:
            self._keep_sharers()
            self._collect()
        elif policy.keeps_types and policy.master_weights:
            # they get masters, and nothing else
            self.parameters = self.rounded
            given = set(map(id, self.rounded.values()))
            self._cast_modules = [m for m in self._own_modules() if given.intersection(map(id, m.parameters(False)))]
        if policy.enabled:
            around = within or [root for _, root in self.roots]
            shard_check.check_shards(self.roots, policy, set(map(id, self.gathered.values())), around)
        dtype = policy.cast_model_type
        if policy.casts_model and dtype is not None:
            self.infinite = checks.check_range({**self.parameters, **self.gathered}, self._buffers, dtype)
            self.coarse = checks.lose_steps(self._buffers, dtype)
        self.raised = self._find_raised()
        # what cannot be done is known before anything changes
        for module in self._own_modules():
            cast_module.class_for(cast_module.base_of(type(module)))

    @property
    def casts_ops(self) -> bool:
        """Whether the tables of O1 and O4 act in the calls of the model."""
        return self._covers and self.policy.runs_16_bit and not self.policy.casts_model

    def _modules(self) -> Iterator[nn.Module]:
        for _, root in self.roots:
            yield from root.modules()

    def _refuse(self, name: str, root: nn.Module) -> None:
        if cast_module.holds_casts(root):
            raise AmpAttachError(
                f'the model ({type(root).__name__}) already carries the casts of another wrapper: '
                f'attach a model once, or take the casts off with detach() first.'
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
        left = {id(p) for m in root.modules() if isinstance(m, self._leave) for p in m.parameters()}
        # of sharded ones, check_shards says what they may be
        left |= {id(p) for p in root.parameters() if is_sharded(p)}
        self.rounded.update(checks.rounded_before(root.named_parameters(prefix=name), self.policy, frozenset(left)))

    def _visit(self, module: nn.Module, kept: bool, is_root: bool = False) -> None:
        if id(module) in self._seen or isinstance(module, (*self._leave, torch.jit.ScriptModule)):
            return
        self._seen.add(id(module))
        why = self.kept.get(id(module))
        if why is BATCHNORM:
            # its kernels take 16-bit input beside FP32 weights and give back the input's type: no rule is needed
            for tensor in (*module.parameters(), *module.buffers()):
                self._kept_tensors.add(id(tensor))
            return
        starts = why is not None and not kept
        kept = kept or starts
        if kept:
            owns = any(True for _ in module.parameters(recurse=False)) or is_parametrized(module)
            if starts or owns:
                # a table is named so that its numbers stay exact
                self._kept_modules.append((module, starts, starts and not is_loss(module) and not is_table(module)))
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                self._kept_tensors.add(id(tensor))
        elif self.policy.casts_model and not is_root and is_table(module):
            self._tables.append(module)
            self._sources.update(map(id, module.buffers()))
        else:
            self._cast_modules.append(module)
            self._sources.update(map(id, computed_weights.sources_of(module)))
        for child in module.children():
            self._visit(child, kept)

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
                    self.kept[id(module)] = SHARED
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
                    chosen = self.gathered if is_sharded(parameter) else self.parameters
                    chosen[names[id(parameter)]] = parameter
            for buffer in module.buffers(recurse=False):
                if self._is_ours(buffer, seen):
                    self._buffers[names[id(buffer)]] = buffer

    def _find_raised(self) -> list[Tensor]:
        """What is 16-bit before, and FP32 after: where modules stay FP32, and at the levels whose weights are FP32.

        Frozen weights at the latter stay as they are: nothing is added to them, and their size is why they are 16-bit.
        """
        found: dict[int, Tensor] = {}
        if self.policy.keeps_types:
            return []
        # under autocast they want FP32 weights beside FP32 inputs, and are small
        norms = self.policy.runs_16_bit and not self.policy.casts_model
        for module in self._modules():
            if isinstance(module, (*self._leave, torch.jit.ScriptModule)):
                continue
            own = [tensor for _, tensor in own_tensors(module) if tensor.dtype in HALF_TYPES]
            trained = {id(parameter) for parameter in self.rounded.values()}
            frozen = any(isinstance(t, nn.Parameter) and id(t) not in trained for t in own)
            for tensor in own:
                if is_sharded(tensor):
                    continue
                kept = id(tensor) in self._kept_tensors or (norms and isinstance(module, _NORMS))
                # what is trained, and buffers of modules in which nothing is frozen and 16-bit
                trains = tensor.requires_grad if isinstance(tensor, nn.Parameter) else not frozen
                if kept or (trains and not self.policy.casts_model and self.policy.from_16bit):
                    found[id(tensor)] = tensor
        return list(found.values())

    def _is_ours(self, tensor: Tensor, seen: set[int]) -> bool:
        kept = id(tensor) in self._kept_tensors or id(tensor) in self._sources
        if id(tensor) in seen or kept or tensor.dtype not in CASTABLE:
            return False
        seen.add(id(tensor))
        return True

    def apply(self) -> CastHandle:
        """Cast the tensors, and let calls of the modules follow their rules.

        Returns:
            The handle that takes both back.
        """
        policy = self.policy
        if policy.cast_model_type is not None:
            for module in self._modules():
                cast_module.take_off(module)
        for tensor in self.raised:
            cast_in_place(tensor, torch.float32)
        region.reach()
        if policy.runs_16_bit:
            self._install()
        if policy.casts_model:
            assert policy.cast_model_type is not None
            for tensor in (*self.parameters.values(), *self._buffers.values()):
                cast_in_place(tensor, policy.cast_model_type)
        for module, rule in self._rules().items():
            cast_module.put(module, rule)
            vars(module)['_amp_attached'] = True
            if rule.is_model and policy.casts_model and policy.verbosity >= 1:
                # its first call looks for numbers beyond the range
                vars(module)['_amp_first'] = True
        if policy.casts_model or policy.keeps_types:
            late_modules.watch()
            self._add_hooks()
        return CastHandle([root for _, root in self.roots], self.parameters, list(self._buffers.values()))

    def _install(self) -> None:
        """Let the registry act in regions, and what the configuration names as long as the model is alive."""
        functions.install()
        recompute.install()
        for op in self.policy.fp32_ops:
            for _, root in self.roots:
                functions.add(op, root)
        if self.policy.verbosity >= 1:
            said_once.begin()

    def _rules(self) -> dict[nn.Module, Rule]:
        """What a call of each module does."""
        policy, half = self.policy, self.policy.cast_model_type if self.policy.casts_model else None
        inside = self._region() if policy.runs_16_bit else region.AS_AROUND
        casts = policy.casts_model or policy.keeps_types
        plain = Rule(entry=inside, casts=casts, level=policy.opt_level, speaks=policy.verbosity >= 1)
        if policy.keeps_types:
            return dict.fromkeys(self._cast_modules, plain)
        rules: dict[nn.Module, Rule] = {}
        for module in self._own_modules():
            has_methods = policy.runs_16_bit and any(hasattr(type(module), name) for name in ENTRY_METHODS)
            # containers as well: what joins them later is warned of
            if has_methods or any(True for _ in (*own_tensors(module), *module.children())):
                rules[module] = plain
        for module in self._cast_modules:
            kept = tuple(kept_inputs(module, policy).items()) if half else ()
            weights = [*module.parameters(recurse=False), *computed_weights.sources_of(module)]
            own = bool(half) and (is_parametrized(module) or any(w.dtype in CASTABLE for w in weights))
            if kept or own:
                rules[module] = dataclasses.replace(plain, inputs=half if own else None, kept=kept)
        for module in self._tables:
            rules[module] = dataclasses.replace(plain, outputs=half, clamps=True)
        for module, starts, gives_back in self._kept_modules:
            back = starts and gives_back
            warning = BCE_WARNING if isinstance(module, nn.BCELoss) else ''
            rule = dataclasses.replace(plain, inputs=torch.float32, outputs=half if back else None, warning=warning)
            if not half:
                # where autocast is on
                rule = dataclasses.replace(rule, sources=HALF_TYPES, gives_back=back, sets_autocast=True)
            rules[module] = rule
        if policy.cast_model_type is torch.float32:
            rules |= self._let_types_meet(plain)
        if self.casts_ops:
            below = self._root_rule(plain, nn.Module())
            roots = {id(root) for _, root in self.roots}
            for module in self._cast_modules:
                if id(module) not in roots:
                    rules[module] = dataclasses.replace(below, outermost=True, is_model=False, fp32_ops=())
        for _, root in self.roots:
            rules[root] = self._root_rule(rules.get(root, plain), root)
        return rules

    def _region(self) -> str:
        """What acts in the calls of the model."""
        if self.casts_ops:
            return region.TABLES
        if self.policy.runs_16_bit:
            return region.OPERANDS if self.policy.casts_model else region.REGISTRY
        # casts of other models end here
        return region.NOTHING if self._covers and not self.policy.keeps_types else region.AS_AROUND

    def _root_rule(self, rule: Rule, root: nn.Module) -> Rule:
        """What a call of a whole model does."""
        policy, dtype = self.policy, self.policy.cast_model_type
        kept = tuple(kept_inputs(root, policy).items()) if dtype is not None else ()
        before = cast_module.rule_of(root)
        if rule.inputs is None and dtype is not None:
            rule = dataclasses.replace(rule, inputs=dtype)
        opens = self._region()
        if before is not None and opens == region.AS_AROUND:
            opens = before.opens
        outputs = policy.cast_model_outputs
        # a validation loop may autocast by itself
        only_eval = outputs is None and dtype is None and not self.casts_ops
        return dataclasses.replace(
            rule,
            kept=kept,
            outputs=outputs or torch.float32,
            gives_back=False,
            only_eval=only_eval,
            enter=self._enter,
            opens=opens,
            sets_autocast=rule.sets_autocast or self._covers,
            autocast=policy.autocast_dtype if self.casts_ops and rule.inputs is None else None,
            is_model=policy.runs_16_bit,
            fp32_ops=policy.fp32_ops,
        )

    def _let_types_meet(self, plain: Rule) -> dict[nn.Module, Rule]:
        """Beside frozen 16-bit weights at O0: each module computes in the type of its own weights, as at the other levels."""
        own = {module: next(module.parameters(recurse=False), None) for module in self._own_modules()}
        types = {module: w.dtype for module, w in own.items() if w is not None and w.dtype in CASTABLE}
        is_mixed = any(dtype in HALF_TYPES for dtype in types.values())
        return {module: dataclasses.replace(plain, inputs=dtype) for module, dtype in types.items()} if is_mixed else {}

    def _own_modules(self) -> Iterator[nn.Module]:
        """Without those that are not touched, and what is in them."""
        left = {id(inside) for m in self._modules() if isinstance(m, self._leave) for inside in m.modules()}
        for module in self._modules():
            if id(module) not in left and not isinstance(module, torch.jit.ScriptModule):
                yield module

    def _add_hooks(self) -> None:
        """Saved values are FP32, and computed weights get the type of their module. The hooks do nothing without a rule."""
        for module in self._cast_modules:
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()
            if state_dicts.save not in torch_internals.state_dict_hooks(module).values():
                module.register_state_dict_post_hook(state_dicts.save)  # type: ignore[no-untyped-call]
            if any(True for _ in computed_weights.sources_of(module)):
                module.register_forward_pre_hook(computed_weights.cast)

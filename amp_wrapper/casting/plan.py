"""Casts a model to 16-bit and back: decides which tensors become 16-bit and which modules get which hooks."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from .. import torch_internals
from ..autocast import op_set, patching, state
from ..autocast.op_set import OpSet
from ..errors import AmpAttachError
from ..policy.levels import Policy
from ..policy.nested import CASTABLE, HALF_TYPES, EnterObject
from ..shards import is_sharded
from . import attached_modules, checks, shard_groups
from .cast_handle import CastHandle, cast_in_place
from .cast_hooks import (
    CastComputed,
    CastInputs,
    CastOutputs,
    ExactInputs,
    Fp32Inputs,
    TableOutputs,
    computed_from,
    computed_weights,
)
from .dtype_errors import ExplainTypes
from .find_hooks import has_hook, holds_casts, strip_hooks
from .kept import BATCHNORM, FOLLOWS, SHARED, check_inputs, kept_inputs, kept_modules
from .modules import is_loss, is_table, own_tensors
from .region_hooks import (
    CASTS,
    FORWARD,
    FP32,
    PLAIN,
    EnterBelow,
    EnterRegion,
    LeaveBelow,
    LeaveRegion,
    cover_below,
    drop_regions,
    put_region,
    region_on,
    run_in_fp32,
)
from .state_dict_hooks import Fp32StateDict, LoadFp32

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
        self.ops: OpSet | None = None
        self.kept = kept_modules(self.roots, policy, average, covers_forward)
        self.momentum = [why.name for why in self.kept.values() if why.reason == FOLLOWS]
        check_inputs(self.roots, policy)
        if policy.runs_16_bit:
            for _, root in self.roots:
                self._visit(root, kept=False, is_root=True)
        if policy.casts_model:
            self._keep_sharers()
            self._collect()
        if policy.enabled:
            around = within or [root for _, root in self.roots]
            shard_groups.check(self.roots, policy, set(map(id, self.gathered.values())), around, leave)
        dtype = policy.cast_model_type
        if policy.casts_model and dtype is not None:
            self.infinite = checks.check_range({**self.parameters, **self.gathered}, self._buffers, dtype)
            self.coarse = checks.lose_steps(self._buffers, dtype)
        self.raised = self._find_raised()
        if policy.runs_16_bit:
            # last, since it wraps methods of the model's classes, and nothing may be touched by a plan that is refused
            classes = sorted({type(m) for m in self._modules()}, key=lambda cls: f'{cls.__module__}.{cls.__qualname__}')
            marks = state.marks(self.casts_ops, policy.casts_model, policy.verbosity >= 1)
            self.ops = OpSet(policy.fp32_ops, classes, marks)

    @property
    def casts_ops(self) -> bool:
        """Whether the hooks of the plan open regions in which ops are cast."""
        return self._covers and self.policy.runs_16_bit and not self.policy.casts_model

    def _modules(self) -> Iterator[nn.Module]:
        for _, root in self.roots:
            yield from root.modules()

    def _refuse(self, name: str, root: nn.Module) -> None:
        if holds_casts(root):
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
            # hooks do not go on them: where a cast needs none, they are left alone
            if isinstance(module, torch.jit.ScriptModule) and (module is root or self.policy.casts_model):
                raise AmpAttachError(
                    f'{key or "the model"} ({type(module).__name__}) was made by torch.jit.script or '
                    f'torch.jit.trace, and such a module takes no hooks, which the casts need. Hand over the Python module and '
                    f'script what is around it; below a Python module, O1 and O4 take scripted ones.'
                )
        left = {id(p) for m in root.modules() if isinstance(m, self._leave) for p in m.parameters()}
        # of sharded ones, shard_groups says what they may be
        left |= {id(p) for p in root.parameters() if is_sharded(p)}
        self.rounded.update(checks.rounded_before(root.named_parameters(prefix=name), self.policy, frozenset(left)))

    def _visit(self, module: nn.Module, kept: bool, is_root: bool = False) -> None:
        if id(module) in self._seen or isinstance(module, (*self._leave, torch.jit.ScriptModule)):
            return
        self._seen.add(id(module))
        why = self.kept.get(id(module))
        if why is BATCHNORM:
            # its kernels take 16-bit input beside FP32 weights and give back the input's type: no hook is needed
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
            self._sources.update(map(id, computed_from(module)))
        for child in module.children():
            self._visit(child, kept)

    def _cast_inputs(self, module: nn.Module, dtype: torch.dtype) -> CastInputs:
        speaks = self.policy.verbosity >= 1 and any(module is root for _, root in self.roots)
        return CastInputs(dtype, kept_inputs(module, self.policy), speaks)

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
        """Cast the tensors and put the hooks on.

        Returns:
            The handle that takes both back.
        """
        policy = self.policy
        patching.forget_graphs()
        # what another wrapper that autocasts has put on the roots
        before = {id(root): hook.ops for _, root in self.roots if (hook := region_on(root, FORWARD, PLAIN, CASTS))}
        for _, root in self.roots:
            if policy.cast_model_type is not None or has_hook(root, Fp32Inputs):
                strip_hooks(root)
        watched = [module for module in self._modules() if not isinstance(module, self._leave)]
        handle = CastHandle([root for _, root in self.roots], self.parameters, list(self._buffers.values()), watched)
        for tensor in self.raised:
            cast_in_place(tensor, torch.float32)
        if policy.cast_model_type is torch.float32:
            self._let_types_meet()
        if policy.casts_model:
            assert policy.cast_model_type is not None
            self._apply_casts(policy.cast_model_type)
        for _, root in self.roots:
            if policy.cast_model_type is not None:
                if not has_hook(root, CastInputs):
                    inputs = (
                        self._cast_inputs(root, policy.cast_model_type)
                        if policy.casts_model
                        else Fp32Inputs(torch.float32, kept_inputs(root, policy))
                    )
                    inputs.put(root, is_model=True)
                root.register_forward_hook(CastOutputs(policy.cast_model_outputs or torch.float32, self._enter))
            elif self.casts_ops:
                pass  # the hooks that close a region cast outputs
            elif policy.cast_model_outputs is not None:
                root.register_forward_hook(CastOutputs(policy.cast_model_outputs, self._enter))
            elif policy.runs_16_bit and not has_hook(root, CastOutputs):
                # a validation loop may autocast by itself
                root.register_forward_hook(CastOutputs(torch.float32, self._enter, only_eval=True))
            self._put_region(root, before.get(id(root)))
            if policy.runs_16_bit and not has_hook(root, ExplainTypes):
                root.register_forward_hook(ExplainTypes(policy.opt_level), always_call=True)
        if self.casts_ops:
            self._cover_below()
        if policy.cast_model_type is not None or policy.runs_16_bit:
            attached_modules.watch(watched, policy)
        if self.ops is not None:
            op_set.attach(watched, self.ops)
            if not policy.casts_model:
                for module, starts, gives_back in self._kept_modules:
                    if region_on(module, FP32) is None:
                        run_in_fp32(module, starts and gives_back)
        return handle

    def _put_region(self, root: nn.Module, before: OpSet | None) -> None:
        """Let every forward of a root open a region; it replaces hooks for regions that do less."""
        ops = before if self.ops is None else self.ops if before is None else before | self.ops
        if self.casts_ops:
            drop_regions(root, (FORWARD, PLAIN, CASTS))
            outputs = self.policy.cast_model_outputs or torch.float32
            enter = EnterRegion(CASTS, ops, self.policy.autocast_dtype)
            put_region(root, enter, LeaveRegion(CASTS, outputs, self._enter))
        elif self._covers:
            drop_regions(root, (FORWARD, PLAIN))
            put_region(root, EnterRegion(PLAIN, ops), LeaveRegion(PLAIN))
        elif self.ops is not None:
            drop_regions(root, (FORWARD,))
            put_region(root, EnterRegion(FORWARD, ops), LeaveRegion(FORWARD))

    def _cover_below(self) -> None:
        """Modules kept in FP32 are no part of this: called directly, they run as they are."""
        assert self.ops is not None
        outputs = self.policy.cast_model_outputs or torch.float32
        roots = {id(root) for _, root in self.roots}
        for module in self._cast_modules:
            if id(module) not in roots:
                drop_regions(module, (FORWARD, PLAIN, CASTS))
                enter = EnterBelow(CASTS, self.ops, self.policy.autocast_dtype)
                cover_below(module, enter, LeaveBelow(CASTS, outputs, self._enter))

    def _let_types_meet(self) -> None:
        """Beside frozen 16-bit weights at O0: each module computes in the type of its own weights, as at the other levels."""
        with_weights = [
            (module, own[0].dtype)
            for module in self._modules()
            if not isinstance(module, (*self._leave, torch.jit.ScriptModule))
            and (own := [p for p in module.parameters(recurse=False) if p.dtype in CASTABLE])
        ]
        if any(dtype in HALF_TYPES for _, dtype in with_weights):
            for module, dtype in with_weights:
                if not has_hook(module, CastInputs):
                    Fp32Inputs(dtype).put(module)

    def _apply_casts(self, dtype: torch.dtype) -> None:
        for tensor in (*self.parameters.values(), *self._buffers.values()):
            cast_in_place(tensor, dtype)
        gathered = set(map(id, self.gathered.values()))
        for _, root in self.roots:
            for module in root.modules():
                kept = kept_inputs(module, self.policy)
                if kept and module is not root:
                    module.register_forward_pre_hook(ExactInputs(kept), with_kwargs=True)
        for module in self._cast_modules:
            computed = computed_weights(module)
            if computed:
                module.register_forward_pre_hook(CastComputed(computed, dtype))
            own = module.parameters(recurse=False)
            if computed or is_parametrized(module) or any(p.dtype is dtype or id(p) in gathered for p in own):
                self._cast_inputs(module, dtype).put(module)
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()
        for module, starts, gives_back in self._kept_modules:
            CastInputs(torch.float32).put(module)
            if starts and gives_back:
                module.register_forward_hook(CastOutputs(dtype))
        for module in self._tables:
            module.register_forward_hook(TableOutputs(dtype))
        cast_modules = set(self._cast_modules)
        for _, root in self.roots:
            left = {id(inside) for m in root.modules() if isinstance(m, self._leave) for inside in m.modules()}
            for module in root.modules():
                if id(module) not in left and any(True for _ in own_tensors(module)):
                    if module in cast_modules:
                        exact = Fp32StateDict(module, self.policy.verbosity >= 1)
                        module.register_state_dict_post_hook(exact)  # type: ignore[no-untyped-call]
                    hooks = LoadFp32()
                    module.register_load_state_dict_pre_hook(hooks.before)  # type: ignore[no-untyped-call]
                    module.register_load_state_dict_post_hook(hooks.after)  # type: ignore[no-untyped-call]

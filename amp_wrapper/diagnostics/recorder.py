"""Keeps what is needed to run the forward and backward passes of the present step again: references, not copies."""

from __future__ import annotations

import copy
import dataclasses
import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..casting.cast_module import Watcher
from ..engine import Engine
from ..policy.nested import map_tensors

#: Forward calls of one step that are kept, the last ones.
MOST_CALLS = 32
#: Samples of a batch that are named at most.
MOST_SAMPLES = 256
#: What tells one sample from another, by the names that data sets give it.
IDENTIFIERS = (
    'img_path',
    'img_id',
    'image_id',
    'image_ids',
    'sample_idx',
    'sample_id',
    'filename',
    'file_name',
    'ori_filename',
    'path',
    'id',
    'ids',
    'idx',
    'index',
    'indices',
    'video_id',
    'frame_id',
    'lidar_path',
    'token',
)


@dataclasses.dataclass
class LossRecord:
    """One loss that was scaled.

    Attributes:
        loss_id: Which scale.
        value: As it was handed over, without its graph.
        scale: The loss scale, a copy; None for 1.
        made_by: The function that computed it, as the graph calls it.
    """

    loss_id: int
    value: Tensor
    scale: Tensor | None
    made_by: str


@dataclasses.dataclass
class CallRecord:
    """One forward call of a model, from outside of any other.

    Attributes:
        name: Of the called module in the model; '' for the model itself.
        args: As they came, before any cast.
        kwargs: As they came.
        states: Of the random generators before the call.
        versions: Version counters of the tensors among the arguments.
        gradients: For each backward pass: the index of the loss in the step, and the gradient of each floating tensor of the
            outputs, scaled, by its place among them.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    states: RandomStates
    versions: tuple[int, ...]
    gradients: dict[int, dict[int, Tensor]] = dataclasses.field(default_factory=dict)

    @property
    def is_unchanged(self) -> bool:
        """Whether nobody has written to the arguments since."""
        return versions_of((self.args, self.kwargs)) == self.versions

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Copies of the arguments, which a replay may change. Tensors that had a graph become leaves with gradients."""
        memo: dict[int, Any] = {}
        for tensor in tensors_of((self.args, self.kwargs)):
            memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad and not tensor.is_leaf)
        try:
            args, kwargs = copy.deepcopy((self.args, self.kwargs), memo)
        except Exception:
            # objects that Python cannot copy are handed over as they are
            args, kwargs = map_tensors(lambda tensor: memo[id(tensor)], (self.args, self.kwargs))
        return args, kwargs


class RandomStates:
    """The states of the random generators, as they give them out: taken at each call, so nothing is converted."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._torch = torch.get_rng_state()
        # asking whether there is a GPU takes longer than all the rest
        in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._cuda = torch.cuda.get_rng_state() if in_use else None

    def restore(self) -> None:
        """Set the generators."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)


@dataclasses.dataclass
class StepRecord:
    """The forward calls and losses since the last step.

    Attributes:
        calls: In their order.
        losses: In the order of their backward passes.
        dropped: Forward calls that are not kept, since there were too many.
        unseen: Forward calls without an output in which a tensor with a gradient was found.
    """

    calls: list[CallRecord] = dataclasses.field(default_factory=list)
    losses: list[LossRecord] = dataclasses.field(default_factory=list)
    dropped: int = 0
    unseen: int = 0

    def clear(self) -> None:
        """Let go of all tensors. Hooks in the graph of a loss that somebody keeps still hold the calls."""
        for call in self.calls:
            call.args, call.kwargs, call.gradients = (), {}, {}
        self.calls.clear()
        self.losses.clear()


class _Depth(threading.local):
    depth = 0


class Recorder:
    """Records the calls of a model with gradients, until it is removed.

    Under ``torch.compile`` nothing is recorded of calls that are part of a graph.

    Args:
        models: Not wrapped. Their calls are recorded, and once a step had none, direct calls of their children: to watch
            what is below a model costs more. Of several, names begin with the place of the model in the list.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.step = StepRecord()
        self._depth = _Depth()
        self._watchers: list[Watcher] = []
        self._models = {str(index) if len(models) > 1 else '': model for index, model in enumerate(models)}
        self._has_children = False
        for front, model in self._models.items():
            self._watch(front, model)

    def _watch(self, name: str, module: nn.Module) -> None:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.enter(name, args, kwargs)

        def leave(module: nn.Module, output: Any) -> None:
            self.leave(output)

        self._watchers.append(Watcher(enter, leave).watch(module))

    def watch_children(self) -> bool:
        """Record direct calls of the models' children, too, from now on. Whether that is new."""
        is_new, self._has_children = not self._has_children, True
        if is_new:
            for front, model in self._models.items():
                for name, module in _children(model, front):
                    self._watch(name, module)
        return is_new

    def remove(self) -> None:
        """Watch no longer."""
        for watcher in self._watchers:
            watcher.remove()
        self._watchers.clear()
        self.step = StepRecord()

    def next_step(self) -> StepRecord:
        """What was recorded since the last step; a new one begins."""
        done, self.step = self.step, StepRecord()
        if done.losses and not done.calls and not done.unseen and self.watch_children():
            # nobody has called a model as a whole; of the next step, more is known
            done.losses.clear()
        return done

    def see_loss(self, engine: Engine, loss: Tensor, loss_id: int) -> None:
        """A loss is about to be scaled, for a backward pass."""
        scale = engine.scales.pinned(loss_id)
        made_by = '' if loss.grad_fn is None else loss.grad_fn.name()
        self.step.losses.append(LossRecord(loss_id, loss.detach(), None if scale is None else scale.clone(), made_by))

    def enter(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module is called."""
        self._depth.depth += 1
        if self._depth.depth > 1 or not torch.is_grad_enabled():
            return
        step = self.step
        if len(step.calls) == MOST_CALLS:
            del step.calls[0]
            step.dropped += 1
        versions = versions_of((args, kwargs))
        # models change the dicts and lists that they are given
        args, kwargs = _same_tensors((args, kwargs))
        step.calls.append(CallRecord(name, args, kwargs, RandomStates(), versions))

    def leave(self, output: Any) -> None:
        """The call ends."""
        self._depth.depth -= 1
        if self._depth.depth > 0 or not torch.is_grad_enabled() or not self.step.calls:
            self._depth.depth = max(self._depth.depth, 0)
            return
        call, step = self.step.calls[-1], self.step
        outputs = outputs_of(output)
        if not any(tensor.requires_grad for tensor in outputs):
            # such as a preprocessor: no gradient comes from it
            step.calls.pop()
            step.unseen += 1
        for place, tensor in enumerate(outputs):
            # hooks of leaves would stay
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(_Keep(step, call, place))  # type: ignore[no-untyped-call]


class _Keep:
    """Tensor hook: keeps the gradient of an output. It holds no engine, since scripts keep their losses."""

    def __init__(self, step: StepRecord, call: CallRecord, place: int) -> None:
        self._step, self._call, self._place = step, call, place

    def __call__(self, gradient: Tensor) -> None:
        place = len(self._step.losses) - 1
        if place < 0:
            # of a loss of other optimizers alone
            return
        kept = self._call.gradients.setdefault(place, {})
        before = kept.get(self._place)
        kept[self._place] = gradient if before is None else before + gradient


def _children(model: nn.Module, front: str) -> Iterator[tuple[str, nn.Module]]:
    """The children of a model, those in its lists and dicts of modules among them: what scripts call."""
    seen = {id(model)}
    waiting = list(model.named_children())
    while waiting:
        name, child = waiting.pop(0)
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            waiting += [(f'{name}.{key}', inner) for key, inner in child.named_children()]
        elif id(child) not in seen and not isinstance(child, torch.jit.ScriptModule):
            seen.add(id(child))
            yield f'{front}.{name}' if front else name, child


def _same_tensors(value: Any) -> Any:
    """New lists, tuples and dicts, with the same things in them."""
    if type(value) in (list, tuple):
        return type(value)(map(_same_tensors, value))
    if type(value) is dict:
        return {key: _same_tensors(item) for key, item in value.items()}
    return value


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors inside nested containers and in the fields of objects that tell them by ``all_items()`` (mmengine's)."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    # in the order of map_tensors, with which recorded gradients find their outputs again
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, found)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, found)
    elif value is None or isinstance(value, (str, int, float)):
        return
    elif callable(getattr(value, 'all_items', None)):
        for _, item in value.all_items():
            _collect(item, found)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _collect(getattr(value, field.name, None), found)


def outputs_of(value: Any) -> list[Tensor]:
    """The floating tensors in what a model returned, in their order."""
    return [tensor for tensor in tensors_of(value) if tensor.is_floating_point()]


def versions_of(value: Any) -> tuple[int, ...]:
    """The version counters of tensors."""
    return tuple(0 if tensor.is_inference() else tensor._version for tensor in tensors_of(value))


def identifiers(value: Any) -> dict[str, list[str]]:
    """What the samples of a batch are called: the entries of :data:`IDENTIFIERS` in dicts, and in ``metainfo`` of objects.

    Args:
        value: The arguments of a forward call, or a batch.

    Returns:
        Name of the entry to the values found, as text, in their order.
    """
    found: dict[str, list[str]] = {}

    def look(value: Any, depth: int) -> None:
        if depth > 6:
            return
        meta = getattr(value, 'metainfo', None)
        if isinstance(meta, dict):
            value = meta
        if isinstance(value, dict):
            for key, item in value.items():
                if isinstance(key, str) and key in IDENTIFIERS:
                    found.setdefault(key, []).extend(_texts(item))
                else:
                    look(item, depth + 1)
        elif isinstance(value, (list, tuple)):
            for item in value:
                look(item, depth + 1)

    look(value, 0)
    return found


def _texts(value: Any) -> list[str]:
    if isinstance(value, Tensor):
        value = [] if value.is_floating_point() or value.is_complex() else value.flatten()[:MOST_SAMPLES].tolist()
    listed = value if isinstance(value, (list, tuple)) else [value]
    return [str(item) for item in listed[:MOST_SAMPLES] if isinstance(item, (str, int))]

"""The hook that makes a resumed run draw the random numbers, see the data and stop where the uninterrupted one would.

What mmengine leaves out of a checkpoint, and this puts in (``checkpoint['exact_resume']``):

* the states of the random generators of every rank, now and at the start of the epoch,
* how many batches of the epoch are done: mmengine's epoch loop would begin the epoch again,
* whether the validation that is due here has run: mmengine saves first and validates then,
* the state of ``EarlyStoppingHook``,
* the running statistics of BatchNorm on every rank but the first, whose own are in the model.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from mmengine.dist import all_gather_object, get_rank, get_world_size
from mmengine.hooks import CheckpointHook, EarlyStoppingHook, Hook
from mmengine.logging import print_log
from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapperDict
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop

from ...checkpoint import random_state, resume_record
from ...errors import AmpConfigError
from ...registry import HOOKS
from ..patches.members import attach_members
from ..patches.saving import wrappers_of
from . import data_order


def _log(text: str, level: int = logging.INFO) -> None:
    print_log(f'amp: {text}', logger='current', level=level)


@HOOKS.register_module()
class ExactResumeHook(Hook):
    """A resumed run equals the uninterrupted one: random numbers, order of the data, validations, early stopping.

    ``custom_hooks=[dict(type='amp_wrapper.ExactResumeHook')]``; ``tools/train.py`` adds it by itself. What cannot be exact
    in a configuration is said once, when the training starts. The random states are copied at each checkpoint and each
    validation.

    Args:
        revalidate: Whether a run that died between a checkpoint and its validation validates when it is resumed. Without
            it, ``save_best`` and early stopping miss that validation.

    Raises:
        AmpConfigError: ``revalidate`` is neither True nor False.
    """

    priority = 'HIGHEST'

    def __init__(self, revalidate: bool = True) -> None:
        if not isinstance(revalidate, bool):
            raise AmpConfigError([f'revalidate={revalidate!r} must be True or False.'])
        self.revalidate = revalidate
        self._batches = 0
        self._validated = -1
        self._begin: dict[str, Any] | None = None
        self._start: dict[str, Any] | None = None
        self._before_val: dict[str, Any] | None = None
        self._collected: list[dict[str, Any]] | None = None
        self._resumed: Mapping[str, Any] | None = None
        self._last: _LastWord | None = None

    # -- the course of a training ------------------------------------------------------------------------------------

    def before_run(self, runner: Any) -> None:
        """Take the last place among the hooks, too."""
        # a config may have one, and a tool add another: two would undo each other
        others = [hook for hook in runner._hooks if isinstance(hook, ExactResumeHook) and hook is not self]
        for hook in others:
            runner._hooks.remove(hook)
        if self._last is None:
            # this hook is called first: appending behind the running iteration is safe
            self._last = _LastWord(self)
            runner.register_hook(self._last, priority='LOWEST')

    def before_train(self, runner: Any) -> None:
        """Say what cannot be exact, and put back what belongs to no particular moment."""
        _early_stopping_first(runner)
        loop = runner.train_loop
        if self._resumed is not None:
            self._follow_seeds(loop)
            self._restore_statistics(runner, self._resumed)
            _restore_early_stopping(runner, self._resumed['early_stopping'])
        for reason in data_order.why_inexact(runner, loop):
            _log(f'a resume of this run will not be exact: {reason}', logging.WARNING)

    def resume_training(self, runner: Any) -> None:
        """After every other hook's ``before_train``: get ready to go on in mid-epoch, and validate what is due."""
        saved, loop = self._resumed, runner.train_loop
        if saved is None:
            return
        self._validated = saved['validated']
        self._begin, self._start = self._own(saved, 'begin'), self._own(saved, 'start')
        self._warn_of_other_batches(saved, loop)
        if type(loop).run_epoch is EpochBasedTrainLoop.run_epoch if isinstance(loop, EpochBasedTrainLoop) else False:
            self._batches = saved['batches']
            if self._batches:
                go_on = functools.partial(self._go_on, runner)
                loop.run_epoch = functools.partial(_rest_of_epoch, loop, self._batches, go_on)
        if self._is_validation_due(runner, loop):
            _log('the checkpoint was saved before its validation, which runs now')
            # FlexibleRunner casts the model at the first iteration, and this validation belongs to a cast one
            if isinstance(runner.optim_wrapper, OptimWrapperDict):
                attach_members(runner.optim_wrapper, runner.model)
            for wrapper in wrappers_of(runner).values():
                wrapper.attach(runner.model)
            self._set_random_states(runner, 'now')
            runner.val_loop.run()
        self._stop_if_stopped(runner, loop, saved)

    def _warn_of_other_batches(self, saved: Mapping[str, Any], loop: Any) -> None:
        length = data_order.batches_of(loop)
        if saved['length'] != length:
            if isinstance(loop, EpochBasedTrainLoop) and saved['validated'] == loop.epoch * saved['length']:
                # the count follows the epochs of now
                self._validated = loop.iter
            _log(
                f'an epoch had {saved["length"]} batches and has {length} now: data seen are passed over by number',
                logging.WARNING,
            )

    def _is_validation_due(self, runner: Any, loop: Any) -> bool:
        if not self.revalidate or runner.val_loop is None or self._batches:
            return False
        if isinstance(loop, EpochBasedTrainLoop):
            done, end = loop.epoch, loop.max_epochs
        elif isinstance(loop, IterBasedTrainLoop):
            done, end = loop.iter, loop.max_iters
        else:
            return False
        loop._decide_current_val_interval()
        due = done > 0 and done >= loop.val_begin and (done % loop.val_interval == 0 or done == end)
        return due and self._validated != loop.iter

    def _stop_if_stopped(self, runner: Any, loop: Any, saved: Mapping[str, Any]) -> None:
        if not saved['stop_training'] or not hasattr(loop, 'stop_training'):
            return
        if [state['settings'] for state in saved['early_stopping']] == [_settings(h) for h in _early_stopping(runner)]:
            loop.stop_training = True
            _log('this run was ended by early stopping already')
        else:
            _log('early stopping had ended this run; its settings were changed since, so the run goes on')

    def before_train_epoch(self, runner: Any) -> None:
        """Before every other hook's: those that draw numbers here draw the same again."""
        if self._resumed is None:
            self._begin = self._capture(runner)
            return
        within = self._batches or (isinstance(runner.train_loop, IterBasedTrainLoop) and runner.iter)
        self._set_random_states(runner, 'begin' if within else 'now')
        self._begin = self._own(self._resumed, 'begin') if within else self._capture(runner)

    def begin_epoch(self, runner: Any) -> None:
        """After every other hook's ``before_train_epoch``: the generators are set to the point to go on from."""
        loop = runner.train_loop
        if self._resumed is None:
            self._start = self._capture(runner)
            self._batches = 0
            return
        by_iter = isinstance(loop, IterBasedTrainLoop)
        if by_iter and loop.iter >= loop.max_iters:
            # nothing is left to train, though mmengine passes over the data all the same
            loop.dataloader_iterator = _Nothing()
            self._go_on(runner)
            return
        if by_iter and getattr(loop, 'fast_forward_on_resume', False):
            # onedl-mmengine passes over nothing then: the data begin anew
            self._go_on(runner)
            return
        if self._batches or (by_iter and loop.iter):
            # data that was seen is passed over as it was seen, from the same start
            self._set_random_states(runner, 'start')
            if by_iter:
                loop.dataloader_iterator = _FastForward(loop, functools.partial(self._go_on, runner))
            return
        self._resumed = None
        self._start = self._capture(runner)

    def _go_on(self, runner: Any) -> None:
        """From here on, everything is as it was in the run that saved the checkpoint."""
        self._set_random_states(runner, 'now')
        self._resumed = None

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Count the batches of the epoch."""
        self._batches = 0 if isinstance(runner.train_loop, IterBasedTrainLoop) else batch_idx + 1

    def after_train_epoch(self, runner: Any) -> None:
        """The epoch is done: a checkpoint of now begins the next."""
        self._batches = 0

    # -- validation draws no random numbers of the training ----------------------------------------------------------

    def before_val(self, runner: Any) -> None:
        """Remember the states of the training."""
        self._before_val = self._capture(runner)

    def after_val_epoch(self, runner: Any, metrics: Any = None) -> None:
        """Put them back before ``save_best`` saves."""
        if self._before_val is not None:
            random_state.restore(self._before_val, self._generators(runner))
            self._validated = runner.iter

    def end_validation(self, runner: Any) -> None:
        """After every other hook's ``after_val``: whatever those drew is undone, too."""
        if self._before_val is not None:
            random_state.restore(self._before_val, self._generators(runner))
            self._before_val = None

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def collect_states(self, runner: Any) -> None:
        """Gather the states of all ranks, for :meth:`before_save_checkpoint`, which runs on rank 0 alone.

        Args:
            runner: On every rank, right before saving.
        """
        now = self._before_val if self._before_val is not None else self._capture(runner)
        own = self._own_part(runner, now)
        self._collected = all_gather_object(own) if get_world_size() > 1 else [own]

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Add the part of this hook to checkpoints that can be resumed from."""
        ranks, self._collected = self._collected, None
        if 'optimizer' not in checkpoint:
            return
        if ranks is None:
            # somebody saves by himself, on rank 0 alone
            ranks = [self._own_part(runner, self._capture(runner))]
            if get_world_size() > 1:
                _log(
                    'the random states of the other ranks are not in this checkpoint: let CheckpointHook save',
                    logging.WARNING,
                )
        checkpoint[resume_record.KEY] = {
            'version': resume_record.VERSION,
            'ranks': ranks,
            'batches': self._batches,
            'length': data_order.batches_of(runner.train_loop),
            'validated': self._validated,
            'stop_training': bool(getattr(runner.train_loop, 'stop_training', False)),
            'early_stopping': [
                {'wait_count': int(h.wait_count), 'best_score': float(h.best_score), 'settings': _settings(h)}
                for h in _early_stopping(runner)
            ],
        }

    def check_states(self, checkpoint: Mapping[str, Any]) -> None:
        """Validate the part of this hook in a file that is about to be resumed from.

        Args:
            checkpoint: The whole file.

        Raises:
            AmpCheckpointError: Names the key and what was expected.
        """
        if resume_record.KEY in checkpoint:
            resume_record.check(checkpoint[resume_record.KEY])

    def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Keep the part of this hook until the training starts."""
        if not runner._resume:
            return
        saved = checkpoint.get(resume_record.KEY)
        if saved is None:
            _log(
                'the checkpoint holds no random states: dropout, augmentation and shuffling will differ',
                logging.WARNING,
            )
            return
        resume_record.check(saved)
        self._resumed = saved
        ranks = len(saved['ranks'])
        if ranks != get_world_size():
            _log(
                f'saved by {ranks} processes and resumed by {get_world_size()}: data and random numbers will differ',
                logging.WARNING,
            )

    # -- details -----------------------------------------------------------------------------------------------------

    def _generators(self, runner: Any) -> list[torch.Generator]:
        loader = getattr(runner.train_loop, 'dataloader', None) if _has_train_loop(runner) else None
        found = [getattr(loader, 'generator', None), getattr(data_order.sampler_of(loader), 'generator', None)]
        return [generator for generator in dict.fromkeys(found) if isinstance(generator, torch.Generator)]

    def _capture(self, runner: Any) -> dict[str, Any]:
        return random_state.capture(self._generators(runner), all_devices=get_world_size() == 1)

    def _own(self, saved: Mapping[str, Any], moment: str) -> dict[str, Any] | None:
        """The states of this rank; None where they were not saved."""
        return saved['ranks'][get_rank()][moment] if get_rank() < len(saved['ranks']) else None

    def _set_random_states(self, runner: Any, moment: str) -> None:
        states = None if self._resumed is None else self._own(self._resumed, moment)
        if states is not None:
            for note in random_state.restore(states, self._generators(runner)):
                _log(note, logging.WARNING)

    def _own_part(self, runner: Any, now: dict[str, Any]) -> dict[str, Any]:
        loop = runner.train_loop if _has_train_loop(runner) else None
        part = {
            'now': now,
            'begin': self._begin,
            'start': self._start,
            'seeds': data_order.seeds_of(getattr(loop, 'dataloader', None)),
            'statistics': {},
        }
        if get_rank() > 0:
            part['statistics'] = {name: value.detach().cpu().clone() for name, value in _statistics(runner)}
        return part

    def _restore_statistics(self, runner: Any, saved: Mapping[str, Any]) -> None:
        """The model part of a file holds those of rank 0; without SyncBN each rank has its own."""
        mine = self._own(saved, 'statistics') if get_world_size() == len(saved['ranks']) else None
        for name, value in _statistics(runner):
            if mine and name in mine and mine[name].shape == value.shape:
                value.copy_(mine[name])

    def _follow_seeds(self, loop: Any) -> None:
        """Samplers and workers are built before a checkpoint is read: give them the seeds they had."""
        loader = loop.dataloader
        saved = None if self._resumed is None else self._own(self._resumed, 'seeds')
        here = data_order.seeds_of(loader)
        if saved is None or here == saved:
            return
        sampler = data_order.sampler_of(loader)
        if None not in (saved['sampler'], here['sampler']):
            sampler.seed = saved['sampler']
        if None not in (saved['workers'], here['workers']):
            outer = loader.worker_init_fn
            init = getattr(outer, 'then', outer)
            new = functools.partial(init.func, *init.args, **{**init.keywords, 'seed': saved['workers']})
            if init is outer:
                loader.worker_init_fn = new
            else:
                outer.then = new
        data_order.restart_iterator(loop)
        _log('the order of the data follows the seed of the checkpoint')


class _LastWord(Hook):
    """What :class:`ExactResumeHook` does after all other hooks: mmengine gives a hook one place in all stages."""

    priority = 'LOWEST'

    def __init__(self, hook: ExactResumeHook) -> None:
        self._hook = hook

    def before_train(self, runner: Any) -> None:
        self._hook.resume_training(runner)

    def before_train_epoch(self, runner: Any) -> None:
        self._hook.begin_epoch(runner)

    def after_val(self, runner: Any) -> None:
        self._hook.end_validation(runner)


class _Passing:
    """What mmengine passes over after a resume: by ``next``, or, in onedl-mmengine, by :meth:`skip_iter`."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        raise NotImplementedError

    def skip_iter(self, num_iters: int) -> None:
        """Pass over batches as if they were trained.

        They are loaded: what draws random numbers as it loads, such as an augmentation, draws what it drew then.
        """
        for _ in range(num_iters):
            next(self)


class _Nothing(_Passing):
    """The iterator of a loop that has nothing left to train."""

    def __next__(self) -> None:
        return None

    def skip_iter(self, num_iters: int) -> None:
        """Nothing to do."""


class _FastForward(_Passing):
    """The iterator of an iteration-based loop that is resumed: mmengine passes over what was seen, then training goes on."""

    def __init__(self, loop: Any, go_on: Any) -> None:
        self._loop = loop
        self._iterator = loop.dataloader_iterator
        self._left = loop.iter
        self._go_on = go_on
        self._progress = _Progress(loop.iter)

    def __next__(self) -> Any:
        if self._left:
            self._left -= 1
            self._progress.step()
        else:
            self._go_on()
            self._loop.dataloader_iterator = self._iterator
        return next(self._iterator)


class _Progress:
    """A line every ten seconds."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._begin = self._said = time.monotonic()

    def step(self) -> None:
        self._done += 1
        now = time.monotonic()
        if now - self._said >= 10:
            self._said = now
            left = (now - self._begin) / self._done * (self._total - self._done)
            _log(f'passing over data seen already: {self._done} of {self._total} batches, about {left:.0f} s left')


def _rest_of_epoch(loop: Any, done: int, go_on: Any) -> None:
    """In place of ``EpochBasedTrainLoop.run_epoch``, once: the epoch from the batch after the last one that was trained."""
    del loop.run_epoch
    runner = loop.runner
    runner.call_hook('before_train_epoch')
    runner.model.train()
    if done >= len(loop.dataloader):
        go_on()
    else:
        iterator = iter(loop.dataloader)
        progress = _Progress(done)
        for _ in range(done):
            next(iterator)
            progress.step()
        go_on()
        for index, data_batch in enumerate(iterator, done):
            loop.run_iter(index, data_batch)
    runner.call_hook('after_train_epoch')
    loop._epoch += 1


def _has_train_loop(runner: Any) -> bool:
    return not isinstance(getattr(runner, '_train_loop', None), (dict, type(None)))


def _statistics(runner: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The running statistics of BatchNorm and its kin, by qualified name."""
    model = runner.model.module if is_model_wrapper(runner.model) else runner.model
    for name, buffer in model.named_buffers():
        if name.rpartition('.')[2] in ('running_mean', 'running_var', 'num_batches_tracked'):
            yield name, buffer


def _early_stopping(runner: Any) -> list[Any]:
    return [hook for hook in runner.hooks if isinstance(hook, EarlyStoppingHook)]


def _early_stopping_first(runner: Any) -> None:
    """``save_best`` saves the file again: early stopping must have counted this validation by then."""
    hooks = runner._hooks
    for hook in _early_stopping(runner):
        savers = [index for index, other in enumerate(hooks) if isinstance(other, CheckpointHook)]
        if savers and hooks.index(hook) > savers[0]:
            hooks.remove(hook)
            hooks.insert(savers[0], hook)


def _settings(hook: Any) -> str:
    names = ('monitor', 'rule', 'min_delta', 'check_finite', 'patience', 'stopping_threshold')
    return ', '.join(f'{name}={getattr(hook, name, None)!r}' for name in names)


def _restore_early_stopping(runner: Any, states: list[Mapping[str, Any]]) -> None:
    hooks = _early_stopping(runner)
    if len(hooks) != len(states):
        _log(
            f'{len(states)} early stopping hooks were saved and {len(hooks)} are configured: they start anew',
            logging.WARNING,
        )
        return
    for hook, state in zip(hooks, states):
        hook.wait_count, hook.best_score = state['wait_count'], state['best_score']

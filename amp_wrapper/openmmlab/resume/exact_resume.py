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
from collections.abc import Mapping
from typing import Any

from mmengine.dist import all_gather_object, get_world_size
from mmengine.hooks import Hook
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop

from ...checkpoint import resume_record
from ...errors import AmpConfigError
from ...registry import HOOKS
from ..log import log, warn
from ..patches.wrapper_dict import attach_siblings
from ..wrappers import wrappers_of
from . import data_order, early_stopping, rank_states, seen_data


@HOOKS.register_module()
class ExactResumeHook(Hook):
    """A resumed run equals the uninterrupted one: random numbers, order of the data, validations, early stopping.

    ``default_hooks=dict(exact_resume=dict(type='amp_wrapper.ExactResumeHook'))``; ``amp-wrapper train`` adds it by itself.
    What cannot be exact in a configuration is said once, when the training starts. The random states are copied at each
    checkpoint and each validation.

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
        """Remove other hooks of this class."""
        # a config may have one, and a tool add another: two would undo each other
        others = [hook for hook in runner._hooks if isinstance(hook, ExactResumeHook) and hook is not self]
        for hook in others:
            runner._hooks.remove(hook)

    def before_train(self, runner: Any) -> None:
        """Register the hook that comes last, warn of what cannot be exact, and restore seeds, statistics and counters."""
        if self._last is None:
            # this hook is called first: appending behind the running iteration is safe
            self._last = _LastWord(self)
            runner.register_hook(self._last, priority='LOWEST')
        early_stopping.put_first(runner)
        if self._resumed is not None:
            data_order.follow_seeds(runner.train_loop, self._own('seeds'))
            rank_states.restore_statistics(runner, self._resumed)
            early_stopping.restore(runner, self._resumed['early_stopping'])
        for reason in data_order.why_inexact(runner, runner.train_loop):
            warn(f'a resume of this run will not be exact: {reason}')

    def resume_training(self, runner: Any) -> None:
        """After every other hook's ``before_train``: get ready to go on in mid-epoch, and validate what is due."""
        saved, loop = self._resumed, runner.train_loop
        if saved is None:
            return
        self._validated = saved['validated']
        self._begin, self._start = self._own('begin'), self._own('start')
        self._warn_of_other_batches(saved, loop)
        if getattr(type(loop), 'run_epoch', None) is EpochBasedTrainLoop.run_epoch:
            self._batches = saved['batches']
            if self._batches:
                go_on = functools.partial(self._go_on, runner)
                loop.run_epoch = functools.partial(seen_data.rest_of_epoch, loop, self._batches, go_on)
        if self._is_validation_due(runner, loop):
            unit, done = ('epoch', loop.epoch) if isinstance(loop, EpochBasedTrainLoop) else ('iteration', loop.iter)
            log(
                f'the checkpoint does not hold the result of the validation after {unit} {done}, before which it is saved: it '
                f'runs now, whether or not it has run before'
            )
            # FlexibleRunner casts the model at the first iteration, and this validation belongs to a cast one
            for wrapper in wrappers_of(runner).values():
                attach_siblings(wrapper, runner.model)
                wrapper.attach(runner.model)
            self._set_random_states(runner, 'now')
            runner.val_loop.run()
        if saved['stop_training'] and hasattr(loop, 'stop_training'):
            early_stopping.stop_again(runner, saved['early_stopping'])

    def _warn_of_other_batches(self, saved: Mapping[str, Any], loop: Any) -> None:
        length = data_order.batches_of(loop)
        if saved['length'] != length:
            if isinstance(loop, EpochBasedTrainLoop) and saved['validated'] == loop.epoch * saved['length']:
                # counted in epochs of the present length
                self._validated = loop.iter
            warn(
                f'an epoch had {saved["length"]} batches and has {length} now: as many batches are skipped as were seen'
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

    def before_train_epoch(self, runner: Any) -> None:
        """Before every other hook's: those that draw numbers here draw the same again."""
        if self._resumed is None:
            self._begin = rank_states.capture(runner)
            return
        within = self._batches or (isinstance(runner.train_loop, IterBasedTrainLoop) and runner.iter)
        self._set_random_states(runner, 'begin' if within else 'now')
        self._begin = self._own('begin') if within else rank_states.capture(runner)

    def begin_epoch(self, runner: Any) -> None:
        """After every other hook's ``before_train_epoch``: the generators are set to the point to go on from."""
        loop = runner.train_loop
        if self._resumed is None:
            self._start = rank_states.capture(runner)
            self._batches = 0
            return
        by_iter = isinstance(loop, IterBasedTrainLoop)
        if by_iter and loop.iter >= loop.max_iters:
            # nothing is left to train, though mmengine passes over the data all the same
            loop.dataloader_iterator = seen_data.Nothing()
            self._go_on(runner)
        elif by_iter and getattr(loop, 'fast_forward_on_resume', False):
            # onedl-mmengine skips nothing then: the data begin anew
            self._go_on(runner)
        elif self._batches or (by_iter and loop.iter):
            # data that was seen is skipped as it was seen, from the same start
            self._set_random_states(runner, 'start')
            if by_iter:
                loop.dataloader_iterator = seen_data.FastForward(loop, functools.partial(self._go_on, runner))
        else:
            self._resumed = None
            self._start = rank_states.capture(runner)

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
        self._before_val = rank_states.capture(runner)

    def after_val_epoch(self, runner: Any, metrics: Any = None) -> None:
        """Put them back before ``save_best`` saves."""
        if self._before_val is not None:
            rank_states.restore(runner, self._before_val)
            self._validated = runner.iter

    def end_validation(self, runner: Any) -> None:
        """After every other hook's ``after_val``: whatever those drew is undone, too."""
        if self._before_val is not None:
            rank_states.restore(runner, self._before_val)
            self._before_val = None

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def collect_states(self, runner: Any) -> None:
        """Gather the states of all ranks, for :meth:`before_save_checkpoint`, which runs on rank 0 alone.

        Args:
            runner: On every rank, right before saving.
        """
        now = self._before_val if self._before_val is not None else rank_states.capture(runner)
        self._collected = all_gather_object(self._part(runner, now))

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Add the part of this hook to checkpoints that can be resumed from."""
        ranks, self._collected = self._collected, None
        if 'optimizer' not in checkpoint:
            return
        if ranks is None:
            # somebody saves by himself, on rank 0 alone
            ranks = [self._part(runner, rank_states.capture(runner))]
            if get_world_size() > 1:
                warn('the random states of the other ranks are not in this checkpoint: let CheckpointHook save')
        checkpoint[resume_record.KEY] = {
            'version': resume_record.VERSION,
            'ranks': ranks,
            'batches': self._batches,
            'length': data_order.batches_of(runner.train_loop),
            'validated': self._validated,
            'stop_training': bool(getattr(runner.train_loop, 'stop_training', False)),
            'early_stopping': early_stopping.states_of(runner),
        }

    def _part(self, runner: Any, now: Mapping[str, Any]) -> dict[str, Any]:
        return rank_states.part_of_this_rank(runner, {'now': now, 'begin': self._begin, 'start': self._start})

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
            warn('the checkpoint holds no random states: dropout, augmentation and shuffling will differ')
            return
        resume_record.check(saved)
        self._resumed = saved
        rank_states.warn_of_other_ranks(saved)

    def _own(self, key: str) -> Any:
        return None if self._resumed is None else rank_states.of_this_rank(self._resumed, key)

    def _set_random_states(self, runner: Any, moment: str) -> None:
        for note in rank_states.restore(runner, self._own(moment)):
            warn(note)


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

"""The hook with which a resumed run becomes the uninterrupted one, bit for bit.

Random numbers are a function of the seed, the rank and the place in the training, so a checkpoint holds none of them. What the
hook adds to mmengine's message hub: at which iteration the last validation ran (mmengine saves first, and validates then), and
the counters of ``EarlyStoppingHook``.
"""

from __future__ import annotations

import functools
import hashlib
import random
from typing import Any

import numpy as np
import torch
from mmengine.dist import get_rank, get_world_size
from mmengine.hooks import CheckpointHook, EarlyStoppingHook, Hook
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop

from ..errors import AmpConfigError
from ..registry import HOOKS
from .log import log, warn

#: Where the message hub of a checkpoint has what the hook adds.
STATE = 'amp_exact_resume'


def seed_for(runner: Any, *place: str | int) -> None:
    """Seed the random generators of this process for a place in the training.

    Args:
        runner: With the seed of the run.
        *place: What happens there, and where it is.
    """
    name = repr((runner.seed, get_rank(), *place)).encode()
    value = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), 'little') >> 1
    random.seed(value)
    np.random.seed(value % 2**32)
    # torch.manual_seed asks all backends, which takes ten times as long
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(value)


@HOOKS.register_module()
class ExactResumeHook(Hook):
    """Lets a resumed run equal the uninterrupted one: random numbers, order of the data, validations, early stopping.

    ``default_hooks=dict(exact_resume=dict(type='amp_wrapper.ExactResumeHook'))``; ``amp-wrapper train`` adds it by itself. It
    seeds the random generators before each iteration, epoch and validation, so a run with it draws other numbers than a run
    without it. What cannot be exact in a configuration is said once, when the training starts. Data that were seen are loaded
    again, and passed over.

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
        self.validated = -1
        self._last: _LastHook | None = None

    def before_train(self, runner: Any) -> None:
        """Warn of what cannot be exact, and restore the counters of early stopping."""
        if self._last is None:
            # this hook is called first: appending behind the running iteration is safe
            self._last = _LastHook(self)
            runner.register_hook(self._last)
        _count_before_saving(runner)
        for reason in why_inexact(runner):
            warn(f'a resume of this run will not be exact: {reason}')
        saved = runner.message_hub.runtime_info.get(STATE) if runner.iter else None
        stopping = _stopping(runner)
        if saved is not None:
            self.validated = saved['validated']
            if saved['ranks'] != get_world_size():
                warn(f'saved by {saved["ranks"]} processes, resumed by {get_world_size()}: random numbers will differ')
            if len(saved['stopping']) != len(stopping):
                warn(f'{len(saved["stopping"])} early stopping hooks were saved and {len(stopping)} are configured')
            for hook, (waited, best) in zip(stopping, saved['stopping']):
                hook.wait_count, hook.best_score = waited, best
        elif runner.iter:
            warn('the file was saved without ExactResumeHook, or by an earlier version: random numbers will differ')

    def before_train_epoch(self, runner: Any) -> None:
        """Seed, and let an iteration-based loop pass over its data as they were loaded."""
        seed_for(runner, 'epoch', runner.epoch)
        loop = runner.train_loop
        if isinstance(loop, IterBasedTrainLoop) and loop.iter:
            loop.dataloader_iterator = _SeededIterator(runner, loop)

    def before_val(self, runner: Any) -> None:
        """Seed: a validation draws nothing from the training."""
        seed_for(runner, 'val', runner.iter)

    def after_val_epoch(self, runner: Any, metrics: Any = None) -> None:
        """Note it before ``save_best`` saves."""
        self.validated = runner.iter

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Add what a resume needs to the message hub of the file."""
        stopping = [[int(hook.wait_count), float(hook.best_score)] for hook in _stopping(runner)]
        hub = checkpoint['message_hub']
        saved = {'validated': self.validated, 'stopping': stopping, 'ranks': get_world_size()}
        hub['runtime_info'] = {**hub['runtime_info'], STATE: saved}
        hub['resumed_keys'] = {**hub['resumed_keys'], STATE: True}


class _LastHook(Hook):
    """What :class:`ExactResumeHook` does after all other hooks: mmengine gives a hook one place in all stages."""

    priority = 'LOWEST'

    def __init__(self, hook: ExactResumeHook) -> None:
        self._hook = hook

    def before_train(self, runner: Any) -> None:
        """Get ready to go on in mid-epoch, and validate what is due."""
        loop = runner.train_loop
        if not loop.iter:
            return
        for hook in runner.hooks:
            if isinstance(hook, CheckpointHook) and hook.last_ckpt is None:
                # mmengine forgets it, and would not write a new best score into it
                hook.last_ckpt = runner.message_hub.runtime_info.get('last_ckpt')
        by_epoch = getattr(type(loop), 'run_epoch', None) is EpochBasedTrainLoop.run_epoch
        done = loop.iter - loop.epoch * len(loop.dataloader) if by_epoch else 0
        if done:
            loop.run_epoch = functools.partial(_rest_of_epoch, runner, loop, done)
        elif self._hook.revalidate and self._hook.validated != loop.iter and _is_validation_due(runner, loop):
            log(f'the file lacks the validation after iteration {loop.iter}, before which it was saved: it runs now')
            runner.val_loop.run()
        for hook in _stopping(runner):
            goal, is_better = hook.stopping_threshold, hook.rule_map[hook.rule]
            if hook.wait_count >= hook.patience or (goal is not None and is_better(hook.best_score, goal)):
                log('this run was ended by early stopping already')
                loop.stop_training = True

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        seed_for(runner, 'iter', runner.iter + 1)

    def after_val(self, runner: Any) -> None:
        seed_for(runner, 'iter', runner.iter)


class _SeededIterator:
    """Stands in front of the iterator of a resumed loop of iterations, which begins with the first batch again.

    mmengine passes over the batches that were trained; each is loaded from the seed that it was loaded from then, since a new
    pass over the data, or a data set with a memory, may draw.
    """

    def __init__(self, runner: Any, loop: Any) -> None:
        self._runner, self._iterator, self._index, self._seen = runner, loop.dataloader_iterator, 0, loop.iter
        self._is_over = loop.iter >= loop.max_iters

    def __next__(self) -> Any:
        if self._is_over:
            # nothing is left to train, though mmengine passes over the data all the same
            return None
        if 0 < self._index <= self._seen:
            seed_for(self._runner, 'iter', self._index)
        self._index += 1
        return next(self._iterator)

    def skip_iter(self, num_iters: int) -> None:
        """Pass over batches, for onedl-mmengine."""
        for _ in range(num_iters):
            next(self)


def _rest_of_epoch(runner: Any, loop: Any, done: int) -> None:
    """``EpochBasedTrainLoop.run_epoch``, once: the epoch from the batch after the last one that was trained."""
    del loop.run_epoch
    runner.call_hook('before_train_epoch')
    runner.model.train()
    log(f'passing over the {done} of {len(loop.dataloader)} batches of the epoch that were trained')
    iterator = iter(loop.dataloader)
    for index in range(done):
        if index:
            seed_for(runner, 'iter', loop.iter - done + index)
        next(iterator)
    seed_for(runner, 'iter', loop.iter)
    for index, batch in enumerate(iterator, done):
        loop.run_iter(index, batch)
    runner.call_hook('after_train_epoch')
    loop._epoch += 1


def _is_validation_due(runner: Any, loop: Any) -> bool:
    if runner.val_loop is None or not isinstance(loop, (EpochBasedTrainLoop, IterBasedTrainLoop)):
        return False
    by_epoch = isinstance(loop, EpochBasedTrainLoop)
    done, end = (loop.epoch, loop.max_epochs) if by_epoch else (loop.iter, loop.max_iters)
    loop._decide_current_val_interval()
    return bool(done >= loop.val_begin and (done % loop.val_interval == 0 or done == end))


def _stopping(runner: Any) -> list[Any]:
    return [hook for hook in runner.hooks if isinstance(hook, EarlyStoppingHook)]


def _count_before_saving(runner: Any) -> None:
    """``save_best`` saves the file again: early stopping must have counted this validation by then."""
    hooks = runner._hooks
    first = next((index for index, hook in enumerate(hooks) if isinstance(hook, CheckpointHook)), len(hooks))
    for hook in _stopping(runner):
        if hooks.index(hook) > first:
            hooks.remove(hook)
            hooks.insert(first, hook)


def why_inexact(runner: Any) -> list[str]:
    """Say why a resume of this configuration cannot be exact: one sentence each, with what to write instead.

    Args:
        runner: About to train.
    """
    loop, reasons = runner.train_loop, []
    by_epoch = getattr(type(loop), 'run_epoch', None) is EpochBasedTrainLoop.run_epoch
    if not by_epoch and not isinstance(loop, IterBasedTrainLoop):
        reasons.append(f'{type(loop).__name__} is no loop of mmengine, so data that were seen are not passed over.')
    if getattr(loop, 'fast_forward_on_resume', False):
        reasons.append('fast_forward_on_resume=True begins the data anew. Write fast_forward_on_resume=False.')
    if by_epoch and getattr(loop.dataloader, 'persistent_workers', False):
        reasons.append('workers keep their random states from epoch to epoch. Write persistent_workers=False.')
    if get_world_size() > 2 and getattr(runner.model, 'find_unused_parameters', None) is False:
        reasons.append('DDP orders its buckets anew in its second iteration. Write find_unused_parameters=True.')
    if runner._randomness_cfg.get('seed') is None:
        reasons.append('the config has no seed, and data sets are built first. Write randomness=dict(seed=0).')
    if torch.cuda.is_available() and not torch.are_deterministic_algorithms_enabled():
        reasons.append('some GPU kernels add in any order. Write randomness=dict(seed=0, deterministic=True).')
    return reasons

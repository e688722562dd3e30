"""Skips the data that were seen before a resume, batch by batch as they were loaded then; the training goes on after them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from ..log import log


class _Passing:
    """An iterator over data that mmengine skips after a resume: by ``next``, or, in onedl-mmengine, by :meth:`skip_iter`."""

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


class Nothing(_Passing):
    """The iterator of a loop that has nothing left to train."""

    def __next__(self) -> None:
        return None

    def skip_iter(self, num_iters: int) -> None:
        """Nothing to do."""


class FastForward(_Passing):
    """The iterator of an iteration-based loop that is resumed, until the first batch that was not seen.

    Args:
        loop: Gets its own iterator back.
        go_on: Called before that batch is fetched.
    """

    def __init__(self, loop: Any, go_on: Callable[[], None]) -> None:
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


def rest_of_epoch(loop: Any, done: int, go_on: Callable[[], None]) -> None:
    """In place of ``EpochBasedTrainLoop.run_epoch``, once: the epoch from the batch after the last one that was trained.

    Args:
        loop: Whose ``run_epoch`` this is.
        done: Batches that were trained.
        go_on: Called before the first one that was not.
    """
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


class _Progress:
    """A line every ten seconds."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._begin = self._reported = time.monotonic()

    def step(self) -> None:
        self._done += 1
        now = time.monotonic()
        if now - self._reported >= 10:
            self._reported = now
            left = (now - self._begin) / self._done * (self._total - self._done)
            log(f'passing over data seen already: {self._done} of {self._total} batches, about {left:.0f} s left')

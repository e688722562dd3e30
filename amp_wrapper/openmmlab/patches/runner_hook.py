"""The hook that every runner is given, for all that mmengine's own hook methods suffice for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mmengine.hooks import Hook

from ...checkpoint import shard_writer
from .. import shard_files, sharded_states, sharding
from ..log import follow_runners
from ..wrappers import is_built_here
from . import ema, resuming, saving


class AmpRunnerHook(Hook):
    """Checks, names and folders around a training. Does nothing where no wrapper of this package trains.

    It comes last among the hooks of the config: averages have been made, and ``CheckpointHook`` knows its folder.
    """

    priority = 'LOWEST'

    def before_run(self, runner: Any) -> None:
        """Refuse what is not supported."""
        ema.check_runner(runner)

    def before_train(self, runner: Any) -> None:
        """Prepare the folders that checkpoints go to."""
        saving.prepare_folders(runner)

    def after_train(self, runner: Any) -> None:
        """Wait for a checkpoint that is being written."""
        shard_files.settle(runner)

    def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Give the weights the names that mmengine looks for."""
        resuming.name_plainly(runner, checkpoint)
        if 'state_dict' in checkpoint and isinstance(runner.model, sharding.MMFullyShard):
            checkpoint['state_dict'] = sharded_states.shard_states(runner.model.module, checkpoint['state_dict'])

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Take out what could not be read back."""
        saving.make_readable(runner, checkpoint)


def register_hooks(original: Callable[..., None], runner: Any, *args: Any, **kwargs: Any) -> None:
    """Replaces ``register_hooks`` of runners: registers :class:`AmpRunnerHook` as well."""
    original(runner, *args, **kwargs)
    give_hook(runner)
    if getattr(runner, '_compile', True) is False and is_built_here(runner.optim_wrapper):
        # FlexibleRunner takes it as a keyword, which from_cfg leaves out
        runner._compile = runner.cfg.get('compile') or False


def load_or_resume(original: Callable[..., None], runner: Any) -> None:
    """Replaces ``load_or_resume`` of runners: chooses the newest complete file where none is named."""
    give_hook(runner)
    # what another training in this process has begun to write may be what this one goes on from
    shard_writer.wait_for_the_last()
    sharding.shard_model_of(runner)
    if resuming.choose_file(runner):
        original(runner)


def give_hook(runner: Any) -> None:
    """Register :class:`AmpRunnerHook`, once. A runner may be older than the patches: mmengine imports the package only when it
    builds a type of it.

    Args:
        runner: Calls no hook at the moment.
    """
    follow_runners()
    if not any(isinstance(hook, AmpRunnerHook) for hook in runner.hooks):
        runner.register_hook(AmpRunnerHook())

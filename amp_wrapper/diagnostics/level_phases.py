"""The phases in which levels are tried: a comparison at the first weights, training, a search for ``keep_fp32``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from ..errors import AmpAttachError, AmpConfigError, AmpUsageError
from ..policy import Policy, dtype_name
from .deviations import Deviation, Pass, compare, run_pass
from .keep_fp32_search import KeepFp32Search, KeepSearch, Outcome
from .level_study import Study
from .level_verdicts import LevelFacts, Limits, choose, compare_runs, difference, judge, type_of
from .progress import Progress
from .sandbox import sandbox
from .side_by_side import LevelRun, Plan, Task, ensure_training, first_line, train_side_by_side

#: Names of runs beside those of the levels.
REFERENCE, REORDERED, WITHOUT_MASTERS = 'O0', 'O0 in another order', 'without masters'


class LevelPhases:
    """The phases, in their order. What is known is in :attr:`study` at any moment, so an interruption loses nothing.

    Args:
        study: With its arguments; filled in.
        task: What to train.
        policies: Level to its configuration; FP32 is among them.
        problems: Level to why it cannot be had.

    Attributes:
        study: What is known.
    """

    def __init__(self, study: Study, task: Task, policies: dict[str, Policy], problems: dict[str, str]) -> None:
        self.study, self.task, self.policies = study, task, policies
        for level in (REFERENCE, *(level for level in study.levels if level != REFERENCE)):
            study.facts[level] = LevelFacts(level, policies.get(level), problem=problems.get(level, ''))
        self._reference: Pass | None = None

    def run(self, bar: Progress) -> None:
        """All phases; ends early after Ctrl-C."""
        try:
            self._probe(bar)
            self._train(bar)
            self._judge()
            self._mend(bar)
            self._confirm(bar)
        except KeyboardInterrupt:
            self.study.interrupted = True
            self._judge()

    # -- at the first weights ----------------------------------------------------------------------------------------

    def _probe(self, bar: Progress) -> None:
        levels = list(self.policies)
        types = {found for level in levels if (found := type_of(self.study.facts[level])) is not None}
        bar.phase('comparing with FP32', len(levels) + len(types) + 1)
        with _left_alone(self.task.model):
            self._reference = self._pass(self.policies[REFERENCE])[0]
            if not self._reference.gradients:
                raise AmpUsageError(
                    'the loss of loss_fn(model, batch) gives the model no gradient: it has to call the model that it is '
                    'given, a copy of yours, and not the one outside.'
                )
        if not math.isfinite(self._reference.loss):
            raise AmpUsageError(
                f'the first loss is {self._reference.loss} in FP32: no level can mend that. Look at the data and the '
                f'weights first.'
            )
        bar.advance()
        if len(self.task.batches) > 1:
            self.study.other_batch = self._pass(self.policies[REFERENCE], batch=1)[1]
        bar.advance()
        for dtype in types:
            rounded = self._pass(self.policies[REFERENCE], rounded_to=dtype)[1]
            if rounded is not None and rounded.finite:
                self.study.sensitivity[dtype_name(dtype)] = rounded.error
            bar.advance()
        for level in levels[1:]:
            self._probe_level(self.study.facts[level], self.policies[level])
            bar.advance()

    def _probe_level(self, facts: LevelFacts, policy: Policy) -> None:
        try:
            facts.deviation = self._pass(policy)[1]
        except torch.OutOfMemoryError:
            facts.problem = 'there is not enough memory'
        except (AmpAttachError, AmpConfigError) as error:
            facts.problem = str(error)
        except AmpUsageError:
            raise
        except Exception as error:
            # whatever the model does at this level
            # an op that a type does not have, say
            facts.problem = first_line(error)

    def _pass(
        self, policy: Policy, batch: int = 0, rounded_to: torch.dtype | None = None
    ) -> tuple[Pass, Deviation | None]:
        """A pass of a copy, and how far it is from FP32; with its weights rounded to a type where one is given."""
        task = self.task
        with sandbox(task.model, policy, task.make_optimizer, task.attach) as box:
            ensure_training(box.model)
            if rounded_to is not None:
                with torch.no_grad():
                    for parameter in box.model.parameters():
                        if parameter.is_floating_point():
                            parameter.copy_(parameter.to(rounded_to))
            found = run_pass(
                box,
                lambda model: task.loss_fn(model, task.batch(batch)),
                partial(task.set_seed, 0),
                task.surrounds,
            )
            deviation = None if self._reference is None else compare(box.model, self._reference, found)
        return found, deviation

    # -- some steps of training --------------------------------------------------------------------------------------

    def _train(self, bar: Progress) -> None:
        study = self.study
        runnable = [level for level in self.policies if not study.facts[level].problem]
        plans = [Plan(level, self.policies[level]) for level in runnable]
        plans.append(Plan(REORDERED, self.policies[REFERENCE], _other_order(study.steps, study.batches)))
        bar.phase('training', len(plans) * study.steps)
        study.side_by_side = train_side_by_side(self.task, plans, study.steps, study.runs, bar.step)

    def _judge(self) -> None:
        """From all that is known by now."""
        study = self.study
        reference = study.runs.get(REFERENCE)
        reordered = study.runs.get(REORDERED)
        noise = None
        if reference is not None and reordered is not None:
            noise = difference(reordered.checked, reference.checked)
        gradient_noise = None if study.other_batch is None else study.other_batch.error
        first = abs(self._reference.loss) if self._reference is not None else 0.0
        study.limits = Limits(gradient_noise, noise, first, study.sensitivity)
        if reference is not None:
            study.lost = dict(reference.lost)
        for level, facts in study.facts.items():
            if not facts.keep_fp32:
                facts.run = study.runs.get(level)
                if facts.run is not None and reference is not None:
                    compare_runs(facts, reference)
            judge(facts, study.limits, study.lost, study.prefer, study.device)
        study.chosen = choose(list(study.facts.values()) + study.mended, study.prefer, study.levels)

    # -- modules in FP32 ---------------------------------------------------------------------------------------------

    def _mend(self, bar: Progress) -> None:
        """Search ``keep_fp32`` for the levels that would be better than the chosen one, if it were not for a few modules."""
        study = self.study
        for level in ('O5', 'O2', 'O4', 'O1'):
            facts = study.facts.get(level)
            if facts is None or not self._worth_mending(facts):
                continue
            used = sum(len(search.trials) for search in study.searches.values())
            left = study.max_trials - used
            if left <= 0 or facts.deviation is None or facts.policy is None:
                continue
            bar.phase(f'modules of {level} in FP32', left)
            found = self._search(facts, facts.policy, facts.deviation, left, bar)
            if found.keep:
                self._try_mended(facts, found.keep, bar)

    def _worth_mending(self, facts: LevelFacts) -> bool:
        chosen = self.study.chosen
        if facts.problem or facts.deviation is None:
            return False
        if facts is chosen:
            return not facts.accurate
        if not facts.reasons or not all(reason.mendable for reason in facts.reasons):
            return False
        if chosen is None or not chosen.in_16_bit:
            return True
        mine, best = facts.measure(self.study.prefer), chosen.measure(self.study.prefer)
        return mine is not None and best is not None and mine < 0.9 * best

    def _search(self, facts: LevelFacts, policy: Policy, deviation: Deviation, left: int, bar: Progress) -> KeepSearch:
        def attempt(keep: tuple[str, ...]) -> Outcome:
            bar.step(', '.join(keep))
            kept = dataclasses.replace(policy, keep_fp32=(*policy.keep_fp32, *keep))
            found = self._pass(kept)[1]
            assert found is not None
            return _outcome(found)

        scores = {name: module.added for name, module in deviation.modules.items()}
        search = KeepFp32Search(self.task.model, attempt, scores, left)
        limits = self.study.limits
        assert limits is not None
        result = search.run(_outcome(deviation), limits.of(type_of(facts))[0])
        self.study.searches[facts.level] = result
        return result

    def _try_mended(self, facts: LevelFacts, keep: tuple[str, ...], bar: Progress) -> None:
        """Measure a level anew, beside FP32, with modules kept."""
        study = self.study
        assert facts.policy is not None
        policy = dataclasses.replace(facts.policy, keep_fp32=(*facts.policy.keep_fp32, *keep))
        mended = LevelFacts(facts.level, policy, keep_fp32=keep)
        mended.deviation = self._pass(policy)[1]
        runs: dict[str, LevelRun] = {}
        plans = [Plan(REFERENCE, self.policies[REFERENCE]), Plan(facts.level, policy)]
        bar.phase(f'{facts.level} with keep_fp32', len(plans) * study.steps)
        train_side_by_side(self.task, plans, study.steps, runs, bar.step)
        mended.run = runs[facts.level]
        compare_runs(mended, runs[REFERENCE])
        study.mended.append(mended)
        self._judge()
        assert study.limits is not None
        judge(mended, study.limits, study.lost, study.prefer, study.device)
        study.chosen = choose(list(study.facts.values()) + study.mended, study.prefer, study.levels)

    # -- masters -----------------------------------------------------------------------------------------------------

    def _confirm(self, bar: Progress) -> None:
        """The chosen level without its masters: do they matter here?"""
        study, chosen = self.study, self.study.chosen
        if chosen is None or chosen.policy is None or not (chosen.policy.casts_model and chosen.policy.master_weights):
            return
        without = dataclasses.replace(chosen.policy, master_weights=False, split_masters=False)
        bar.phase(f'{chosen.level} without masters', study.steps)
        runs: dict[str, LevelRun] = {}
        train_side_by_side(self.task, [Plan(WITHOUT_MASTERS, without)], study.steps, runs, bar.step)
        study.without_masters = runs[WITHOUT_MASTERS]


def _outcome(deviation: Deviation) -> Outcome:
    return Outcome(deviation.error, deviation.first_nonfinite)


def _other_order(steps: int, batches: int) -> tuple[int, ...]:
    """The same batches as often, the other way round; with one batch, other random numbers at least."""
    return tuple(reversed(range(steps))) if batches > 1 else tuple(range(steps, 2 * steps))


@contextmanager
def _left_alone(model: nn.Module) -> Iterator[None]:
    """Puts back what a ``loss_fn`` that runs the original would change: gradients and buffers."""
    gradients = [(p, p.grad) for p in model.parameters()]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in gradients:
            parameter.grad = grad
        with torch.no_grad():
            for buffer, before in buffers:
                # BatchNorm's kernels do not count as writes
                if not torch.equal(buffer, before):
                    buffer.copy_(before)

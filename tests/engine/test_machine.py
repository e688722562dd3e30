"""Acts of a training in any order, at every level and through both doors, against plain FP32 training."""

from __future__ import annotations

import math
from typing import Any

import pairs
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from play import DOORS, EXACT_LEVELS, Plain, Setup, fused_sgd, oracle_of, sgd

PARTS = st.integers(0, 1)
REACHED = st.sampled_from([(0,), (0, 1), (0, 1), (1,)])
INDICES = st.integers(0, 11)
HITS = st.sampled_from([False, False, False, True])
VALUES = st.sampled_from([math.inf, -math.inf, math.nan])
#: What is written: no sum of the other numbers, so that no weight stands there before.
WRITTEN = st.sampled_from([0.1875, 0.40625, -0.15625])
#: Of a buffer, to which numbers are added that have few bits: 16-bit types hold the sums.
LOADED = st.sampled_from([0.25, -0.5])


class Training(RuleBasedStateMachine):
    """Plays each act twice, and compares values, buffers, moments and scales bit for bit when somebody looks."""

    @initialize(
        level=st.sampled_from(EXACT_LEVELS),
        door=st.sampled_from(sorted(DOORS)),
        optimizer=st.sampled_from([sgd, fused_sgd]),
        losses=st.integers(1, 2),
        clip=st.sampled_from([None, 0.5]),
        grouped=st.integers(1, 2),
    )
    def begin(self, door: str, grouped: int, **words: Any) -> None:
        # the wrapper casts what its optimizer has
        setup = Setup(grouped=grouped if door == 'amp' else 2, **words)
        self.ours = DOORS[door](setup)
        self.plain = Plain(oracle_of(DOORS[door], setup))
        self.both = self.ours, self.plain
        #: Of each part: the side that was written to since somebody looked. Writes to both sides are an error.
        self.written: dict[int, str] = {}
        self.may_step = False

    def act(self, name: str, *words: Any) -> None:
        for training in self.both:
            getattr(training, name)(*words)

    @rule(reached=REACHED, index=INDICES, hit=HITS, loss_id=st.integers(0, 1), value=VALUES)
    def backward(self, reached: tuple[int, ...], index: int, hit: bool, loss_id: int, value: float) -> None:
        if self.plain.grouped == 1:
            # a loss reaches something that the optimizer has
            reached = (0, *reached[1:])
        part = reached[-1]
        hit = hit and part < self.plain.grouped and self.plain.weight(part).requires_grad
        self.act('backward', reached, index, part if hit else None, loss_id % self.plain.setup.losses, value)
        self.written.clear()
        self.may_step = True

    @precondition(lambda self: self.may_step)
    @rule()
    def step(self) -> None:
        self.act('step')
        assert self.ours.was_skipped() == self.plain.was_skipped()
        self.look()
        self.may_step = False

    @rule(
        passes=st.lists(st.tuples(REACHED, INDICES, HITS, st.integers(0, 1), VALUES), min_size=1, max_size=3),
        part=PARTS,
        value=WRITTEN,
        side=st.sampled_from([None, 'weight', 'master']),
    )
    def iterate(self, passes: list[Any], part: int, value: float, side: str | None) -> None:
        """A step over some batches, perhaps with a write before it: acts that are drawn one by one seldom get as far."""
        for words in passes:
            self.backward(*words)
        if side is not None:
            self.write(part, value, side)
        self.step()

    @rule(set_to_none=st.booleans())
    def clear(self, set_to_none: bool) -> None:
        self.act('clear', set_to_none)
        self.may_step = False

    @rule(part=PARTS, value=WRITTEN, side=st.sampled_from(['weight', 'master']))
    def write(self, part: int, value: float, side: str) -> None:
        if part < self.plain.grouped:
            if self.written.get(part, side) != side:
                self.look()
            self.act(f'write_{side}', part, value)
            self.written[part] = side

    @rule(part=PARTS, value=WRITTEN)
    def load_weight(self, part: int, value: float) -> None:
        if part < self.plain.grouped:
            self.act('load_weight', part, value)
            self.written.pop(part, None)

    @rule(part=PARTS, value=LOADED)
    def load_buffer(self, part: int, value: float) -> None:
        self.act('write_buffer', part, value)

    @precondition(lambda self: not self.may_step)
    @rule(part=PARTS, on=st.booleans())
    def train(self, part: int, on: bool) -> None:
        """Freeze a weight, or let it train."""
        self.act('train', part, on)

    @precondition(lambda self: not self.may_step and self.plain.grouped == 1)
    @rule()
    def add_group(self) -> None:
        for training in self.both:
            # what they got before they joined carries the loss scale, and would be refused
            training.model.parts[1].zero_grad()
        self.act('add_group')

    @precondition(lambda self: not self.may_step)
    @rule()
    def save_and_load(self) -> None:
        self.act('save_and_load')
        self.look()

    @rule(name=st.sampled_from(['copy_model', 'evaluate']))
    def read(self, name: str) -> None:
        self.act(name)
        self.written.clear()

    @rule()
    def look(self) -> None:
        ours, plain = (training.state() for training in self.both)
        assert [(key, ours[key], plain[key]) for key in ours if ours[key] != plain[key]] == []
        self.written.clear()

    def teardown(self) -> None:
        if hasattr(self, 'both'):
            self.look()
            del self.ours, self.plain, self.both


TestTraining = Training.TestCase
TestTraining.settings = settings(
    max_examples=5000 if pairs.full else 200,
    stateful_step_count=30,
    deadline=None,
    derandomize=not pairs.full,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)

"""The search for modules to keep, on trees whose errors are known: what it finds, and in how many trials."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest
from torch import nn

from amp_wrapper.diagnostics.keep_fp32_search import KeepFp32Search, KeepSearch, Outcome, gain


class Own(nn.Module):
    """A container that computes something itself."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def tree() -> nn.Module:
    """Eight stages of four layers."""
    return nn.Sequential(*(Own(**{f'l{index}': nn.Identity() for index in range(4)}) for _ in range(8)))


def covered(name: str, keep: tuple[str, ...], model: nn.Module) -> bool:
    kinds = {key: type(module).__name__ for key, module in model.named_modules()}
    return any(name == each or name.startswith(f'{each}.') or kinds.get(name) == each for each in keep)


def errors_of(model: nn.Module, errors: Mapping[str, float], floor: float = 0.01) -> Callable[..., Outcome]:
    """Each of some modules adds its error, unless it is kept."""

    def attempt(keep: tuple[str, ...] = ()) -> Outcome:
        left = [error for name, error in errors.items() if not covered(name, keep, model)]
        return Outcome(math.sqrt(floor**2 + sum(error * error for error in left)))

    return attempt


def infinities_of(model: nn.Module, places: list[str], floor: float = 0.01) -> Callable[..., Outcome]:
    """Each of some modules overflows, unless it is kept; the first one is named."""

    def attempt(keep: tuple[str, ...] = ()) -> Outcome:
        left = [name for name in places if not covered(name, keep, model)]
        return Outcome(math.inf, left[0]) if left else Outcome(floor)

    return attempt


def search(
    model: nn.Module, attempt: Callable[..., Outcome], most: int = 32, scores: Mapping[str, float] | None = None
) -> KeepSearch:
    return KeepFp32Search(model, attempt, scores or {}, most).run(attempt(), limit=0.05)


@pytest.mark.parametrize('place', ['0', '3.l2', '7.l3', '5'])
def test_one_module_is_found(place: str) -> None:
    model = tree()
    found = search(model, errors_of(model, {place: 0.8}))
    assert found.keep == (place,)
    assert found.after.error == pytest.approx(0.01)
    # all, three halvings of 8 that may miss each time, the same within one of 4
    assert len(found.trials) <= 1 + 2 * 3 + 1 + 2 * 2
    assert found.ended == 'the error is below the limit'


def test_scores_say_where_to_look_first() -> None:
    model = tree()
    attempt = errors_of(model, {'6.l1': 0.8})
    blind = search(model, attempt)
    led = search(model, attempt, scores={'6.l1': 5.0, '2.l0': 1.0})
    assert blind.keep == led.keep == ('6.l1',)
    assert len(led.trials) < len(blind.trials)


def test_two_modules_are_found_one_after_the_other() -> None:
    model = tree()
    found = search(model, errors_of(model, {'1.l1': 0.8, '6.l0': 0.4}))
    assert found.keep == ('1.l1', '6.l0')


def test_an_error_that_is_everywhere_is_left() -> None:
    model = tree()
    everywhere = {f'{stage}.l{layer}': 0.1 for stage in range(8) for layer in range(4)}
    found = search(model, errors_of(model, everywhere))
    assert found.keep == ()
    assert found.after == found.before


def test_an_error_of_the_model_itself_costs_one_trial() -> None:
    model = tree()
    found = search(model, errors_of(model, {'': 0.8}))
    assert found.keep == ()
    assert [len(trial.keep) for trial in found.trials] == [8]


def test_the_module_that_overflows_is_kept_and_no_other() -> None:
    model = tree()
    found = search(model, infinities_of(model, ['4.l1']))
    assert found.keep == ('4.l1',)
    assert [trial.keep for trial in found.trials] == [('4.l1',)]


def test_the_module_around_is_kept_where_its_result_overflows_too() -> None:
    model = tree()

    def attempt(keep: tuple[str, ...] = ()) -> Outcome:
        return Outcome(0.01) if '4' in keep else Outcome(math.inf, '4.l1')

    assert search(model, attempt).keep == ('4',)


def test_modules_that_are_not_needed_in_the_end_are_dropped() -> None:
    model = tree()

    def attempt(keep: tuple[str, ...] = ()) -> Outcome:
        if '2' in keep:
            return Outcome(0.01)
        return Outcome(math.inf, '2' if '4.l1' in keep else '4.l1')

    assert search(model, attempt).keep == ('2',)


def test_a_second_one_of_a_class_brings_all_of_it() -> None:
    model = nn.Sequential(*(Own(bad=nn.Softmax(1), good=nn.Identity()) for _ in range(12)))
    found = search(model, infinities_of(model, [f'{index}.bad' for index in range(12)]))
    assert found.keep == ('Softmax',)
    assert len(found.trials) == 2


def test_an_overflow_outside_of_modules_is_left() -> None:
    model = tree()
    found = search(model, lambda keep=(): Outcome(math.inf))
    assert found.keep == ()
    assert 'no few modules make it finite' in found.ended


def test_modules_that_are_not_few_are_left() -> None:
    model = nn.Sequential(*(Own(**{f'{index}': kind}) for index, kind in enumerate(map(new_class, range(10)))))
    places = [f'{index}.{index}' for index in range(10)]
    found = search(model, infinities_of(model, places))
    assert found.keep == ()
    assert found.ended == '10 modules would have to stay in FP32, which are not few'


def new_class(index: int) -> nn.Module:
    return type(f'Kind{index}', (nn.Identity,), {})()


@pytest.mark.parametrize('most', [0, 1, 3])
def test_the_budget_is_kept(most: int) -> None:
    model = tree()
    found = search(model, errors_of(model, {'5.l3': 0.8}), most)
    assert len(found.trials) == most
    assert found.keep == ()
    assert found.ended == f'the {most} trials that were allowed are used up'


def test_what_was_found_before_the_budget_ended_counts() -> None:
    model = tree()
    found = search(model, errors_of(model, {'0.l0': 0.8, '6.l3': 0.3}), 8)
    assert found.keep == ('0.l0',)
    assert found.after.error < found.before.error / 2


def test_gain() -> None:
    assert gain(Outcome(0.4), Outcome(0.1)) == pytest.approx(0.75)
    assert gain(Outcome(math.inf), Outcome(0.9)) == 1.0
    assert gain(Outcome(0.4), Outcome(math.inf)) == 0.0
    assert gain(Outcome(math.inf), Outcome(math.inf)) == 0.0
    assert gain(Outcome(0.0), Outcome(0.0)) == 0.0

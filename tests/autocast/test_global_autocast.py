"""Casts that are on for everything: started, stopped, suspended, on one thread, beside autocast of others."""

from __future__ import annotations

import gc
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toy_autocast import HALVES

from amp_wrapper import AmpUsageError
from amp_wrapper.amp.functions import disable_casts
from amp_wrapper.autocast import kernels, op_set, regions, state
from amp_wrapper.autocast.global_autocast import GlobalCasts
from amp_wrapper.autocast.patching import Patches

# -- handles -----------------------------------------------------------------------------------------------------------


def _types() -> tuple[torch.dtype, torch.dtype]:
    half = torch.ones(2, dtype=torch.float16)
    return F.linear(torch.ones(1, 2), torch.ones(2, 2)).dtype, half.sum().dtype


OFF, ON16, ONB = (torch.float32, torch.float16), (torch.float16, torch.float32), (torch.bfloat16, torch.float32)


def test_start_and_stop() -> None:
    casts = GlobalCasts()
    casts.stop()
    assert (casts.is_on, _types()) == (False, OFF)
    casts.start()
    casts.start()
    assert (casts.is_on, _types()) == (True, ON16)
    casts.stop()
    casts.stop()
    assert (casts.is_on, _types()) == (False, OFF)


@pytest.mark.parametrize('first_to_stop', [0, 1])
def test_two_handles_stop_in_any_order(first_to_stop: int) -> None:
    handles = [GlobalCasts(torch.float16), GlobalCasts(torch.bfloat16)]
    handles[0].start()
    handles[1].start()
    assert _types() == ONB
    handles[first_to_stop].stop()
    assert _types() == (ONB if first_to_stop == 0 else ON16)
    handles[1 - first_to_stop].stop()
    assert _types() == OFF


def test_autocast_is_put_back_as_it_was() -> None:
    with torch.autocast('cpu', torch.bfloat16):
        casts = GlobalCasts(torch.float16)
        casts.start()
        assert torch.get_autocast_dtype('cpu') is torch.float16
        assert not torch.is_autocast_cache_enabled()
        casts.stop()
        assert torch.is_autocast_enabled('cpu')
        assert torch.get_autocast_dtype('cpu') is torch.bfloat16
        assert torch.is_autocast_cache_enabled()


def _on_another_thread(function: Callable[[], Any]) -> Any:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(function())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def test_a_handle_is_of_its_thread(half: torch.dtype) -> None:
    assert _on_another_thread(_types) == OFF
    casts = GlobalCasts()
    casts.start()
    assert isinstance(_on_another_thread(casts.stop), AmpUsageError)
    assert casts.is_on
    casts.stop()


def test_disable_casts(half: torch.dtype) -> None:
    on = _types()
    with disable_casts():
        assert _types() == OFF
        with disable_casts():
            assert _types() == OFF
        assert _types() == OFF
    assert _types() == on
    with pytest.raises(KeyError), disable_casts():
        raise KeyError
    assert _types() == on


def test_casts_that_start_and_stop_inside_disable_casts() -> None:
    casts = GlobalCasts()
    with disable_casts():
        casts.start()
        assert _types() == OFF
        with disable_casts():
            assert _types() == OFF
        assert _types() == OFF
    assert _types() == ON16
    with disable_casts():
        casts.stop()
        assert _types() == OFF
    assert _types() == OFF
    assert not torch.is_autocast_enabled('cpu')


def test_a_block_of_autocast_that_ends_before_the_casts() -> None:
    casts = GlobalCasts()
    with torch.autocast('cpu', torch.bfloat16):
        casts.start()
    casts.stop()
    assert not torch.is_autocast_enabled('cpu')


@pytest.mark.parametrize('dtype', HALVES)
def test_functions_keep_their_identity(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    # without what other tests have registered, for the life of the process
    fresh = Patches()
    monkeypatch.setattr(regions, 'patches', fresh)
    monkeypatch.setattr(op_set, 'patches', fresh)
    # of ops that torch's dispatcher casts
    sites = [(torch, 'softmax'), (torch, 'sum'), (torch, 'mm'), (torch.Tensor, 'sum'), (F, 'softmax'), (F, 'linear')]
    before = [vars(holder).get(name) for holder, name in sites]
    casts = GlobalCasts(dtype)
    casts.start()
    try:
        assert [vars(holder).get(name) for holder, name in sites] == before
        assert pickle.loads(pickle.dumps(F.softmax)) is F.softmax
    finally:
        casts.stop()


def test_weights_that_change_are_seen_at_once(half: torch.dtype) -> None:
    layer, x = nn.Linear(2, 2, bias=False), torch.ones(1, 2)
    with torch.no_grad():
        layer(x)
        layer.weight.fill_(1.0)
    layer.load_state_dict({'weight': torch.full((2, 2), 2.0)})
    result = layer(x)
    assert result.tolist() == [[4.0, 4.0]]
    result.sum().backward()
    assert layer.weight.grad is not None


def test_a_session_counts_while_somebody_holds_it() -> None:
    # models of other tests
    gc.collect()
    assert not state.casts_alive()
    session = state.session_opened()
    assert state.casts_alive()
    del session
    gc.collect()
    assert not state.casts_alive()
    session = state.session_opened()
    state.session_closed(session)
    state.session_closed(session)
    assert not state.casts_alive()


def test_autocast_of_somebody_else_is_left_alone() -> None:
    kernels.install('cpu')
    x = torch.ones(2, dtype=torch.bfloat16)
    with torch.autocast('cpu', torch.bfloat16):
        assert x.sum().dtype is x.softmax(0).dtype is (x**2).dtype is torch.bfloat16
        x.clone().exp_()

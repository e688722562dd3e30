"""Functions are patched while a forward pass runs, and nothing of it is left afterwards: nested passes, threads, imports."""

from __future__ import annotations

import functools
import gc
import os
import pickle
import sys
import threading
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from command_line import python
from fp32_functions import ME, product, seen, square
from torch import Tensor, nn
from torch.nn.functional import l1_loss as imported_by_name

from amp_wrapper.autocast import op_set, patching, regions, state
from amp_wrapper.autocast.call import call
from amp_wrapper.autocast.op_set import OpSet
from amp_wrapper.autocast.patched_function import PatchedFunction
from amp_wrapper.autocast.patching import patches
from amp_wrapper.policy.fp32_registry import Fp32Op

HALVES = (torch.float16, torch.bfloat16)


def test_modules_imported_later_are_seen(device: torch.device) -> None:
    with_ops = OpSet((f'{ME}.product',))
    regions.enter(with_ops.keys)
    regions.leave()
    late = types.ModuleType('late_module_of_this_test')
    late.op = product  # type: ignore[attr-defined]
    sys.modules[late.__name__] = late
    try:
        regions.enter(with_ops.keys)
        x = torch.ones(2, 2, device=device, dtype=torch.float16)
        late.op(x, x)
        assert seen.pop()[:2] == (torch.float32, torch.float32)
        regions.leave()
        late.op(x, x)
        assert seen.pop()[0] is torch.float16
    finally:
        del sys.modules[late.__name__]


def test_outside_everything_is_the_original(device: torch.device) -> None:
    before = (F.mse_loss, torch.kl_div, imported_by_name, torch._C._nn.l1_loss)
    x = torch.ones(3, device=device, dtype=torch.float16)
    assert F.mse_loss(x, x).dtype is torch.float16
    regions.enter(OpSet().keys)
    assert F.mse_loss is not before[0] and imported_by_name is not before[2]
    assert F.mse_loss.__name__ == 'mse_loss' and F.mse_loss.__doc__ == before[0].__doc__
    regions.leave()
    assert (F.mse_loss, torch.kl_div, imported_by_name, torch._C._nn.l1_loss) == before
    assert F.mse_loss(x, x).dtype is torch.float16
    assert pickle.loads(pickle.dumps(F.mse_loss)) is F.mse_loss


def test_what_somebody_else_put_there_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs() -> None: ...

    regions.enter(OpSet().keys)
    monkeypatch.setattr(F, 'hinge_embedding_loss', theirs)
    regions.leave()
    left = F.hinge_embedding_loss
    monkeypatch.undo()
    # monkeypatch gave the stand-in back, which is the original outside of a pass; put that in place again
    F.hinge_embedding_loss = F.hinge_embedding_loss.__wrapped__  # type: ignore[attr-defined]
    assert left is theirs


# -- passes ------------------------------------------------------------------------------------------------------------


def test_nested_passes_see_the_union(device: torch.device) -> None:
    x = torch.ones(2, 2, device=device, dtype=torch.float16)
    regions.enter(OpSet((f'{ME}.product',)).keys)
    regions.enter(OpSet().keys)
    product(x, x)
    regions.leave()
    product(x, x)
    regions.leave()
    regions.enter(OpSet().keys)
    product(x, x)
    regions.leave()
    assert [types[0] for types in seen] == [torch.float32, torch.float32, torch.float16]
    seen.clear()


def test_depth() -> None:
    for depth in (1, 2, 3):
        regions.enter(OpSet().keys)
        assert state.depth() == depth and patches.in_place
    for depth in (2, 1, 0):
        regions.leave()
        assert state.depth() == depth and patches.in_place == bool(depth)


def test_leaving_once_too_often_is_harmless() -> None:
    regions.leave()
    assert state.depth() == 0
    regions.enter(OpSet().keys)
    assert state.depth() == 1 and patches.in_place
    regions.leave()


@pytest.mark.parametrize('to', [0, 1, 2])
def test_unwind(to: int) -> None:
    for _ in range(3):
        regions.enter(OpSet().keys)
    regions.unwind(to)
    assert state.depth() == to and patches.in_place == (to > 0)
    regions.unwind(5)
    assert state.depth() == to
    regions.unwind(0)


def other_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.usefixtures('inside')
def test_other_threads_keep_the_original(device: torch.device) -> None:
    x = torch.ones(3, device=device, dtype=torch.float16)
    assert F.mse_loss(x, x).dtype is torch.float32
    assert other_thread(lambda: F.mse_loss(x, x)).dtype is torch.float16


def test_two_threads_at_once(device: torch.device) -> None:
    """The first to leave must not take the stand-ins from the other."""
    x = torch.ones(3, device=device, dtype=torch.float16)
    regions.enter(OpSet().keys)

    def whole_pass() -> torch.dtype:
        regions.enter(OpSet().keys)
        dtype = F.mse_loss(x, x).dtype
        regions.leave()
        return dtype

    assert other_thread(whole_pass) is torch.float32
    assert F.mse_loss(x, x).dtype is torch.float32
    regions.leave()


def test_backward_pass_counts_on_every_thread(device: torch.device) -> None:
    x = torch.ones(3, device=device, dtype=torch.float16)
    with patching.in_backward(OpSet().keys):
        assert state.depth() == 0 and F.mse_loss(x, x).dtype is torch.float32
        assert other_thread(lambda: F.mse_loss(x, x)).dtype is torch.float32
    assert F.mse_loss(x, x).dtype is torch.float16

    def interrupted() -> None:
        with patching.in_backward(OpSet().keys):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert F.mse_loss(x, x).dtype is torch.float16


def test_op_sets_can_be_pickled(device: torch.device) -> None:
    again = pickle.loads(pickle.dumps(OpSet((f'{ME}.product',))))
    x = torch.ones(2, 2, device=device, dtype=torch.float16)
    regions.enter(again.keys)
    product(x, x)
    regions.leave()
    assert seen.pop()[0] is torch.float32


# -- several names for one object --------------------------------------------------------------------------------------


def test_aliases_join(device: torch.device) -> None:
    """mmcv.ops.nms and mmcv.ops.nms.nms: whichever name a wrapper gives, the other's stand-in must not hide it."""
    alias = types.ModuleType('alias_module_of_this_test')
    alias.product, alias.op = product, square  # type: ignore[attr-defined]
    sys.modules[alias.__name__] = alias
    x = torch.ones(2, 2, device=device, dtype=torch.float16)
    try:
        for names in ((f'{ME}.product', f'{ME}.Square'), (f'{alias.__name__}.product', f'{alias.__name__}.op')):
            regions.enter(OpSet(names).keys)
            alias.product(x, x)
            product(x, x)
            assert alias.op(x)[0].dtype is torch.float16
            regions.leave()
            assert [types_[0] for types_ in seen] == [torch.float32] * 2
            seen.clear()
    finally:
        del sys.modules[alias.__name__]


def test_rules_of_one_function_do_not_mix() -> None:
    """A configuration widens a registry entry for its own model, and for no other."""
    only = frozenset({torch.bfloat16})
    narrow, wide = Fp32Op('a', 'float32', only, only), Fp32Op('a')
    member = PatchedFunction()
    member.ops = {'a': narrow, 'config:caller:a': wide}
    assert member.active() is None
    try:
        regions.enter(frozenset({'a'}))
        assert member.active() is narrow
        regions.enter(frozenset({'config:caller:a'}))
        both = member.active()
        assert both is not None and both.avoids('cpu') == set(HALVES) and both.output == 'float32'
    finally:
        regions.unwind()


# -- other people's hands ----------------------------------------------------------------------------------------------


def test_a_patch_that_is_there_when_a_pass_begins(device: torch.device) -> None:
    x = torch.ones(3, device=device, dtype=torch.float16)
    original = F.huber_loss
    for _ in range(2):
        with mock.patch.object(F, 'huber_loss', return_value=-1):
            regions.enter(OpSet().keys)
            assert F.huber_loss(x, x) == -1
            regions.leave()
            assert F.huber_loss(x, x) == -1
        regions.enter(OpSet().keys)
        assert F.huber_loss(x, x).dtype is torch.float32
        regions.leave()
        assert F.huber_loss is original


def test_a_patch_that_outlives_the_pass_it_began_in(device: torch.device) -> None:
    x = torch.ones(3, device=device, dtype=torch.float16)
    original = F.soft_margin_loss
    patch = mock.patch.object(F, 'soft_margin_loss', return_value=-1)
    regions.enter(OpSet().keys)
    patch.start()
    assert F.soft_margin_loss(x, x) == -1
    regions.leave()
    assert F.soft_margin_loss(x, x) == -1
    patch.stop()
    # the patch gave our stand-in back, which rests; the next pass puts the original in its place
    assert F.soft_margin_loss(x, x).dtype is torch.float16
    regions.enter(OpSet().keys)
    assert F.soft_margin_loss(x, x).dtype is torch.float32
    regions.leave()
    assert F.soft_margin_loss is original


def test_modules_that_are_imported_in_a_pass_get_the_original(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / 'imported_in_a_pass.py').write_text('from torch.nn.functional import l1_loss\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    regions.enter(OpSet().keys)
    import imported_in_a_pass  # type: ignore[import-not-found]

    x = torch.ones(3, dtype=torch.float16)
    assert imported_in_a_pass.l1_loss(x, x).dtype is torch.float32
    regions.leave()
    assert imported_in_a_pass.l1_loss is F.l1_loss
    regions.enter(OpSet().keys)
    assert imported_in_a_pass.l1_loss(x, x).dtype is torch.float32
    regions.leave()
    del sys.modules['imported_in_a_pass']


def test_a_module_that_comes_inside_a_nested_pass_is_seen(device: torch.device) -> None:
    late = types.ModuleType('nested_module_of_this_test')
    x = torch.ones(3, device=device, dtype=torch.float16)
    original = F.l1_loss
    regions.enter(OpSet().keys)
    late.loss = original  # type: ignore[attr-defined]
    sys.modules[late.__name__] = late
    try:
        regions.enter(OpSet().keys)
        assert late.loss is not original and late.loss(x, x).dtype is torch.float32
        regions.leave()
        regions.leave()
        assert late.loss is original
    finally:
        del sys.modules[late.__name__]


def test_a_failed_begin_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = F.l1_loss
    (holder, _), site = next(reversed(patches.targets.items()))

    def fail() -> bool:
        raise TypeError('cannot set')

    monkeypatch.setattr(site, 'prepare', fail)
    # each one by itself, as where something else is found in their place
    monkeypatch.setattr(patches._namespaces[holder], 'patches', {})
    with pytest.raises(TypeError, match='cannot set'):
        regions.enter(OpSet().keys)
    assert F.l1_loss is before and state.depth() == 0 and not patches.in_place


def test_classes_are_not_kept_alive(device: torch.device) -> None:
    def attach() -> weakref.ref[type]:
        class Local(nn.Module):
            def loss_by_feat(self, x: Tensor) -> Tensor:
                return x

        module = Local()
        ops = OpSet(classes=[Local])
        op_set.attach([module], ops)
        assert module.loss_by_feat(torch.ones(1, device=device, dtype=torch.float16)).dtype is torch.float32
        return weakref.ref(Local)

    sites = len(patches.targets)
    references = [attach() for _ in range(3)]
    gc.collect()
    assert [reference() for reference in references] == [None] * 3 and len(patches.targets) == sites


def test_autocast_to_a_type_that_is_fine_stays_on(device: torch.device) -> None:
    only = frozenset({torch.bfloat16})
    op = Fp32Op('x', cpu=only, cuda=only)
    x = torch.ones(2, 2, device=device)
    for dtype, expected in ((torch.float16, torch.float16), (torch.bfloat16, torch.float32)):
        with torch.autocast(device.type, dtype):
            assert call(op, lambda a: a @ a, (x,), {}).dtype is expected


# -- methods that begin a pass -----------------------------------------------------------------------------------------


class Verbs(nn.Module):
    def predict(self, x: Tensor) -> torch.dtype:
        return F.l1_loss(x, x).dtype

    def other(self, x: Tensor) -> torch.dtype:
        return F.l1_loss(x, x).dtype


def test_methods_of_attached_modules_begin_a_pass(device: torch.device) -> None:
    module, stranger = Verbs(), Verbs()
    ops = OpSet(classes=[Verbs])
    op_set.attach([module], ops)
    x = torch.ones(3, device=device, dtype=torch.float16)
    assert module.predict(x) is torch.float32 and state.depth() == 0
    assert stranger.predict(x) is torch.float16 and module.other(x) is torch.float16
    with pytest.raises(AttributeError):
        module.predict(None)
    assert state.depth() == 0
    op_set.release([module])
    assert module.predict(x) is torch.float16


def test_a_name_that_comes_late_is_found_where_it_was_imported_before(device: torch.device) -> None:
    """The second wrapper of a process names a function that modules scanned long ago have imported."""
    home, user = types.ModuleType('home_of_this_test'), types.ModuleType('user_of_this_test')
    ran: list[torch.dtype] = []
    home.op = lambda x: ran.append(x.dtype)  # type: ignore[attr-defined]
    user.op = home.op  # type: ignore[attr-defined]
    sys.modules.update({home.__name__: home, user.__name__: user})
    x = torch.ones(2, device=device, dtype=torch.float16)
    try:
        for names in ((), (f'{home.__name__}.op',)):
            regions.enter(OpSet(names).keys)
            user.op(x)
            regions.leave()
    finally:
        del sys.modules[home.__name__], sys.modules[user.__name__]
    assert ran == [torch.float16, torch.float32]


def test_op_sets_bring_their_methods_to_another_process(tmp_path: Path) -> None:
    (tmp_path / 'heads_of_this_test.py').write_text(
        'from torch import nn\n\n\nclass Head(nn.Module):\n    def loss_by_feat(self, x):\n        return x\n'
    )
    dump = (
        'import pickle, heads_of_this_test as h; from amp_wrapper.autocast.op_set import OpSet;'
        'pickle.dump(OpSet(classes=[h.Head]), open("set.pkl", "wb"))'
    )
    load = (
        'import pickle, torch, heads_of_this_test as h; from amp_wrapper.autocast import regions;'
        'ops = pickle.load(open("set.pkl", "rb")); regions.enter(ops.keys);'
        'print(h.Head().loss_by_feat(torch.ones(1).half()).dtype)'
    )
    root = str(Path(op_set.__file__).parents[2])
    for code in (dump, load):
        done = python('-c', code, cwd=tmp_path, env={**os.environ, 'PYTHONPATH': root})
        assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == 'torch.float32'


def test_a_name_that_holds_something_else_by_now_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """A variable of a notebook: a loss first, and another function later."""
    here = sys.modules[__name__]
    monkeypatch.setattr(here, 'borrowed', F.smooth_l1_loss, raising=False)
    monkeypatch.setattr(patches, '_scanned', set())
    monkeypatch.setattr(patches, '_fingerprint', ())
    x = torch.ones(2, device=device, dtype=torch.bfloat16)
    regions.enter(OpSet().keys)
    try:
        assert here.borrowed(x, x).dtype is torch.float32
    finally:
        regions.leave()

    def other(left: torch.Tensor, right: torch.Tensor) -> torch.dtype:
        return left.dtype

    for function in (other, functools.wraps(F.smooth_l1_loss)(lambda *args: F.smooth_l1_loss(*args))):
        here.borrowed = function
        regions.enter(OpSet().keys)
        try:
            assert (here.borrowed is other) is (function is other)
            found = here.borrowed(x, x)
        finally:
            regions.leave()
        assert here.borrowed is function
        assert found is torch.bfloat16 or found.dtype is torch.float32

"""Checks the arguments of ops. ``csrc/common/lists.cpp`` checks the same for the compiled ops, with the same error texts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..policy.nested import HALF_TYPES
from ..torch_internals import internal_overlap
from . import schemas

Named = tuple[str, Sequence[Tensor]]


def _is_traced(tensor: Tensor) -> bool:
    """Whether the tensor has no memory of its own to look at: under torch.compile, or a fake one."""
    return torch.compiler.is_compiling() or type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_meta


def check_tensor(label: str, tensor: object) -> None:
    """A tensor at all.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f'{label} must be a tensor, not {type(tensor).__name__}.')


def _check_writable(label: str, tensor: Tensor) -> None:
    # torch would say so too, but at the first write, when others were made already
    if not torch.compiler.is_compiling() and tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(f'{label} was made in inference mode: outside of it, it cannot be written to.')


def _check_memory(label: str, tensor: Tensor) -> None:
    if not _is_traced(tensor) and tensor.numel() and tensor.untyped_storage().nbytes() == 0:
        raise ValueError(f'{label} has no memory: its storage was freed (resized to 0).')


def check_lists(read: Sequence[Named], written: Sequence[Named] = ()) -> None:
    """Every list against the first, before anything is written.

    Args:
        read: (name, tensors) of the lists that are read.
        written: Of those that are written, too.

    Raises:
        TypeError: Something is no tensor. Names list and index, as all of these do.
        ValueError: Different lengths or shapes, sparse tensors, memory that is written and shared, or a tensor of inference
            mode that would be written outside of it.
    """
    lists = [*read, *written]
    for other, tensors in lists:
        for index, tensor in enumerate(tensors):
            check_tensor(f'{other}[{index}]', tensor)
    name, first = lists[0]
    for other, tensors in lists[1:]:
        if len(tensors) != len(first):
            raise ValueError(f'{name} has {len(first)} tensors and {other} {len(tensors)}: the lists must pair up.')
    for index, tensor in enumerate(first):
        for other, tensors in lists[1:]:
            if tensors[index].shape != tensor.shape:
                raise ValueError(
                    f'{name}[{index}] has shape {tuple(tensor.shape)} and {other}[{index}] {tuple(tensors[index].shape)}.'
                )
    for other, tensors in lists:
        for index, tensor in enumerate(tensors):
            if tensor.layout is not torch.strided:
                raise ValueError(f'{other}[{index}] is not dense: give the values of a sparse tensor, coalesced.')
    if torch.compiler.is_compiling():
        return
    for other, tensors in lists:
        for index, tensor in enumerate(tensors):
            _check_memory(f'{other}[{index}]', tensor)
    for other, tensors in written:
        for index, tensor in enumerate(tensors):
            _check_writable(f'{other}[{index}]', tensor)
            if not _is_traced(tensor) and internal_overlap(tensor) == 1:
                raise ValueError(
                    f'{other}[{index}] has elements that share memory (an expanded tensor): it cannot be written to.'
                )
    for target in written:
        _check_overlap(target, [other for other in lists if other is not target], written)


def check_call(op: str, floating: bool = True, **arguments: Any) -> None:
    """The tensors of a call of an op, as its schema says: lists that pair up, scalars of one float32, no memory shared.

    Args:
        op: Its name.
        floating: Whether the lists hold floating or complex tensors alone.
        **arguments: All of its tensors and lists, missing ones as None.

    Raises:
        TypeError: Something is no tensor.
        ValueError: Says what is wrong with which argument.
    """
    wanted = schemas.ARGUMENTS[op]
    read, written = ([(name, arguments[name]) for name in names] for names in (wanted.read, wanted.written))
    check_lists(read, written)
    if floating:
        check_floating(*read, *written)
    scalars = {name: arguments[name] for name in wanted.scalars}
    for name, scalar in scalars.items():
        check_scalar(name, scalar, written=wanted.scalars[name])
    check_apart(read, written, **scalars)


def check_apart(read: Sequence[Named], written: Sequence[Named], **scalars: Tensor | None) -> None:
    """Scalar arguments share no memory with what is written, and a flag none with what is read.

    Args:
        read: (name, tensors) of the lists that are read.
        written: Of those that are written, too.
        **scalars: By name, missing ones as None. ``found_inf`` is the one that is written.

    Raises:
        ValueError: One lies in a tensor of a list. Names list and index.
    """
    for label, scalar in scalars.items():
        if scalar is None or _is_traced(scalar):
            continue
        begin = scalar.data_ptr()
        end = begin + scalar.numel() * scalar.element_size()
        for name, tensors in [*(read if label == 'found_inf' else ()), *written]:
            if any(_is_traced(tensor) for tensor in tensors):
                continue
            for first, last, index in _spans(tensors):
                if scalar.device == tensors[index].device and first < end and begin < last:
                    raise ValueError(f'{label} and {name}[{index}] share memory: give each memory of its own.')


def check_distinct(written: Mapping[str, Tensor | None], others: Mapping[str, Tensor | None]) -> None:
    """What is written by name shares memory with nothing else that has a name.

    Args:
        written: Tensors without gaps, missing ones as None.
        others: Those that are read, and perhaps some of ``written`` again.

    Raises:
        ValueError: Names both.
    """
    found = {
        name: tensor for name, tensor in {**written, **others}.items() if tensor is not None and not _is_traced(tensor)
    }
    for first, one in found.items():
        if first not in written:
            continue
        begin, end = one.data_ptr(), one.data_ptr() + one.numel() * one.element_size()
        for second, other in found.items():
            start = other.data_ptr()
            apart = end <= start or start + other.numel() * other.element_size() <= begin or one.device != other.device
            if first != second and not apart:
                raise ValueError(f'{first} and {second} share memory: give each memory of its own.')


def is_direct(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors of one shape have no gaps, and their elements in one order: they are worked on in place."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return True
    if any(_is_traced(tensor) for tensor in tensors):
        return True
    stride = tensors[0].stride()
    return all(t.stride() == stride and internal_overlap(t) == 0 for t in tensors)


def check_floating(*lists: Named) -> None:
    """Floating or complex tensors only.

    Raises:
        ValueError: An integer or boolean one. Names list and index.
    """
    for name, tensors in lists:
        for index, tensor in enumerate(tensors):
            if not (tensor.is_floating_point() or tensor.is_complex()):
                raise ValueError(f'{name}[{index}] has dtype {tensor.dtype}: a floating tensor is expected.')


def _spans(tensors: Sequence[Tensor]) -> list[tuple[int, int, int]]:
    """(begin, end, index) in memory, in order, of the tensors without gaps; others are read whole before they are written."""
    spans: list[tuple[int, int, int]] = []
    for index, tensor in enumerate(tensors):
        if not _is_traced(tensor) and tensor.numel() and (tensor.is_contiguous() or internal_overlap(tensor) == 0):
            begin = tensor.data_ptr()
            spans.append((begin, begin + tensor.numel() * tensor.element_size(), index))
    return sorted(spans)


def _check_overlap(written: Named, others: Sequence[Named], all_written: Sequence[Named]) -> None:
    name, targets = written
    spans = _spans(targets)
    for (_, end, one), (begin, _, two) in itertools.pairwise(spans):
        if end > begin:
            first, second = sorted((one, two))
            raise ValueError(
                f'{name}[{first}] and {name}[{second}] share memory: give each tensor that is written once.'
            )
    for named in others:
        other, tensors = named
        written_too = any(named is one for one in all_written)
        start = 0
        for begin, end, index in _spans(tensors):
            while start < len(spans) and spans[start][1] <= begin:
                start += 1
            for span in spans[start:]:
                if span[0] >= end:
                    break
                source, target = tensors[index], targets[span[2]]
                same = source.data_ptr() == target.data_ptr() and source.stride() == target.stride()
                # a partner that is its parameter means that there is none
                twice = written_too and not (source is target and 'partners' in (name, other))
                if span[2] != index or not same or twice or source.dtype is not target.dtype:
                    raise ValueError(
                        f'{other}[{index}] and {name}[{span[2]}] share memory, but are not the same tensor: what is written '
                        'would be read.'
                    )


def check_scalar(name: str, scalar: Tensor | None, dtype: torch.dtype = torch.float32, written: bool = False) -> None:
    """A scalar argument: one element of ``dtype``.

    Raises:
        TypeError: It is no tensor.
        ValueError: It is another tensor, or one of inference mode that would be ``written`` outside of it.
    """
    if scalar is None:
        return
    check_tensor(name, scalar)
    if not torch.compiler.is_compiling() and scalar.is_neg():
        raise ValueError(f'{name} has its negative bit set: give {name}.resolve_neg().')
    if scalar.numel() != 1 or scalar.dtype is not dtype:
        raise ValueError(
            f'{name} has shape {tuple(scalar.shape)} and dtype {scalar.dtype}: one element of {dtype} is expected.'
        )
    check_own(name, scalar, written)


def check_own(name: str, tensor: Tensor, written: bool) -> None:
    """Any argument beside the lists: it has memory, and may be written where it is.

    Raises:
        ValueError: Its storage was freed, or it is one of inference mode that would be ``written`` outside of it.
    """
    _check_memory(name, tensor)
    if written:
        _check_writable(name, tensor)


def check_refresh_types(weights: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    """16-bit weights, float32 masters.

    Raises:
        ValueError: Another dtype.
    """
    for index, weight in enumerate(weights):
        if weight.dtype not in HALF_TYPES:
            raise ValueError(f'weights[{index}] has dtype {weight.dtype}: float16 or bfloat16 is expected.')
    for index, master in enumerate(masters):
        if master.dtype is not torch.float32:
            raise ValueError(f'masters[{index}] has dtype {master.dtype}: float32 is expected.')


def check_table(name: str, table: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A contiguous table of numbers.

    Raises:
        ValueError: Another shape or dtype.
    """
    if table.dtype is not dtype or table.shape != shape or not table.is_contiguous():
        raise ValueError(
            f'{name} has shape {tuple(table.shape)} and dtype {table.dtype}: {shape} of {dtype} is expected.'
        )


def check_device(name: str, tensor: Tensor, decision: Tensor) -> None:
    """An argument of an optimizer step lies where the decision does.

    Raises:
        ValueError: It is on another device.
    """
    if tensor.device != decision.device:
        raise ValueError(f'{name} is on {tensor.device} and decision on {decision.device}: they belong on one device.')


def check_step_tables(decision: Tensor, rows: Tensor, count: int, written: bool) -> None:
    """The decision on a step and the rows of its parameters.

    Args:
        decision: Should have :data:`~amp_wrapper.ops.schemas.DECISION` elements.
        rows: Should have :data:`~amp_wrapper.ops.schemas.ROW` elements for each parameter.
        count: Of the parameters.
        written: Whether both will be written.

    Raises:
        ValueError: Says which of them is something else.
    """
    if decision.dtype is not torch.float32 or decision.shape != (schemas.DECISION,) or not decision.is_contiguous():
        raise ValueError(
            f'decision has shape {tuple(decision.shape)} and dtype {decision.dtype}: {schemas.DECISION} float32 numbers in a '
            'row are expected.'
        )
    check_own('decision', decision, written)
    check_table('rows', rows, (count, schemas.ROW), torch.float32)
    check_own('rows', rows, written)
    check_device('rows', rows, decision)

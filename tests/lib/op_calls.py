"""Calls of functions of torch with tensors of 4 x 4, by what becomes of their types under autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

#: Of a tensor and another one.
Call = Callable[[Tensor, Tensor], Any]

ROWS, ALL_ROWS, MASK = torch.tensor([0, 2]), torch.tensor([0, 2, 1, 3]), torch.tensor([True, False, True, True])
PLACES = ALL_ROWS.expand(4, 4)


def signs(x: Tensor) -> Tensor:
    return torch.ones(4, 4, device=x.device)


#: Products: 16-bit, whatever they are given.
PRODUCTS: dict[str, Call] = {
    'matmul': lambda x, y: x @ y,
    'mm': torch.mm,
    'mv': lambda x, y: x.mv(y[0]),
    'bmm': lambda x, y: torch.bmm(x[None], y[None]),
    'broadcast': lambda x, y: x[None, None] @ y.expand(2, 4, 4),
    'addmm': lambda x, y: torch.addmm(y, x, y),
    'addmv': lambda x, y: torch.addmv(x[0], x, y[0]),
    'addr': lambda x, y: torch.addr(x, x[0], y[0]),
    'baddbmm': lambda x, y: torch.baddbmm(x[None], y[None], x[None]),
    'addbmm': lambda x, y: torch.addbmm(x, y[None], x[None]),
    'einsum': lambda x, y: torch.einsum('ij,kj->ik', x, y),
    'multi_dot': lambda x, y: torch.linalg.multi_dot([x, y, x]),
    'chain_matmul': lambda x, y: torch.chain_matmul(x, y, x),
    'linear': lambda x, y: F.linear(x, y, y[0]),
    'linear of three dimensions': lambda x, y: F.linear(x[None], y),
    'conv1d': lambda x, y: F.conv1d(x[None], y[:, :, None], y[0]),
    'conv1d with another bias': lambda x, y: F.conv1d(x[None], x[:, :, None], y[0]),
    'conv1d, same': lambda x, y: F.conv1d(x[None], y[:, :, None], padding='same'),
    'conv2d': lambda x, y: F.conv2d(x[None, :, None], y[:, :, None, None]),
    'conv3d': lambda x, y: F.conv3d(x[None, :, None, None], y[:, :, None, None, None]),
    'conv_transpose1d': lambda x, y: F.conv_transpose1d(x[None], y[:, :, None], y[0]),
    'conv_transpose2d': lambda x, y: F.conv_transpose2d(x[None, :, None], y[:, :, None, None]),
    'conv_transpose3d': lambda x, y: F.conv_transpose3d(x[None, :, None, None], y[:, :, None, None, None]),
    'attention': lambda x, y: F.scaled_dot_product_attention(x[None], y[None], x[None]),
}
#: Products that autocast on a GPU promotes, or gives another type.
MIXED_PRODUCTS: dict[str, Call] = {
    'dot': lambda x, y: x[0].dot(y[0]),
    'vdot': lambda x, y: torch.vdot(x[0], y[0]),
    'tensordot': lambda x, y: torch.tensordot(x, y, 1),
}
#: Methods that write a source, 4 x 4, and what comes after the destination in a call; each writes in place with ``_`` as well.
WRITES: dict[str, Callable[[Tensor], tuple[Any, ...]]] = {
    'index_put': lambda x: ((ROWS,), x[:2]),
    'index_copy': lambda x: (0, ROWS, x[:2]),
    'index_add': lambda x: (0, ROWS, x[:2]),
    'index_reduce': lambda x: (0, ROWS, x[:2], 'mean'),
    'scatter': lambda x: (0, PLACES, x),
    'scatter_add': lambda x: (0, PLACES, x),
    'scatter_reduce': lambda x: (0, PLACES, x, 'sum'),
    'put': lambda x: (ROWS, x[0, :2]),
    'masked_scatter': lambda x: (MASK, x),
}
#: Losses: FP32, with the second tensor in (0, 1).
LOSSES: dict[str, Call] = {
    **{name: getattr(F, name) for name in 'huber_loss kl_div l1_loss mse_loss poisson_nll_loss smooth_l1_loss'.split()},
    'mse_loss by name': lambda x, y: F.mse_loss(input=x, target=y),
    'binary_cross_entropy_with_logits': lambda x, y: F.binary_cross_entropy_with_logits(x, y, weight=y),
    'cosine_embedding_loss': lambda x, y: F.cosine_embedding_loss(x, y, signs(x)[0]),
    'cross_entropy': lambda x, y: F.cross_entropy(x, ALL_ROWS, label_smoothing=0.1),
    'ctc_loss': lambda x, y: F.ctc_loss(x[:, None], ALL_ROWS[None, 1:3], torch.tensor([4]), torch.tensor([2])),
    'gaussian_nll_loss': lambda x, y: F.gaussian_nll_loss(x, y, y),
    'hinge_embedding_loss': lambda x, y: F.hinge_embedding_loss(x, signs(x)),
    'margin_ranking_loss': lambda x, y: F.margin_ranking_loss(x, y, signs(x)),
    'multi_margin_loss': lambda x, y: F.multi_margin_loss(x, ALL_ROWS),
    'multilabel_margin_loss': lambda x, y: F.multilabel_margin_loss(x, PLACES),
    'multilabel_soft_margin_loss': lambda x, y: F.multilabel_soft_margin_loss(x, y.round()),
    'nll_loss': lambda x, y: F.nll_loss(x, ALL_ROWS),
    'soft_margin_loss': lambda x, y: F.soft_margin_loss(x, signs(x)),
    'triplet_margin_loss': lambda x, y: F.triplet_margin_loss(x, y, x * 2),
    'triplet_margin_with_distance_loss': lambda x, y: F.triplet_margin_with_distance_loss(x, y, x * 2),
    'torch.kl_div': lambda x, y: torch.kl_div(x, y, reduction=1),
    'torch.nll_loss_nd': lambda x, y: torch._C._nn.nll_loss_nd(x, ALL_ROWS),
}

"""The functions of linear algebra that compute in FP32 at every opt level, by name.

Most of them have no 16-bit kernel; ``matrix_exp`` on a CPU has one that returns garbage; the others divide by what 16-bit
numbers cancel to.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

#: Products of matrices, which 16-bit numbers are for; a view; and sums of powers, whose kernels add in float32 already.
IN_16_BIT = frozenset({'matmul', 'multi_dot', 'diagonal', 'vector_norm'})

# functions of torch, most of them also methods of tensors, by which the same algorithms are reached
_ALIASES = """
    cholesky cholesky_inverse cholesky_solve det frobenius_norm geqrf inverse lobpcg logdet lu lu_solve lu_unpack
    matrix_exp matrix_power norm_except_dim nuclear_norm orgqr ormqr pca_lowrank pinverse qr slogdet svd svd_lowrank
    triangular_solve _weight_norm
"""


def functions() -> Iterator[str]:
    """Dotted names: all of ``torch.linalg`` that this torch has, but for :data:`IN_16_BIT`, and their other names."""
    for name, value in vars(torch.linalg).items():
        if not name.startswith('_') and not isinstance(value, type) and callable(value) and name not in IN_16_BIT:
            yield f'torch.linalg.{name}'
    for name in _ALIASES.split():
        if hasattr(torch, name):
            yield f'torch.{name}'
        if hasattr(torch.Tensor, name):
            yield f'torch.Tensor.{name}'

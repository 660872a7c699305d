"""Batched QR by the CUDA extension; see :mod:`prokl.backends.cuda_qr` for how."""

from prokl.backends.cuda_qr import Factorisation, Used, qr

__all__ = ["Factorisation", "Used", "qr"]

"""Batched QR by the CUDA extension; see :mod:`prokl.backends.cuda_qr` for how."""

from prokl.backends.cuda_qr import Factorisation, QRStatus, qr

__all__ = ["Factorisation", "QRStatus", "qr"]

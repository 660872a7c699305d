"""Explain which backend runs on a device, and why, in one line: :func:`explain` and :func:`explain_qr`."""

from prokl.backends.select import explain, explain_qr

__all__ = ["explain", "explain_qr"]

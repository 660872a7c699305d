"""Which backend runs where, and why: :func:`explain` and :func:`explain_qr` say it in one line."""

from prokl.backends.select import explain, explain_qr

__all__ = ["explain", "explain_qr"]

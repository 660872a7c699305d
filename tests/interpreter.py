"""Quickens Triton's interpreter, which at every call and tensor derives again what the one before had."""

from functools import cache
from types import SimpleNamespace
from typing import Any


def quicken() -> None:
    """Keep what the interpreter replaces in the language, and what follows from a type or a shape.

    Tensors lie on the host, so none are copied there: what does that holds their memory until the garbage collector
    comes. Whether integers overflow is not computed: it takes a fifth of the time, and without Triton's debug nothing
    asks for the answer.
    """
    from triton.runtime import interpreter

    interpreter.GridExecutor._init_args_hst = lambda self, args, kwargs: ([*args], kwargs)
    interpreter.GridExecutor._restore_args_dev = lambda self, *copies: None
    _language(interpreter)
    _types(interpreter)
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)  # it is frozen


def _language(interpreter: Any) -> None:
    """Replace the language's parts for the outermost call alone, by what the first one put in their places."""
    tl, replace, scope_of = interpreter.tl, interpreter._patch_lang, getattr(interpreter, "_LangPatchScope", None)
    everything = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    first: list[tuple[Any, str, Any, Any]] = []

    def direct(new: Any) -> Any:
        """Return a function that does what is under the wrappers."""
        member = (getattr(new, "__kwdefaults__", None) or {}).get("member")
        if not hasattr(member, "__wrapped__"):
            return new
        semantic, call = interpreter.interpreter_semantic, member.__wrapped__
        return lambda *args, **kwargs: call(*args, **{**kwargs, "_semantic": semantic})

    def replaced(fn: Any) -> Any:
        if scope_of is None:  # Triton 3.5 and before: what the first call replaces stays so
            return replace(everything) if tl.core.is_builtin(tl.load) else None
        if not tl.core.is_builtin(tl.load):  # in a call from one that has replaced them
            return scope_of()
        if not first:
            scope = replace(everything)
            first.extend((part, name, old, direct(getattr(part, name))) for part, name, old in scope._changes)
            return scope
        scope = scope_of()
        scope._changes = [(part, name, old) for part, name, old, _ in first]
        for part, name, _, new in first:
            setattr(part, name, new)
        return scope

    interpreter._patch_lang = replaced


def _types(interpreter: Any) -> None:
    """Look up what follows from a type's name or a shape."""
    core, numpy_of = interpreter.tl.core, interpreter._get_np_dtype
    numpys: dict[str, Any] = {}

    def numpys_dtype(dtype: Any) -> Any:
        found = numpys.get(dtype.name)
        return numpys.setdefault(dtype.name, numpy_of(dtype)) if found is None else found

    @cache
    def of_shape(sides: tuple[int, ...]) -> tuple[Any, ...]:
        numel = core.validate_block_shape(sides) if sides else 1
        known = core.constexpr(numel), core.tuple([core.constexpr(side) for side in sides])
        return core.tuple(sides), numel, known

    scalar = of_shape(())[-1]

    def new_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.of_tensor if type.is_block() else scalar

    def new_block(self: Any, element_ty: Any, shape: Any) -> None:
        if not (sides := tuple(core._unwrap_shape(shape))):
            raise TypeError("0d block_type is forbidden")
        self.element_ty = element_ty
        self.shape, self.numel, self.of_tensor = of_shape(sides)
        self.name = f"<{sides}, {element_ty}>"

    def same(self: Any, other: Any) -> bool:
        other = unwrapped(other)
        return self is other or (isinstance(other, core.dtype) and self.name == other.name)

    unwrap, whole = core._unwrap_if_constexpr, {bool, int, float, str, type(None), core.dtype, core.tensor}

    def unwrapped(value: Any) -> Any:
        return value if type(value) in whole else unwrap(value)

    semantic = type(interpreter.interpreter_semantic)
    broadcast = semantic.broadcast_impl_value

    def broadcast_once(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        blocks = left.type.is_block(), right.type.is_block()
        alike = left.type.shape is right.type.shape if all(blocks) else not any(blocks)
        return (left, right) if alike else broadcast(self, left, right)

    semantic.broadcast_impl_value = broadcast_once
    interpreter._get_np_dtype = numpys_dtype
    core.tensor.__init__, core.block_type.__init__, core.dtype.__eq__ = new_tensor, new_block, same
    core._unwrap_if_constexpr = unwrapped

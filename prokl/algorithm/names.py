"""Names of weights, and what wrappers of a module put into them, which counts nowhere."""

from __future__ import annotations

from collections.abc import Sequence

# Path components that wrappers (DDP, torch.compile, FSDP, activation checkpointing, peft) put around a module.
WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer"}
WRAPPERS |= {"original_module", "modules_to_save"}


def indices_without_wrappers(parts: Sequence[str]) -> list[int]:
    """Return the places of a path's components that no wrapper put in, nor peft as the name of a saved copy."""
    before = ["", *parts]
    return [i for i, part in enumerate(parts) if part not in WRAPPERS and before[i] != "modules_to_save"]


def unwrapped_name(name: str) -> str:
    """Return a name as it is without wrappers."""
    parts = name.split(".")
    return ".".join(parts[i] for i in indices_without_wrappers(parts))

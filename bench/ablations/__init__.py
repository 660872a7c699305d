"""Single changes, each beside the same without it: variants x seeds, compared by differences that seeds pair."""
